// Shows how many requests wait and run, the speed of their output, and the workers.

import { drain, pause, resume } from "../shared/actions.js";
import { live } from "../shared/api.js";
import { chart } from "../shared/chart.js";
import { h, show } from "../shared/dom.js";
import { count, duration, rate, reported } from "../shared/format.js";
import { badge, bar, heartbeat, section, table, tile, withCode, workerLink } from "../shared/parts.js";

const HOUR_MS = 3_600_000;
const RECENT_MS = 60_000;

export function open(main, { frame }) {
  const title = h("div", { class: "title" });
  const tiles = h("div", { class: "tiles" });
  const charts = [
    chart("Requests", [{ name: "waiting", of: (sample) => sample.waiting }, { name: "running", of: (sample) => sample.running }], count),
    chart("Tokens per second", [{ name: "generated", of: (sample) => sample.tokens_per_second }], rate),
    chart("Time to first token", [{ name: "median", of: (sample) => sample.ttft_p50_ms }, { name: "95th percentile", of: (sample) => sample.ttft_p95_ms }], duration),
    chart("Time in the queue", [{ name: "median", of: (sample) => sample.queue_p50_ms }, { name: "95th percentile", of: (sample) => sample.queue_p95_ms }], duration),
  ];
  const priorities = h("div");
  const workers = h("div");
  const warning = h("div");
  main.append(title, warning, tiles, h("div", { class: "charts" }, charts.map(({ element }) => element)), priorities, workers);
  let samples = [];
  let sampleMs = 5000;

  function showOverview({ now, value: overview }) {
    if (overview.latest && overview.latest.at > (samples.at(-1)?.at ?? 0)) samples.push(overview.latest);
    samples = samples.filter((sample) => sample.at > now - HOUR_MS);
    show(title, ...head(overview));
    show(warning, overview.server_warning && h("p", { class: "card problem", role: "alert" }, overview.server_warning));
    show(tiles, ...tilesOf(overview, samples, now));
    for (const one of charts) one.draw(samples, now, sampleMs);
    show(priorities, prioritiesOf(overview));
    show(workers, workersOf(overview, now));
  }

  return live("overview", {}, frame, showOverview, {
    history: (history) => {
      samples = history.samples;
      sampleMs = history.sample_ms;
    },
  });
}

function head(overview) {
  return [
    h("h1", {}, "Overview"),
    overview.paused ? badge("paused") : badge("live"),
    overview.model && h("span", { class: "quiet" }, overview.model),
    h("span", { class: "spacer" }),
    overview.paused
      ? h("button", { type: "button", class: "primary", onclick: resume }, "Resume queue")
      : h("button", { type: "button", onclick: pause }, "Pause queue"),
  ];
}

/** A median time and its 95th percentile, from the latest sample that has one. */
function timeTile(name, kind, samples, now) {
  const latest = samples.findLast((sample) => sample[`${kind}_p50_ms`] !== null && now - sample.at < RECENT_MS);
  if (!latest) return tile(name, "–", "none in the last minute");
  return tile(name, duration(latest[`${kind}_p50_ms`]), `95th percentile ${duration(latest[`${kind}_p95_ms`])}`);
}

function tilesOf(overview, samples, now) {
  const slots = overview.workers.reduce((sum, worker) => sum + worker.max_num_seqs, 0);
  return [
    tile("Waiting", count(overview.waiting), overview.delayed ? `and ${count(overview.delayed)} delayed` : "in the queue"),
    tile("Running", count(overview.running), `of ${count(slots)} slots`),
    tile("Tokens/s", rate(overview.tokens_per_second), "generated"),
    overview.affinity && tile("Affinity hits", count(overview.affinity.held), affinityText(overview.affinity)),
    timeTile("First token", "ttft", samples, now),
    timeTile("Queue time", "queue", samples, now),
    tile("Workers", count(overview.workers.length), `${count(overview.scaling.desired)} wanted, as ${overview.scaling.because}`),
    tile("Dead letters", count(overview.dead), overview.dead ? "look at them" : "none", "#/dead"),
  ];
}

function affinityText({ missed, left, cached_tokens: cached }) {
  return `${count(missed)} misses, ${count(left)} waits, ${count(cached)} tokens cached`;
}

function prioritiesOf(overview) {
  const rows = Object.entries(overview.priorities).map(([priority, num]) => ({ priority: Number(priority), num }));
  rows.sort((one, other) => one.priority - other.priority);
  const most = Math.max(1, ...rows.map((row) => row.num));
  if (!rows.length) return section("Waiting by priority", h("p", { class: "empty" }, "No request waits."));
  return section("Waiting by priority", h("ul", { class: "ranking" }, rows.map((row) =>
    h("li", { "data-key": row.priority }, h("span", { class: "number" }, String(row.priority)),
      bar(row.num / most, count(row.num))))));
}

function workersOf(overview, now) {
  if (!overview.workers.length) return section("Workers", h("p", { class: "empty" }, ...withCode(`${overview.why_no_worker}.`)));
  return section("Workers", table([
    { name: "Worker", of: (one) => workerLink(one.worker_id) },
    { name: "State", of: (one) => [badge(one.state), " ", one.holds_back && h("span", { class: "quiet" }, one.holds_back)] },
    { name: "Heartbeat", of: (one) => heartbeat(now - one.heartbeat_at), number: true },
    { name: "Slots", of: (one) => bar(one.num_running / one.max_num_seqs, `${one.num_running} of ${one.max_num_seqs}`) },
    { name: "KV blocks", of: (one) => bar(one.kv_used_blocks / one.kv_blocks, `${count(one.kv_used_blocks)} of ${count(one.kv_blocks)}`) },
    { name: "Tokens/s", of: (one) => rate(one.recent_tokens_per_second), number: true },
    { name: "Step", of: (one) => duration(reported(one, "step_ms")), number: true },
    { name: "", of: (one) => one.state !== "draining" && h("button", { type: "button", class: "small", onclick: () => drain(one.worker_id) }, "Drain") },
  ], overview.workers, (one) => one.worker_id));
}
