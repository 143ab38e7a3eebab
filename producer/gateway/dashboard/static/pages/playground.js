// Runs a prompt, and shows the output's tokens as they are generated, each with its probability.

import { post, stream } from "../shared/api.js";
import { toast } from "../shared/dialog.js";
import { h, show } from "../shared/dom.js";
import { counted, duration, rate } from "../shared/format.js";
import { requestLink, waiting } from "../shared/parts.js";
import { tokenView } from "../shared/tokens.js";

/** The fields with a number: name, label, and attributes of the input. Empty ones are not sent. */
const NUMBERS = [
  ["max_tokens", "Max tokens", { min: 1, step: 1, value: "200" }],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05, value: "0.8" }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01, placeholder: "1" }],
  ["top_k", "Top k", { min: 0, step: 1, placeholder: "all" }],
  ["seed", "Seed", { min: 0, step: 1, placeholder: "any" }],
  ["priority", "Priority", { min: -1000, max: 1000, step: 1, placeholder: "0" }],
  ["logprobs", "Likeliest shown", { min: 0, max: 20, step: 1, value: "5" }],
];

export function open(main) {
  const prompt = h("textarea", { rows: 5, required: true, placeholder: "such as: Once upon a time" });
  const chat = h("input", { type: "checkbox" });
  const stop = h("input", { placeholder: "none", autocomplete: "off" });
  const numbers = NUMBERS.map(([name, label, options]) => ({ name, label, input: h("input", { type: "number", inputmode: "decimal", ...options }) }));
  const run = h("button", { type: "submit", class: "primary" }, "Run");
  const halt = h("button", { type: "button", disabled: true }, "Stop");
  const tokens = tokenView();
  const outcome = h("p", { class: "quiet outcome" }, "Nothing has run yet.");
  let close = () => {};
  let current = null;

  function fields() {
    const text = prompt.value;
    const given = chat.checked ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    for (const { name, input } of numbers) if (input.value !== "") given[name] = Number(input.value);
    if (stop.value) given.stop = stop.value;
    return given;
  }

  function isRunning(running) {
    run.disabled = running;
    halt.disabled = !running;
  }

  async function start() {
    close();
    const given = fields();
    tokens.clear(given.prompt);
    isRunning(true);
    show(outcome, "Enqueued …");
    const began = performance.now();
    let first = null;
    let isOver = false;
    let id;
    let soFar = "Enqueued";
    let because = "";
    const showOutcome = () => show(outcome, `${soFar}. `, ...waiting(because), requestLink(id));
    try {
      ({ id } = await post("play", given));
    } catch (error) {
      toast(error.message, "bad");
      show(outcome, error.message);
      isRunning(false);
      return;
    }
    current = id;
    close = stream("live/request", { id }, {
      request: ({ value }) => {
        because = value.waits_because;
        showOutcome();
      },
      begun: () => tokens.clear(given.prompt),
      tokens: (event) => {
        const now = performance.now();
        if (event.token_ids.length) first ??= now;
        tokens.add(event);
        soFar = progress(event, began, first, now);
        showOutcome();
        isOver = event.finish_reason !== null;
        if (isOver) isRunning(false);
      },
      problem: (error) => toast(error.message, "bad"),
      broken: (error) => toast(error.message, "bad"),
    }, () => isOver);
  }

  halt.onclick = () => current && post("cancel", { id: current }).catch((error) => toast(error.message, "bad"));
  main.append(
    h("div", { class: "title" }, h("h1", {}, "Playground")),
    h("div", { class: "halves" },
      h("form", {
        class: "card",
        onsubmit: (event) => {
          event.preventDefault();
          start();
        },
      },
      h("label", { class: "field" }, "Prompt", prompt),
      h("label", { class: "check" }, chat, "As a chat message, with the model's template"),
      h("div", { class: "fields" },
        numbers.map(({ label, input }) => h("label", { class: "field" }, label, input)),
        h("label", { class: "field" }, "Stop at", stop)),
      h("div", { class: "buttons" }, halt, run)),
      h("section", { class: "card" }, h("h2", {}, "Answer"), tokens.element, outcome,
        h("p", { class: "legend" }, "Tokens by how surprising they are: ",
          h("span", {}, [0, 1, 2, 3, 4, 5].map((level) => h("i", { class: `swatch surprise-${level}` }))),
          "Hover over a token, tap it, or use the arrow keys."))));
  return () => close();
}

function progress(event, began, first, now) {
  const num = event.index + event.token_ids.length;
  const seconds = first === null ? 0 : (now - first) / 1000;
  const words = [counted(num, "token")];
  if (first !== null) words.push(`the first after ${duration(first - began)}`);
  if (num > 1 && seconds > 0) words.push(`${rate((num - 1) / seconds)}\u00a0tokens/s`);
  if (event.finish_reason) words.push(`ended with ${event.finish_reason}`);
  if (event.error) words.push(event.error.message);
  return words.join(", ");
}
