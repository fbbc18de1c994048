// OpenAI's client for JavaScript: node openai_node.mjs WORLD, as programs/calls.py describes it
import fs from "node:fs";
import assert from "node:assert/strict";
import OpenAI from "openai";

const world = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: world.url, apiKey: "none", maxRetries: 0 });
const ask = (more) => client.chat.completions.create({ model: world.chat, temperature: 0, max_tokens: 12, ...more });
const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: "What colour is red 1?" }];
const schema = {
  type: "object", properties: { colour: { enum: ["red", "blue"] }, sure: { type: "boolean" } },
  required: ["colour", "sure"], additionalProperties: false,
};
const parameters = { type: "object", properties: { name: { enum: ["red", "blue"] } }, required: ["name"] };
const lookUp = { type: "function", function: { name: "look_up", parameters } };

async function tried(call, run) {
  let result = "works";
  try {
    await run();
  } catch (error) {
    const isRefused = error.status >= 400 && error.status < 500;
    result = `${isRefused ? "refused" : "fails"}: ${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ call, result }));
}

await tried("models", async () => {
  const names = [];
  for await (const one of await client.models.list()) names.push(one.id);
  assert.ok(names.includes(world.chat));
});
await tried("chat", async () => assert.ok((await ask({ messages })).choices[0].message.content));
await tried("chat: an answer's message sent back", async () => {
  const { message } = (await ask({ messages })).choices[0];
  assert.ok((await ask({ messages: [...messages, message, { role: "user", content: "And blue 1?" }] })).choices[0]);
});
await tried("chat: streamed, with usage", async () => {
  let text = "", usage = null;
  for await (const one of await ask({ messages, stream: true, stream_options: { include_usage: true } })) {
    text += one.choices[0]?.delta.content ?? "";
    usage = one.usage ?? usage;
  }
  const whole = await ask({ messages });
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage, whole.usage);
});
await tried("chat: n, seed, top_p, penalties, stop", async () => {
  const how = { n: 2, seed: 3, temperature: 1, top_p: 0.9, presence_penalty: 0.5, stop: ["\n"] };
  assert.equal((await ask({ messages, ...how })).choices.length, 2);
});
await tried("chat: log-probabilities", async () => {
  const { choices } = await ask({ messages, logprobs: true, top_logprobs: 2 });
  assert.equal(choices[0].logprobs.content.map(one => one.token).join(""), choices[0].message.content);
});
await tried("chat: JSON by a schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "a", strict: true, schema } };
  const answer = await client.chat.completions.parse({ model: world.chat, messages, max_tokens: 64, response_format });
  assert.equal(typeof answer.choices[0].message.parsed.sure, "boolean");
});
await tried("chat: a tool called, its result sent back", async () => {
  const how = { max_tokens: 64, tools: [lookUp] };
  const { message, finish_reason } = (await ask({ messages, tool_choice: "required", ...how })).choices[0];
  assert.equal(finish_reason, "tool_calls");
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "It is dark." };
  assert.ok((await ask({ messages: [...messages, message, result], ...how })).choices[0]);
});
await tried("chat: a picture", () =>
  ask({ messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } }] }] }));
await tried("completions: texts, token ids", async () => {
  const how = { model: world.chat, max_tokens: 9 };
  assert.equal((await client.completions.create({ prompt: ["a red", "a blue"], ...how })).choices.length, 2);
  assert.equal((await client.completions.create({ prompt: [[70, 71], [72]], ...how })).choices.length, 2);
});
await tried("completions: echo with log-probabilities", async () => {
  const how = { model: world.chat, prompt: [70, 71, 72], echo: true, logprobs: 1, max_tokens: 0 };
  assert.equal((await client.completions.create(how)).choices[0].logprobs.tokens.length, 3);
});
await tried("embeddings: base64", async () =>
  assert.equal((await client.embeddings.create({ model: world.vectors, input: ["a", "b"] })).data.length, 2));
await tried("embeddings: floats, token ids", async () => {
  const input = [[70], [72]];
  const { data } = await client.embeddings.create({ model: world.vectors, input, encoding_format: "float" });
  assert.equal(typeof data[1].embedding[0], "number");
});
await tried("embeddings: fewer dimensions", () =>
  client.embeddings.create({ model: world.vectors, input: "a", dimensions: 3 }));
await tried("files", async () => {
  const file = await client.files.create({ file: fs.createReadStream(world.rows), purpose: "fine-tune" });
  assert.equal(await (await client.files.content(file.id)).text(), fs.readFileSync(world.rows, "utf8"));
  assert.ok((await client.files.delete(file.id)).deleted);
});
await tried("fine-tuning, to an answer of the model", async () => {
  const { jobs } = client.fineTuning;
  const file = await client.files.create({ file: fs.createReadStream(world.rows), purpose: "fine-tune" });
  let job = await jobs.create({ model: world.model, training_file: file.id, hyperparameters: { n_epochs: 1 } });
  while (!["succeeded", "failed"].includes(job.status)) {
    await new Promise(done => setTimeout(done, 500));
    job = await jobs.retrieve(job.id);
  }
  assert.equal(job.status, "succeeded");
  assert.ok((await ask({ model: job.fine_tuned_model, messages })).choices[0]);
});
