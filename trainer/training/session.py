"""What one run of the step loop works with, and what it remembers between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from trainer.config.schema import Experiment, Train, steps_between
from trainer.config.scores.direction import Direction
from trainer.data.mixed.mixture import Mixture
from trainer.data.mixed.store import sources_in
from trainer.data.order import Sharding
from trainer.errors import ConfigError
from trainer.telemetry.chain import StepChain
from trainer.telemetry.source_losses import SourceSums
from trainer.training.bad_steps import BadSteps, SkippedSteps, Trouble
from trainer.training.schedule import DEFAULT_EVERY, Plateau, log_interval

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.metrics.own import OwnMetric
    from trainer.protocol.task import Row, Task
    from trainer.runtime.preemption import Preemption
    from trainer.telemetry.meter import Meter
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.choice.budget import Budget
    from trainer.training.engine import Engine


@dataclass(frozen=True)
class Cadence:
    """Every how many steps the loop logs, evaluates and saves: where these are no whole numbers, at
    the first step that they are over with.
    """

    log: Fraction
    evaluate: Fraction
    save: Fraction
    is_first_logged: bool = False  # step 1 has a line in metrics.jsonl whatever `log` says

    @classmethod
    def of(cls, train: Train, epoch_steps: Fraction, *, otherwise: int | None) -> Cadence:
        """The intervals of a dictionary, else `otherwise` (the flag --log_every), else the
        defaults: a hundred log lines in a run, evaluations and saves every DEFAULT_EVERY steps.
        """
        log_every, rarely = train.log_every or otherwise, otherwise or DEFAULT_EVERY
        return cls(
            log=steps_between(log_every or log_interval(train.steps), epoch_steps),
            evaluate=steps_between(train.eval_every or rarely, epoch_steps),
            save=steps_between(train.save_every or rarely, epoch_steps),
            is_first_logged=log_every is None,
        )

    def due(self, step: int, last: int) -> Due:
        """What follows step `step` (counted from 1) of a run of `last` steps."""

        def is_due(every: Fraction) -> bool:
            return step // every > (step - 1) // every or step == last

        return Due(
            log=is_due(self.log) or (step == 1 and self.is_first_logged),
            evaluation=is_due(self.evaluate),
            save=is_due(self.save),
        )


@dataclass(frozen=True)
class Due:
    """What is to be done after one step."""

    log: bool
    evaluation: bool
    save: bool


@dataclass
class Progress:
    """What the loop remembers between steps. Every checkpoint saves it."""

    step: int = 0  # optimizer steps done
    units: int = 0  # units trained on so far
    best: float | None = None  # of the first metric of train.best
    tie_breakers: list[float] = field(default_factory=list[float])  # of the others, then
    best_step: int = 0
    waited: int = 0  # evaluations since the best one
    # of a mix, by source: the loss and its labels since the last line of the log, on all ranks
    by_source: list[list[float]] = field(default_factory=list[list[float]])
    # "min" in a run that began before best/ followed the metric: it was the default then
    best_is: Direction | None = None
    owes_evaluation: bool = False  # this step was saved before its evaluation was done
    plateau: Plateau = field(default_factory=Plateau)
    is_out_of_time: bool = False  # this step is the last one that train.hours has room for
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    bad: BadSteps = field(default_factory=BadSteps)
    links: list[str] = field(default_factory=list[str])  # of the chain, by rank (chain.py)

    def refuse_past(self, until: int | None) -> None:
        """ConfigError when --until names a step before those that are done."""
        if until is not None and self.step > until:
            raise ConfigError(
                f"--until {until}: the run is at step {self.step} already. Give a later step, or "
                "leave --until out."
            )

    def state(self) -> dict[str, Any]:
        own = {"plateau": self.plateau.state(), "skipped": self.skipped.state()}
        return {**self.__dict__, **own, "bad": self.bad.state()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        # older checkpoints have none of these, no best_is, and have not waited
        skipped, bad = SkippedSteps(**state.get("skipped", {})), BadSteps(**state.get("bad", {}))
        own = {"plateau": Plateau.of(state["plateau"]), "skipped": skipped, "bad": bad}
        return cls(**{"best_is": "min", **state, **own})


@dataclass(frozen=True)
class Moved:
    """An event: `step` steps are done. is_stepping: the next thing is a step, not a save or an
    evaluation, so that its length is known.
    """

    step: int
    is_stepping: bool


def ignore(event: Moved) -> None:
    """Report an event to nobody."""


def do_nothing(engine: Engine, progress: Progress) -> None:
    """Do nothing after a step."""


def no_check() -> None:
    """Blame no weight."""


@dataclass(frozen=True)
class ValidSet:
    """Rows that every evaluation scores."""

    store: TokenStore
    questions: Sequence[Row] = ()  # the first of them, answered by generation


@dataclass(frozen=True)
class Session:
    """Everything that one run of the loop needs."""

    cfg: Experiment
    task: Task
    engine: Engine
    train: TokenStore
    valid: TokenStore
    sharding: Sharding
    cadence: Cadence
    record: RunRecord
    meter: Meter
    preemption: Preemption
    save: Callable[[Progress], None]  # a checkpoint of the present state; a collective
    export_best: Callable[[], None]  # the present weights as best/; a collective
    log_gradients: bool = False
    until: int | None = None  # the step at which --until stops the run
    # the first validation rows, answered by generation at each evaluation
    questions: Sequence[Row] = ()
    valid_sets: Mapping[str, ValidSet] = field(  # of data.valid_sets, by "valid_NAME"
        default_factory=dict[str, ValidSet]
    )
    own_metrics: Sequence[OwnMetric] = ()  # of `metrics`, on rank 0
    rolled_back: Mapping[int, str] = field(
        default_factory=dict[int, str]
    )  # by rollbacks: step, why
    chain: StepChain = field(default_factory=StepChain)  # what proves the steps, from here on
    roll_back: Callable[[int, Trouble], None] | None = None  # leaves a window out; a collective
    budget: Budget | None = None  # of train.hours
    after_step: Callable[[Engine, Progress], None] = do_nothing  # the last thing of every step
    # ConfigError when weights that the run began with are not finite; a collective
    refuse_unsound_base: Callable[[], None] = no_check
    report: Callable[[Moved], None] = ignore  # reports to the process that watches this rank
    sums: SourceSums = field(default_factory=lambda: SourceSums(()))  # of each source of a mix

    def epochs_of_sources(self, step: int) -> dict[str, float]:
        """Of a mix, how often each source was read after `step` steps, by the name of its
        metric.
        """
        rows, labels = self.train, self.sums.labels
        epochs = self.sharding.epochs(len(rows), self.cfg.train.seed, sources_in(rows))
        if not isinstance(epochs, Mixture):
            return {}
        pairs = zip(labels, epochs.epochs_after(step), strict=True)
        return {f"epoch_{label}": count for label, count in pairs}

    def all_valid_sets(self) -> dict[str, ValidSet]:
        """What an evaluation scores by split: "valid", then those of data.valid_sets."""
        return {"valid": ValidSet(self.valid, self.questions), **self.valid_sets}

    def has_waited(self, progress: Progress) -> bool:
        """Whether so many evaluations were no better that the run ends (train.patience)."""
        patience = self.cfg.train.patience
        return patience is not None and progress.waited >= patience

    def is_out_of_time(self) -> bool:
        """Whether the next step is the last one that train.hours has room for, by this rank's
        clock. Called once a step.
        """
        return self.budget is not None and self.budget.is_spent()

    def pauses(self, progress: Progress) -> bool:
        """Whether --until stops the run at this step, before its last one."""
        is_early = self.has_waited(progress) or progress.is_out_of_time
        is_last = progress.step == self.cfg.train.steps or is_early
        return progress.step == self.until and not is_last

    @property
    def is_judged(self) -> bool:
        """Whether the loss of every step is looked at before it updates anything."""
        return self.cfg.train.on_bad_step != "stop" or self.cfg.train.spike_z is not None
