// The page of the API: the OpenAPI document as a table.

import { get } from "./api.js";
import { h, table } from "./dom.js";

export class ApiPage {
  constructor() {
    this.lines = h("div", {}, h("p", { class: "soft" }, "loading"));
    this.node = h("div", {}, h("h1", {}, "API"), h("p", {}, "Besides these routes the server has OpenAI's own ones below ", h("span", { class: "mono" }, "/v1"),
      ". For programs: ", h("a", { href: "/lathe/v1/openapi.json" }, "openapi.json"), "."), this.lines);
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
