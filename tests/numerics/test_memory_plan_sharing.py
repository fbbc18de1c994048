"""The memory plan of ranks that share rows, against what the CPU's allocator hands out to one of
them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.facts import LLAMA, experiment, write_facts
from tests.families import ids_of
from tests.ranks import run_alone
from trainer import tasks
from trainer.models.decoder.streams import reader_of
from trainer.models.packed.layout import pack_labelled
from trainer.models.stretches.stretch import stretch_of
from trainer.plan.memory.fake_device import exchanges_alone
from trainer.plan.memory.measure import MeasureRequest, measure
from trainer.protocol.abilities import RankPlace, shared
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.tasks.causal_lm.task import CausalLM

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from memory_plan import TOLERANCE, Precision, predicted_bytes, real_bytes

TOKENS = [700, 322]
# Of what is no weight, two ranks hold about half each: not of what is made of the whole stream, its
# layout, and of pieces that are as large on any number of ranks, such as chunks of logits.
HALF = (0.45, 0.62)


@dataclass(frozen=True)
class SharedStep:
    """A step of a small Llama, of whose stream one of `ranks` ranks reads its stretch."""

    ranks: int
    key_value_heads: int = 4
    recompute_every: int | None = None
    precision: Precision = "fp32"

    def model_on(self, device: str) -> nn.Module:
        config = LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=self.key_value_heads,
            vocab_size=96,
        )
        with torch.device(device):
            base: Any = AutoModelForCausalLM.from_config(config)
        read = reader_of(base.model, recompute_every=self.recompute_every)
        return CausalLM(base, read).train()

    def rows(self) -> dict[str, Tensor]:
        batch = pack_labelled(ids_of(TOKENS, 3), [[1] * count for count in TOKENS])
        return batch if self.ranks == 1 else stretch_of(batch, RankPlace(0, self.ranks))

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch)["loss"]


def _found(step: SharedStep) -> tuple[int, int]:
    with exchanges_alone():
        return predicted_bytes(step), real_bytes(step)


@pytest.mark.parametrize(
    "step",
    [
        SharedStep(2),
        pytest.param(SharedStep(4, key_value_heads=2), marks=pytest.mark.long),
        pytest.param(SharedStep(2, recompute_every=1), marks=pytest.mark.long),
        pytest.param(SharedStep(2, precision="master"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_step_of_a_stretch_is_predicted_within_the_tolerance(step: SharedStep) -> None:
    predicted, real = run_alone(_found, step)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.long
def test_a_plan_of_two_ranks_that_share_rows_has_half_of_the_activations(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "facts")
    values = experiment("causal_lm", folder, base=LLAMA)
    places = Places(folder, tmp_path / "cache", tmp_path / "runs")
    task: Any = tasks.load(tasks.parse(values), places)
    raw = [row for row, _ in zip(task.rows("train"), range(8), strict=False)]
    rows = [{name: [*map(int, ids)] for name, ids in task.encode(row).items()} for row in raw]
    drawn = [{**row, DRAW: [5], EPOCH: [0]} for row in rows]
    for kind, given in (("train", drawn), ("evaluate", rows)):
        request: Any = {"experiment": values, "kind": kind, "rows": given}
        steps = measure([MeasureRequest(**request, sharing=ranks) for ranks in (1, 2)], places)
        whole, half = (step.peak.activations + step.peak.logits for step in steps)
        assert HALF[0] * whole < half < HALF[1] * whole, kind
        assert steps[0].units == steps[1].units, "of the whole batch"
        batch = task.collate(rows)
        parts = [shared(task, batch, RankPlace(number, 2)) for number in range(2)]
        most = max(len(part["scored"]) for part in parts)
        assert steps[1].shapes["scored"] == [most]
