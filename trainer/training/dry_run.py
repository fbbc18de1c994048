"""What --dry_run shows.

Id, dictionary with defaults, DeepSpeed dictionary, batch arithmetic, parameter counts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainer import tasks
from trainer.config import deepspeed_config
from trainer.errors import ConfigError
from trainer.models.freezing import trainable_report
from trainer.training.schedule import warmup_steps

if TYPE_CHECKING:
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan


def show(plan: RunPlan, options: Options) -> str:
    """The preview as text. Reads a base's config, never its weights; writes only caches."""
    train = plan.cfg.train
    rows = [
        ("experiment", plan.id),
        ("folder", str(plan.folder)),
        ("task", plan.cfg.task),
        (
            "steps",
            f"{train.steps}, of which {warmup_steps(plan.cfg.schedule, train.steps)} warm-up",
        ),
        *deepspeed_config.summary(plan.ds),
        ("parameters", _parameters(plan, options)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += ["", "resolved.json", json.dumps(plan.cfg.model_dump(mode="json"), indent=2)]
    lines += ["", "ds_config.json", json.dumps(plan.ds, indent=2)]
    return "\n".join(lines) + "\n"


def _parameters(plan: RunPlan, options: Options) -> str:
    """Counts from the model built without storage; or why not, when the base cannot be seen."""
    try:
        task = tasks.load(plan.cfg, options.places)
        return str(trainable_report(task.skeleton()))
    except ConfigError as error:
        return f"not counted: {error}"
