"""The flags of a run that are no part of an experiment's identity."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.flags import ENTITY_ALONE, RunFlags
from trainer.config.identity import base_label, exp_id
from trainer.config.mistakes import is_secret
from trainer.errors import ConfigError
from trainer.files.atomic import read_json
from trainer.files.packages import require
from trainer.protocol.task import Places
from trainer.telemetry.trackers import tracker_names
from trainer.telemetry.wandb_run import WandbSettings

_WANDB_KEY = re.compile("[0-9a-f]{40}")  # W&B's keys until 2025


@dataclass(frozen=True)
class Options(RunFlags):
    """The flags that a run reads, where it stands, and what its launch decided."""

    savedir_base: Path
    reset: bool = False  # move an old folder aside and start over
    group: str = ""  # of experiments, to which this one belongs
    names: Mapping[str, str] = field(default_factory=dict[str, str])  # by id, for people
    saves_behind: bool = True  # checkpoints are written while the steps behind them are made
    is_shortened: bool = False  # its steps are those of --steps
    # Unix time at which it was asked for; None: when its process started
    began_at: float | None = None

    # of a run that survives its ranks: two files in memory for each rank, every how many steps
    # they are written, and which experiments were begun before a rank was lost
    memory: list[list[str]] = field(default_factory=list[list[str]])
    mirror_every: int = 1
    begun: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tracker_names(self.trackers)  # on every rank, before anything begins
        names = {"entity": self.wandb_entity_name, "project": self.wandb_project_name}
        for name, value in names.items():
            if value and (_WANDB_KEY.fullmatch(value) or is_secret(value)):
                raise ConfigError(
                    f"--wandb_{name}_name: got what looks like a key, want a name. The key belongs "
                    "into WANDB_API_KEY, or `wandb login` asks for it."
                )
        if self.wandb_project_name is not None:
            require("wandb", "wandb")

    def resets(self, exp_id: str) -> bool:
        """Whether this run begins by moving its old folder aside."""
        return self.reset and exp_id not in self.begun

    def wandb(self, values: dict[str, Any]) -> WandbSettings | None:
        """Where the run of an experiment appears in wandb; None: nowhere."""
        if self.wandb_project_name is None:
            if self.wandb_entity_name is not None:
                raise ConfigError(ENTITY_ALONE)
            return None
        number = exp_id(values)
        folder = self.savedir_base.absolute() / number
        # an evaluation, and a run that goes on by its id alone, keep the name of the first start
        last_name = (read_json(folder / "status.json") or {}).get("name")
        name = self.names.get(number) or str(last_name or "")
        return WandbSettings(
            self.wandb_entity_name,
            self.wandb_project_name,
            name=self._wandb_name(name) or number,
            id=number,
            config=values,
            group=self.group or None,
            tags=(str(values.get("task")), base_label(values)),
            notes="\n".join(filter(None, (name, f"{socket.gethostname()}:{folder}"))),
            keeps_artifacts=self.wandb_artifacts,
        )

    def _wandb_name(self, name: str) -> str:
        """The name in wandb: the one that was given, with what tells the run from its siblings."""
        apart = name.removeprefix(self.group).strip()
        if self.wandb_run_name is None or apart in ("", "1/1"):
            return self.wandb_run_name or name
        return f"{self.wandb_run_name} {apart}"

    @property
    def places(self) -> Places:
        return Places(self.data_path, self.cache_dir, self.savedir_base, self.num_proc)
