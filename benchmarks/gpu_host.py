"""What the host does in a step on a GPU: seconds of forward, backward and update, of models so
narrow that the device has nothing to do, and of whole ones.

    python benchmarks/gpu_host.py [--out gpu_host] [--only NAME ...] [--minutes 6] [--rehearse]

Every run writes its own JSON file as it ends. Processes start side by side, and one at a time makes
its steps: it holds a lock meanwhile. `--rehearse` makes few steps of the narrow ones. A plan on any
machine says what was predicted: `--predict` adds it to the files that are there.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from benchmarks import gpu_steps
from benchmarks.gpu_shapes import SHAPES, Shape, Values, write_rows
from trainer.files.atomic import write_json

_STEPS, _SETTLING = 20, 8  # those that are made, and those that do not count
_STARTED = 3  # processes that start side by side: more disturb those that are measured
_LIMIT_S = 240.0
_FIRST = ("zero2", 2)  # DeepSpeed file, micro-batches of a step
_WAYS = (("zero0", 2), ("zero3", 2), ("zero2", 4))
_NARROW = (
    "retriever-bert-base",
    "summariser-t5-base-512",
    "causal_lm-1b-4096",
    "vera-xxl-encoder",
    "fid-base-100",
)
_IN_EVERY_WAY = 3  # of the narrow ones
_AHEAD = ("retriever-bert-base", "summariser-t5-base-512", "fid-base-100")
_WHOLE = (
    "cross_attention-7b",
    "cross_attention-3b",
    "summariser-t5-3b-512",
    "vera-xxl-encoder",
    "fid-large-100",
    "compiled-cross_attention-3b",
    "causal_lm-1b-4096",
    "summariser-t5-base-4096",
    "cross_attention-1b",
    "retriever-0.6b-lora",
)


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    values: Values
    is_profiled: bool = True  # one step more


def cases() -> Iterator[Case]:
    """Every run, in the order of what it decides."""
    by_name = {shape.name: shape for shape in SHAPES}
    for name in _NARROW:
        yield narrow(by_name[name], *_FIRST)
    for name in _AHEAD:
        yield Case(name, by_name[name].experiment(is_rehearsed=False))
    for preset, count in _WAYS:
        for name in _NARROW[:_IN_EVERY_WAY]:
            yield narrow(by_name[name], preset, count)
    for name in _WHOLE:
        shape = by_name[name.removeprefix("compiled-")]
        more = {"compile": True} if name.startswith("compiled-") else {}
        yield Case(name, shape.experiment(is_rehearsed=False, **more))


def narrow(shape: Shape, preset: str, count: int) -> Case:
    """A shape with all its blocks, but of 32 channels and short rows; `count` micro-batches."""
    values = shape.experiment(is_rehearsed=True)
    depths = {name: n for name, n in shape.config.items() if name.endswith(("layers", "n_layer"))}
    values["base"]["config"] |= depths
    values["train"]["global_batch"] = count * values["train"]["micro_batch"]
    values["deepspeed"] = preset
    return Case(f"narrow-{shape.name}-{preset}-b{count}", values, is_profiled=False)


# In the process of a run
# --------------------------------------------------------------------------------------------------


def watch(file: Path, lock: Path, steps: int, profile: Path | None) -> None:
    """From here on, this process makes its steps while it holds the lock, and writes their seconds
    by part behind the last. profile: then the next step is profiled.
    """
    from trainer.training import engine, loop

    train_step, parts = loop.train_step, {"backward": 0.0, "update": 0.0}
    for name, of_engine in (("backward", "backward"), ("update", "step")):
        _count(engine.Engine, of_engine, parts, name)
    seen: list[dict[str, float]] = []
    held: list[Any] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        if not held:
            held.append(lock.open("w"))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        parts.update(backward=0.0, update=0.0)
        started = time.perf_counter()
        if len(seen) == steps and profile is not None:
            return gpu_steps.profiled(functools.partial(train_step, *args, **kwargs), profile)
        done = train_step(*args, **kwargs)
        seen.append({"step": time.perf_counter() - started, **parts})
        if len(seen) == steps:
            write_json(file, {"steps": seen, "peak_gib": _peak_gib()})
        return done

    loop.train_step = step


def _count(owner: Any, method: str, parts: dict[str, float], name: str) -> None:
    run = getattr(owner, method)

    @functools.wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            parts[name] += time.perf_counter() - started

    setattr(owner, method, counted)


def _peak_gib() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


# The runs
# --------------------------------------------------------------------------------------------------


def measured(case: Case, out: Path, *, steps: int) -> dict[str, Any]:
    """Medians of a run's steps by part, its plan, and what was seen under the profiler."""
    work = out / "work"
    run = gpu_steps.Run(case.values, work / case.name, work / "rows")
    file, profile = run.folder / "steps.json", run.folder / "profile.json"
    for path in (file, profile):
        path.unlink(missing_ok=True)
    seen = profile if case.is_profiled else None
    first = functools.partial(watch, file, work / "lock", steps, seen)
    lines = run.until(1, _LIMIT_S, first=first, until=seen or file)
    found = json.loads(file.read_text())
    counted = found["steps"][min(_SETTLING, steps // 2) :]
    medians = {name: statistics.median(step[name] for step in counted) for name in counted[0]}
    step_s = [line["step_s"] for line in run.lines()[-2:]] or [line["step_s"] for line in lines]
    return {
        "seconds": medians,
        "step_s": min(step_s),
        "mfu": run.lines()[-1].get("mfu"),
        "peak_gib": found["peak_gib"],
        "plan": run.plan(),
        "profile": json.loads(profile.read_text()) if case.is_profiled else None,
    }


def predicted(case: Case, out: Path, device: str) -> dict[str, Any]:
    """What `plan` says of a run on a device: seconds of a step by part."""
    from tests.forked import TRAINER, run

    work = gpu_steps.Run(case.values, out / "work" / case.name, out / "work" / "rows")
    argv = [*TRAINER, "plan", *work.argv, "--device", device, "--json"]
    done = run(*argv, timeout_s=_LIMIT_S)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return json.loads(done.stdout)["time"]


@contextmanager
def _told(name: str) -> Iterator[None]:
    begun = time.monotonic()
    try:
        yield
        print(f"{name}: done in {time.monotonic() - begun:.1f} s", flush=True)
    except (Exception, SystemExit) as error:
        print(f"{name}: FAILED {type(error).__name__}: {str(error)[-1500:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_host"))
    parser.add_argument("--only", nargs="*", default=[""], help="runs whose names begin so")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--predict", metavar="DEVICE", help="add what a plan says of this device")
    given = parser.parse_args()
    out = given.out.resolve()
    write_rows(out / "work" / "rows", is_rehearsed=False)
    until = time.monotonic() + 60 * given.minutes
    asked = [case for case in cases() if case.name.startswith(tuple(given.only))]

    def one(case: Case) -> None:
        file = out / f"{case.name}.json"
        with _told(case.name):
            if given.predict:
                if file.is_file():
                    known = json.loads(file.read_text())
                    time_of = predicted(case, out, given.predict)
                    write_json(file, known | {"predicted": time_of})
            elif time.monotonic() < until and not file.is_file():
                steps = 3 if given.rehearse else _STEPS
                write_json(file, measured(case, out, steps=steps))

    with ThreadPoolExecutor(1 if given.predict else 2 if given.rehearse else _STARTED) as pool:
        list(pool.map(one, asked))


if __name__ == "__main__":
    main()
