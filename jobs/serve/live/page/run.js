// The page of one run (curves that grow, memory, attempts, dictionary, log, answers), and of several in one chart.

import { buttons } from "./actions.js";
import { get } from "./api.js";
import { Chart, thin } from "./chart.js";
import { ago, bytes, clean, day, h, number, panel, table } from "./dom.js";
import { Driven } from "./driven.js";
import { progress } from "./overview.js";
import { canTalk, Talk } from "./talk.js";
import { Votes } from "./votes.js";

const LOG_EVERY_MS = 3000, LOG_LINES = 200, HIDDEN = ["tokens", "step", "operation"];
// Charts stand in the order of their groups, each under the name of the first group whose rule the metric's name fits.
const GROUPS = [["Loss", /^(valid\/)?loss(_sum)?$/], ["Validation", /^valid\//],
  ["Speed", /(_per_s|step_s)$|^(mfu|tflops|goodput)$/], ["Memory", /_gib$/], ["Optimizer", /^(lr|grad_norm|loss_scale|skipped_steps|bad_steps)$/], ["Other", /./]];
const groupOf = name => GROUPS.find(([, rule]) => rule.test(name))[0];

// The curves of some runs by metric, and the places from which the stream continues.
export class Curves {
  constructor(ids, labelOf) {
    Object.assign(this, { ids, labelOf, runs: new Map(), charts: new Map(), isTime: false, isLog: false });
    const toggle = (name, text) => h("label", { class: "toggle" }, h("input", { type: "checkbox", onchange: event => { this[name] = event.target.checked; this.draw(); } }), ` ${text}`);
    this.grid = h("div", { class: "cards" });
    this.node = h("section", { "aria-label": "Curves" }, h("h2", {}, "Curves"), h("div", { class: "tools" }, toggle("isTime", "over time"), toggle("isLog", "logarithmic")), this.grid);
  }

  async load(only = this.ids) {
    await Promise.all(only.map(async id => this.runs.set(id, await get(`/lathe/v1/runs/${id}/curves`))));
    this.draw();
  }

  watched() {
    return [...this.runs].map(([id, run]) => `${id}:${run.place}`).join(",");
  }

  // Adds the lines of an event.
  grow({ id, lines }) {
    const run = this.runs.get(id);
    if (!run) return;
    if (lines === null) {
      this.load([id]).then(() => this.onReload?.());
      return;
    }
    for (const { at, step, ...values } of lines) {
      run.began ??= at;
      const seconds = (Date.parse(at) - Date.parse(run.began)) / 1000 || 0;
      for (const [name, value] of Object.entries(values)) (run.series[name] ??= []).push([step, seconds, value, value, value]);
    }
    for (const [name, points] of Object.entries(run.series)) run.series[name] = thin(points);
    this.draw();
  }

  draw() {
    const names = [...new Set([...this.runs.values()].flatMap(run => Object.keys(run.series)))].filter(name => !HIDDEN.includes(name));
    names.sort((a, b) => a.localeCompare(b)); // "loss" stands before "valid/loss"
    const isOne = this.ids.length === 1;
    const visible = isOne && names.includes("loss") ? names.filter(name => name !== "valid/loss") : names;
    for (const name of visible.filter(name => !this.charts.has(name))) {
      const chart = new Chart(name);
      chart.node.classList.add("card");
      chart.node.firstChild.prepend(h("span", { class: "soft small under" }, groupOf(name)));
      this.charts.set(name, chart);
    }
    const key = visible.join("\n");
    if (key !== this.shown) {
      this.shown = key;
      const places = GROUPS.map(([title]) => title);
      const sorted = visible.toSorted((a, b) => places.indexOf(groupOf(a)) - places.indexOf(groupOf(b)));
      this.grid.replaceChildren(...sorted.map(name => this.charts.get(name).node));
      if (!visible.length) this.grid.replaceChildren(h("p", { class: "empty" }, "No metrics were written yet."));
    }
    for (const name of visible) this.charts.get(name).draw(this.linesOf(name, isOne), this);
  }

  linesOf(name, isOne) {
    const lines = this.ids.map((id, at) => ({ label: isOne ? name : this.labelOf(id), colour: at % 6, dash: at >= 6, points: this.runs.get(id)?.series[name] ?? [] }));
    const valid = isOne && name === "loss" ? this.runs.get(this.ids[0])?.series["valid/loss"] : null;
    if (valid) lines.push({ label: "valid/loss", colour: 1, points: valid });
    return lines;
  }
}

export class Run {
  constructor(board, id, me) {
    Object.assign(this, { board, id, me, ids: [id], logAt: 0 });
    this.title = h("h1", {});
    this.acts = h("div", { class: "buttons" });
    this.message = h("pre", { class: "message", role: "status", hidden: true });
    this.facts = h("div", { class: "facts big" });
    this.curves = new Curves([id], () => "");
    this.memory = panel("Memory");
    this.attempts = panel("Attempts");
    this.answers = panel("Generated answers");
    this.dictionary = panel("Dictionary");
    this.log = new Log(id);
    this.talk = h("div", {});
    this.votes = new Votes(id, me);
    this.driven = new Driven(id);
    this.node = h("div", {}, h("p", {}, h("a", { href: "#/" }, "All runs")), this.title, this.facts, this.acts, this.message, this.talk, this.votes.node, this.curves.node, this.driven.node,
      h("div", { class: "pair" }, this.memory.node, this.attempts.node), this.answers.node, this.log.node, this.dictionary.node);
    this.isMissing = this.isWaiting = Boolean(board.of(id)?.isWaiting);
    this.update();
    this.ready = this.isWaiting ? Promise.resolve() : this.load();
  }

  async load() {
    await this.curves.load();
    this.drawAnswers();
    this.drawDictionary();
  }

  news() { this.update(); }

  say(text, isBad = false) {
    this.message.hidden = false;
    this.message.className = `message ${isBad ? "s-failed" : ""}`;
    this.message.textContent = clean(text);
  }

  update() {
    const line = this.board.of(this.id);
    if (!line) {
      this.title.textContent = "There is no such run now";
      return;
    }
    const key = JSON.stringify(line);
    if (key === this.key) return;
    const before = this.line;
    Object.assign(this, { key, line });
    this.title.replaceChildren(clean(line.label), h("span", { class: `pill dot s-${line.state}` }, h("span", {}, line.job?.is_paused ? "paused" : line.state)));
    const rate = Object.entries(line.metrics).filter(([name]) => name.endsWith("_per_s"));
    const words = [line.isWaiting && line.state === "pending" ? "waits: its files are checked, then it is sent" : null, line.group ? `group ${line.group}` : "started by hand", line.task, line.job ? `job ${line.job.id}` : null, line.differs, `id ${line.id}`,
      line.host, line.backend ? `${line.backend} ${line.backend_id ?? ""}` : null, 
      ...rate.map(([name, value]) => `${number(value)} ${name.replace("_per_s", "/s")}`),
      line.metrics.mfu ? `MFU ${(100 * line.metrics.mfu).toFixed(1)} %` : null, line.metrics.step_s ? `${number(line.metrics.step_s)} s a step` : null,
      line.metrics.peak_gib ? `peak ${number(line.metrics.peak_gib)} GiB` : null,
      line.recoveries ? `ranks lost and replaced: ${line.recoveries} times` : null, line.gpu_hours ? `${line.gpu_hours} GPU-hours` : null, ago(line.ended ?? line.started ?? line.created)];
    this.facts.replaceChildren(progress(line), ...words.filter(Boolean).map(word => h("span", {}, clean(word))));
    if (line.reason || line.unseen) this.facts.append(h("div", { class: `why s-${line.state}` }, h("span", {}, clean(line.unseen ? `Not seen now: ${line.unseen}` : line.reason))));
    const [old, current] = [before, line].map(one => [one?.state, one?.job?.status, one?.job?.is_paused, one?.job?.is_deleted].join());
    const has = old === current;
    if (!before || !has) this.acts.replaceChildren(...buttons(line, this.me, (text, isBad) => this.say(text, isBad)));
    if (line.isWaiting) return;
    if (!before || !has || before.attempts !== line.attempts) this.drawAttempts();
    if (before && Object.keys(before.scores).length + before.step !== Object.keys(line.scores).length + line.step) this.drawAnswers();
    if (!before || !has) this.votes.load();
    if (canTalk(line) && !this.talk.firstChild) this.talk.append(new Talk(line).node);
    this.driven.update(line);
    this.log.update();
  }

  async drawAttempts() {
    const full = await get(`/lathe/v1/runs/${this.id}`);
    this.drawMemory(full.has_memory_plan);
    this.log.isKept = full.has_console || !this.line.by_hand;
    this.log.update();
    const rows = full.history.map(attempt => {
      const starts = full.starts.filter(start => start.attempt === attempt.number);
      const spans = starts.map(start => `${day(start.began_at)} to ${day(start.ended_at)} on ${start.host}${start.code === null ? "" : `, code ${start.code}`}`);
      return h("tr", {}, h("td", {}, String(attempt.number)), h("td", { class: `pill s-${attempt.state}` }, attempt.state), h("td", { class: "wrap" }, clean(`${attempt.backend} ${attempt.id ?? ""}`)),
        h("td", { class: "wrap" }, clean(spans.join("; ") || attempt.reason || "")));
    });
    this.attempts.fill(rows.length ? table("Attempts", ["attempt", "state", "where", "when"], rows)
      : h("p", { class: "empty" }, "It was started by hand: nothing was submitted."));
  }

  async drawMemory(isPlanned) {
    if (!isPlanned) {
      this.memory.fill(h("p", { class: "empty" }, "No plan: only a run on a GPU has one."), this.measured(null));
      return;
    }
    const memory = await get(`/lathe/v1/runs/${this.id}/memory`);
    const phases = memory.plan?.phases ?? [];
    const rows = phases.map(phase => {
      const total = Object.values(phase.peak).reduce((sum, one) => sum + one, 0);
      const parts = Object.entries(phase.peak).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]).map(([name, size]) => `${name} ${bytes(size)}`);
      return h("tr", {}, h("td", {}, clean(phase.name)), h("td", { class: "num" }, bytes(total)), h("td", { class: "wrap" }, clean(parts.join(", "))));
    });
    this.memory.fill(rows.length ? table("Planned memory", ["phase", "planned peak", "of it"], rows) : null, this.measured(memory));
  }

  measured(memory) {
    const peak = this.line?.metrics.peak_gib;
    const planned = Math.max(0, ...(memory?.plan?.phases ?? []).map(phase => Object.values(phase.peak).reduce((sum, one) => sum + one, 0)));
    const real = memory?.measured ?? (peak ? peak * 2 ** 30 : null);
    if (real === null) return h("p", { class: "soft" }, "Nothing was measured yet.");
    const share = planned ? `, ${(100 * real / planned).toFixed(0)} % of the plan` : "";
    return h("p", {}, `Measured peak: ${bytes(real)}${share}.`);
  }

  async drawAnswers(step) {
    const answers = await get(`/lathe/v1/runs/${this.id}/answers${step === undefined ? "" : `?step=${step}`}`);
    this.answers.node.hidden = !answers.steps.length;
    if (!answers.steps.length || step === undefined && answers.step === this.answerStep) return;
    this.answerStep = answers.step;
    const pick = h("select", { id: "answers-step", onchange: () => this.drawAnswers(pick.value) }, answers.steps.map(one => h("option", { value: one, selected: one === answers.step }, String(one))));
    const names = [...new Set(answers.rows.flatMap(Object.keys))];
    const rows = answers.rows.map(row => h("tr", {}, names.map(name => h("td", { class: "wrap" }, clean(row[name])))));
    this.answers.fill(h("label", { for: "answers-step" }, "at step ", pick), table("Generated answers", names.map(clean), rows));
  }

  async drawDictionary() {
    const { experiment } = await get(`/lathe/v1/runs/${this.id}`);
    const others = this.board.lines().filter(line => line.id !== this.id && !line.isWaiting);
    others.sort((a, b) => (b.group === this.line?.group) - (a.group === this.line?.group) || (b.created ?? "").localeCompare(a.created ?? ""));
    const place = h("div", {}, h("pre", { tabindex: "0", "aria-label": "Dictionary" }, clean(JSON.stringify(experiment, null, 2))));
    const pick = h("select", { id: "other", onchange: async () => place.replaceChildren(pick.value ? await differences([this.id, pick.value], id => clean(this.board.of(id)?.label ?? id))
      : h("pre", { tabindex: "0", "aria-label": "Dictionary" }, clean(JSON.stringify(experiment, null, 2)))) },
      h("option", { value: "" }, "nothing: show it whole"), others.slice(0, 200).map(line => h("option", { value: line.id }, `${clean(line.label)} · ${clean(line.group || "by hand")} · ${line.id.slice(0, 8)}`)));
    this.dictionary.fill(h("label", { for: "other" }, "compare with ", pick), place);
  }
}

