// What runs and what waits, as the backend has it, and whether the backend itself can be used.

import { get } from "./api.js";
import { ACTIVE } from "./board.js";
import { ago, clean, h, table } from "./dom.js";
import { progress } from "./overview.js";

export class QueuePage {
  constructor(board, me) {
    this.board = board;
    this.lines = h("div", {});
    this.checks = h("div", {}, h("p", { class: "soft" }, "is being looked at"));
    this.node = h("div", {}, h("h1", {}, "Queue"), this.lines, h("h2", {}, `Backend ${clean(me.backend)}`), this.checks);
    this.news();
    this.look();
  }

  news() {
    const lines = this.board.lines().filter(line => [...ACTIVE, "pending", "preempted", "paused"].includes(line.state) || line.job?.is_paused);
    const rank = line => (line.state === "running" ? 0 : ACTIVE.includes(line.state) ? 1 : 2);
    lines.sort((a, b) => rank(a) - rank(b) || (a.submitted ?? a.created ?? "").localeCompare(b.submitted ?? b.created ?? ""));
    const rows = lines.map((line, at) => h("tr", {}, h("td", { class: "num" }, String(at + 1)),
      h("td", { class: "text" }, line.isWaiting ? clean(line.label) : h("a", { href: `#/run/${line.id}` }, clean(line.label)), h("span", { class: "soft mono under" }, line.id.slice(0, 8))),
      h("td", {}, clean(line.group || "by hand")), h("td", { class: `pill s-${line.state}` }, line.job?.is_paused ? "paused" : line.state), h("td", {}, progress(line)),
      h("td", {}, clean(line.backend ? `${line.backend} ${line.backend_id ?? ""}` : "")), h("td", {}, clean(line.host)),
      h("td", { class: "soft" }, ago(line.submitted ?? line.created)), h("td", { class: "wrap" }, clean(line.unseen ?? line.reason))));
    this.lines.replaceChildren(rows.length ? table("Queue", ["place", "run", "group", "state", "progress", "where", "host", "sent", "why"], rows)
      : h("p", { class: "empty" }, "Nothing runs and nothing waits."));
  }

  async look() {
    const findings = await get("/lathe/v1/doctor");
    this.checks.replaceChildren(table("Backend", ["what", "verdict", "in words"], findings.map(one => h("tr", {}, h("td", {}, clean(one.name)),
      h("td", { class: `pill s-${one.is_good ? "succeeded" : "failed"}` }, one.is_good ? "good" : "bad"), h("td", { class: "wrap" }, clean(one.text))))));
  }
}
