"""Everything that wants measuring on a GPU, in the order of what it decides, in one command.

    python benchmarks/gpu.py [--out gpu_results] [--only PART ...] [--minutes 25] [--rehearse]

Every part writes its own JSON file as it ends, and a part that has one is left out: the command
can be given again. Each has a time limit, and none is begun after --minutes. A SIGTERM ends the
runs of the part at hand too. Seconds of a step are those behind the first eight steps. --rehearse
runs every part on the CPU with tiny models, two at a time, in minutes, so that nothing is tried for
the first time on the GPU; what it wrote does not count there.
`benchmarks/gpu_report.py` makes the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from benchmarks import gpu_kernels, gpu_steps
from benchmarks.gpu_shapes import COMPILED, ONE_OF_EACH, SHAPES, Shape, write_rows
from tests.ranks import run_alone
from trainer.files.atomic import write_json

ROOT = Path(__file__).resolve().parent.parent
_WARM, _LINES = 2, 5  # lines of four steps: those that are not counted, and all


@dataclass(frozen=True)
class Place:
    """Where a part reads and writes."""

    folder: Path  # rows, caches, runs
    is_rehearsed: bool

    @property
    def rows(self) -> Path:
        return self.folder / "rows"


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: float
    measure: Callable[[Place], dict[str, Any]]


def alone(function: Callable[..., Any], limit_s: float, place: Place) -> dict[str, Any]:
    """What a function measured in a process of its own."""
    return run_alone(function, place.is_rehearsed, timeout_s=limit_s)


def tests_on_cuda(limit_s: float, place: Place) -> dict[str, Any]:
    """tests/gpu, the short file first; of the other, one model."""
    chosen = ["tests/gpu/test_on_cuda.py", "tests/gpu/test_memory_on_cuda.py", "-k"]
    argv = [sys.executable, "-m", "pytest", "-x", *chosen, "not memory_on_cuda or bert"]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    return {"returncode": done.returncode, "tail": done.stdout[-1500:]}


def speed_of(shape: Shape, limit_s: float, place: Place) -> dict[str, Any]:
    """Seconds a step, units a second, MFU and peak memory of a run, beside its plan."""
    run = gpu_steps.Run.of(shape, place.folder, place.rows, is_rehearsed=place.is_rehearsed)
    if shape.is_prepared:
        run = run.prepared(limit_s)
    started = time.monotonic()
    lines = run.until(_LINES, limit_s)
    counted = lines[_WARM:]
    found = {name: value for name, value in counted[-1].items() if isinstance(value, (int, float))}
    found["step_s"] = sorted(line["step_s"] for line in counted)[len(counted) // 2]
    plan = run.plan()
    return found | {"seconds_in_all": time.monotonic() - started, "plan": plan}


def profile_of(shape: Shape, limit_s: float, place: Place) -> dict[str, Any]:
    """Where the time of one step goes."""
    run = gpu_steps.Run.of(
        shape, place.folder / "profile", place.rows, is_rehearsed=place.is_rehearsed
    )
    file = place.folder / f"profile-{shape.name}.json"
    file.unlink(missing_ok=True)
    run.until(_LINES, limit_s, first=functools.partial(gpu_steps.profile, file), until=file)
    return json.loads(file.read_text())


def resumed(task: str, limit_s: float, place: Place) -> dict[str, Any]:
    """Whether a repeated and a killed and resumed run give equal bits, and what switches cost."""
    is_short = place.is_rehearsed and task != gpu_steps.TASKS[0]
    return gpu_steps.repeated(task, place.folder / "resume", limit_s, is_short=is_short)


def parts(is_rehearsed: bool) -> list[Part]:
    """In the order of what they decide (decides what others are worth first)."""
    by_name = {shape.name: shape for shape in SHAPES}
    every: list[Part] = [
        _part("environment", 60, functools.partial(alone, gpu_kernels.environment)),
        _part("tests", 240, tests_on_cuda),
        _part("attention", 150, functools.partial(alone, gpu_kernels.attention)),
        _part("by_length", 120, functools.partial(alone, gpu_kernels.by_length)),
        _part("memory_of_stock", 60, functools.partial(alone, gpu_kernels.memory_of_stock)),
        _part("new_shapes", 60, functools.partial(alone, gpu_kernels.new_shapes)),
        _part("calibration", 60, functools.partial(alone, gpu_kernels.calibration)),
    ]
    for shape in SHAPES:
        every.append(_part(f"step-{shape.name}", shape.limit_s, functools.partial(speed_of, shape)))
    for name in COMPILED[:1] if is_rehearsed else COMPILED:  # a rehearsal waits for one compiler
        shape = replace(by_name[name], name=f"compiled-{name}", train={"compile": True})
        every.append(_part(f"step-{shape.name}", 240, functools.partial(speed_of, shape)))
    for name in ONE_OF_EACH:
        measure = functools.partial(profile_of, by_name[name])
        every.append(_part(f"profile-{name}", 120, measure))
    every.append(_part("head", 60, functools.partial(alone, gpu_kernels.head)))
    for task in gpu_steps.TASKS:
        every.append(_part(f"resume-{task}", 120, functools.partial(resumed, task)))
    return every


def _part(name: str, limit_s: float, measure: Callable[..., dict[str, Any]]) -> Part:
    return Part(name, limit_s, functools.partial(measure, limit_s))


def _is_done(file: Path, is_rehearsed: bool) -> bool:
    """Whether a part has its numbers, from this kind of run."""
    if not file.is_file():
        return False
    found = json.loads(file.read_text())
    return "failed" not in found and found["is_rehearsed"] == is_rehearsed


def end_with_every_run(*_: Any) -> None:
    """For SIGTERM. A run that outlived this program would hold its pipe and the GPU: who waits for
    the end of the output waited nine minutes of a lent GPU for nothing.
    """
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(128 + signal.SIGTERM)


def main() -> int:
    """0 when every part that was begun has its numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--only", nargs="*", default=[""], help="parts whose names begin so")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, end_with_every_run)
    place = Place((given.out / "work").resolve(), given.rehearse)
    write_rows(place.rows, is_rehearsed=given.rehearse)
    started = time.monotonic()
    until = started + 60 * given.minutes
    asked = [part for part in parts(given.rehearse) if part.name.startswith(tuple(given.only))]
    # seconds of a rehearsal say nothing: one part may disturb another
    with ThreadPoolExecutor(2 if given.rehearse else 1) as pool:
        done = list(pool.map(lambda part: _is_measured(part, place, given.out, until), asked))
    failed = [part.name for part, is_good in zip(asked, done, strict=True) if not is_good]
    print(
        f"{time.monotonic() - started:.0f} s; {len(failed)} failed: {', '.join(failed) or 'none'}"
    )
    return bool(failed)


def _is_measured(part: Part, place: Place, out: Path, until: float) -> bool:
    """False for a part that failed. One that is measured already, or comes late, is left out."""
    file = out / f"{part.name}.json"
    if _is_done(file, place.is_rehearsed):
        return True
    begun = time.monotonic()
    if begun > until:
        print(f"{part.name}: left out, the time is over", flush=True)
        return True
    print(f"{part.name}: begins, {part.limit_s:.0f} s at most", flush=True)
    try:
        found = part.measure(place)
    except (Exception, SystemExit) as error:
        found = {"failed": f"{type(error).__name__}: {str(error)[-3000:]}"}
    seconds, is_good = time.monotonic() - begun, "failed" not in found
    write_json(file, {"seconds": seconds, "is_rehearsed": place.is_rehearsed} | found)
    print(f"{part.name}: {'done' if is_good else 'FAILED'} in {seconds:.1f} s", flush=True)
    return is_good


if __name__ == "__main__":
    raise SystemExit(main())
