"""What a save costs the run that makes it, blocking against behind; and kills at random instants.

    python benchmarks/faults.py bump [--megabytes 500] [--saves 4] [--rows 256]
    python benchmarks/faults.py kills [--kills 200] [--ranks 1]
    python benchmarks/faults.py survive [--stages 1,2,3] [--steps 1000] [--kills 100] [--stops 10]

bump: a network of so many MB of trainable fp32 weights under the engine at ZeRO-0, as a run saves
it: seconds that a save keeps the run waiting, and by how much steps beside the writing are longer;
in steps of so many rows. kills: a run that saves after every step is killed by signal 9 at random
instants and started again until it ends, in part on a disk that is slow, and on one that is full
after some writes; its weights and lines must be those of an undisturbed one. Exits 1 when they are
not. survive: three ranks and a spare, of which one at a time is killed or stopped at random
instants, against torchrun with three ranks; what every recovery lost is counted.
"""

from __future__ import annotations

import argparse
import errno
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

WIDTH = 2048
EXIT_STORAGE = 2  # of a run whose disk refused
TIMINGS = ("at", "step_s", "peak_gib", "goodput", "seal", "tokens_per_s")


def bump(megabytes: int, saves: int, rows: int) -> None:
    """Print a line for each way to save."""
    import torch
    from torch import nn

    from trainer.config import deepspeed_config
    from trainer.config.block import validate
    from trainer.config.schema import Experiment
    from trainer.runtime import distributed
    from trainer.training.engine import Engine

    distributed.init()
    layers = max(megabytes * 2**20 // (4 * WIDTH * WIDTH), 1)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    train = {"steps": 1000, "global_batch": 1, "micro_batch": 1, "precision": "fp32"}
    values = {"task": "benchmark", "base": "none", "train": train, "optim": {"lr": 1e-4}}
    cfg = validate(Experiment, values)
    file = deepspeed_config.read("zero0")
    ds = deepspeed_config.build(file, train=cfg.train, optim=cfg.optim, world=1, source="bump")
    live = Engine(net, deepspeed_config.for_engine(ds), cfg.optim)
    inputs = torch.randn(rows, WIDTH)

    def step() -> float:
        start = time.monotonic()
        live.backward(live.model(inputs).square().mean())
        live.step(1e-4)
        return time.monotonic() - start

    step()
    quiet = statistics.median(step() for _ in range(5))
    size = f"{layers * 4 * WIDTH * WIDTH / 2**20:.0f} MB trained"
    print(f"{size}, {torch.get_num_threads()} thread(s), quiet step {quiet:.3f} s", flush=True)
    blocking = statistics.median(_saves(live, cfg, saves, quiet, step=None)[0])
    print(f"blocking: the run waits {blocking:.2f} s a save", flush=True)
    waits, held, longer = map(statistics.median, _saves(live, cfg, saves, quiet, step=step))
    print(
        f"behind: the run waits {waits:.3f} s a save and {held:.3f} s before its next update, "
        f"{(waits + held) / blocking:.1%} of the blocking save\n"
        f"all steps until it is written are {longer:.2f} s longer together "
        f"({longer / blocking:.1%}): what copying, hashing and writing take of the cores"
    )


def _saves(
    live: Any, cfg: Any, saves: int, quiet: float, *, step: Callable[[], float] | None
) -> tuple[list[float], list[float], list[float]]:
    """By save, in seconds: what the run waited, what its next update waited for the copy, and by
    how much all steps until the save was written were longer. step: None for a run that waits.
    """
    from trainer.launch import start
    from trainer.runtime.beside import Beside
    from trainer.training.session import Progress

    waited, held, all_longer, saver = [], [], [], Beside()

    wait_for_copy = live.state_copy.wait

    def wait() -> None:
        start = time.monotonic()
        wait_for_copy()
        held[-1] += time.monotonic() - start

    live.state_copy.wait = wait
    with tempfile.TemporaryDirectory(dir=ROOT) as root:
        plan: Any = SimpleNamespace(folder=Path(root), values={}, cfg=cfg)
        for number in range(saves + 1):  # the first one meets memory that nobody has used
            held.append(0.0)
            start, longer = time.monotonic(), list[float]()
            saver.start(start.snapshot(plan, live, Progress(step=number + 1), {}))
            if step is None:
                saver.wait()
            waited.append(time.monotonic() - start)
            while step and (not longer or (saver._thread and saver._thread.is_alive())):
                longer.append(step() - quiet)
            all_longer.append(sum(longer))
        saver.wait()
        live.state_copy.wait = wait_for_copy
    return waited[1:], held[1:], all_longer[1:]


def _argv(folder: Path, savedir: Path, groups: Path) -> list[str]:
    flags = ["--exp_configs", str(groups), "-e", "mine", "-sb", str(savedir)]
    data = ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    return [str(ROOT / "trainval.py"), *flags, *data]


def _outcome(savedir: Path) -> tuple[bytes, list[dict[str, Any]]]:
    (folder,) = savedir.glob("[0-9a-f]*")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    untimed = [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]
    weights = folder / "final" / "model.safetensors"  # none: it did not end well
    return weights.read_bytes() if weights.exists() else b"", untimed


def _plant(disk: str, good_writes: int) -> None:
    """From now on this process's checkpoints lie on a disk of that kind: slow, or full after so
    many files.
    """
    from trainer.files import safetensors_file

    sync, count = os.fsync, itertools.count(1)

    def fsync(descriptor: int) -> None:
        if disk == "slow":
            time.sleep(0.1)
        elif next(count) > good_writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    safetensors_file.os = SimpleNamespace(fsync=fsync)  # pyright: ignore


def kills(count: int, ranks: int) -> int:
    """Print how it went; 1 when anything differs."""
    from tests.facts import experiment, with_dropout, write_facts
    from tests.forked import run_ranks

    draw, torn, full = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        root = Path(place)
        folder = write_facts(root / "facts")
        train = {"steps": 60, "log_every": 1, "eval_every": 20, "save_every": 1}
        values = with_dropout(experiment("causal_lm", folder, train=train, deepspeed="zero2"))
        groups = root / "groups.py"
        groups.write_text(f"EXP_GROUPS = {{'mine': [{values!r}]}}\n")
        for name in ("first", "straight"):  # the first one encodes the rows
            start = time.monotonic()
            done = run_ranks(ranks, *_argv(folder, root / name, groups))
            assert not any(rank.returncode for rank in done), done[0].stderr
        whole_s, wanted, killed, runs = time.monotonic() - start, _outcome(root / "straight"), 0, 0
        print(f"undisturbed: {whole_s:.1f} s", flush=True)
        while killed < count:
            shutil.rmtree(root / "killed", ignore_errors=True)
            codes = _until_it_ends(_argv(folder, root / "killed", groups), ranks, draw, whole_s)
            killed += codes.count(-signal.SIGKILL)
            full += codes.count(EXIT_STORAGE)
            runs += 1
            is_equal = codes[-1] == 0 and _outcome(root / "killed") == wanted
            torn += not is_equal
            how = "equal" if is_equal else f"DIFFERENT: {codes}"
            print(f"{killed} kills, {full} full disks, {runs} runs: {how}", flush=True)
    return min(torn, 1)


def _until_it_ends(argv: list[str], ranks: int, draw: random.Random, whole_s: float) -> list[int]:
    """Exit codes of rank 0 over the attempts, of which all but the last ones were disturbed."""
    from tests.forked import start_ranks

    codes: list[int] = []
    while True:
        disk = draw.choice(["good", "good", "good", "slow", "full"])
        plant = functools.partial(_plant, disk, draw.randrange(80))
        started = start_ranks(ranks, *argv, first=None if disk == "good" else plant)
        given_up = time.monotonic() + whole_s * draw.uniform(0.1, 0.9)
        alive = [rank.process for rank in started]
        while alive and time.monotonic() < given_up:
            alive = [process for process in alive if process.exitcode is None]
            time.sleep(0.005)
        if alive:  # any rank goes first, the others as a launcher ends them
            draw.shuffle(alive)
        for process in alive:
            process.kill()
        codes.append(started[0].finish().returncode)
        if codes[-1] not in (-signal.SIGKILL, EXIT_STORAGE):
            return codes


def survive(stages: list[int], steps: int, kills: int, stops: int) -> int:
    """Print a line for each stage; 1 when a run differs or a recovery lost more than a step."""
    from tests.facts import experiment, with_dropout, write_facts

    wrong = 0
    # the examination of a new folder is no part of a recovery; on three ranks it refuses ZeRO-3
    os.environ["LATHE_EXAMINE"] = "off"
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        root = Path(place)
        folder = write_facts(root / "facts")
        for stage in stages:
            train = {"steps": steps, "log_every": 1, "eval_every": 100, "save_every": 250}
            train |= {"global_batch": 12, "micro_batch": 2}
            plain = experiment("causal_lm", folder, train=train, deepspeed=f"zero{stage}")
            groups = root / f"zero{stage}.py"
            groups.write_text(f"EXP_GROUPS = {{'mine': [{with_dropout(plain)!r}]}}\n")
            argv = [_argv(folder, root / f"{name}{stage}", groups) for name in ("a", "b", "c")]
            python = sys.executable
            run = [python, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
            subprocess.run([*run, *argv[0]], check=True, capture_output=True)
            spare = ["--survive", "3+1,hang_s=5"]
            quiet = subprocess.run(
                [python, *argv[1], *spare], check=True, capture_output=True, text=True
            )
            cost = re.search(r"mirrored .*\n.*", quiet.stdout)
            happened = _disturbed([python, *argv[2], *spare], steps, kills, stops)
            outcomes = [_outcome(root / f"{name}{stage}") for name in ("a", "b", "c")]
            is_equal = outcomes[0] == outcomes[1] == outcomes[2]
            events = _events(root / f"c{stage}")
            lost = max((event["steps_lost"] for event in events), default=0)
            wrong += not is_equal or lost > 1 or not events
            print(
                f"ZeRO-{stage}: {happened}, {'equal' if is_equal else 'DIFFERENT'}; {_told(events)}"
            )
            print(
                f"  undisturbed: {' '.join(cost[0].split()) if cost else quiet.stdout}", flush=True
            )
    return min(wrong, 1)


def _disturbed(argv: list[str], steps: int, kills: int, stops: int) -> str:
    """Run `argv`, and end or stop a rank every few steps; says how often."""
    draw, counts = random.Random(0), {signal.SIGKILL: 0, signal.SIGSTOP: 0}
    every = max(steps // (kills + stops + 1), 1)
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None, "it is a pipe"
    ranks, due, last = list[int](), every, deque[str](maxlen=60)
    for line in child.stdout:
        last.append(line)
        if found := re.search(r"ranks: processes ([\d, ]+)", line):
            ranks = [int(pid) for pid in found[1].split(",")]
        step = re.search(r"step (\d+)/\d+  loss", line)
        if step is None or int(step[1]) < due or not ranks:
            continue
        due = int(step[1]) + every
        number = sum(counts.values()) + 1
        sign = signal.SIGSTOP if number % (kills // max(stops, 1) + 1) == 0 else signal.SIGKILL
        time.sleep(draw.uniform(0, 0.2))  # anywhere within a step
        with suppress(ProcessLookupError):
            os.kill(draw.choice(ranks), sign)
            counts[sign] += 1
        ranks = []
    code = child.wait()
    if code:
        print("".join(last), flush=True)
    return f"exit code {code}, " + ", ".join(f"{n} {sign.name}" for sign, n in counts.items())


def _events(savedir: Path) -> list[dict[str, Any]]:
    (path,) = savedir.glob("[0-9a-f]*/survival.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _told(events: list[dict[str, Any]]) -> str:
    """What recoveries lost and took, of kills and of hangs."""
    lost = Counter(event["steps_lost"] for event in events)
    told = [f"{len(events)} recoveries, steps lost: {dict(sorted(lost.items()))}"]
    told.append(f"from {dict(Counter(event['source'] for event in events))}")
    for name, is_hang in (("killed", False), ("hung", True)):
        times = sorted(
            event["recovery_s"]
            for event in events
            if any("SIG" not in one["why"] for one in event["lost"]) == is_hang
        )
        if times:
            p95 = times[int(0.95 * (len(times) - 1))]
            told.append(f"{name}: median {statistics.median(times):.2f} s, p95 {p95:.2f} s")
    return "; ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("bump", "kills", "survive"))
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stages", default="1,2,3")
    given = parser.parse_args()
    if given.what == "survive":
        stages = [int(stage) for stage in given.stages.split(",")]
        return survive(stages, given.steps, given.kills or 100, given.stops)
    if given.what == "kills":
        return kills(given.kills or 200, given.ranks)
    bump(given.megabytes, given.saves, given.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
