"""The runs of a task that its contract looks at: each is trained once, and many tests read it.

An entry is a task, a kind of experiment, a number of ranks and a ZeRO stage. `make test` reads the
entries of `usual()`; the tests marked `long` read all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from exp_configs import vary
from tests.facts import experiment, with_dropout
from tests.ranks import run_on_ranks
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.config.schema import RandomBase
from trainer.models import base_model, base_source
from trainer.protocol.task import Places

WORLDS, STAGES = (1, 2), (0, 1, 2, 3)
EVERY_ENTRY = [(world, stage) for world in WORLDS for stage in STAGES]
# What a stage does with gradients and weights on one rank and on two is DeepSpeed's, the same for
# every task: one task stands for all, and the others have one rank and two.
# The retriever, which goes backward many times in a step, is followed through every stage by
# tests/parity/test_retriever.py.
ALL_STAGES_MATTER = ("causal_lm",)
TIMINGS = ("at", "step_s", "peak_gib", "goodput", "seal")
ADAPTERS = "adapters, "  # in front of a kind of runs
# What needs most of the base: its weights when it is made and in every forward.
DORA: dict[str, Any] = {"r": 4, "alpha": 8, "targets": "all-linear", "dora": True}
SHORT = {"steps": 4, "eval_every": 2, "save_every": 2, "eval_batch": 11}


def usual(name: str) -> list[tuple[int, int]]:
    """(ranks, stage) of the runs that `make test` trains of a task."""
    return EVERY_ENTRY if name in ALL_STAGES_MATTER else [(1, 2), (2, 3)]


def train(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int = 0, **flags: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """Run an experiment to its end on the ranks of this process group; its folder and the lines of
    metrics.jsonl.
    """
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(
        savedir, data_path=folder, cache_dir=folder / "cache", deepspeed=f"zero{stage}", **flags
    )
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options, Preemption()) == 0
    return planned.folder, lines_of(planned.folder)


def lines_of(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in lines if "loss" in line]


def untimed(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl without what differs from run to run: times and memory."""
    return [
        {k: v for k, v in line.items() if k not in TIMINGS and not k.endswith("_per_s")}
        for line in lines_of(path.parent)
    ]


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    folder: Path
    lines: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return losses(self.lines)


def published(random: RandomBase, places: Places) -> Any:
    """The model of a random base as it is published: the whole of it, an encoder of masked language
    modelling with its head for words.
    """
    config: Any = base_source.config_of(random, places)
    head = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if head is not None and type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random.seed)
            return head(config)
    kind = "seq2seq_lm" if config.is_encoder_decoder else "causal_lm" if head else "encoder"
    return base_model.load(random, places, precision="fp32", kind=kind)


def from_folder(values: dict[str, Any], bases: Path) -> dict[str, Any]:
    """The same experiment, the weights of its random base read from a folder under `bases`, where
    they lie in several files.
    """
    random, places = tasks.parse(values).base, Places(None, bases / "cache", bases)
    saved = bases / exp_id(values)
    if not saved.is_dir():
        model = published(random, places)
        model.save_pretrained(saved, max_shard_size="60KB")
        assert len(list(saved.glob("*.safetensors"))) > 1
    return {**values, "base": str(saved)}


class Runs:
    """Every run that was asked for in this session, trained when it was first asked for. Its base is
    what a user has: a folder of weights, in several files.

    The kinds: `plain`; `at once`, with all rows of a step in one micro-batch; `dropout`, with every
    dropout switched on; `recomputed`, the same with gradient checkpointing. Plain runs on two ranks
    log the gradients of every weight, those on one rank do not: that they agree shows that logging
    changes nothing. Behind `adapters, `: the same with DoRA in every linear layer of the base.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self._root, self._bases = folder, root, root / "bases"
        self._trained: dict[tuple[str, str, int, int], Trained] = {}

    def values(self, name: str, kind: str) -> dict[str, Any]:
        """The dictionary of a kind."""
        if kind.startswith(ADAPTERS):
            of_base = self.values(name, kind.removeprefix(ADAPTERS))
            dropout = 0.0 if kind.endswith(("plain", "at once")) else 0.2
            return {**of_base, "lora": DORA | {"dropout": dropout}}
        plain = from_folder(
            experiment(name, self.folder, train=SHORT | {"best": None}), self._bases
        )
        if kind == "plain":
            return plain
        if kind == "at once":
            return vary(plain, train={"micro_batch": plain["train"]["global_batch"]})  # type: ignore[index]
        dropout = with_dropout(experiment(name, self.folder, train=SHORT))
        dropout = from_folder(dropout, self._bases)
        recomputed = vary(dropout, train={"gradient_checkpointing": True})
        return {"dropout": dropout, "recomputed": recomputed}[kind]

    def of(self, name: str, kind: str, world: int = 1, stage: int = 0) -> Trained:
        """That run, as its first rank left it."""
        key = (name, kind, world, stage)
        if key not in self._trained:
            savedir = self._root / "-".join(map(str, key))
            flags = {"wandb_log_gradients": kind.endswith("plain") and world > 1}
            ranks = run_on_ranks(
                world, _train, self.values(name, kind), self.folder, savedir, stage, flags
            )
            self._trained[key] = Trained(*ranks[0])
        return self._trained[key]


def _train(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int, flags: dict[str, Any]
) -> tuple[Path, list[dict[str, Any]]]:
    return train(values, folder, savedir, stage, **flags)
