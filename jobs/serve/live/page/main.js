// The page: the login, the part that is shown, and the stream that keeps it up to date.

import { ask } from "./actions.js";
import { get, hasToken, Refused, setToken, Stream } from "./api.js";
import { ApiPage } from "./api_page.js";
import { Board } from "./board.js";
import { h } from "./dom.js";
import { NewRun } from "./new_run.js";
import { Overview } from "./overview.js";
import { QueuePage } from "./queue.js";
import { Compare, Run } from "./run.js";

const content = document.getElementById("content");
const link = document.getElementById("link");
const board = new Board();
let me = null, view = null, stream = null, turn = 0;

async function login(message) {
  const input = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
  const name = h("input", { type: "text", autocomplete: "username", value: location.host, hidden: true, "aria-hidden": "true", tabindex: "-1" });
  const body = h("div", { class: "form" }, h("p", {}, message), name, h("label", { for: "token" }, h("span", {}, "Token"), input));
  const text = await ask("This server asks for a token", body, "Log in", () => input.value.trim());
  setToken(text);
}

async function enter() {
  for (;;) {
    try {
      me = await get("/lathe/v1/me");
      break;
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 401) throw error;
      await login(hasToken() ? "This server does not know that token." : "Whoever runs this server gives you one. The page forgets it when you reload or close it.");
    }
  }
  document.getElementById("base").textContent = me.base;
  document.getElementById("who").textContent = `${me.name} (${me.role})`;
  document.getElementById("new").hidden = me.role === "read";
  listen(null);
}

function listen(curves) {
  stream?.close();
  const path = () => `/lathe/v1/stream?since=${board.tick}${curves ? `&watch=${curves.watched()}` : ""}`;
  stream = new Stream(path, (kind, news) => {
    if (kind === "metrics") return view?.curves?.grow(news);
    if (kind === "unreadable") {
      board.unreadable = news;
      view?.draw?.();
      return;
    }
    const isLess = board.take(news);
    if (!view || view.isMissing && view.ids.every(id => board.runs.has(id) || board.of(id) && !view.isWaiting)) show();
    else if (view.draw) view.draw();
    else view.news();
    if (isLess) {
      board.runs.clear();
      board.tick = -1;
      listen(view.curves);
    }
  }, state => showLink(state));
}

function showLink(state) {
  const words = { live: ["running", "live"], lost: ["failed", "the server does not answer"] };
  const [colour, text] = words[state] ?? ["failed", state.message];
  link.className = `dot s-${colour}`;
  link.firstElementChild.textContent = text;
  if (state.status === 401) enter();
}

async function show() {
  const own = ++turn;
  const [path] = location.hash.slice(1).split("?");
  const [, kind, rest] = path.split("/");
  const shown = view = viewOf(kind, rest);
  for (const one of document.querySelectorAll("nav a"))
    one.toggleAttribute("aria-current", one.hash === (["new", "queue", "api"].includes(kind) ? `#/${kind}` : "#/"));
  content.replaceChildren(view.node);
  document.title = `${view.node.querySelector("h1")?.firstChild?.textContent ?? "Runs"} · Lathe`;
  if (!view.curves) return listen(null);
  view.curves.onReload = () => listen(view.curves);
  try {
    await view.ready;
    if (own === turn) listen(view.curves);
  } catch (error) {
    shown.isMissing = error.status === 404; // it is shown again once its runs are on the board
    if (own === turn) content.append(h("p", { class: "s-failed", role: "alert" }, error.message));
  }
}

function viewOf(kind, rest) {
  if (kind === "run") return new Run(board, rest, me);
  if (kind === "compare") return new Compare(board, rest.split(","));
  if (kind === "new" && me.role !== "read") return new NewRun(board, me);
  if (kind === "queue") return new QueuePage(board, me);
  return kind === "api" ? new ApiPage() : new Overview(board, me);
}

addEventListener("hashchange", () => {
  if (!me) return;
  show();
  content.focus();
  scrollTo(0, 0);
});
enter().catch(error => showLink({ message: error.message }));
