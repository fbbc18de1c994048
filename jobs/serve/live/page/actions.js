// The buttons of a run. Each asks for confirmation first.

import { get, newKey, post, remove } from "./api.js";
import { ACTIVE } from "./board.js";
import { clean, h } from "./dom.js";

const DIALECT = "/v1/fine_tuning/jobs/";

// A dialog that resolves to what `read` gives when its button is pressed, else to null.
export function ask(title, content, button, read = () => true) {
  return new Promise(resolve => {
    const error = h("p", { class: "s-failed", role: "alert" });
    const yes = h("button", { type: "submit", class: "strong" }, button);
    const no = h("button", { type: "button", onclick: () => dialog.close() }, "Go back");
    const form = h("form", { method: "dialog", onsubmit: event => {
      event.preventDefault();
      try {
        answer = read();
        dialog.close();
      } catch (mistake) { error.textContent = mistake.message; }
    } }, h("h2", { id: "question" }, title), content, error, h("p", { class: "buttons" }, no, yes));
    let answer = null;
    const dialog = h("dialog", { "aria-labelledby": "question", onclose: () => { dialog.remove(); resolve(answer); } }, form);
    document.body.append(dialog);
    dialog.showModal();
    if (!dialog.querySelector("input,textarea")) no.focus();
  });
}

function resultText(results) {
  return results.map(one => `${one.action}: ${one.text}`).join("\n") || "There was nothing to do.";
}

// The buttons that this client may press. say: shows the result.
export function buttons(line, me, say) {
  const { job } = line;
  const mayChange = me.role === "admin" || (me.role === "run" && job && job.owner === me.name);
  const nodes = [];
  const add = (name, title, text, act) => nodes.push(h("button", { type: "button", onclick: async () => {
    if (!await ask(title, h("p", {}, text), name)) return;
    try {
      const results = await act();
      say(Array.isArray(results) ? resultText(results) : `${name}: done.`);
    } catch (error) { say(error.message, true); }
  } }, name));
  const what = `${clean(line.label)} (${line.id.slice(0, 8)})`;
  if (job && mayChange && !["succeeded", "failed", "cancelled"].includes(job.status)) {
    if (job.is_paused) add("Resume", `Resume ${what}?`, "It goes on from its last checkpoint, as if it had never stopped.", () => post(`${DIALECT}${job.id}/resume`));
    else add("Pause", `Pause ${what}?`, "It saves a checkpoint and stops. When it is resumed, it waits in the queue again.", () => post(`${DIALECT}${job.id}/pause`));
    if (job.is_driven && ACTIVE.includes(line.state)) add("Put aside", `Put ${what} aside?`, "It saves its state and gives its device back. Its next operation wakes it.", () => post(`/lathe/v1/runs/${line.id}/put_aside`));
    add("Cancel", `Cancel ${what}?`, "It saves a checkpoint and stops for good: it cannot be resumed.", () => post(`${DIALECT}${job.id}/cancel`));
  } else if (job?.is_driven && mayChange && !job.is_deleted && !ACTIVE.includes(line.state)) {
    add("Delete", `Delete ${what}?`, "Its operations, states and weights go, those of its samplers too. Its curves and its log stay.", () => remove(`/lathe/v1/runs/${line.id}`));
  } else if (!job && mayChange && !line.by_hand) {
    const path = `/lathe/v1/runs/${line.id}`;
    if (ACTIVE.includes(line.state)) add("Cancel", `Cancel ${what}?`, "It saves a checkpoint and stops. Retry goes on from there.", () => post(`${path}/cancel`));
    else add("Retry", `Retry ${what}?`, "It is sent again with the same code, and goes on from its last checkpoint.", () => post(`${path}/retry`));
  }
  if (job && !job.is_driven && me.role !== "read" || !job && me.role === "admin")
    nodes.push(h("button", { type: "button", onclick: () => (job ? cloneJob(job, say) : cloneRun(line, say)) }, "Copy with changes"));
  return nodes;
}

async function cloneJob(job, say) {
  const full = await get(DIALECT + job.id);
  const used = full.hyperparameters;
  const method = full.method.type;
  const inputs = {};
  const row = (name, label, value) => {
    inputs[name] = h("input", { id: `clone-${name}`, value });
    return h("label", { for: `clone-${name}` }, h("span", {}, label), inputs[name]);
  };
  const content = h("div", { class: "form" }, h("p", { class: "soft" }, `A new run of the model ${clean(full.model)} on the same file, ${clean(full.training_file)}.`),
    row("n_epochs", "Epochs", used.n_epochs), row("batch_size", "Rows of a step (batch)", used.batch_size),
    row("learning_rate_multiplier", "Learning-rate factor", used.learning_rate_multiplier), row("seed", "Seed", full.seed), row("suffix", "Suffix of the name", full.lathe.suffix ?? ""));
  const body = await ask("Copy with changes", content, "Start it", () => {
    const value = name => Number(inputs[name].value);
    const hyperparameters = { n_epochs: value("n_epochs"), batch_size: value("batch_size"), learning_rate_multiplier: value("learning_rate_multiplier") };
    if (method === "dpo") hyperparameters.beta = full.method.dpo.hyperparameters.beta;
    for (const [name, one] of Object.entries({ ...hyperparameters, seed: value("seed") })) if (!Number.isFinite(one)) throw new Error(`${name}: want a number.`);
    return { model: full.model, training_file: full.training_file, validation_file: full.validation_file, seed: value("seed"),
      suffix: inputs.suffix.value || null, method: { type: method, [method]: { hyperparameters } } };
  });
  if (body) await sayResult(say, async () => `Started ${(await post("/v1/fine_tuning/jobs", body, { "idempotency-key": newKey() })).id}.`);
}

async function cloneRun(line, say) {
  const { experiment } = await get(`/lathe/v1/runs/${line.id}`);
  const text = h("textarea", { id: "clone-text", rows: "20", cols: "70", spellcheck: "false", class: "mono" });
  text.value = JSON.stringify(experiment, null, 2);
  const content = h("label", { for: "clone-text" }, h("span", {}, "The new experiment's dictionary"), text);
  const values = await ask("Copy with changes", content, "Look at the plan", () => JSON.parse(text.value));
  if (!values) return;
  await sayResult(say, async () => {
    const plan = await post("/lathe/v1/experiments", { experiment: values });
    const isAgreed = await ask("Submit it?", h("pre", {}, resultText(plan)), "Submit");
    return isAgreed ? resultText(await post("/lathe/v1/experiments", { experiment: values, action: "submit" })) : "Nothing was submitted.";
  });
}

async function sayResult(say, act) {
  try {
    say(await act());
  } catch (error) { say(error.message, true); }
}
