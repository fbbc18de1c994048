// The table of all runs: filtered by state, group and text, sorted by any metric; selected runs can be compared.

import { isBad, STATES, valueOf } from "./board.js";
import { Columns } from "./columns.js";
import { ago, clean, duration, h, number } from "./dom.js";

const FIRST = 200, MOST_SCORES = 5, MOST_SELECTED = 12;
const BEFORE = ["group", "state", "progress", "loss"], AFTER = ["GPU-h", "when"]; // columns around those of the scores

export class Overview {
  constructor(board, me) {
    Object.assign(this, { board, me });
    this.query = new URLSearchParams(location.hash.split("?")[1] ?? "");
    this.states = new Set((this.query.get("state") ?? "").split(",").filter(Boolean));
    this.selection = new Set();
    this.limit = FIRST;
    this.rows = new Map();
    const changed = () => this.draw();
    this.search = h("input", { type: "search", id: "search", placeholder: "name, id, host, reason", oninput: changed });
    this.search.value = this.query.get("text") ?? "";
    this.group = h("select", { id: "group", onchange: changed });
    this.sort = h("select", { id: "sort", onchange: changed });
    this.chips = h("div", { class: "chipbar", role: "group", "aria-label": "States" });
    this.compare = h("a", { class: "button", href: "#/", hidden: true }, "");
    this.head = h("tr");
    this.body = h("tbody");
    this.more = h("button", { type: "button", hidden: true, onclick: () => { this.limit = Infinity; this.draw(); } });
    this.count = h("p", { class: "soft small", role: "status" });
    this.columns = new Columns(changed);
    this.empty = h("div", { hidden: true });
    this.unreadable = h("details", { class: "s-held small", hidden: true, open: "" });
    this.full = h("div", {}, this.chips,
      h("div", { class: "tools" }, field("Search", this.search), field("Group", this.group), field("Sort by", this.sort), this.columns.node, this.compare),
      this.count, h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Runs" },
        h("table", { class: "runs" }, h("thead", {}, this.head), this.body)), this.more);
    this.node = h("div", {}, h("h1", {}, "Runs"), this.unreadable, this.empty, this.full);
    this.draw();
  }

  draw() {
    const lines = this.board.lines();
    this.drawUnreadable();
    this.drawEmpty(!lines.length);
    this.drawChoices(lines);
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = lines.filter(line => (!this.states.size || this.states.has(line.state))
      && (!this.group.value || line.group === this.group.value.slice(1)) && words.every(word => textOf(line).includes(word)));
    const columns = this.columnsOf(matches, lines);
    this.order(matches);
    this.drawHead(columns);
    const visible = matches.slice(0, this.limit);
    const rows = visible.map(line => this.row(line, columns));
    if (rows.length !== this.body.rows.length || rows.some((row, at) => row !== this.body.rows[at])) this.body.replaceChildren(...rows);
    this.more.hidden = visible.length === matches.length;
    this.more.textContent = `Show all ${matches.length}`;
    this.count.textContent = `${matches.length} of ${lines.length} runs`;
    this.remember();
  }

  // What to do where nothing was run yet. It waits for the first news of the server.
  drawEmpty(isEmpty) {
    this.full.hidden = isEmpty;
    this.empty.hidden = !isEmpty;
    const isReading = this.board.tick < 0;
    if (!isEmpty || this.empty.firstChild && this.isReading === isReading) return;
    this.isReading = isReading;
    if (isReading) {
      this.empty.replaceChildren(h("p", { class: "soft" }, "The runs are being read."));
      return;
    }
    const start = this.me.role === "read" ? null : h("p", {}, h("a", { class: "button", href: "#/new" }, "Start a run of an offered model"));
    this.empty.replaceChildren(h("p", {}, "Nothing was run here yet."), start ?? "", h("p", {}, start ? "Or in a terminal, with your own dictionary:" : "In a terminal:"),
      h("pre", { class: "commands", tabindex: "0" }, `lathe new causal_lm\nlathe train causal_lm.py --data_path data -sb ${clean(this.me.base)}`),
      h("p", { class: "soft small" }, "The first writes causal_lm.py, ten commented keys; the second trains it on the rows of the folder data. Its run then stands here."));
  }

  // A line for every folder that cannot be read.
  drawUnreadable() {
    const pairs = Object.entries(this.board.unreadable), key = JSON.stringify(pairs);
    if (key === this.unreadableKey) return;
    this.unreadableKey = key;
    this.unreadable.hidden = !pairs.length;
    this.unreadable.replaceChildren(h("summary", {}, `${pairs.length} folder${pairs.length > 1 ? "s" : ""} cannot be read`),
      h("ul", {}, ...pairs.map(([name, reason]) => h("li", { class: "wrap" }, `${clean(name)}: ${clean(reason)}`))));
  }

  drawChoices(lines) {
    const counts = Object.groupBy(lines, line => line.state);
    const states = STATES.filter(state => counts[state] || this.states.has(state));
    const key = JSON.stringify(states.map(state => [state, counts[state]?.length ?? 0, this.states.has(state)]));
    if (key !== this.chipsKey) {
      this.chipsKey = key;
      const at = [...this.chips.children].indexOf(document.activeElement);
      this.chips.replaceChildren(...states.map(state => h("button", {
        type: "button", class: `chip dot s-${state}`, "aria-pressed": String(this.states.has(state)),
        onclick: () => { if (!this.states.delete(state)) this.states.add(state); this.draw(); },
      }, h("span", {}, h("b", {}, String(counts[state]?.length ?? 0)), ` ${state}`))));
      this.chips.children[at]?.focus();
    }
    const groups = [...new Set(lines.map(line => line.group))].sort();
    options(this.group, [["", "all"], ...groups.map(group => [`=${group}`, group || "started by hand"])], this.query.get("group"));
    const names = [...new Set(lines.flatMap(line => Object.keys(line.scores ?? {})))].sort();
    options(this.sort, [["newest", "newest"], ["group", "group"], ["state", "state"], ["loss", "loss"],
      ...names.map(name => [name, name])], this.query.get("sort"));
  }

  // The columns that are shown, in order: those that a person chose; before that, the usual ones and the scores that most runs have.
  columnsOf(matches, lines) {
    const counts = new Map();
    for (const line of matches) for (const name of Object.keys(line.scores ?? {})) counts.set(name, (counts.get(name) ?? 0) + 1);
    const usual = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || a.localeCompare(b)).slice(0, MOST_SCORES);
    if (counts.has(this.sort.value) && !usual.includes(this.sort.value)) usual.splice(-1, 1, this.sort.value);
    const others = [...new Set(lines.flatMap(line => Object.keys(line.scores ?? {})))].filter(name => !usual.includes(name)).sort();
    const pairs = [...BEFORE.map(name => [name, true]), ...usual.map(name => [name, true]), ...others.map(name => [name, false]), ...AFTER.map(name => [name, true])];
    this.columns.offer(pairs);
    return pairs.filter(([name, isUsual]) => this.columns.isShown(name, isUsual)).map(([name]) => name);
  }

  order(lines) {
    const by = this.sort.value;
    const isScore = !["newest", "group", "state"].includes(by);
    const least = lines.find(line => line.scores?.[by])?.scores[by][1] ?? true;
    const value = line => valueOf(line, by) ?? (least ? Infinity : -Infinity);
    const newest = (a, b) => (b.created ?? "").localeCompare(a.created ?? "") || a.id.localeCompare(b.id);
    if (isScore) lines.sort((a, b) => (least ? value(a) - value(b) : value(b) - value(a)) || newest(a, b));
    else if (by === "group") lines.sort((a, b) => a.group.localeCompare(b.group) || a.label.localeCompare(b.label));
    else if (by === "state") lines.sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || newest(a, b));
    else lines.sort(newest);
  }

  drawHead(shown) {
    const columns = shown.join("\n"), key = columns + this.sort.value;
    if (key === this.headKey) return;
    if (columns !== this.shown) this.rows.clear();
    Object.assign(this, { shown: columns, headKey: key });
    const sortable = (name, by, kind) => h("th", { scope: "col", class: kind, "aria-sort": this.sort.value === by ? "other" : null },
      h("button", { type: "button", onclick: () => { this.sort.value = by; this.draw(); } }, clean(name)));
    const heads = shown.map(name => (name === "progress" || AFTER.includes(name) ? h("th", { scope: "col", class: name === "GPU-h" ? "num" : "" }, name)
      : sortable(name, name, ["group", "state"].includes(name) ? "" : "num")));
    this.head.replaceChildren(h("th", { scope: "col", class: "box" }, h("span", { class: "hidden" }, "Chosen")), sortable("run", "newest", "name"), ...heads);
  }

  // The row of a run. It is made again only when the run has changed.
  row(line, shown) {
    const key = JSON.stringify(line);
    const before = this.rows.get(line.id);
    if (before?.key === key) return before.node;
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${clean(line.label)} ${line.id.slice(0, 8)}`, onchange: () => this.choose(line.id, box) });
    box.checked = this.selection.has(line.id);
    const words = [line.differs, line.owner && line.owner !== "local" ? `of ${line.owner}` : ""].filter(Boolean);
    const why = line.unseen ?? (line.state === "succeeded" ? "" : line.reason);
    const node = h("tr", {}, h("td", { class: "box" }, line.isWaiting ? "" : box),
      h("td", { class: "text name", title: clean(line.label) }, h("a", { href: `#/run/${line.id}` }, clean(line.label)),
        h("span", { class: "soft small under" }, h("span", { class: "mono" }, line.id.slice(0, 8)), words.map(word => ` · ${clean(word)}`)),
        why ? h("span", { class: `small under reason ${isBad(line) ? `s-${line.state}` : "soft"}`, title: clean(why) }, clean(why)) : null),
      shown.map(name => (CELLS[name] ?? score(name))(line)));
    this.rows.set(line.id, { key, node });
    return node;
  }

  choose(id, box) {
    if (box.checked && this.selection.size >= MOST_SELECTED) box.checked = false;
    if (box.checked) this.selection.add(id); else this.selection.delete(id);
    this.compare.hidden = this.selection.size < 2;
    this.compare.href = `#/compare/${[...this.selection].join(",")}`;
    this.compare.textContent = `Compare ${this.selection.size} runs`;
  }

  // Writes filters and order into the address, so that it can be shared.
  remember() {
    const query = new URLSearchParams();
    if (this.states.size) query.set("state", [...this.states].join(","));
    if (this.search.value) query.set("text", this.search.value);
    if (this.group.value) query.set("group", this.group.value);
    if (this.sort.value !== "newest") query.set("sort", this.sort.value);
    const text = query.toString();
    this.query = query;
    history.replaceState(null, "", `#/${text ? `?${text}` : ""}`);
  }
}

