// Finds requests by id, tenant and state.

import { get, live } from "../shared/api.js";
import { toast } from "../shared/dialog.js";
import { h, show } from "../shared/dom.js";
import { clock, count, duration } from "../shared/format.js";
import { badge, requestLink, table } from "../shared/parts.js";

const STATES = [
  ["waiting", "waiting"], ["delayed", "delayed"], ["active", "active"], ["completed", "completed"], ["failed", "failed"],
  ["cancelled", "cancelled"], ["expired", "expired"], ["dead", "dead"], ["", "any"],
];

/** States with a set in the queue: their first page is live. For other states, all keys are searched. */
const IN_SETS = ["waiting", "delayed", "active", "dead"];

export function open(main, { query, frame }) {
  const given = Object.fromEntries(["prefix", "tenant", "state"].map((it) => [it, query.get(it) ?? ""]));
  const prefix = h("input", { name: "prefix", value: given.prefix, placeholder: "the id, or its beginning", autocomplete: "off" });
  const tenant = h("input", { name: "tenant", value: given.tenant, placeholder: "any", autocomplete: "off" });
  const state = h("select", { name: "state" }, STATES.map(([value, name]) => h("option", { value, selected: value === given.state }, name)));
  const found = h("section", { class: "card" });
  let rows = [];
  let close = () => {};
  let closed = false;

  function showPage(page, before = []) {
    rows = [...before, ...page.requests];
    show(found,
      h("p", { class: "quiet searched" }, `Searched ${page.searched}.`),
      rows.length ? table(COLUMNS, rows, (it) => it.request_id) : h("p", { class: "empty" }, page.cursor ? "Nothing found yet." : "No request matches."),
      page.cursor && h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => searchOn(page.cursor, rows) }, "Search further")));
  }

  async function searchOn(cursor, before) {
    close(); // further pages continue what is shown now
    try {
      const page = await get("requests", { ...given, cursor });
      if (!closed) showPage(page, before);
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  function search() {
    close();
    if (given.prefix || !IN_SETS.includes(given.state)) searchOn("", []);
    else close = live("requests", given, frame, ({ value }) => showPage(value));
  }

  main.append(
    h("div", { class: "title" }, h("h1", {}, "Requests")),
    h("form", {
      class: "card search",
      onsubmit: (event) => {
        event.preventDefault();
        const wanted = `#/requests?${new URLSearchParams({ prefix: prefix.value.trim(), tenant: tenant.value.trim(), state: state.value })}`;
        if (location.hash === wanted) search();
        else location.hash = wanted;
      },
    },
    h("label", { class: "field wide" }, "Id", prefix),
    h("label", { class: "field" }, "Tenant", tenant),
    h("label", { class: "field" }, "State", state),
    h("button", { type: "submit", class: "primary" }, "Search")),
    found);
  search();
  return () => {
    closed = true;
    close();
  };
}

const COLUMNS = [
  { name: "Request", of: (it) => requestLink(it.request_id) },
  { name: "State", of: (it) => badge(it.state) },
  { name: "Enqueued", of: (it) => clock(it.enqueued_at), number: true },
  { name: "First token", of: (it) => (it.first_token_at ? duration(it.first_token_at - it.enqueued_at) : "–"), number: true },
  { name: "Total", of: (it) => (it.finished_at ? duration(it.finished_at - it.enqueued_at) : "–"), number: true },
  { name: "Prompt tokens", of: (it) => count(it.prompt_tokens), number: true },
  { name: "Priority", of: (it) => String(it.priority), number: true },
  { name: "Tenant", of: (it) => it.tenant || "–" },
  { name: "Attempts", of: (it) => String(it.attempt), number: true },
];
