"""What an extra brings is asked for where it is used, before a run begins, and by the extra's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exp_configs import EXP_GROUPS
from tests.wording import refused
from trainer import tasks
from trainer.api.run import Run
from trainer.harness import lm_eval, mteb
from trainer.protocol.task import Places
from trainer.retrieval.sparse import word_weights
from trainer.tasks.vera import use
from trainer.training.options import Options


def load(group: str, folder: Path) -> None:
    tasks.load(tasks.parse(EXP_GROUPS[group][0]), Places(None, folder, folder))


USES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "wandb": ("wandb", lambda folder: Options(folder, wandb_project_name="p")),
    "rouge": ("rouge_score", lambda folder: load("summarise_tiny", folder)),
    "vera": ("sklearn", lambda folder: load("vera_tiny", folder)),
    "lm-eval": ("lm_eval", lambda folder: lm_eval.version()),
    "mteb": ("mteb", lambda folder: mteb.version()),
    "sparse": ("scipy", lambda folder: word_weights.scipy_sparse()),
    "plots": ("matplotlib", lambda folder: Run(folder, {}, cache_dir=folder).plot()),
}


@pytest.mark.parametrize("extra", USES)
def test_an_extra_that_is_not_installed_is_named(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, use_it = USES[extra]
    monkeypatch.setitem(sys.modules, module, None)
    with refused("extra_not_installed", name=module, extra=extra):
        use_it(tmp_path)


def test_the_diagrams_of_a_calibration_are_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    how: Any = {"split": "valid", "objective": "nll", "report": tmp_path}
    with refused("extra_not_installed", name="matplotlib", extra="plots"):
        use.calibrate_model(tmp_path, torch.zeros(1, 4), **how)
