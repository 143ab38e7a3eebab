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

/** States whose requests are in a sorted set. Their first page is live. For other states, all keys are searched. */
const IN_SETS = ["waiting", "delayed", "active", "dead"];

export function open(main, { query, frame }) {
  const given = Object.fromEntries(["prefix", "tenant", "state"].map((name) => [name, query.get(name) ?? ""]));
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
      rows.length ? table(COLUMNS, rows, (row) => row.request_id) : h("p", { class: "empty" }, page.cursor ? "Nothing found yet." : "No request matches."),
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
  { name: "Request", of: (row) => requestLink(row.request_id) },
  { name: "State", of: (row) => badge(row.state) },
  { name: "Enqueued", of: (row) => clock(row.enqueued_at), number: true },
  { name: "First token", of: (row) => (row.first_token_at ? duration(row.first_token_at - row.enqueued_at) : "–"), number: true },
  { name: "Total", of: (row) => (row.finished_at ? duration(row.finished_at - row.enqueued_at) : "–"), number: true },
  { name: "Prompt tokens", of: (row) => count(row.prompt_tokens), number: true },
  { name: "Priority", of: (row) => String(row.priority), number: true },
  { name: "Tenant", of: (row) => row.tenant || "–" },
  { name: "Attempts", of: (row) => String(row.attempt), number: true },
];