// A table of the keys in which the dictionaries of some runs differ.
export async function differences(ids, labelOf) {
  const { keys } = await get(`/lathe/v1/differences?runs=${ids.join(",")}`);
  if (!keys.length) return h("p", { class: "empty" }, "Their dictionaries are the same.");
  const rows = keys.map(({ key, values }) => h("tr", {}, h("td", { class: "mono" }, clean(key)), values.map(value => h("td", { class: "wrap" }, value === null ? "–" : clean(value)))));
  return table("Differences", ["key", ...ids.map(id => `${labelOf(id)} ${id.slice(0, 8)}`)], rows);
}

export class Compare {
  constructor(board, ids) {
    const label = id => board.of(id)?.label ?? id.slice(0, 8);
    Object.assign(this, { board, ids });
    const hasTwins = new Set(ids.map(label)).size < ids.length;
    this.curves = new Curves(ids, id => hasTwins ? `${label(id)} ${id.slice(0, 8)}` : label(id));
    const legend = ids.map((id, at) => h("li", {}, h("i", { class: `mark k${at % 6}${at >= 6 ? " dash" : ""}` }), h("a", { href: `#/run/${id}` }, clean(`${label(id)} ${id.slice(0, 8)}`))));
    const place = panel("Differences");
    this.node = h("div", {}, h("p", {}, h("a", { href: "#/" }, "All runs")), h("h1", {}, `${ids.length} runs`), h("ul", { class: "legend" }, legend), this.curves.node, place.node);
    this.ready = this.curves.load();
    differences(ids, label).then(node => place.fill(node), error => place.fill(h("p", { class: "soft" }, error.message)));
  }

