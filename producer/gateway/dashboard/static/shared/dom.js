// Builds and updates the page. Text becomes a text node, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element: `h("a", {class: "x", href: "#/", onclick: f}, "text", node, ...)`. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Returns an SVG element, like `h`. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on") || name === "value") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const HANDLERS = ["onclick", "onchange", "onsubmit"];

/** Makes the children of `target` equal to `fresh`. Changes nodes instead of replacing them, so that focus and clicks are not lost. */
export function show(target, ...fresh) {
  const wanted = fresh.flat().filter(Boolean).map((child) => (typeof child === "string" ? document.createTextNode(child) : child));
  wanted.forEach((node, at) => {
    const old = target.childNodes[at];
    if (!old) target.append(node);
    else if (!isAlike(old, node)) target.replaceChild(node, old);
    else update(old, node);
  });
  while (target.childNodes.length > wanted.length) target.lastChild.remove();
}

function isAlike(old, node) {
  return old.nodeName === node.nodeName && old.dataset?.key === node.dataset?.key;
}

function update(old, node) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // Details that somebody opened stay open. Elements of `sized` keep their size until they get another one.
    if (!node.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    // The page's security policy forbids style attributes, but not `style.cssText`.
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of HANDLERS) old[name] = node[name];
  if (node.style?.length) old.style.cssText = node.style.cssText;
  show(old, ...node.childNodes);
}

/** Sets an element's width to a share (0 to 1) of its parent's. */
export function sized(element, share) {
  element.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return element;
}
