// Shows one worker: its batch, with a row for each slot, and its memory.

import { drain } from "../shared/actions.js";
import { live } from "../shared/api.js";
import { h, show, sized } from "../shared/dom.js";
import { ago, bytes, count, duration, percent, rate, reported } from "../shared/format.js";
import { badge, bar, facts, heartbeat, requestLink, section, table, tile } from "../shared/parts.js";

export function open(main, { argument: id, frame }) {
  return live("worker", { id }, frame, ({ now, value }) => {
    show(main, ...(value ? view(value, now) : gone(id)));
  });
}

function gone(id) {
  return [
    h("div", { class: "title" }, h("h1", { class: "id" }, id), badge("gone")),
    h("p", { class: "card empty" }, "This worker is not alive: it ended, or its heartbeat is overdue. ", h("a", { href: "#/" }, "Overview")),
  ];
}

function view({ stats, slots, told_at: reportedAt }, now) {
  return [
    h("div", { class: "title" },
      h("h1", { class: "id" }, stats.worker_id), badge(stats.state),
      h("span", { class: "quiet" }, "heartbeat ", heartbeat(now - stats.heartbeat_at)),
      h("span", { class: "spacer" }),
      stats.state !== "draining" && h("button", { type: "button", class: "danger", onclick: () => drain(stats.worker_id) }, "Drain worker")),
    h("div", { class: "tiles" },
      tile("Slots in use", count(slots.filter(({ slot }) => slot !== null).length), `of ${count(stats.max_num_seqs)}`),
      tile("Step time", duration(reported(stats, "step_ms")), "recent median"),
      tile("Tokens/s", rate(stats.recent_tokens_per_second), `${rate(stats.tokens_per_second)} while busy`),
      tile("Preemptions", count(stats.num_preemptions), "since it started"),
      tile("Recomputed", count(reported(stats, "recomputed_tokens")), "tokens since it started"),
      tile("Requests done", count(stats.num_processed), `${count(stats.num_waiting + stats.num_prefetched)} prepared`)),
    memory(stats),
    batch(slots, reportedAt, now),
    section("Worker", facts([
      ["Model", stats.model], ["Device", `${stats.device} ${stats.dtype}`.trim()],
      ["Host", stats.host], ["Process", String(stats.pid)], ["Up for", duration(now - stats.started_at_ms)],
      ["Prompt tokens", `${count(stats.prompt_tokens)}, and ${count(reported(stats, "cached_tokens"))} from the cache`],
      ["Affinity", affinityText(stats)],
      ["Generated tokens", count(stats.generation_tokens)],
      ["Drafted, accepted", `${count(reported(stats, "drafted_tokens"))}, ${count(reported(stats, "accepted_tokens"))}`],
      ["Holds back because", stats.holds_back || "–"],
      ["Refused fields", stats.refused.replaceAll(" ", ", ") || "–"],
      ["Recurrent states", stats.state_bytes ? bytes(stats.state_bytes) : "–"],
      ["Peak memory", stats.peak_memory_bytes ? bytes(stats.peak_memory_bytes) : "–"],
    ])),
  ];
}

function affinityText(stats) {
  const { affinity_held: held, affinity_missed: missed, affinity_left: left } = stats;
  return held + missed + left === 0 ? null : `${count(held)} hits, ${count(missed)} misses, ${count(left)} waits, ${count(reported(stats, "affinity_cached_tokens"))} tokens cached`;
}

function memory(stats) {
  const own = stats.kv_used_blocks - stats.kv_shared_blocks;
  const empty = stats.kv_free_blocks - stats.kv_cached_blocks;
  const parts = [
    ["used", own, "Used by one request"], ["shared", stats.kv_shared_blocks, "Shared by several requests"],
    ["cached", stats.kv_cached_blocks, "Free, with a prefix that can be used again"], ["free", empty, "Free"],
  ];
  const all = Math.max(1, stats.kv_blocks);
  return section(`KV blocks, ${count(stats.kv_blocks)} in all`,
    h("div", { class: "stack", role: "img", "aria-label": parts.map(([, num, name]) => `${name}: ${count(num)}`).join(", ") },
      parts.map(([kind, num]) => sized(h("span", { class: kind }), num / all))),
    h("p", { class: "legend" }, parts.map(([kind, num, name]) => h("span", {},
      h("i", { class: `swatch ${kind}` }), `${name} `, h("b", {}, count(num)), ` (${percent(num / all)})`))));
}

function progress(slot) {
  if (slot.state === "prefill") {
    return bar(slot.computed_tokens / (slot.prompt_tokens + slot.emitted_tokens), `${count(slot.computed_tokens)} of ${count(slot.prompt_tokens + slot.emitted_tokens)} prompt`, "prefill");
  }
  return bar(slot.emitted_tokens / slot.max_tokens, `${count(slot.emitted_tokens)} of ${count(slot.max_tokens)}`);
}

function batch(slots, reportedAt, now) {
  const title = ["Batch ", reportedAt > 0 && h("span", { class: "quiet" }, `seen ${ago(now - reportedAt)}`)];
  return section(title, slots.length ? table([
    { name: "Slot", of: (row) => (row.slot === null ? "–" : String(row.slot)), number: true },
    { name: "Request", of: (row) => requestLink(row.request_id) },
    { name: "State", of: (row) => badge(row.state) },
    { name: "Progress", of: progress },
    { name: "Prompt tokens", of: (row) => count(row.prompt_tokens), number: true },
    { name: "KV blocks", of: (row) => `${count(row.kv_blocks)}${row.kv_shared_blocks ? `, ${count(row.kv_shared_blocks)} shared` : ""}`, number: true },
    { name: "Priority", of: (row) => String(row.priority), number: true },
    { name: "Tenant", of: (row) => row.tenant ?? "–" },
    { name: "Preempted", of: (row) => `${row.preemptions}${row.recomputed_tokens ? `, ${count(row.recomputed_tokens)} recomputed` : ""}`, number: true },
  ], slots, (row) => row.request_id) : h("p", { class: "empty" }, "No request is in the batch."));
}
