"""A training loop of the Tinker SDK, unmodified, that may be killed at any instant and started again.

usage: tinker_loop.py JSON with "url", "model", "steps", and "journal": a file of one JSON line for
each thing that the loop learnt

Its journal tells a later start which run to go on with. It then begins at its first step again: an
operation that was sent before is not run twice, and its result is the one of the first time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

WORLD = json.loads(sys.argv[1])
os.environ |= {"TINKER_BASE_URL": WORLD["url"], "TINKER_API_KEY": "tml-none"}
warnings.simplefilter("ignore")

from tinker import ServiceClient, TrainingClient, types  # noqa: E402
from tinker.lib.public_interfaces.training_client import fetch_training_info  # noqa: E402

VOCABULARY, LONGEST = 512, 24
SAVES_EVERY, SAMPLES_EVERY, POLICY_EVERY, LOOKS_EVERY = 20, 25, 3, 7  # steps


class Journal:
    """What the loop has learnt. A line that is there already must come out again."""

    def __init__(self, path: Path) -> None:
        whole = path.read_bytes() if path.exists() else b""
        end = whole.rfind(b"\n") + 1
        self.lines = [json.loads(line) for line in whole[:end].splitlines()]
        self.file = path.open("r+b" if path.exists() else "w+b")
        self.file.truncate(end)  # a kill may have torn the last line
        self.file.seek(end)
        self.place = 0

    def note(self, **line: Any) -> None:
        line = json.loads(json.dumps(line))
        if self.place < len(self.lines):
            before = self.lines[self.place]
            assert before == line, f"line {self.place} was {before}, is {line}"
        else:
            self.lines.append(line)
            self.file.write(json.dumps(line).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        self.place += 1


def attach(service: ServiceClient, run: str) -> TrainingClient:
    """A client of a run that another process began."""
    holder = service.holder
    info = holder.run_coroutine_threadsafe(fetch_training_info(holder, run)).result()
    return TrainingClient(holder, int(run.rpartition(":")[2]), run, info=info)


def rows_of(step: int) -> list[Any]:
    """The rows of a step: different lengths, with targets and weights."""
    draw, rows = random.Random(step), []
    for _ in range(draw.randint(2, 4)):
        ids = [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(4, LONGEST))]
        inputs = {"target_tokens": ids[1:], "weights": [draw.random() for _ in ids[1:]]}
        rows.append(
            types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
        )
    return rows


def with_advantages(rows: list[Any], output: Any, step: int) -> list[Any]:
    """The same rows for importance sampling: what a pass said of them is the sampler's view."""
    draw, more = random.Random(-1 - step), []
    for row, told in zip(rows, output.loss_fn_outputs, strict=True):
        count = len(row.loss_fn_inputs["target_tokens"].data)
        inputs = {
            "target_tokens": row.loss_fn_inputs["target_tokens"],
            "logprobs": told["logprobs"],
            "advantages": [draw.uniform(-1, 1) for _ in range(count)],
        }
        more.append(types.Datum(model_input=row.model_input, loss_fn_inputs=inputs))
    return more


def digest_of(output: Any) -> str:
    """The bytes of all log-probabilities of a pass."""
    values = [one["logprobs"].to_numpy().tobytes() for one in output.loss_fn_outputs]
    return hashlib.sha256(b"".join(values)).hexdigest()


def step_of(client: TrainingClient, step: int, journal: Journal) -> None:
    """One step of the loop, and what it says."""
    rows = rows_of(step)
    adam = types.AdamParams(learning_rate=0.01 / (1 + step % 10), grad_clip_norm=step % 2 * 0.5)
    passes = [client.forward_backward(rows, "cross_entropy")]
    if step % POLICY_EVERY == 2:
        more = with_advantages(rows, passes[0].result(), step)
        passes.append(client.forward_backward(more, "importance_sampling"))
    update = client.optim_step(adam)
    if step % LOOKS_EVERY == 4:
        passes.append(client.forward(rows, "cross_entropy"))
    outputs = [one.result() for one in passes]
    losses = [one.metrics["loss:sum"] for one in outputs]
    told = [digest_of(one) for one in outputs]
    journal.note(step=step, losses=losses, logprobs=told, update=update.result().metrics)


def samples_of(client: TrainingClient, step: int, journal: Journal) -> None:
    """Samples of the present weights."""
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([3 + step % 7, 5, 8])
    how = types.SamplingParams(max_tokens=12, seed=step, temperature=0.8)
    answer = sampler.sample(prompt, 2, how).result()
    found = [[list(one.tokens), list(one.logprobs or [])] for one in answer.sequences]
    journal.note(samples_behind=step, sequences=found)


def main() -> None:
    journal = Journal(Path(WORLD["journal"]))
    service = ServiceClient()
    if journal.lines:
        client = attach(service, journal.lines[0]["run"])
    else:
        client = service.create_lora_training_client(WORLD["model"], rank=4, seed=5).result()
    journal.note(run=client.model_id)
    for step in range(WORLD["steps"]):
        step_of(client, step, journal)
        if step % SAVES_EVERY == SAVES_EVERY - 1:
            path = client.save_state(f"behind-{step}").result().path
            journal.note(saved_behind=step, name=path.rpartition("/")[2])
        if step % SAMPLES_EVERY == SAMPLES_EVERY - 1:
            samples_of(client, step, journal)
    path = client.save_state("last").result().path
    journal.note(end=WORLD["steps"], name=path.rpartition("/")[2])
    journal.file.close()
    os._exit(0)  # the session of this process is not ended: the run may be of an earlier one


main()
