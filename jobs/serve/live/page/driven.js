// The part of a driven run: its operations, where its time went, who drives it, and what it has saved.
// Whatever a client has named is shown as text.

import { get } from "./api.js";
import { ACTIVE } from "./board.js";
import { ago, bytes, clean, day, duration, h, number, panel, table } from "./dom.js";

const EVERY_MS = 3000;
const dash = value => value === null || value === undefined ? "–" : value;
const seconds = value => value === null || value === undefined ? "–" : value < 60 ? `${number(value)} s` : duration(value);
const percent = value => `${(100 * value).toFixed(0)} %`;
const text = value => clean(typeof value === "string" ? value : JSON.stringify(value));
const isoOf = value => value === null ? "" : new Date(1000 * value).toISOString();

export class Driven {
  constructor(id) {
    Object.assign(this, { id, at: 0 });
    this.now = panel("Operations");
    this.driver = panel("Who drives it");
    this.saved = panel("Saved states and weights of samplers");
    this.node = h("div", { hidden: true }, this.now.node, h("div", { class: "pair" }, this.driver.node, this.saved.node));
  }

  // Reads what is new, again and again while the run is on its way.
  update(line) {
    const isShown = Boolean(line.is_driven && !line.isWaiting && !line.job?.is_deleted);
    this.node.hidden = !isShown;
    this.goesOn = line.job ? !["succeeded", "failed", "cancelled"].includes(line.job.status) : ACTIVE.includes(line.state);
    if (isShown) this.timer ??= setTimeout(() => this.load(), Math.max(0, this.at + EVERY_MS - Date.now()));
  }

  async load() {
    this.at = Date.now();
    this.timer = undefined;
    if (!this.node.isConnected && this.isDrawn) return;
    try {
      this.draw(await get(`/lathe/v1/runs/${this.id}/operations`));
    } catch (error) {
      this.now.fill(h("p", { class: "empty" }, error.status === 404 ? "No operation was sent yet." : error.message));
    }
    this.isDrawn = true;
    if (this.goesOn && !this.node.hidden) this.timer ??= setTimeout(() => this.load(), EVERY_MS);
  }

  draw({ totals, last, failures, waiting, driver, saved }) {
    const key = JSON.stringify([totals, waiting.map(one => one.seq), driver, saved]);
    if (key === this.key) return;
    this.key = key;
    const kinds = Object.entries(totals.by_kind).map(([kind, count]) => `${count} ${kind}`).join(", ");
    const { shares } = totals;
    const parts = shares ? [["working", totals.working_s, shares.working], ["waiting", totals.waiting_s, shares.waiting], ["no operation was there", totals.idle_s, shares.idle]] : [];
    this.now.fill(
      h("p", {}, `${totals.results} done (${clean(kinds) || "none"}), ${totals.failed} of them failed, ${totals.pending} wait.`),
      shares ? h("p", { class: "soft" }, `Since the first one: ${parts.map(([name, time, share]) => `${name} ${seconds(time)} (${percent(share)})`).join(", ")}.`) : null,
      waiting.length ? h("h3", {}, "Waiting now") : null, waiting.length ? lines("Waiting operations", waiting, false) : null,
      failures.length ? h("h3", {}, "Failed") : null, failures.length ? reasons(failures) : null,
      last.length ? h("h3", {}, "The last ones") : null, last.length ? lines("Last operations", last, true) : null);
    this.driver.fill(driver ? facts(driver) : h("p", { class: "empty" }, "No session of this service."));
    this.saved.fill(saved.length ? table("Saved states and weights of samplers", ["path", "kind", ["size"], "when", "expires"], saved.map(one =>
      h("tr", {}, h("td", { class: "wrap mono" }, clean(one.tinker_path)), h("td", {}, clean(one.checkpoint_type)), h("td", { class: "num" }, bytes(one.size_bytes)),
        h("td", {}, day(one.time)), h("td", {}, one.expires_at ? day(one.expires_at) : "never"))))
      : h("p", { class: "empty" }, "Nothing was saved yet."));
  }
}

// A line for each operation. hasWork: whether ranks have worked on it.
function lines(label, operations, hasWork) {
  const heads = [["number"], "kind", ["rows"], ["tokens"], ["waited"], ...(hasWork ? [["worked"], "ended"] : [])];
  const rows = operations.map(one => h("tr", {}, [one.seq, null, dash(one.rows), dash(one.tokens), seconds(one.waited_s), ...(hasWork ? [seconds(one.worked_s)] : [])].map((value, at) =>
    at === 1 ? h("td", { class: one.error === null ? null : "s-failed" }, clean(one.kind) + (one.error === null ? "" : ", failed")) : h("td", { class: "num" }, String(value))),
    hasWork ? h("td", {}, day(isoOf(one.ended))) : null));
  return table(label, heads, rows);
}

function reasons(operations) {
  return table("Failed operations", [["number"], "kind", "whose fault", "why"], operations.map(one => h("tr", {}, h("td", { class: "num" }, String(one.seq)),
    h("td", {}, clean(one.kind)), h("td", {}, one.category === "user" ? "the client's" : "the service's"), h("td", { class: "wrap" }, clean(one.error)))));
}

function facts(driver) {
  const beat = driver.last_heartbeat ? `${ago(driver.last_heartbeat)}${driver.is_alive ? "" : ", so its client is not there now"}` : "none yet";
  const end = driver.finished && `${driver.finished.type} at ${day(driver.finished.at)}${driver.finished.detail ? `: ${driver.finished.detail}` : ""}`;
  const pairs = [["token", driver.token], ["session", driver.session], ["its name", driver.display_name], ["training run", driver.run], ["base", driver.base_model],
    ["adapter rank", driver.rank], ["begins with", driver.begins_with], ["last heartbeat", beat], ["the session ended", end], ["SDK", driver.sdk_version],
    ["tags", driver.tags.length ? driver.tags : null], ["said of the session", driver.metadata], ["said of the run", driver.run_metadata]];
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "wrap" }, text(value))));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Who drives it" }, h("table", {}, h("tbody", {}, rows)));
}
