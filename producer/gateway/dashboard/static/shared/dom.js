// Builds and updates the page. Text becomes a text node, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("a", {class: "x", href: "#/", onclick: f}, "text", node, ...)`. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for an SVG element. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on") || name === "value") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((it) => it !== null && it !== undefined && it !== false));
  return element;
}

const HANDLERS = ["onclick", "onchange", "onsubmit"];

/** Makes the children of `target` like `fresh`. Nodes are kept, so that focus and clicks survive. */
export function show(target, ...fresh) {
  const wanted = fresh.flat().filter(Boolean).map((it) => (typeof it === "string" ? document.createTextNode(it) : it));
  wanted.forEach((node, at) => {
    const old = target.childNodes[at];
    if (!old) target.append(node);
    else if (!isAlike(old, node)) target.replaceChild(node, old);
    else become(old, node);
  });
  while (target.childNodes.length > wanted.length) target.lastChild.remove();
}

function isAlike(old, node) {
  return old.nodeName === node.nodeName && old.dataset?.key === node.dataset?.key;
}

function become(old, node) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // What people opened stays open. Elements of `sized` keep their size until they get a new one.
    if (!node.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    // The page's policy refuses style attributes, but allows setting properties.
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of HANDLERS) old[name] = node[name];
  if (node.style?.length) old.style.cssText = node.style.cssText;
  show(old, ...node.childNodes);
}

/** Sets an element's width to a share of its parent's, as in bars. */
export function sized(element, share) {
  element.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return element;
}
