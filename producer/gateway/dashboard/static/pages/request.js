// Shows one request: its timeline, and its text as it is generated.

import { cancel, reprioritise } from "../shared/actions.js";
import { notLive, stream } from "../shared/api.js";
import { h, show } from "../shared/dom.js";
import { clock, count, counted, duration, rate } from "../shared/format.js";
import { badge, bar, facts, requestLink, section, waiting, workerLink } from "../shared/parts.js";
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
  const body = h("div");
  main.append(title, about, h("div", { class: "halves" }, life,
    h("section", { class: "card" }, h("h2", {}, "Text ", length), text.element)), body);

  // The gateway sends only changes, and the waiting time grows between them.
  const clockwork = setInterval(() => {
    if (latest?.value.state === "waiting") show(about, ...facets(latest.value, Date.now() + latest.ahead));
  }, 1000);
  const close = stream("live/request", { id }, {
    request: ({ now, value }) => {
      latest = { value, ahead: now - Date.now() };
      show(title, ...head(value));
      show(about, ...facets(value, now));
      show(life, section("Timeline", timeline(value, now)));
      show(body, section("Payload", payload(value.payload)));
    },
    tokens: (event) => {
      text.add(event);
      isOver = event.finish_reason !== null;
      length.textContent = counted(event.index + event.token_ids.length, "token");
    },
    begun: () => {
      frame.warn(null);
      text.clear();
    },
    problem: (error) => frame.warn(error.message),
    broken: (error) => {
      if (error.status === 404) show(main, h("p", { class: "card empty" }, `${error.message}. `, h("a", { href: "#/requests" }, "Search")));
      else frame.warn(notLive(error));
    },
  }, () => isOver);
  return () => {
    clearInterval(clockwork);
    close();
  };
}

function head(request) {
  const isOver = !["waiting", "active"].includes(request.state);
  return [
    h("h1", { class: "id" }, request.request_id), badge(request.state), h("span", { class: "spacer" }),
    h("div", { class: "buttons" },
      request.state === "waiting" && h("button", { type: "button", onclick: () => reprioritise(request.request_id, request.priority) }, "Change priority"),
      !isOver && h("button", { type: "button", class: "danger", onclick: () => cancel(request.request_id) }, "Cancel request"),
      request.state === "dead" && h("a", { class: "button", href: "#/dead" }, "Dead letters")),
  ];
}

function facets(request, now) {
  const slot = request.slot;
  return [
    request.error && h("p", { class: "card problem" }, h("b", {}, request.error.type), ` ${request.error.message}`),
    request.waits_because && h("p", { class: "card problem" }, ...waiting(request.waits_because)),
    section("Now", facts([
      ["Worker", request.worker && workerLink(request.worker)],
      ["Slot", slot && (slot.slot === null ? slot.state : `${slot.slot}, ${slot.state}`)],
      ["Progress", slot && bar(slot.emitted_tokens / slot.max_tokens, `${count(slot.emitted_tokens)} of ${count(slot.max_tokens)}`)],
      ["KV blocks", slot && `${count(slot.kv_blocks)}, ${count(slot.kv_shared_blocks)} shared`],
      ["Ended with", request.finish_reason],
      ["Priority", String(request.priority)], ["Tenant", request.tenant], ["Attempts", String(request.attempts)],
      ["Crashes", request.crashes ? String(request.crashes) : null],
      // A request that ended before a worker counted its tokens has 0.
      ["Prompt", request.usage?.prompt_tokens ? `${counted(request.usage.prompt_tokens, "token")}, ${count(request.usage.cached_tokens)} from the cache` : null],
      ["Output", request.usage && counted(request.usage.completion_tokens, "token")],
      ["Speed", request.stats && `${rate(request.stats.tokens_per_second)}\u00a0tokens/s`],
      ["Recomputed", request.stats?.recomputed_tokens ? counted(request.stats.recomputed_tokens, "token") : null],
      ["Requeued from", request.requeued_from && requestLink(request.requeued_from)],
      ["Forked from", request.forked_from && [requestLink(request.forked_from), ` after ${counted(request.forked_at, "token")}`]],
      ["Has waited", request.state === "waiting" && request.moments.length ? duration(Math.max(0, now - request.moments[0].at)) : null],
    ])),
  ];
}

function timeline(request, now) {
  const began = request.moments[0]?.at;
  return h("ol", { class: "timeline" }, request.moments.map((moment, nth) => h("li", { class: moment.what === "finished" && request.error ? "failed" : moment.what },
    h("span", { class: "what" }, ...happened(moment)),
    h("span", { class: "when" }, clock(moment.at, now),
      nth > 0 && h("span", { class: "quiet" }, ` +${duration(moment.at - began)}`)),
    moment.worker && moment.what === "claimed" && h("span", { class: "where quiet" }, `attempt ${moment.attempt} on ${moment.worker}`))));
}

// Leaves out a detail that is already in the name.
function happened({ what, detail }) {
  const name = NAMES[what] ?? what;
  const isSaid = !detail || name.toLowerCase() === detail;
  return isSaid ? [name] : [name, h("span", { class: "quiet" }, ` ${detail}`)];
}

// Lists of numbers, such as token ids, are not broken into lines.
function payload(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2).replace(/\[\n[\s\d,.e+-]+\]/g, (list) => list.replace(/\s+/g, " "));
  } catch {
    // It is not JSON, so it is shown unchanged.
  }
  return h("pre", { class: "payload" }, shown);
}