// The cells of a row by the name of their column.
const CELLS = {
  group: line => h("td", { class: "text", title: clean(line.group) }, line.group ? clean(line.group) : h("span", { class: "soft" }, "by hand")),
  state: line => h("td", { class: `pill state s-${line.state}`, title: clean(line.unseen ?? line.reason) }, line.job?.is_paused ? "paused" : line.state + (line.unseen ? "?" : "")),
  progress: line => h("td", { class: "steps" }, progress(line)),
  loss: line => h("td", { class: "num loss" }, number(line.metrics.loss)),
  "GPU-h": line => h("td", { class: "num" }, line.gpu_hours ? line.gpu_hours.toFixed(1) : ""),
  when: line => h("td", { class: "soft" }, ago(line.ended ?? line.started ?? line.created)),
};
const score = name => line => h("td", { class: "num" }, number(valueOf(line, name)));
const field = (label, node) => h("label", { for: node.id }, h("span", { class: "soft small" }, label), node);
const textOf = line => `${line.label} ${line.id} ${line.group} ${line.task} ${line.state} ${line.host ?? ""} ${line.reason ?? ""} ${line.owner} ${line.differs} ${line.job?.id ?? ""}`.toLowerCase();

function options(select, pairs, initial) {
  const key = JSON.stringify(pairs);
  if (select.dataset.key === key) return;
  const value = initial ?? select.value;
  select.dataset.key = key;
  select.replaceChildren(...pairs.map(([name, text]) => h("option", { value: name }, clean(text))));
  if (pairs.some(([name]) => name === value)) select.value = value;
}

export function progress(line) {
  if (line.step === null || line.step === undefined) return h("span", { class: "soft" }, "–");
  const share = line.total ? Math.min(1, line.step / line.total) : 0;
  const words = `${line.step}${line.total ? `/${line.total}` : ""}${line.eta_s ? `, ${duration(line.eta_s)} left` : ""}`;
  return h("span", { class: "progressbox" }, h("progress", { max: 1, value: share, "aria-label": `step ${words}`, class: `s-${line.state}` }),
    h("span", { class: "small soft" }, words));
}
