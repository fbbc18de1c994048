"""The flags of a run that are no part of an experiment's identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.protocol.task import Places
from trainer.telemetry.trackers import named
from trainer.telemetry.wandb_run import WandbSettings


@dataclass(frozen=True)
class Options:
    """The flags of trainval.py that are no part of an experiment's identity."""

    savedir_base: Path
    data_path: Path | None = None
    cache_dir: Path = Path("tmp-cache")
    reset: bool = False
    log_every: int | None = None  # None: a hundred lines a run; evaluations every 1000 steps
    deepspeed: str | None = None
    extra_evals: int = 0  # rows that are answered by generation at each evaluation; 0: none
    wandb_entity: str | None = None
    wandb_project: str | None = None
    wandb_run_name: str | None = None
    log_gradients: bool = False
    push_to_hub: bool = False
    device: str | None = None  # that memory is planned for; None: the GPU of this process
    names: Mapping[str, str] = field(default_factory=dict[str, str])  # by id, for people
    force: bool = False  # run what does not fit by the plan
    saves_behind: bool = True  # checkpoints are written while the steps behind them are made
    num_proc: int | None = None  # processes that encode rows; None: by their number
    is_shortened: bool = False  # its steps are those of --steps
    trackers: str | None = None  # besides wandb, by commas: of trackers.TRACKERS

    # of a run that survives its ranks: two files in memory for each rank, every how many steps
    # they are written, and which experiments were begun before a rank was lost
    memory: list[list[str]] = field(default_factory=list[list[str]])
    mirror_every: int = 1
    begun: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named(self.trackers)  # on every rank, before anything begins

    def resets(self, exp_id: str) -> bool:
        """Whether this run begins by moving its old folder aside."""
        return self.reset and exp_id not in self.begun

    def wandb(self, values: dict[str, Any]) -> WandbSettings | None:
        """Where the run of an experiment appears in wandb; None: nowhere."""
        if self.wandb_project is None:
            if self.wandb_entity is not None:
                raise ConfigError(
                    "--wandb_entity_name and --wandb_project_name: got the entity alone, want the "
                    "project too (or alone: then it is your default entity's), or neither."
                )
            return None
        number = exp_id(values)
        name = self.wandb_run_name or self.names.get(number) or number
        return WandbSettings(
            self.wandb_entity, self.wandb_project, name=name, id=number, config=values
        )

    @property
    def places(self) -> Places:
        return Places(self.data_path, self.cache_dir, self.savedir_base, self.num_proc)
