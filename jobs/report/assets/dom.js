// Makes elements from data, never from HTML, and short texts of numbers and times.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// A text whose control characters, and marks that reorder letters, are made visible.
export const clean = text => String(text ?? "").replace(
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
  letter => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"));

export function number(value) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return size < 1e4 ? Number(value).toPrecision(4) : value.toFixed(0);
  return value.toExponential(1);
}

export function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (Math.round(seconds) < 60) return `${Math.round(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${String(minutes % 60).padStart(2, "0")}`
    : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const ago = at => at ? `${duration(Math.max(0, (Date.now() - Date.parse(at)) / 1000))} ago` : "";
export const bytes = value => (value < 2 ** 26 ? `${(value / 2 ** 20).toFixed(1)} MiB` : `${(value / 2 ** 30).toFixed(2)} GiB`);
export const day = at => at ? at.slice(0, 19).replace("T", " ") : "";

// heads: texts; one of a column of numbers is in a list of its own, as it stands to the right.
export function table(label, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, heads.map(head => h("th", { scope: "col", class: Array.isArray(head) ? "num" : null }, head)))),
      h("tbody", {}, rows)));
}

// A part of a page with a title, whose content is replaced by `fill`.
export function panel(title) {
  const content = h("div", {});
  const node = h("section", { class: "card panel", "aria-label": title }, h("h2", {}, title), content);
  return { node, fill: (...nodes) => content.replaceChildren(...nodes.filter(Boolean)) };
}
