// A new run: a model, a file of rows, what was understood of them, the plan, and the start.

import { newKey, post, upload } from "./api.js";
import { bytes, clean, duration, h, panel, table } from "./dom.js";

const BUSY = 429, BUSY_MS = 3000;
const NEWS_MS = 10_000; // within which the stream tells of a new job
const pause = ms => new Promise(resolve => setTimeout(resolve, ms));
const NUMBERS = [["n_epochs", "Epochs"], ["batch_size", "Rows of a step (batch)"], ["learning_rate_multiplier", "Learning-rate factor"]];
const WAYS = { supervised: "examples", dpo: "preferences (dpo)" };

export class NewRun {
  constructor(board, me) {
    Object.assign(this, { board, models: me.models, training: null, validation: null, turn: 0, key: newKey() });
    const changed = () => this.look();
    this.model = h("select", { id: "model", onchange: () => { this.drawMethods(); changed(); } },
      Object.keys(me.models).map(name => h("option", { value: name }, clean(name))));
    this.method = h("select", { id: "method", onchange: () => { this.drawKinds(); changed(); } });
    this.kinds = h("p", { class: "soft small" });
    this.inputs = Object.fromEntries([...NUMBERS, ["seed", "Seed"], ["suffix", "Suffix of the name"]].map(([name, label]) =>
      [name, h("input", { id: `new-${name}`, placeholder: name === "suffix" ? "none" : "auto", "data-label": label, onchange: changed })]));
    this.reading = h("p", { role: "status", class: "soft" }, "No file was chosen yet.");
    this.understood = panel("What was understood");
    this.plan = panel("Plan");
    this.start = h("button", { type: "button", class: "strong", disabled: true, onclick: () => this.create() }, "Start");
    this.error = h("p", { class: "s-failed why", role: "alert", hidden: true });
    const valid = fileInput("validation-file", file => this.take("validation", file));
    const rows = fileInput("rows-file", file => this.take("training", file));
    const drop = h("div", { class: "drop", ondragover: event => { event.preventDefault(); drop.classList.add("over"); },
      ondragleave: () => drop.classList.remove("over"),
      ondrop: event => { event.preventDefault(); drop.classList.remove("over"); if (event.dataTransfer.files.length) this.take("training", event.dataTransfer.files[0]); } },
      h("label", { for: "rows-file" }, h("b", {}, "Drop a file of rows here"), ", or choose one: one JSON object a line"), rows, this.reading);
    const fields = Object.values(this.inputs).map(input => h("label", { for: input.id }, h("span", {}, input.dataset.label), input));
    this.node = h("div", { class: "new" }, h("h1", {}, "New run"),
      h("section", { class: "card panel form", "aria-label": "Model and rows" }, h("label", { for: "model" }, h("span", {}, "Model"), this.model),
        h("label", { for: "method" }, h("span", {}, "Learns from"), this.method), this.kinds, drop,
        h("details", {}, h("summary", {}, "Numbers, and a file for validation"), h("div", { class: "form" }, fields,
          h("label", { for: "validation-file" }, h("span", {}, "Validation rows"), valid)),
        h("p", { class: "soft small" }, "Without a validation file a share of the rows is held out."))),
      this.understood.node, this.plan.node, this.error, h("p", { class: "buttons" }, this.start));
    this.understood.fill(h("p", { class: "empty" }, "Choose a file first."));
    this.plan.fill(h("p", { class: "empty" }, "Choose a file first."));
    this.drawMethods();
  }

  news() {}

  drawMethods() {
    const methods = Object.keys(this.models[this.model.value].methods);
    this.method.replaceChildren(...methods.map(name => h("option", { value: name }, WAYS[name])));
    this.drawKinds();
  }

  drawKinds() {
    const { methods, task } = this.models[this.model.value];
    const ways = Object.entries(methods[this.method.value]).map(([name, keys]) => `${keys.join(", ")} (${name})`);
    this.kinds.textContent = clean(`Task ${task}. A row has the keys ${ways.join(", or ")}.`);
  }

  // Sends a file to the server. which: training or validation.
  async take(which, file) {
    this[which] = null;
    this.start.disabled = true;
    this.reading.textContent = `${clean(file.name)} is being sent.`;
    try {
      const made = await upload(file);
      this.reading.textContent = clean(`${made.filename}, ${made.bytes.toLocaleString("en")} bytes.`);
      if (made.status === "error") throw new Error(made.status_details);
      this[which] = made.id;
    } catch (error) {
      this.say(error.message);
      return;
    }
    this.look();
  }

  say(text) {
    this.error.hidden = !text;
    this.error.replaceChildren(h("span", {}, clean(text)));
  }

