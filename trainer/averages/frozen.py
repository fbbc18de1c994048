"""The weights that a run keeps as they are, which no saved step of it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.models import base_model
from trainer.models.optimizers.rates import freeze_whole, frozen_by_name

if TYPE_CHECKING:
    from trainer.config.schema import Experiment


def frozen_weights(cfg: Experiment, task: Any) -> dict[str, Tensor]:
    """By name the weights that train.freeze keeps from the first step to the last; {} without."""
    if not any(one.is_whole for one in cfg.train.freeze):
        return {}
    model = task.model().to(base_model.DTYPES[cfg.train.precision])
    freeze_whole(model, cfg.train.freeze)
    return {name: weight.detach() for name, weight in frozen_by_name(model).items()}
