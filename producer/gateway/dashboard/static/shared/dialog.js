// Asks for confirmation of an action, and shows its result.

import { h } from "./dom.js";

/**
 * Opens a dialog. Resolves to null if it was cancelled, otherwise to the value of its field ("" without a field).
 * `field` is {label, value, type, min, max}.
 */
export function confirm({ title, text, action, danger = false, field = null }) {
  return new Promise((resolve) => {
    const input = field && h("input", {
      type: field.type ?? "text", min: field.min, max: field.max, step: 1, value: String(field.value),
      required: true, autofocus: true,
    });
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" },
      h("form", { method: "dialog" },
        h("h2", { id: "dialog-title" }, title),
        h("p", {}, text),
        field && h("label", { class: "field" }, field.label, input),
        h("div", { class: "buttons" },
          h("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Leave it"),
          h("button", { type: "submit", value: "yes", class: danger ? "danger" : "primary", autofocus: !field }, action))));
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? input?.value ?? "" : null);
    };
    document.body.append(dialog);
    dialog.showModal();
  });
}

const SHOWN_MS = 6000;

export function toast(text, kind = "good") {
  const node = h("p", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), SHOWN_MS);
}
