// Shows dead letters: requests that no worker gets again, because they crash workers.

import { purge, requeue } from "../shared/actions.js";
import { get, live } from "../shared/api.js";
import { h, show } from "../shared/dom.js";
import { clock, count, counted } from "../shared/format.js";
import { requestLink } from "../shared/parts.js";

const MOST = 100;

export function open(main, { frame }) {
  const list = h("div");
  const all = h("div", { class: "buttons" });
  main.append(h("div", { class: "title" }, h("h1", {}, "Dead letters"), h("span", { class: "spacer" }), all), list);
  let shown = null;
  let closed = false;

  async function load(ids) {
    shown = ids;
    let letters;
    try {
      letters = await get("dead", { limit: MOST + 1 });
    } catch (error) {
      frame.warn(error.message);
      shown = null; // so that the next event makes a new try
      return;
    }
    if (closed) return;
    show(all, letters.length > 0 && h("button", { type: "button", onclick: () => requeue(null) }, "Requeue all"),
      letters.length > 0 && h("button", { type: "button", class: "danger", onclick: () => purge(null) }, "Purge all"));
    const hasMore = letters.length > MOST;
    show(list, hasMore && h("p", { class: "quiet" }, `The latest ${MOST}; there are more.`), letters.length
      ? letters.slice(0, MOST).map(card)
      : h("p", { class: "card empty" }, "There are no dead letters."));
  }

  const close = live("dead", {}, frame, ({ value }) => {
    const ids = value.ids.join(" ");
    if (ids !== shown) load(ids);
  });
  return () => {
    closed = true;
    close();
  };
}

function card(letter) {
  return h("article", { class: "card letter", "data-key": letter.request_id },
    h("h2", {}, requestLink(letter.request_id)),
    h("p", { class: "reason" }, `${letter.message}.`),
    h("p", { class: "quiet" }, `Became a dead letter at ${clock(letter.buried_at)} after ${count(letter.crashes)} ${letter.crashes === 1 ? "crash" : "crashes"} in ${counted(letter.attempts, "attempt")}; it had emitted ${counted(letter.num_tokens, "token")}.`),
    h("details", {}, h("summary", {}, "Attempts and payload"),
      h("ul", {}, letter.history.map((one) => h("li", {}, `Attempt ${one.attempt} on ${one.worker}, ${clock(one.claimed_at)} to ${clock(one.ended_at)}: ${one.how}`))),
      h("pre", { class: "payload" }, letter.payload)),
    h("div", { class: "buttons" },
      h("button", { type: "button", onclick: () => requeue([letter.request_id]) }, "Requeue"),
      h("button", { type: "button", class: "danger", onclick: () => purge([letter.request_id]) }, "Purge")));
}
