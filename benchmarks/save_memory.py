"""Host memory that a rank takes for a save and for a resume, against the formula.

    python benchmarks/save_memory.py [--millions 8,16,32] [--stages 2,3]

Networks of so many million bf16 parameters with fp32 masters are saved and read back on one rank
and on two (gloo). The formulas: 14 bytes a parameter, divided by the ranks, to save; to resume 4,
for the zeros with which the optimizer makes its moments, and one tensor. Memory is the largest
anonymous memory of the process above that before (RssAnon; pages of mapped files are the disk's
cache).
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

WIDTH, BYTES, ZEROS = 1024, 14, 4


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@contextmanager
def _peak(found: dict[str, int], name: str) -> Iterator[None]:
    """The largest anonymous memory inside, above that before, every 2 ms."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed would hide what is taken
    before, ended, most = _anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
        time.sleep(0.01)
    finally:
        ended.set()
        watcher.join()
        found[name] = max(most[0] - before, 0)


def measured(stage: int, millions: int, root: Path) -> dict[str, int]:
    """Bytes for a save and for a resume on this rank, and the parameters of the network."""
    import torch
    from torch import nn

    from trainer.config import deepspeed_config
    from trainer.config.block import validate
    from trainer.config.schema import Experiment
    from trainer.runtime import distributed
    from trainer.training import checkpoint, engine

    layers = max(millions * 10**6 // WIDTH**2, 1)
    train = {"steps": 9, "global_batch": 2, "micro_batch": 1, "precision": "bf16"}
    values = {"task": "benchmark", "base": "none", "train": train, "optim": {"lr": 1e-4}}
    cfg = validate(Experiment, values)
    preset, world = deepspeed_config.read(f"zero{stage}"), distributed.world()
    ds = deepspeed_config.for_engine(
        deepspeed_config.build(
            preset, train=cfg.train, optim=cfg.optim, world=world, source="save_memory"
        )
    )

    def step(live: Any) -> None:
        live.backward(live.model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).square().mean())
        live.step(1e-4)

    def net() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(
            torch.bfloat16
        )

    found = {"parameters": layers * WIDTH**2}
    live = engine.Engine(net(), ds, cfg.optim)
    step(live)
    with _peak(found, "save"):
        weights, optimizer = live.own_tensors()
        live.state_copy.of({**weights, **optimizer})
        made = live.state_copy.copy()
        checkpoint.save(
            root,
            1,
            weights={name: made[name] for name in weights},
            optimizer={name: made[name] for name in optimizer},
            rng={},
            state={"engine": live.optimizer.scalars()},
            keep_last=1,
        )
    live.destroy()
    del live, made, weights, optimizer
    again = engine.Engine(net(), ds, cfg.optim)
    step(again)  # its moments are made
    with _peak(found, "resume"):
        state = checkpoint.read_state(root / "step-1")["engine"]
        again.optimizer.restore(checkpoint.read_tensors(root / "step-1", "optimizer"), state)
    again.destroy()
    return found


def main() -> None:
    from tests.ranks import run_on_ranks

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--millions", default="8,16,32")
    parser.add_argument("--stages", default="2,3")
    given = parser.parse_args()
    for stage in map(int, given.stages.split(",")):
        for world in (1, 2):
            for millions in map(int, given.millions.split(",")):
                with tempfile.TemporaryDirectory(dir=ROOT) as place:
                    ranks = run_on_ranks(world, measured, stage, millions, Path(place) / "saves")
                count = ranks[0]["parameters"]
                save, resume = (max(rank[name] for rank in ranks) for name in ("save", "resume"))
                print(
                    f"ZeRO-{stage}, {world} rank(s), {count / 1e6:.1f} M: save {save / 2**20:.1f} "
                    f"MiB, {save / count:.2f} bytes a parameter (formula {BYTES / world:.2f}); "
                    f"resume {resume / 2**20:.1f} MiB, {resume / count:.2f} ({ZEROS / world:.2f})",
                    flush=True,
                )
    print(f"11B on 8 ranks: {11e9 * BYTES / 8 / 2**30:.1f} GiB a rank")


if __name__ == "__main__":
    main()
