// Elements that several pages use.

import { h, sized } from "./dom.js";
import { ago, shortId } from "./format.js";

export function tile(label, value, note = null, href = null) {
  return h(href ? "a" : "div", { class: "card tile", href },
    h("span", { class: "label" }, label), h("strong", {}, value), note && h("small", {}, note));
}

/** Why a request waits, as a sentence; empty if there is no reason. */
export const waiting = (because) => withCode(because && `The request waits: ${because}. `);

/** Text whose parts between backticks become code. */
export function withCode(text) {
  return text.split("`").map((part, nth) => (nth % 2 ? h("code", {}, part) : part));
}

/** A state as a coloured word. */
export function badge(state) {
  return h("span", { class: `badge ${state}` }, state);
}

export function requestLink(id) {
  return h("a", { class: "id", href: `#/request/${encodeURIComponent(id)}`, title: id }, shortId(id));
}

export function workerLink(id) {
  return h("a", { class: "id", href: `#/worker/${encodeURIComponent(id)}`, title: id }, id);
}

const LATE_MS = 3000;

/** Shows how long ago a worker's last heartbeat was. Workers send one each second. */
export function heartbeat(ms) {
  return h("span", { class: ms > LATE_MS && "late" }, ago(ms));
}

/** A bar of which a share (0 to 1) is filled, with words beside it. */
export function bar(share, words, kind = "") {
  return h("span", { class: "bar" },
    h("span", { class: `track ${kind}` }, sized(h("span", { class: "filled" }), share)),
    h("span", { class: "words" }, words));
}

/** A table that becomes cards in a narrow window. `columns`: [{name, of: (row) => node or text, number}]. */
export function table(columns, rows, keyOf) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.number && "number" }, column.name)))),
    h("tbody", {}, rows.map((row) => h("tr", { "data-key": keyOf(row) },
      columns.map((column) => h("td", { class: column.number && "number", "data-name": column.name }, column.of(row))))))));
}

export function section(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, ...[title].flat().filter(Boolean)), ...children);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value != null && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
