"""The folder is the registration: trainer/tasks/<name>/ makes "task": "<name>" legal."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.block import validate
from trainer.config.origin.continues import refuse_other
from trainer.config.schema import Experiment, RandomBase
from trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from trainer.protocol.task import Places, Task


def names() -> list[str]:
    """All task names, sorted."""
    return sorted(folder.parent.name for folder in Path(__file__).parent.glob("*/config.py"))


def parse(values: dict[str, Any], *, source: str = "experiment") -> Experiment:
    """The frozen Config of `values["task"]`; ConfigError names every mistake. Imports no torch."""
    cfg = validate(config_of(values.get("task"), source=source), values, source=source)
    if cfg.continues is not None:
        before = parse(cfg.continues.experiment, source=f"{source}, continues.experiment")
        refuse_other(cfg, before)
    return cfg


def config_of(name: Any, *, source: str = "TASK") -> type[Experiment]:
    """The schema of a task's dictionary; ConfigError for an unknown name. Imports no torch."""
    if name not in names():
        raise ConfigError(f"{source}: task={name!r} does not exist. {nearest(str(name), names())}")
    return importlib.import_module(f"trainer.tasks.{name}.config").Config


def load(cfg: Experiment, places: Places) -> Task:
    """The Task that `cfg` asks for. A base that is another run's adapters is merged first. Imports
    torch.
    """
    if not isinstance(cfg.base, RandomBase):
        importlib.import_module("trainer.tasks.merged_base").make(cfg, places)
    kind = importlib.import_module(f"trainer.tasks.{cfg.package}.task").Task
    if getattr(getattr(cfg, "data", None), "mix", None):
        kind = importlib.import_module("trainer.data.mixed.task").mixed(kind)
    return kind(cfg, places)
