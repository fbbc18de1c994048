// What OpenAI's client for JavaScript does with the service: node openai_node.mjs BASE_URL ROWS WHAT, WHAT being how trainings go
import fs from "node:fs";
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, file] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const { jobs } = client.fineTuning;

async function until(id, isSo) {
  for (;;) {
    const job = await jobs.retrieve(id);
    if (isSo(job)) return job;
    await new Promise(done => setTimeout(done, 100));
  }
}

const upload = await client.files.create({ file: fs.createReadStream(file), purpose: "fine-tune" });
assert.equal((await client.files.retrieve(upload.id)).filename, "rows.jsonl");
assert.equal(await (await client.files.content(upload.id)).text(), fs.readFileSync(file, "utf8"));
const listed = [];
for await (const one of await client.files.list()) listed.push(one.id);
assert.ok(listed.includes(upload.id));

const made = await jobs.create({ model: "tiny-chat", training_file: upload.id, suffix: "node", seed: 5, metadata: { from: "node" } });
await until(made.id, job => job.status === "running" && job.lathe.step === 0 || job.lathe.step > 0);
await jobs.pause(made.id);
const paused = await until(made.id, job => job.status === "queued" && job.lathe.state === "paused");
assert.equal(paused.lathe.is_paused, true);
fs.writeFileSync(process.argv[4], "ok");
await jobs.resume(made.id);
const done = await until(made.id, job => ["succeeded", "failed"].includes(job.status));
assert.equal(done.status, "succeeded");
assert.match(done.fine_tuned_model, /^ft:tiny-chat:lathe:node:/);

const events = [];
for await (const event of await jobs.listEvents(made.id, { limit: 3 })) events.push(event.message);
assert.ok(events.length > 3 && events.at(-1).startsWith("Created fine-tuning job"));
const points = [];
for await (const point of await jobs.checkpoints.list(made.id)) points.push(point.step_number);
assert.ok(points.length > 0);
const mine = [];
for await (const job of await jobs.list({ metadata: { from: "node" } })) mine.push(job.id);
assert.deepEqual(mine, [made.id]);

fs.writeFileSync(process.argv[4], "slow");
const other = await jobs.create({ model: "tiny-chat", training_file: upload.id });
await jobs.cancel(other.id);
assert.equal((await until(other.id, job => job.status === "cancelled")).id, other.id);
await assert.rejects(jobs.resume(other.id), OpenAI.BadRequestError);
await assert.rejects(jobs.retrieve("ftjob-none"), OpenAI.NotFoundError);

assert.ok((await client.models.list()).data.some(model => model.id === done.fine_tuned_model));
assert.equal((await client.models.delete(done.fine_tuned_model)).deleted, true);
assert.equal((await client.files.delete(upload.id)).deleted, true);
await assert.rejects(client.files.retrieve(upload.id), OpenAI.NotFoundError);
console.log("all of it");
