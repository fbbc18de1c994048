"""Every family of decoders trains from a folder of weights: at ZeRO-3 on two ranks as alone at
ZeRO-0, and what a language model of it exports loads in stock transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bases import DECODERS, SCALED, config_of
from tests.contract.runs import from_folder, losses, train
from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close

# Four steps of two passes.
LOSSES = {"what": "losses", "depth": 4 * 2 * 6 * 4 * 48, "margin": 0.02}
STEPS = {"steps": 4, "eval_every": 4, "save_every": 4, "eval_batch": 11, "global_batch": 4}
# Frequencies by kind of block, norms behind and before; fused projections. The others are trained
# by `make test-long`.
USUAL = ("gemma3", "phi3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=16, valid=11)


def experiments(task: str, names: tuple[str, ...], folder: Path, bases: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        config = config_of(name)
        base = {"config": (DECODERS | SCALED)[name][1] | {"model_type": config.model_type}}
        base["config"] |= {"vocab_size": 384, "initializer_range": 0.05}
        values = experiment(task, folder, base=base | {"seed": 1}, train=STEPS, optim={"lr": 1e-3})
        found[name] = from_folder(values, bases)
    return found


def runs(
    values: dict[str, dict[str, Any]], folder: Path, savedir: Path, stage: int
) -> dict[str, tuple[Path, list[float]]]:
    trained = {name: train(each, folder, savedir, stage) for name, each in values.items()}
    return {name: (run_folder, losses(lines)) for name, (run_folder, lines) in trained.items()}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(USUAL, id="usual"),
        pytest.param(tuple(DECODERS | SCALED), id="every", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("task", ["cross_attention", "causal_lm"])
def test_a_family_trains_partitioned_as_it_does_alone_and_its_export_loads(
    task: str, names: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    if task == "cross_attention":
        names = tuple(name for name in names if name in DECODERS)
    values = experiments(task, names, folder, tmp_path / "bases")
    (alone,) = run_on_ranks(1, runs, values, folder, tmp_path / "alone", 0)
    together = run_on_ranks(2, runs, values, folder, tmp_path / "together", 3)[0]
    for name in names:
        run_folder, wanted = alone[name]
        assert len(wanted) == 4
        assert len(set(wanted)) == 4, "something trains"
        assert_close(together[name][1], wanted, **LOSSES, of=name)
        if task == "causal_lm":
            stock = AutoModelForCausalLM.from_pretrained(run_folder / "final")
            other = AutoModelForCausalLM.from_pretrained(together[name][0] / "final")
            for (of, one), two in zip(stock.named_parameters(), other.parameters(), strict=True):
                assert torch.isfinite(one).all(), of
                assert (one - two).abs().max() <= 4 * 1e-3, "no further apart than four whole steps"
