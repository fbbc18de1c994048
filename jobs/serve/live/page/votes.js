// Votes of a person on the answers of two models, side by side. The server alone knows whose answer stands where.

import { get, post } from "./api.js";
import { clean, h } from "./dom.js";

const SIDES = ["left", "right"], TITLES = { left: "Left answer", right: "Right answer" };
// What a person may say: the button, and the key that does the same.
const CHOICES = [["left", "Left is better", "ArrowLeft"], ["equal", "They are equal", "="], ["right", "Right is better", "ArrowRight"], ["skip", "Skip", "s"]];
const EMPTY = "(an empty answer)";
const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export class Votes {
  constructor(id, me) {
    Object.assign(this, { path: `/lathe/v1/runs/${id}/votes`, mayVote: me.role !== "read", pair: null, isBusy: false });
    this.state = h("p", { class: "soft", role: "status" });
    this.prompt = h("div", { class: "side", tabindex: "0", role: "group", "aria-label": "Prompt" });
    this.sides = Object.fromEntries(SIDES.map(side => [side, h("div", { class: "side", tabindex: "0", role: "group", "aria-label": TITLES[side] })]));
    this.form = h("div", { hidden: true });
    this.result = h("p", { role: "status" });
    this.show = h("button", { type: "button", hidden: true, onclick: () => this.showResult() }, "Show the result so far");
    this.node = h("section", { class: "card panel", "aria-label": "Which answer is better?", hidden: true, onkeydown: event => this.onKey(event) },
      h("h2", {}, "Which answer is better?"), this.state);
  }

  // Puts the parts into the page, once there are pairs of answers.
  fill() {
    const buttons = CHOICES.map(([choice, name, key]) => h("button", { type: "button", "aria-keyshortcuts": key, onclick: () => this.choose(choice) }, name));
    if (this.mayVote) this.form.append(this.prompt,
      h("div", { class: "pair" }, SIDES.map(side => h("div", {}, h("h3", {}, TITLES[side]), this.sides[side]))),
      h("p", { class: "buttons" }, buttons),
      h("p", { class: "soft small" }, "Keys, while the focus is in this part: arrow left, arrow right, = and s for skip."));
    this.node.append(this.form, h("p", { class: "buttons" }, this.show), this.result);
  }

  // Asks for the next pair. after: the pair that is passed over.
  async load(after) {
    try {
      this.draw(await get(this.path + (after ? `?after=${after}` : "")));
    } catch (error) { this.say(error.message, true); }
  }

  say(text, isBad = false) {
    this.node.hidden = false;
    this.state.className = isBad ? "s-failed" : "soft";
    this.state.textContent = clean(text);
  }

  draw({ pairs, own, votes, next }) {
    this.node.hidden = !pairs;
    if (!pairs) return;
    if (!this.form.parentNode) this.fill();
    const all = pairs.toLocaleString("en");
    if (!this.mayVote) this.say(`On ${count(pairs, "pair", "pairs")} of answers people gave ${count(votes, "vote", "votes")}.`);
    else this.say(next ? `You voted on ${own.toLocaleString("en")} of ${all}.` : `You voted on all ${all}.`);
    this.show.hidden = !votes;
    this.pair = next;
    this.form.hidden = !next;
    if (!next) return;
    const right = next.references.length ? [h("details", {}, h("summary", {}, "What stands in the row"), next.references.map(one => h("p", {}, clean(one))))] : [];
    this.prompt.replaceChildren(...next.prompt.map(turn => h("p", {}, turn.role ? h("span", { class: "soft" }, `${clean(turn.role)}: `) : null, clean(turn.text))), ...right);
    for (const side of SIDES) {
      this.sides[side].replaceChildren(h("p", {}, clean(next[side]) || EMPTY));
      this.sides[side].scrollTop = 0;
    }
  }

  onKey(event) {
    const choice = CHOICES.find(([, , key]) => key === event.key);
    if (!choice || !this.pair || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.choose(choice[0]);
  }

  async choose(better) {
    if (this.isBusy || !this.pair) return; // the buttons stay enabled: a disabled one would lose the focus
    this.isBusy = true;
    const { pair } = this.pair;
    try {
      if (better !== "skip") await post(this.path, { pair, better });
      this.result.textContent = "";
      await this.load(pair);
    } catch (error) {
      if (error.status === 409) await this.load(); // it was judged anew
      this.say(error.message, true);
    }
    if (this.form.hidden) this.show.focus();
    this.isBusy = false;
  }

  async showResult() {
    try {
      const { votes, voters, words } = await get(`${this.path}?part=result`);
      this.result.textContent = `${count(votes, "vote", "votes")} of ${count(voters, "person", "people")}. The trained model's answer is preferred in ${clean(words)}.`;
    } catch (error) { this.say(error.message, true); }
  }
}