  // The request of POST /v1/fine_tuning/jobs. Throws for what is no number.
  body() {
    const text = name => this.inputs[name].value.trim();
    const value = (name, label) => {
      if (!Number.isFinite(Number(text(name)))) throw new Error(`${label}: got ${text(name)}, want a number, or nothing for "auto".`);
      return Number(text(name));
    };
    const body = { model: this.model.value, training_file: this.training };
    const numbers = NUMBERS.filter(([name]) => text(name) && text(name) !== "auto").map(([name, label]) => [name, value(name, label)]);
    const type = this.method.value;
    body.method = { type, [type]: { hyperparameters: Object.fromEntries(numbers) } };
    if (this.validation) body.validation_file = this.validation;
    if (text("seed")) body.seed = value("seed", "Seed");
    if (text("suffix")) body.suffix = text("suffix");
    return body;
  }

  // Asks what the server understands of the rows, and then for the plan.
  async look() {
    if (!this.training) return;
    const own = ++this.turn;
    this.say("");
    this.start.disabled = true;
    this.key = newKey();
    const wait = text => h("p", { class: "soft", role: "status" }, text);
    this.understood.fill(wait("The rows are being read and cut into tokens."));
    this.plan.fill(wait("Waits for the rows."));
    try {
      const rows = await this.ask("rows", own);
      if (own !== this.turn) return;
      this.drawRows(rows);
      this.start.disabled = false;
      this.plan.fill(wait("Memory and time are being predicted."));
      const plan = await this.ask("plan", own);
      if (own === this.turn) this.drawPlan(plan);
    } catch (error) {
      if (own !== this.turn) return;
      const panels = this.start.disabled ? [this.understood, this.plan] : [this.plan];
      for (const one of panels) one.fill(h("p", { class: "soft" }, one === this.plan && panels.length > 1 ? "No plan without rows." : "It could not be made."));
      this.say(error.message);
    }
  }

  async ask(part, own) {
    for (;;) {
      try {
        return await post("/lathe/v1/preview", { ...this.body(), part });
      } catch (error) {
        if (error.status !== BUSY || own !== this.turn) throw error;
        await pause(BUSY_MS);
      }
    }
  }

  drawRows({ num_rows, sample_rows, kind, splits, examples }) {
    const count = value => h("td", { class: "num" }, value.toLocaleString("en"));
    const lines = Object.entries(splits).map(([name, one]) => h("tr", {}, h("td", {}, name === "train" ? "training" : "validation"),
      count(one.rows), count(one.tokens), count(one.cut_rows ?? 0)));
    const part = sample_rows < num_rows ? ` Counted here: the first ${sample_rows.toLocaleString("en")}.` : "";
    const hasMarks = examples.some(one => Object.values(one.texts).some(segments => segments.some(segment => segment.in_loss !== null)));
    this.understood.fill(h("p", {}, h("b", {}, num_rows.toLocaleString("en")), ` rows of the kind ${kind}.${part}`),
      table("Rows and tokens", ["rows of", ["rows"], ["tokens"], ["cut rows"]], lines),
      h("p", { class: "soft small" }, hasMarks ? "Two rows as the model reads them. It learns the marked tokens." : "Two rows as the model reads them. The loss of this task is not over tokens."),
      ...examples.map(example));
  }

  drawPlan({ steps, epochs, batch, peak_bytes, fits, device, time }) {
    const words = [`${steps.toLocaleString("en")} steps: ${epochs} epochs, ${batch} rows a step`];
    const verdict = fits === null ? "" : fits ? `, fits on ${device}` : `, does not fit on ${device}`;
    words.push(`peak memory of a device ${bytes(peak_bytes)}${verdict}`);
    if (time) words.push(`about ${duration(time.total_s)} on ${time.world > 1 ? `${time.world} x ` : ""}${time.device}`);
    else words.push("how long it takes is not known: service.py names no `device` for this model");
    this.plan.fill(h("ul", { class: fits === false ? "plan s-failed" : "plan" }, words.map(word => h("li", {}, h("span", {}, clean(word))))));
  }

  async create() {
    this.start.disabled = true;
    this.say("");
    try {
      const job = await post("/v1/fine_tuning/jobs", this.body(), { "idempotency-key": this.key });
      const run = job.lathe.exp_id, end = Date.now() + NEWS_MS;
      while (!this.board.of(run) && Date.now() < end) await pause(100);
      location.hash = `#/run/${run}`;
    } catch (error) {
      this.say(error.message);
      this.start.disabled = false;
    }
  }
}

function fileInput(id, take) {
  return h("input", { id, type: "file", accept: ".jsonl,.json,.txt", onchange: event => { if (event.target.files.length) take(event.target.files[0]); } });
}

function example({ tokens, texts }) {
  const pairs = Object.entries(texts); // a single text needs no name
  const parts = pairs.map(([name, segments]) => h("p", {}, pairs.length > 1 ? h("span", { class: "soft small under" }, clean(name)) : null,
    segments.map(one => (one.in_loss ? h("mark", {}, clean(one.text)) : h("span", {}, clean(one.text))))));
  return h("figure", { class: "example" }, h("figcaption", { class: "soft small" }, `${tokens} tokens`), parts);
}
