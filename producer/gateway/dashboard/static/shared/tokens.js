// Shows a text token by token as it is generated, with the probabilities of the tokens if they are known.

import { h, s, show } from "./dom.js";
import { count, percent } from "./format.js";

const WIDEST_TIP = 260;

/** Makes spaces and line breaks visible. */
function visible(text) {
  return text === "" ? "(nothing)" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

/** Returns a token's colour: 0 for a certain token, up to 5 for the most surprising ones. */
function surprise(logprob) {
  return Math.min(5, Math.floor(-logprob / 0.7));
}

/** Returns {element, add(event), clear(prompt)}; `event` is one of a request's events, `prompt` the text before them. */
export function tokenView() {
  const text = h("div", { class: "text", tabindex: 0, role: "log", "aria-label": "Text" });
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const element = h("div", { class: "tokens" }, text, tip);
  let logprobsOf = new WeakMap();
  let coming = [];
  let shown = null;

  /** Shows the tokens that came since the screen was last drawn. If the end was visible, it stays visible. */
  function append() {
    const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    text.append(...coming);
    coming = [];
    if (isAtEnd) text.scrollTop = text.scrollHeight;
  }

  function explain(span) {
    const logprobs = logprobsOf.get(span);
    shown?.classList.remove("shown");
    shown = logprobs ? span : null;
    tip.hidden = !logprobs;
    if (!logprobs) return;
    span.classList.add("shown");
    show(tip, ...logprobs.map((chosen) => h("table", {},
      h("caption", {}, `${visible(chosen.token ?? span.textContent)} `, h("span", { class: "quiet" }, `id ${chosen.token_id}, rank ${count(chosen.rank)}`)),
      h("tbody", {}, rowsOf(chosen)))));
    const frame = element.getBoundingClientRect();
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(at.left - frame.left, frame.width - WIDEST_TIP))}px`;
    tip.style.top = `${at.bottom - frame.top + 4}px`;
  }

  text.onpointerover = (event) => explain(event.target);
  text.onclick = (event) => explain(event.target);
  text.onpointerleave = () => explain(null);
  text.onblur = () => explain(null);
  text.onkeydown = (event) => {
    if (event.key === "Escape") explain(null);
    const next = {
      ArrowRight: shown ? shown.nextElementSibling : text.querySelector(".token"),
      ArrowLeft: shown?.previousElementSibling,
    }[event.key];
    if (!logprobsOf.has(next)) return;
    event.preventDefault();
    next.scrollIntoView({ block: "nearest" });
    explain(next);
  };
  return {
    element,
    add(event) {
      for (const piece of piecesOf(event)) {
        const span = h("span", {}, piece.text);
        if (piece.logprobs.length) {
          logprobsOf.set(span, piece.logprobs);
          const worst = Math.min(...piece.logprobs.map((chosen) => chosen.logprob));
          span.className = `token surprise-${surprise(worst)}`;
        }
        if (!coming.length) requestAnimationFrame(append);
        coming.push(span);
      }
    },
    clear(prompt = "") {
      coming = [];
      text.replaceChildren(h("span", { class: "quiet" }, prompt));
      explain(null);
      logprobsOf = new WeakMap();
    },
  };
}

/**
 * Splits an event's text into its tokens, because the text of an ended request comes as one event. A token that is
 * half a character, or that was cut off at the end, is not in the text. Such tokens share the text between their
 * neighbours.
 */
function piecesOf({ text, logprobs }) {
  const pieces = [];
  let shared = [];
  let at = 0;
  for (const chosen of logprobs ?? []) {
    const from = chosen.token && logprobs.length > 1 ? text.indexOf(chosen.token, at) : -1;
    if (from === at || (from > at && shared.length)) {
      if (shared.length) pieces.push({ text: text.slice(at, from), logprobs: shared });
      pieces.push({ text: chosen.token, logprobs: [chosen] });
      shared = [];
      at = from + chosen.token.length;
    } else {
      shared.push(chosen);
    }
  }
  if (shared.length || at < text.length) pieces.push({ text: text.slice(at), logprobs: shared });
  return pieces;
}

function rowsOf(chosen) {
  const others = chosen.top ?? [];
  const rows = others.some((other) => other.token_id === chosen.token_id) ? others : [...others, chosen];
  return rows.map((row) => h("tr", { class: row.token_id === chosen.token_id && "chosen" },
    h("td", {}, row.token == null ? `token ${row.token_id}` : visible(row.token)),
    h("td", { class: "number" }, percent(Math.exp(row.logprob))),
    h("td", { class: "share" }, s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none" },
      s("rect", { width: 100 * Math.exp(row.logprob), height: 8 })))));
}
