"""What a save costs the run that makes it, blocking against behind; and kills at random instants.

    python benchmarks/faults.py bump [--megabytes 500] [--saves 4]
    python benchmarks/faults.py kills [--kills 20]

bump: a network of so many MB of trainable fp32 weights under the engine at ZeRO-0, as a run saves
it: seconds that a save keeps the run waiting, and steps beside the writing. kills: a run that saves
after every step is killed by signal 9 at random instants and started again until it ends; its
weights and lines must be those of an undisturbed one. Exits 1 when they are not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

WIDTH = 2048
TIMINGS = ("at", "step_s", "peak_gib", "goodput", "seal", "tokens_per_s")


def bump(megabytes: int, saves: int) -> None:
    """Print a line for each way to save."""
    import torch
    from torch import nn

    from trainer.config import deepspeed_config
    from trainer.config.schema import Experiment, validate
    from trainer.runtime import distributed
    from trainer.runtime.beside import Beside
    from trainer.training import run
    from trainer.training.engine import Engine
    from trainer.training.loop import Progress

    distributed.init()
    layers = max(megabytes * 2**20 // (4 * WIDTH * WIDTH), 1)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    train = {"steps": 1000, "global_batch": 1, "micro_batch": 1, "precision": "fp32"}
    values = {"task": "benchmark", "base": "none", "train": train, "optim": {"lr": 1e-4}}
    cfg = validate(Experiment, values)
    file = deepspeed_config.read("zero0")
    ds = deepspeed_config.build(file, train=cfg.train, optim=cfg.optim, world=1, source="bump")
    live = Engine(net, deepspeed_config.for_engine(ds), cfg.optim)
    inputs = torch.randn(4, WIDTH)

    def step() -> float:
        start = time.monotonic()
        live.backward(live.model(inputs).square().mean())
        live.step(1e-4)
        return time.monotonic() - start

    quiet = statistics.median(step() for _ in range(5))
    print(f"{layers * 4 * WIDTH * WIDTH / 2**20:.0f} MB trained, quiet step {quiet:.3f} s")
    for is_behind in (False, True):
        waited, beside, saver = [], [], Beside()
        with tempfile.TemporaryDirectory(dir=ROOT) as root:
            plan: Any = SimpleNamespace(folder=Path(root), values={}, cfg=cfg)
            for number in range(saves):
                start = time.monotonic()
                saver.start(run._snapshot(plan, live, Progress(step=number + 1), {}))
                if not is_behind:
                    saver.wait()
                waited.append(time.monotonic() - start)
                while saver._thread is not None and saver._thread.is_alive():
                    beside.append(step())
            saver.wait()
        said = f", steps beside it {statistics.median(beside):.3f} s" if beside else ""
        name = "behind" if is_behind else "blocking"
        print(f"{name}: the run waits {statistics.median(waited):.2f} s a save{said}")


def _argv(folder: Path, savedir: Path, groups: Path) -> list[str]:
    flags = ["--exp_configs", str(groups), "-e", "mine", "-sb", str(savedir)]
    data = ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    return [sys.executable, str(ROOT / "trainval.py"), *flags, *data]


def _outcome(savedir: Path) -> tuple[bytes, list[dict[str, Any]]]:
    (folder,) = savedir.glob("[0-9a-f]*")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    untimed = [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]
    return (folder / "final" / "model.safetensors").read_bytes(), untimed


def kills(count: int) -> int:
    """Print how it went; 1 when anything differs."""
    from tests.facts import experiment, with_dropout, write_facts

    draw, torn = random.Random(0), 0
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        root = Path(place)
        folder = write_facts(root / "facts")
        train = {"steps": 150, "log_every": 1, "eval_every": 50, "save_every": 1}
        values = with_dropout(experiment("causal_lm", folder, train=train, deepspeed="zero1"))
        groups = root / "groups.py"
        groups.write_text(f"EXP_GROUPS = {{'mine': [{values!r}]}}\n")
        start = time.monotonic()
        subprocess.run(_argv(folder, root / "straight", groups), check=True, capture_output=True)
        whole_s, wanted, killed = time.monotonic() - start, _outcome(root / "straight"), 0
        while killed < count:
            shutil.rmtree(root / "killed", ignore_errors=True)
            while True:
                child = subprocess.Popen(
                    _argv(folder, root / "killed", groups),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                try:
                    # not in its imports, which write nothing
                    child.wait(timeout=whole_s * draw.uniform(0.5, 0.95))
                    break
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGKILL)
                    child.wait()
                    killed += 1
            is_equal = child.returncode == 0 and _outcome(root / "killed") == wanted
            torn += not is_equal
            print(f"{killed} kills, {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return min(torn, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("bump", "kills"))
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    if given.what == "kills":
        return kills(given.kills)
    bump(given.megabytes, given.saves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
