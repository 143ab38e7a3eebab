// One request: its timeline, and its text as it comes.

import { cancel, reprioritise } from "../shared/actions.js";
import { stream } from "../shared/api.js";
import { h, show } from "../shared/dom.js";
import { clock, count, duration, rate } from "../shared/format.js";
import { badge, bar, facts, requestLink, section, workerLink } from "../shared/parts.js";
import { tokenView } from "../shared/tokens.js";

const NAMES = {
  enqueued: "Enqueued", claimed: "Claimed", prefill: "Prefill begins", first_token: "First token",
  preempted: "Preempted", resumed: "Resumed", given_back: "Given back", crashed: "Its worker",
  claim_lost: "Its claim was lost", finished: "Finished",
};

export function open(main, { argument: id, frame }) {
  const title = h("div", { class: "title" });
  const about = h("div");
  const life = h("div");
  const text = tokenView();
  let isOver = false;
  let latest = null;
  const length = h("span", { class: "quiet" });
  const asked = h("div");
  main.append(title, about, h("div", { class: "halves" }, life,
    h("section", { class: "card" }, h("h2", {}, "Text ", length), text.element)), asked);

  // The gateway reports changes. The waiting time changes by itself.
  const clockwork = setInterval(() => {
    if (latest?.value.state === "waiting") show(about, ...facets(latest.value, Date.now() + latest.ahead));
  }, 1000);
  const close = stream("live/request", { id }, {
    request: ({ now, value }) => {
      latest = { value, ahead: now - Date.now() };
      show(title, ...head(value));
      show(about, ...facets(value, now));
      show(life, section("Timeline", timeline(value, now)));
      show(asked, section("Payload", payload(value.payload)));
    },
    tokens: (event) => {
      text.add(event);
      isOver = event.finish_reason !== null;
      length.textContent = `${count(event.index + event.token_ids.length)} tokens`;
    },
    begun: () => {
      frame.warn(null);
      text.clear();
    },
    problem: (error) => frame.warn(error.message),
    broken: (error) => {
      if (error.status === 404) show(main, h("p", { class: "card empty" }, `${error.message}. `, h("a", { href: "#/requests" }, "Search")));
      else frame.warn(`Not live: ${error.message}. Trying again.`);
    },
  }, () => isOver);
  return () => {
    clearInterval(clockwork);
    close();
  };
}

function head(it) {
  const isOver = !["waiting", "active"].includes(it.state);
  return [
    h("h1", { class: "id" }, it.request_id), badge(it.state), h("span", { class: "spacer" }),
    h("div", { class: "buttons" },
      it.state === "waiting" && h("button", { type: "button", onclick: () => reprioritise(it.request_id, it.priority) }, "Change priority"),
      !isOver && h("button", { type: "button", class: "danger", onclick: () => cancel(it.request_id) }, "Cancel request"),
      it.state === "dead" && h("a", { class: "button", href: "#/dead" }, "Dead letters")),
  ];
}

function facets(it, now) {
  const slot = it.slot;
  return [
    it.error && h("p", { class: "card problem" }, h("b", {}, it.error.type), ` ${it.error.message}`),
    section("Now", facts([
      ["Worker", it.worker && workerLink(it.worker)],
      ["Slot", slot && (slot.slot === null ? slot.state : `${slot.slot}, ${slot.state}`)],
      ["Progress", slot && bar(slot.emitted_tokens / slot.max_tokens, `${count(slot.emitted_tokens)} of ${count(slot.max_tokens)}`)],
      ["KV blocks", slot && `${count(slot.kv_blocks)}, ${count(slot.kv_shared_blocks)} shared`],
      ["Ended with", it.finish_reason],
      ["Priority", String(it.priority)], ["Tenant", it.tenant], ["Attempts", String(it.attempts)],
      ["Crashes", it.crashes ? String(it.crashes) : null],
      ["Prompt", it.usage && `${count(it.usage.prompt_tokens)} tokens, ${count(it.usage.cached_tokens)} from the cache`],
      ["Output", it.usage && `${count(it.usage.completion_tokens)} tokens`],
      ["Speed", it.stats && `${rate(it.stats.tokens_per_second)}\u00a0tokens/s`],
      ["Recomputed", it.stats?.recomputed_tokens ? `${count(it.stats.recomputed_tokens)} tokens` : null],
      ["Requeued from", it.requeued_from && requestLink(it.requeued_from)],
      ["Forked from", it.forked_from && [requestLink(it.forked_from), ` behind ${count(it.forked_at)} tokens`]],
      ["Has waited", it.state === "waiting" && it.moments.length ? duration(Math.max(0, now - it.moments[0].at)) : null],
    ])),
  ];
}

function timeline(it, now) {
  const began = it.moments[0]?.at;
  return h("ol", { class: "timeline" }, it.moments.map((moment, nth) => h("li", { class: moment.what },
    h("span", { class: "what" }, ...happened(moment)),
    h("span", { class: "when" }, clock(moment.at, now),
      nth > 0 && h("span", { class: "quiet" }, ` +${duration(moment.at - began)}`)),
    moment.worker && moment.what === "claimed" && h("span", { class: "where quiet" }, `attempt ${moment.attempt} on ${moment.worker}`))));
}

// A detail that its name already says is not shown twice.
function happened({ what, detail }) {
  const name = NAMES[what] ?? what;
  const isSaid = !detail || name.toLowerCase() === detail;
  return isSaid ? [name] : [name, h("span", { class: "quiet" }, ` ${detail}`)];
}

function payload(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is shown as it came.
  }
  return h("pre", { class: "payload" }, shown);
}
