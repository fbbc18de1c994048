"""Driven runs for tests: a dictionary, a log of operations, and a worker that may be killed."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.facts import LLAMA
from trainer.config.identity import exp_id
from trainer.operations.operation_log import FOLDER, OperationLog
from trainer.operations.results import OperationResult, OperationResults
from trainer.operations.rows import DrivenRow, rows_to_payload

VOCABULARY = LLAMA["config"]["vocab_size"]
ADAM = {
    "learning_rate": 0.02,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
Step = tuple[str, dict[str, Any], bytes]  # kind, fields and payload of an operation


def driven_values(facts: Path, *, world: int = 1, **changes: Any) -> dict[str, Any]:
    """The dictionary of a driven run on the base and the tokenizer of tests/facts.py."""
    train = {"steps": 1000, "global_batch": 2 * world, "micro_batch": 2, "precision": "fp32"}
    values = {
        "task": "causal_lm",
        "base": LLAMA,
        "tokenizer": str(facts / "tokenizer"),
        "data": {"source": "client", "max_tokens": 24},
        "lora": {"r": 4, "alpha": 8, "dropout": 0.0},
        "train": train,
        "optim": {"lr": 1e-3},
    }
    for block, own in changes.items():
        values[block] = {**values[block], **own}
    return values


def rows_of_seed(seed: int, count: int = 3, **more: Any) -> list[DrivenRow]:
    """Rows of different lengths, with targets and weights drawn from a seed."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(random.integers(4, 20))
        ids = random.integers(2, VOCABULARY, length + 1)
        inputs = {"target_tokens": ids[1:], "weights": random.random(length, np.float32)}
        rows.append(DrivenRow(ids[:-1].astype(np.int32), inputs))
    return rows


def create(values: dict[str, Any]) -> Step:
    lora = {"rank": values["lora"]["r"], "alpha": values["lora"]["alpha"]}
    return ("create", {"lora": lora}, b"")


def passed(rows: Sequence[DrivenRow], kind: str = "forward_backward", **fields: Any) -> Step:
    """An operation over rows."""
    payload, inputs = rows_to_payload(rows)
    return (kind, {"loss_fn": "cross_entropy", **fields, "inputs": inputs}, payload)


def step(**changes: Any) -> Step:
    return ("optim_step", {**ADAM, **changes}, b"")


def write_log(run: Path, steps: Sequence[Step], *, after: int = -1) -> None:
    """Append operations to the log of a run, as a server does."""
    log = OperationLog(run / FOLDER)
    for seq, (kind, fields, payload) in enumerate(steps, start=after + 1):
        log.append(kind, seq, fields, payload)  # pyright: ignore[reportArgumentType]
    log.close()


def results_of(run: Path) -> list[OperationResult]:
    results = OperationResults(run / FOLDER)
    results.follow()
    every = [results.get(seq) for seq in range(results.last_seq + 1)]
    return [one for one in every if one is not None]


@dataclass(frozen=True)
class Kill:
    """Rank `rank` sends itself a signal at the call number `count` (from 1) of a function of the worker.

    place: "done", an operation has run; "booked", its result is about to be written; "torn", half of its result is written; "written", its
    result is; "saving", the files of a state are written and not committed; "saved", a state is.
    """

    place: str
    count: int
    rank: int = 0
    number: int = signal.SIGKILL


def drive(
    values: dict[str, Any], facts: Path, savedir: Path, stage: int, kill: Kill | None = None
) -> int:
    """Run the worker on the ranks of this process group until the run ends; its exit code."""
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    if kill is not None and kill.rank == distributed.rank():
        _arm(kill)
    options = Options(savedir, data_path=facts, cache_dir=facts / "cache", deepspeed=f"zero{stage}")
    world, rank = distributed.world(), distributed.rank()
    return run(plan(values, options, world=world, rank=rank), options, Preemption())


def _arm(kill: Kill) -> None:
    from trainer.driven.account import Account
    from trainer.driven.model import DrivenModel
    from trainer.operations import records, results
    from trainer.training import checkpoint

    owner, name, when = {
        "done": (DrivenModel, "do", "after"),
        "booked": (Account, "book", "before"),
        "torn": (records, "write_at", "half"),
        "written": (results.ResultWriter, "append", "after"),
        "saving": (checkpoint, "commit", "before"),
        "saved": (checkpoint, "commit", "after"),
    }[kill.place]
    whole, calls = getattr(owner, name), itertools.count(1)

    def dying(*args: Any, **how: Any) -> Any:
        is_last = next(calls) == kill.count
        if is_last and when == "half":
            descriptor, content, offset = args
            os.pwrite(descriptor, content[: len(content) // 2], offset)
        outcome = None if is_last and when != "after" else whole(*args, **how)
        if is_last:
            os.kill(os.getpid(), kill.number)
        return outcome

    setattr(owner, name, dying)


def folder_of(values: dict[str, Any], savedir: Path) -> Path:
    return savedir / exp_id(values)


def tensors_sha(folder: Path) -> dict[str, str]:
    """The files of tensors below a folder, by their sha256."""
    paths = sorted(folder.rglob("*.safetensors"))
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}
