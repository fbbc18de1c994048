"""The base that the experiments of a group share, and the engine of each on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.config import deepspeed_config
from trainer.data.order import sizes_of
from trainer.driven.passes import PassLayout
from trainer.driven.together.shared_base import SharedBase
from trainer.driven.together.shared_run import SharedSaves
from trainer.driven.together.shared_steps import SharedMember, SharedSteps
from trainer.driven.together.step_packs import StepRows
from trainer.driven.together.trained_adapters import TrainedAdapters
from trainer.launch.start import Footing, restore
from trainer.launch.together.refusals import KEY
from trainer.models import base_model
from trainer.models.losses import Terms
from trainer.models.weights import absent
from trainer.runtime import distributed
from trainer.runtime.beside import Beside
from trainer.tasks.token_task import refuse_beyond_positions
from trainer.training import engine
from trainer.training.engine import Engine
from trainer.training.session import Progress

if TYPE_CHECKING:
    from trainer.launch.prepare import PreparedRun


@dataclass
class SharedFooting:
    """What a group stands on. The base is loaded with the first experiment that needs it."""

    names: Sequence[str]  # of the experiments, in their order
    most_tokens: int  # of a pack
    steps: SharedSteps | None = None
    rows: dict[str, StepRows] = field(default_factory=dict[str, StepRows])
    _thread: Beside = field(default_factory=Beside)  # saves of all runs, one after another

    def of(self, run: PreparedRun) -> Footing:
        """What one experiment stands on."""
        return Footing(False, partial(self._engine_of, run.plan.id), SharedSaves(self._thread))

    def add_rows(self, run: PreparedRun, *, end: int) -> None:
        """Count the rows of an experiment of so many steps among those of every pack."""
        train, sharding = run.plan.cfg.train, run.plan.sharding
        seed = train.seed if train.order == "shuffled" else None
        sizes = sizes_of(run.stores["train"], run.task)
        self.rows[run.plan.id] = StepRows(sizes, sharding, seed, end)

    def leave(self, name: str, *, returns: bool) -> None:
        """Let an experiment go. Unless it returns, its rows are in no pack of later steps."""
        if not returns:
            self.rows.pop(name, None)
        if self.steps is not None:
            self.steps.members.pop(name, None)

    def _engine_of(
        self, name: str, run: PreparedRun, lap: Callable[[str], None]
    ) -> tuple[Engine, Progress]:
        """New adapters under an engine, in the state to resume from. A collective."""
        cfg, newest = run.plan.cfg, run.newest
        steps = self.steps = self.steps or self._load(run)
        lap("model")
        data: Any = getattr(cfg, "data")  # noqa: B009 (of the task)
        refuse_beyond_positions(steps.base.base, data.max_tokens)
        assert cfg.lora is not None, "refusals.py has looked"
        adapters = TrainedAdapters(steps.base.draw(cfg.lora, seed=cfg.train.seed), steps.base)
        if newest is not None:
            engine.load_weights(adapters, newest.weights(engine.shapes(adapters)))
        ds = deepspeed_config.for_engine(run.plan.ds)
        live = Engine(adapters, ds, cfg.optim, plus=cfg.lora.plus)
        lap("engine")
        progress = Progress()
        if newest is not None:
            progress = restore(live, newest, seed=cfg.train.seed)
            lap("checkpoint")
        steps.members[name] = SharedMember(adapters, Terms.of(cfg.train), cfg.train.seed)
        return live, progress

    def _load(self, run: PreparedRun) -> SharedSteps:
        """The steps of the group, on the base of this run."""
        cfg, task = run.plan.cfg, run.task
        of_tokens: Any = task
        model = of_tokens.loaded(cfg.base, None)
        absent.refuse(model, is_trained=True)
        # as an engine moves a model of its own
        model = model.to(distributed.device(), base_model.DTYPES[cfg.train.precision])
        layout = PassLayout(self.most_tokens, of_tokens.is_packed, of_tokens.pad)
        base = SharedBase(model, of_tokens.base_name, layout, key=KEY)
        return SharedSteps(base, task, self.most_tokens, self.names, self.rows)
