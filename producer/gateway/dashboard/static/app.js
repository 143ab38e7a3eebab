// The frame around the pages: the open page, the theme, and the API key.

import { get, key, queue, whenRefused } from "./shared/api.js";
import { h } from "./shared/dom.js";
import * as dead from "./pages/dead.js";
import * as overview from "./pages/overview.js";
import * as playground from "./pages/playground.js";
import * as request from "./pages/request.js";
import * as requests from "./pages/requests.js";
import * as worker from "./pages/live_batch.js";

const PAGES = { "": overview, worker, requests, request, dead, playground };
const TITLES = { "": "Overview", requests: "Requests", dead: "Dead letters", playground: "Playground" };

const main = document.getElementById("main");
const banner = document.getElementById("banner");
let close = () => {};
let stale = 0;

/** What pages may use of the frame. */
const frame = {
  /** Show a warning at the top of the page; null hides it. */
  warn(text) {
    banner.hidden = !text;
    banner.textContent = text ?? "";
  },
};

/** Splits `#/request/ID?x=1` into page, argument and query. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  let argument = rest.join("/");
  try {
    argument = decodeURIComponent(argument);
  } catch {
    // Somebody typed it wrongly, so it is used as it is.
  }
  return { name, argument, query: new URLSearchParams(query) };
}

async function open() {
  close();
  close = () => {};
  frame.warn(null);
  const mine = ++stale;
  const { name, argument, query } = place();
  document.title = `${argument || TITLES[name] || TITLES[""]} – promptq`;
  for (const link of document.querySelectorAll("nav a[href^='#']")) {
    const target = link.hash.replace(/^#\/?/, "");
    const isHere = target === name || (target === "requests" && name === "request") || (target === "" && name === "worker");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.getElementById("leave").hidden = !key.get();
  try {
    showQueues((await get("caller")).queues);
  } catch (error) {
    if (mine === stale && error.status !== 401 && error.status !== 403) {
      frame.warn(`Not live: ${error.message}. Trying again.`);
      setTimeout(() => mine === stale && open(), 2000);
    }
    return;
  }
  if (mine !== stale) return;
  const page = PAGES[name] ?? overview;
  main.replaceChildren();
  main.dataset.page = name || "overview";
  window.scrollTo(0, 0);
  close = page.open(main, { argument, query, frame });
}

/** A choice if there are several queues. A queue that is gone gives way to the gateway's own. */
function showQueues(queues) {
  const names = queues.map((it) => it.name);
  if (queue.get() && !names.includes(queue.get())) {
    frame.warn(`Queue ${queue.get()} is no longer served. This is queue ${names[0]}.`);
    queue.forget();
  }
  const chosen = queue.get() ?? names[0];
  const shown = document.getElementById("queue");
  if (names.length < 2) {
    shown.replaceChildren(`queue ${chosen}`);
    return;
  }
  const choice = h("select", {
    name: "queue",
    "aria-label": "Queue",
    onchange: (event) => {
      queue.set(event.target.value);
      main.replaceChildren(); // its buttons would act on the other queue
      if (place().argument) location.hash = "#/"; // a request or worker of the old one
      else open();
    },
  }, queues.map((it) => {
    const label = it.model ? `${it.name} (${it.model})` : it.name;
    return h("option", { value: it.name, selected: it.name === chosen }, label);
  }));
  shown.replaceChildren(h("span", {}, "queue"), choice);
}

function askForKey(error) {
  close();
  close = () => {};
  stale += 1;
  frame.warn(null);
  const input = h("input", { type: "password", name: "key", autocomplete: "off", required: true });
  main.dataset.page = "key";
  main.replaceChildren(h("form", {
    class: "card login",
    onsubmit: (event) => {
      event.preventDefault();
      key.set(input.value.trim());
      open();
    },
  },
  h("h1", {}, "A key, please"),
  h("p", { class: "quiet" }, error.message),
  h("label", { class: "field" }, "API key with the rights of an administrator", input),
  h("p", { class: "quiet" }, "This tab keeps it until you close the tab."),
  h("div", { class: "buttons" }, h("button", { class: "primary", type: "submit" }, "Enter"))));
  input.focus();
}

const THEMES = { "": "Auto", light: "Light", dark: "Dark" };

function showTheme() {
  const chosen = document.documentElement.dataset.theme ?? "";
  const button = document.getElementById("theme");
  button.replaceChildren(h("span", {}, "Theme: "), THEMES[chosen]);
}

document.getElementById("theme").onclick = () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("promptq-theme", next);
  showTheme();
};
document.getElementById("leave").onclick = () => {
  key.forget();
  open();
};

whenRefused(askForKey);
window.onhashchange = open;
showTheme();
open();
