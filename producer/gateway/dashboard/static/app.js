// The frame around the pages: opens pages, and shows the queue, the theme, and the form for the API key.

import { get, key, notLive, queue, whenRefused } from "./shared/api.js";
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
let numOpened = 0;

/** The part of the frame that pages may use. */
const frame = {
  /** Shows a warning at the top of the page; null hides it. */
  warn(text) {
    banner.hidden = !text;
    banner.textContent = text ?? "";
  },
};

/** Splits an address such as `#/request/ID?x=1` into page, argument and query. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  let argument = rest.join("/");
  try {
    argument = decodeURIComponent(argument);
  } catch {
    // It is not encoded correctly, so it is used unchanged.
  }
  return { name: Object.hasOwn(PAGES, name) ? name : "", argument, query: new URLSearchParams(query) };
}

async function open() {
  close();
  close = () => {};
  const number = ++numOpened;
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
    const { queues } = await get("caller");
    if (number !== numOpened) return; // another page was opened meanwhile
    frame.warn(null);
    showQueues(queues);
  } catch (error) {
    if (number === numOpened && error.status !== 401 && error.status !== 403) {
      main.replaceChildren(); // the page before is no longer true
      frame.warn(notLive(error));
      setTimeout(() => number === numOpened && open(), 2000);
    }
    return;
  }
  main.replaceChildren();
  main.dataset.page = name || "overview";
  window.scrollTo(0, 0);
  close = PAGES[name].open(main, { argument, query, frame });
}

/** Shows the queue's name, or a choice if there are several queues. Replaces a queue that is gone by the gateway's own. */
function showQueues(queues) {
  const names = queues.map(({ name }) => name);
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
      main.replaceChildren(); // the page's buttons would act on the other queue
      if (place().argument) location.hash = "#/"; // it named a request or a worker of the old queue
      else open();
    },
  }, queues.map(({ name, model }) =>
    h("option", { value: name, selected: name === chosen }, model ? `${name} (${model})` : name)));
  shown.replaceChildren(h("span", {}, "queue"), choice);
}

function askForKey(error) {
  close();
  close = () => {};
  numOpened += 1;
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
  key.get() && h("p", { class: "quiet reason" }, `${error.message}.`),
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
