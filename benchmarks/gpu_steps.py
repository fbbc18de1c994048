"""Runs of trainval.py that `benchmarks/gpu.py` looks at: how fast, where the time goes, and whether
a repeated one gives the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_shapes import Shape, Values
from tests.facts import experiment, with_dropout, write_facts
from tests.forked import TRAINER, TRAINVAL, run, start
from trainer.config.identity import exp_id

TASKS = ("causal_lm", "cross_attention", "fid", "retriever", "summariser", "vera")
_POLL_S = 0.1
_KILLED_AT, _STEPS = 5, 8


@dataclass(frozen=True)
class Run:
    """One experiment and its folders."""

    values: Values
    folder: Path
    rows: Path

    @classmethod
    def of(cls, shape: Shape, folder: Path, rows: Path, *, is_rehearsed: bool) -> Run:
        return cls(shape.experiment(is_rehearsed=is_rehearsed), folder / shape.name, rows)

    @property
    def argv(self) -> list[str]:
        """What names the experiment, for every command."""
        self.folder.mkdir(parents=True, exist_ok=True)
        groups = self.folder / "groups.py"
        groups.write_text(f"EXP_GROUPS = {{'one': [{self.values!r}]}}\n")
        cache = ["--data_path", str(self.rows), "--cache_dir", str(self.folder.parent / "cache")]
        return ["-e", "one", "--exp_configs", str(groups), *cache]

    @property
    def out(self) -> Path:
        return self.folder / "out" / exp_id(self.values)

    def train(self, limit_s: float, *more: str, first: Callable[[], None] | None = None) -> int:
        """The exit code of the whole run."""
        argv = [*TRAINVAL, *self.argv, "-sb", str(self.folder / "out"), *more]
        done = run(*argv, timeout_s=limit_s, first=first)
        if done.returncode > 0:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        return done.returncode

    def until(
        self,
        count: int,
        limit_s: float,
        *,
        first: Callable[[], None] | None = None,
        until: Path | None = None,
    ) -> list[dict[str, Any]]:
        """The first `count` lines with a loss; the run is then killed, before it saves anything.

        until: a file that must be there besides.
        """
        argv = [*TRAINVAL, *self.argv, "-sb", str(self.folder / "out"), "-r", "1"]
        begun, started = start(*argv, first=first), time.monotonic()
        try:
            while time.monotonic() - started < limit_s:
                lines = self.lines()
                if len(lines) >= count and (until is None or until.is_file()):
                    return lines[:count]
                if not begun.process.is_alive():
                    raise RuntimeError((begun.output + begun.errors)[-3000:])
                time.sleep(_POLL_S)
            raise TimeoutError(f"{limit_s} s: {(begun.output + begun.errors)[-2000:]}")
        finally:
            begun.process.kill()
            begun.process.join()

    def lines(self) -> list[dict[str, Any]]:
        file = self.out / "metrics.jsonl"
        if not file.is_file():
            return []
        whole = file.read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, whole) if "loss" in line and "step_s" in line]

    def plan(self) -> dict[str, Any] | None:
        """The peak that was planned, by its parts."""
        file = self.out / "memory_plan.json"
        if not file.is_file():
            return None
        phases = json.loads(file.read_text())["plan"]["phases"]
        return max((phase["peak"] for phase in phases), key=lambda peak: sum(peak.values()))

    def prepared(self, limit_s: float) -> Run:
        """The same on stored encoder states, which are computed now."""
        out = self.folder / "prepared"
        done = run(*TRAINER, "prepare", "--out", str(out), *self.argv, timeout_s=limit_s)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        return replace(self, rows=out)


# One step, under the profiler
# --------------------------------------------------------------------------------------------------

_KINDS = {
    "matmul": ("gemm", "cutlass", "addmm", "aten::mm", "aten::bmm", "nvjet", "xmma"),
    "attention": ("flash", "fmha", "attention", "_forward", "of_queries", "of_keys"),
    "copies": ("memcpy", "memset", "aten::copy_", "aten::_to_copy"),
    "communication": ("nccl", "gloo", "c10d"),
}
_LONGEST = 30  # kernels that are named
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def profile(file: Path, at: int = 9) -> None:
    """From here on, the `at`th step of this process is profiled, and the file written."""
    from trainer.training import loop

    train_step, calls = loop.train_step, [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return train_step(*args, **kwargs)
        return profiled(functools.partial(train_step, *args, **kwargs), file)

    loop.train_step = step


def profiled(step: Callable[[], Any], file: Path) -> Any:
    """What `step` returns; where its time went is written to the file."""
    import torch
    from torch.profiler import ProfilerActivity

    is_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    if is_gpu:
        torch.cuda.synchronize()
    started = time.monotonic()
    with torch.profiler.profile(activities=activities) as seen:
        done = step()
        if is_gpu:
            torch.cuda.synchronize()
    wall_s = time.monotonic() - started
    of_kind: dict[str, float] = dict.fromkeys((*_KINDS, "memory-bound"), 0.0)
    kernels = 0
    longest: list[tuple[float, int, str]] = []  # seconds, calls, name of a kernel
    waits: dict[str, int] = {}
    for event in seen.key_averages():
        name, lower = event.key, event.key.lower()
        if name in _WAITS:
            waits[name] = event.count
        seconds = (event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1e6
        is_kernel = seconds > 0 and (not is_gpu or event.self_cpu_time_total == 0)
        if is_kernel:
            kernels += event.count
            longest.append((seconds, event.count, name[:100]))
            kinds = (kind for kind, parts in _KINDS.items() if any(x in lower for x in parts))
            of_kind[next(kinds, "memory-bound")] += seconds
    busy = sum(of_kind.values())
    found = {"wall_s": wall_s, "busy_s": busy, "gaps_s": max(0.0, wall_s - busy)}
    shares = {kind: seconds / max(busy, 1e-9) for kind, seconds in of_kind.items()}
    more = {"kernels": kernels, "waits": waits, "longest": sorted(longest)[:-_LONGEST:-1]}
    text = json.dumps(found | {"shares": shares, **more})
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)
    return done


# Equal bits
# --------------------------------------------------------------------------------------------------


_WRITING = threading.Lock()


def repeated(task: str, folder: Path, limit_s: float, *, is_short: bool) -> dict[str, Any]:
    """A run with dropout, the same again, and once more killed and resumed: whether all numbers and
    weights are equal, as they come and, unless this `is_short`, with torch's deterministic
    algorithms; and seconds a run.
    """
    found: dict[str, Any] = {}
    with _WRITING:  # a rehearsal has two parts at a time, and transformers is imported here
        rows = write_facts(folder / task / "facts")
    train = {"steps": _STEPS, "precision": "bf16", "save_every": 4, "eval_every": _STEPS}
    values = {**with_dropout(experiment(task, rows, train=train)), "deepspeed": "zero2"}
    ways: dict[str, Callable[[], None] | None] = {"as it is": None}
    if not is_short:
        ways["deterministic"] = _deterministic
    for name, switch in ways.items():
        runs = [Run(values, folder / task / f"{name[:3]}-{number}", rows) for number in range(3)]
        started = time.monotonic()
        for one in runs[:2]:
            one.train(limit_s, "-r", "1", first=switch)
        seconds = (time.monotonic() - started) / 2
        if runs[2].train(limit_s, "-r", "1", first=functools.partial(_killed, switch)) != -9:
            raise RuntimeError("the run was not killed")
        runs[2].train(limit_s, first=switch)
        digests = [_digest(one) for one in runs]
        found[name] = {
            "repeats": digests[0] == digests[1],
            "resumes": digests[0] == digests[2],
            "seconds": seconds,
        }
    return found


def _digest(one: Run) -> str:
    """Of the losses and the final weights."""
    hashed = hashlib.sha256()
    losses = {line["step"]: line["loss"] for line in one.lines()}
    hashed.update(json.dumps(losses).encode())
    for file in sorted((one.out / "final").glob("*.safetensors")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()


def _deterministic() -> None:
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def _killed(switch: Callable[[], None] | None) -> None:
    """From here on, this process is killed in its sixth step."""
    from trainer.training import loop

    if switch is not None:
        switch()
    train_step, calls = loop.train_step, [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > _KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **kwargs)

    loop.train_step = step
