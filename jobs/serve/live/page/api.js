// The requests of the page. The token stays in this module's memory: after a reload the page asks for it again.

let token = null;
export const hasToken = () => token !== null;
export const setToken = text => { token = text; };

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  return token === null ? { ...more } : { authorization: `Bearer ${token}`, ...more };
}

async function okAnswer(answer) {
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* no JSON: a proxy's page */ }
  throw new Refused(answer.status, message);
}

export async function get(path) {
  return (await okAnswer(await fetch(path, { headers: headers() }))).json();
}

async function posted(path, body, more) {
  const kind = body === undefined ? {} : { "content-type": "application/json" };
  return okAnswer(await fetch(path, {
    method: "POST", headers: headers({ ...kind, ...more }),
    body: body === undefined ? undefined : JSON.stringify(body),
  }));
}

export const post = async (path, body, more = {}) => (await posted(path, body, more)).json();

export const remove = async path => (await okAnswer(await fetch(path, { method: "DELETE", headers: headers() }))).json();

// The pieces of an answer as they are generated. Fails where the last one does not come.
export async function* postForPieces(path, body) {
  for await (const { data } of eventsOf(await posted(path, { ...body, stream: true }, {}))) {
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
  throw new Error("The answer broke off before its end.");
}

// The server-sent events of an answer, each an object of its fields.
async function* eventsOf(answer) {
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield Object.fromEntries(part.split("\n").map(line => line.split(/: (.*)/s, 2)));
  }
}

// Sends a file of rows. Returns the file as the API has it.
export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file, file.name);
  return (await okAnswer(await fetch("/v1/files", { method: "POST", headers: headers(), body: form }))).json();
}

export const newKey = () =>
  [...crypto.getRandomValues(new Uint8Array(16))].map(one => one.toString(16).padStart(2, "0")).join("");

// Server-sent events by fetch, because an EventSource cannot send a token. It reconnects by itself, and disconnects while
// the page is hidden, because a browser has few connections to one server.
export class Stream {
  constructor(path, onEvent, onLink) {
    Object.assign(this, { path, onEvent, onLink, stopper: null, isOver: false });
    this.onSight = () => { if (!document.hidden && !this.stopper) this.run(); else if (document.hidden) this.rest(); };
    document.addEventListener("visibilitychange", this.onSight);
    this.run();
  }

  rest() {
    this.stopper?.abort();
    this.stopper = null;
  }

  close() {
    this.isOver = true;
    document.removeEventListener("visibilitychange", this.onSight);
    this.rest();
  }

  async run() {
    const stopper = this.stopper = new AbortController();
    while (!this.isOver && this.stopper === stopper) {
      try {
        const answer = await okAnswer(await fetch(this.path(), { headers: headers(), signal: stopper.signal }));
        this.onLink("live");
        for await (const { event, data } of eventsOf(answer)) if (event) this.onEvent(event, JSON.parse(data));
      } catch (error) {
        if (stopper.signal.aborted) return;
        this.onLink(error instanceof Refused ? error : "lost");
        if (error instanceof Refused && error.status < 429) return;
      }
      await new Promise(resolve => setTimeout(resolve, 1500));
    }
  }
}
