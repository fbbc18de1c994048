// Which columns the table of runs shows. What a person chose is remembered in this browser; the token never is.

import { clean, h } from "./dom.js";

const PLACE = "lathe.columns";

export class Columns {
  constructor(onChange) {
    this.onChange = onChange;
    this.choice = read();
    this.list = h("div", { class: "ticks" });
    this.node = h("details", { class: "columns" }, h("summary", {}, "Columns"), this.list);
  }

  // usual: whether a column is shown before anybody has chosen.
  isShown(name, usual) {
    return this.choice[name] ?? usual;
  }

  // Draws a tick for each column. pairs: [name, usual]
  offer(pairs) {
    const key = JSON.stringify(pairs);
    if (key === this.key) return;
    this.key = key;
    this.list.replaceChildren(...pairs.map(([name, usual]) => {
      const box = h("input", { type: "checkbox", onchange: () => { this.choice[name] = box.checked; this.keep(); this.onChange(); } });
      box.checked = this.isShown(name, usual);
      return h("label", { class: "toggle" }, box, ` ${clean(name)}`);
    }));
  }

  keep() {
    try {
      localStorage.setItem(PLACE, JSON.stringify(this.choice));
    } catch { /* storage is forbidden: the choice lasts until the page is left */ }
  }
}

function read() {
  try {
    const values = JSON.parse(localStorage.getItem(PLACE) ?? "{}");
    return Object.fromEntries(Object.entries(values).filter(([, value]) => typeof value === "boolean"));
  } catch {
    return {};
  }
}
