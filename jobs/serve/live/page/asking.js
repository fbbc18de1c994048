// What the server can be asked, in our own words: the OpenAPI document as a table.

import { get } from "./api.js";
import { h, table } from "./dom.js";

export class AskingPage {
  constructor() {
    this.lines = h("div", {}, h("p", { class: "soft" }, "is being asked"));
    this.node = h("div", {}, h("h1", {}, "API"), h("p", {}, "Besides OpenAI's own paths below ", h("span", { class: "mono" }, "/v1"),
      ", as OpenAI's clients know them. For programs: ", h("a", { href: "/lathe/v1/openapi.json" }, "openapi.json"), "."), this.lines);
    this.look();
  }

  async look() {
    const { paths } = await get("/lathe/v1/openapi.json");
    const rows = Object.entries(paths).sort().flatMap(([path, methods]) => Object.entries(methods).map(([method, one]) =>
      h("tr", {}, h("td", { class: "mono" }, method.toUpperCase()), h("td", { class: "mono" }, path), h("td", { class: "wrap" }, one.summary))));
    this.lines.replaceChildren(table("API", ["method", "path", "what it does"], rows));
  }

  news() {}
}
