// All runs and jobs, as the server last sent them.

const FAILED = ["failed", "timeout", "oom", "lost", "held"];
export const ACTIVE = ["submitting", "submitted", "queued", "running", "held"];
export const STATES = ["running", "queued", "submitted", "submitting", "pending", "held", "preempted", "paused",
  "succeeded", "failed", "timeout", "oom", "lost", "cancelled"];

export class Board {
  constructor() {
    this.tick = -1;
    this.runs = new Map();
    this.jobs = new Map();
    this.jobOfRun = new Map();
    this.unreadable = {}; // name -> why its folder cannot be read
  }

  // Adds what changed. Returns whether the number of runs differs from the server's.
  take(news) {
    if (news.tick < this.tick) this.runs.clear();
    this.tick = news.tick;
    for (const run of news.runs) this.runs.set(run.id, run);
    for (const job of news.jobs) {
      this.jobs.set(job.id, job);
      this.jobOfRun.set(job.run, job);
    }
    return this.runs.size !== news.num_runs;
  }

  // A line for every run, and for every job that has no run (yet).
  lines() {
    const lines = [...this.runs.values()].map(run => this.line(run));
    for (const job of this.jobs.values()) {
      if (!this.runs.has(job.run)) lines.push(this.waiting(job));
    }
    return lines;
  }

  of(id) {
    const run = this.runs.get(id), job = this.jobOfRun.get(id);
    return run ? this.line(run) : job && this.waiting(job);
  }

  line(run) {
    const job = this.jobOfRun.get(run.id);
    const own = job ? `${job.model}${job.suffix ? " · " + job.suffix : ""}` : "";
    return { ...run, job, label: own || run.name || run.task || "run", differs: job?.numbers ?? "", owner: job?.owner ?? "" };
  }

  waiting(job) {
    const state = { failed: "failed", cancelled: "cancelled", succeeded: "succeeded" }[job.status] ?? "pending";
    const created = new Date(job.created * 1000).toISOString();
    return { id: job.run, group: "service", task: "", state, reason: job.error, metrics: {}, scores: {}, step: null,
      attempts: 0, gpu_hours: 0, created, job, label: `${job.model}${job.suffix ? " · " + job.suffix : ""}`,
      differs: job.numbers, owner: job.owner, isWaiting: true };
  }
}

export const isBad = line => FAILED.includes(line.state);

// The value of a metric for sorting: the best of a run, or else the last one.
export const valueOf = (line, name) => line.scores?.[name]?.[0] ?? line.metrics?.[name] ?? null;