  news() {}
}

// The last lines that a run printed, read again while it runs.
class Log {
  constructor(id) {
    Object.assign(this, { id, at: 0 });
    this.text = h("pre", { tabindex: "0", "aria-label": "Log" });
    this.isErr = h("input", { type: "checkbox", onchange: () => this.load() });
    this.node = h("section", { class: "card panel", "aria-label": "Log" }, h("h2", {}, "Log"), h("label", { class: "toggle" }, this.isErr, " standard error"), this.text);
  }

  // isKept: whether there is a log; undefined until the server has said so.
  update() {
    if (this.isKept === false) this.text.textContent = "It was started by hand, and its console was not kept.";
    else if (this.isKept) this.timer ??= setTimeout(() => this.load(), Math.max(0, this.at + LOG_EVERY_MS - Date.now()));
  }

  async load() {
    this.at = Date.now();
    this.timer = undefined;
    try {
      const { lines } = await get(`/lathe/v1/runs/${this.id}/logs?limit=${LOG_LINES}${this.isErr.checked ? "&err=1" : ""}`);
      const isAtEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 8;
      this.text.textContent = lines.map(line => clean(line.replace(/\u001b\[[0-9;]*m/g, ""))).join("\n") || "Nothing was printed yet.";
      if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
    } catch (error) { this.text.textContent = error.message; }
  }
}
