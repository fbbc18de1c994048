// Asking a finished run beside its base: a chat, an answer, vectors compared, or scores of statements.

import { post, postForPieces } from "./api.js";
import { clean, h, number, table } from "./dom.js";

const SIDES = [["final", "After the training"], ["base", "Its base, before"]];
const MOST_TOKENS = 200, EMPTY = "(an empty answer)";
const linesOf = text => text.split("\n").map(line => line.trim()).filter(Boolean);

// For each task: the fields of its form, and how one side is asked. ask: gives nodes; `past` is the chat so far, and
// `show` takes the nodes of an answer that is still growing.
const READER = {
  fields: [["question", "Question", 2], ["contexts", "Passages, one a line", 4]],
  ask: async (head, { question, contexts }) => say(await post("/v1/completions", { ...head, prompt: question, contexts: linesOf(contexts), temperature: 0 })),
};
const WAYS = {
  causal_lm: {
    fields: [["message", "Message", 2]],
    ask: async (head, { message }, past, show) => {
      past.push({ role: "user", content: message });
      const answer = { role: "assistant", content: "" };
      let cut = 0;
      for await (const { choices, usage } of postForPieces("/v1/chat/completions", { ...head, messages: past, max_tokens: MOST_TOKENS, temperature: 0 })) {
        answer.content += choices[0].delta.content ?? "";
        cut = usage?.cut_tokens ?? cut;
        show(chat([...past, answer], "..."));
      }
      past.push(answer);
      return [...chat(past, EMPTY), ...unread(cut)];
    },
  },
  cross_attention: READER,
  fid: READER,
  summariser: {
    fields: [["document", "Document", 6]],
    ask: async (head, { document }) => say(await post("/v1/completions", { ...head, prompt: document, temperature: 0 })),
  },
  retriever: {
    fields: [["query", "Query", 1], ["passages", "Passages, one a line", 4]],
    ask: async (head, { query, passages }) => {
      const embed = (side, input) => post("/v1/embeddings", { ...head, side, input });
      const asked = await embed("query", [query]), found = await embed("passage", linesOf(passages));
      const cosines = found.data.map(one => cosine(asked.data[0].embedding, one.embedding));
      return [...ranked("passage", linesOf(passages), cosines), ...unread((asked.usage.cut_tokens ?? 0) + (found.usage.cut_tokens ?? 0))];
    },
  },
  vera: {
    fields: [["statements", "Statements, one a line", 4]],
    ask: async (head, { statements }) => {
      const { scores, cut_tokens } = await post("/lathe/v1/score", { ...head, statements: linesOf(statements) });
      return [...ranked("statement", linesOf(statements), scores), ...unread(cut_tokens)];
    },
  },
};

export const canTalk = line => line.state === "succeeded" && line.task in WAYS;

const chat = (messages, empty) =>
  messages.map(({ role, content }) => h("p", { class: role === "user" ? "soft" : "answer" }, clean(content) || empty));

const say = ({ choices, usage }) => [h("p", { class: "answer" }, clean(choices[0].text) || EMPTY), ...unread(usage.cut_tokens)];

// What of a question the limits of the experiment cut off.
const unread = cut => (cut ? [h("p", { class: "soft small" }, `${cut.toLocaleString("en")} tokens of it were not read: they are beyond the limits of its dictionary.`)] : []);

function ranked(what, texts, scores) {
  const order = texts.map((text, at) => [text, scores[at]]).sort((a, b) => b[1] - a[1]);
  return [table("Scores", [what, ["score"]], order.map(([text, score]) => h("tr", {}, h("td", { class: "wrap" }, clean(text)), h("td", { class: "num" }, number(score)))))];
}

function cosine(a, b) {
  const dot = (x, y) => x.reduce((sum, one, at) => sum + one * y[at], 0);
  return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);
}

export class Talk {
  constructor(line) {
    this.id = line.id;
    this.way = WAYS[line.task];
    this.pasts = SIDES.map(() => []);
    this.inputs = Object.fromEntries(this.way.fields.map(([name, label, rows]) => [name, h("textarea", { id: `talk-${name}`, rows, required: true, "data-label": label })]));
    this.button = h("button", { type: "submit", class: "strong" }, "Ask both");
    this.places = SIDES.map(([, title]) => h("div", { class: "side", tabindex: "0", role: "group", "aria-label": title, "aria-live": "polite" }, h("p", { class: "empty" }, `${title}: not asked yet.`)));
    const fields = Object.values(this.inputs).map(input => h("label", { for: input.id }, h("span", {}, input.dataset.label), input));
    this.node = h("section", { class: "card panel", "aria-label": "Ask it" }, h("h2", {}, "Ask it"),
      h("form", { class: "form", onsubmit: event => { event.preventDefault(); this.ask(); } }, fields, h("p", { class: "buttons" }, this.button)),
      h("div", { class: "pair" }, SIDES.map(([, title], at) => h("div", {}, h("h3", {}, title), this.places[at]))));
  }

  async ask() {
    const texts = Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
    this.button.disabled = true;
    this.places.forEach((place, at) => place.replaceChildren(...chat(this.pasts[at], EMPTY), h("p", { class: "soft" }, "It is being asked. The first time its weights are read.")));
    let isAnswered = false;
    await Promise.all(SIDES.map(async ([weights], at) => {
      const past = this.pasts[at], length = past.length, place = this.places[at];
      const show = nodes => place.replaceChildren(...nodes);
      place.setAttribute("aria-busy", "true"); // a growing answer is read out once, when it is whole
      try {
        show(await this.way.ask({ model: this.id, weights }, texts, past, show));
        isAnswered = true;
      } catch (error) {
        past.length = length; // the message had no answer
        show([...chat(past, EMPTY), h("p", { class: "why s-failed" }, h("span", {}, clean(error.message)))]);
      }
      place.removeAttribute("aria-busy");
    }));
    this.button.disabled = false;
    if (this.inputs.message && isAnswered) this.inputs.message.value = "";
  }
}
