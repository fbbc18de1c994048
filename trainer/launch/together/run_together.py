"""Trains a group of experiments at once: one step of each after one pass over the rows of all.

Each experiment is the ordinary run, with its own folder, record, engine and saves. It halts before
every step (training/loop.py: steps) and goes on once the passes of its step were computed with
those of the others (driven/together/shared_steps.py).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainer.data import left_out
from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED, LatheError, StorageError
from trainer.files.atomic import read_json, write_json
from trainer.launch.choose import choose
from trainer.launch.preflight import has_begun
from trainer.launch.prepare import prepare
from trainer.launch.run import EXIT_CODES, SENTENCES, refused_row, trained
from trainer.launch.run_folder import claim_folder, kernels_of, tell_changed_data
from trainer.launch.start import start
from trainer.launch.together.refusals import refuse
from trainer.launch.together.shared_footing import SharedFooting
from trainer.runtime import device_defaults, distributed, watch
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Preemption, Stopped
from trainer.telemetry.console import Lines, screen
from trainer.telemetry.run_record import STATUS, RunRecord
from trainer.training.run_plan import is_finished, rests

if TYPE_CHECKING:
    from trainer.data.order import StepBatches
    from trainer.launch.start import ReadyRun
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)

FILE = "together.json"  # in a run folder: with whom the run was trained
Course = Generator["StepBatches", "StepBatches", int]  # a run; it returns its exit code


def run_together(plans: Sequence[RunPlan], options: Options, *, most_tokens: int) -> int:
    """Train the experiments of a group on one base, without those that are finished. An error of
    one ends that one alone.

    most_tokens: that are read at once. Returns 75 where a signal stopped the group, else the exit
    code of the first experiment that failed, else that of --until, else 0. A collective.
    """
    plans = [*{plan.id: plan for plan in plans}.values()]
    refuse(plans, options)
    preemption = Preemption()
    try:
        footing = SharedFooting([plan.id for plan in plans], most_tokens)
        with kernels_of(_unfinished(plans, options), options):
            return _Group(plans, options, preemption, footing).train()
    finally:
        preemption.close()


def _unfinished(plans: Sequence[RunPlan], options: Options) -> list[RunPlan]:
    """Those that take a step: by whose kernels the others were trained does not matter."""
    return [
        plan
        for plan in plans
        if options.resets(plan.id) or not on_main(functools.partial(is_finished, plan))
    ]


@dataclass(frozen=True)
class _Begun:
    """An experiment before its next step."""

    plan: RunPlan  # with its steps
    ready: ReadyRun
    record: RunRecord


@dataclass
class _Group:
    """The experiments of a group while they train. Every method is a collective."""

    plans: Sequence[RunPlan]
    options: Options
    preemption: Preemption
    footing: SharedFooting
    courses: dict[str, Course] = field(default_factory=dict[str, Course])
    windows: dict[str, StepBatches] = field(default_factory=dict[str, "StepBatches"])
    records: dict[str, RunRecord] = field(default_factory=dict[str, RunRecord])
    codes: dict[str, int] = field(default_factory=dict[str, int])  # of those that have ended
    resting: list[RunPlan] = field(default_factory=list["RunPlan"])  # finished before, or paused

    def train(self) -> int:
        """Train all to their ends; the exit code of the group."""
        first = self.plans[0].cfg
        how: Any = {"optimizer": first.optim.name, "compiles": False}
        device_defaults.settle(first.train.precision, **how)
        try:
            for plan in self.plans:
                self._begin(plan)
            self._count_resting()
            while self.windows:
                self._step()
        except Stopped as stopped:  # before the first step: there is nothing to save
            self._end_all(stopped)
            return EXIT_PREEMPTED
        except BaseException as error:
            self._end_all(error)
            raise
        codes = [self.codes[plan.id] for plan in self.plans if plan.id in self.codes]
        if EXIT_PREEMPTED in codes:
            return EXIT_PREEMPTED
        failed = [code for code in codes if code not in (EXIT_OK, EXIT_PAUSED)]
        return next(iter(failed), max(codes, default=EXIT_OK))

    def _begin(self, plan: RunPlan) -> None:
        """Bring an experiment before its next step, unless it is finished. Stopped when a signal
        came.
        """
        resets = self.options.resets(plan.id)
        if not resets and on_main(functools.partial(is_finished, plan)):
            logger.info("%s is finished; -r 1 starts it over", plan.folder)
            on_main(functools.partial(tell_changed_data, plan, self.options))
            self.codes[plan.id] = EXIT_OK
            return self.resting.append(plan)
        if not resets and on_main(functools.partial(rests, plan, self.options.until)):
            self.codes[plan.id] = EXIT_PAUSED
            return self.resting.append(plan)
        self.courses[plan.id] = self._course(plan)
        self._go_on(plan.id, None)
        if self.codes.get(plan.id) == EXIT_PREEMPTED:
            raise Stopped
        return None

    def _count_resting(self) -> None:
        """Count the rows of experiments that need no step now among those of steps that others make
        again: then the packs of these steps are as they were.
        """
        first = min((window.step for window in self.windows.values()), default=None)
        for plan in self.resting:
            status = on_main(functools.partial(read_json, plan.folder / STATUS)) or {}
            if first is not None and status["step"] > first:
                is_finished = self.codes[plan.id] == EXIT_OK
                self._count_rows(plan, end=status["step"] if is_finished else None)

    def _count_rows(self, plan: RunPlan, *, end: int | None) -> None:
        try:
            with left_out.gathering(), claim_folder(plan, self.options):
                run = prepare(choose(plan, self.options), self.options, lambda name: None)
        except LatheError as error:
            if distributed.world() > 1 and not error.is_of_all_ranks:
                raise
            text = "%s rests, and its rows cannot be read: the last bits of others may differ (%s)"
            return logger.warning(text, plan.folder, error)
        self.footing.add_rows(run, end=end or run.plan.cfg.train.steps)
        return run.stores["train"].close()

    def _step(self) -> None:
        """Make the earliest step that is left, of all experiments that have not done it."""
        step = min(window.step for window in self.windows.values())
        now = {name: one for name, one in self.windows.items() if one.step == step}
        assert self.footing.steps is not None, "an experiment that waits has an engine"
        computed = self.footing.steps.computed(now)
        for name in now:
            window = computed.pop(name)
            self._go_on(name, window)
            window.batches.clear()  # the loop keeps the window, and these are the gradients

    def _go_on(self, name: str, window: StepBatches | None) -> None:
        """Let an experiment make its step, up to the next one or to its end. window: None before
        its first one.
        """
        self.windows.pop(name, None)
        course = self.courses[name]
        try:
            self.windows[name] = next(course) if window is None else course.send(window)
        except StopIteration as end:
            self.codes[name] = end.value
        except LatheError as error:
            if distributed.world() > 1 and not error.is_of_all_ranks:
                raise  # the other ranks go on with it, and would wait for this one
            logger.error("%s: %s: %s", name, type(error).__name__, error)
            self.codes[name] = error.exit_code
        if name not in self.windows:
            del self.courses[name]
            # others go on with a step that it will make, too, when it goes on
            self.footing.leave(name, returns=self.codes[name] in (EXIT_PREEMPTED, EXIT_PAUSED))
        watch.record_by(self._fail)  # a record that was opened or closed has taken its place

    def _course(self, plan: RunPlan) -> Course:
        """The whole of one experiment."""
        logger.info("experiment %s", f"{plan.name}, {plan.id}" if plan.name else plan.id)
        with contextlib.ExitStack() as stack:
            try:
                begun = self._begun(plan, stack)
                ended = yield from trained(begun.plan, begun.ready)
            except Stopped:  # before the first step of one of the group: there is nothing to save
                distributed.leave_alone()
                ended = "preempted"
            if plan.id in self.records:
                self.records[plan.id].status(ended)
            logger.info("%s: %s", SENTENCES[ended], plan.folder)
        return EXIT_CODES[ended]

    def _begun(self, plan: RunPlan, stack: contextlib.ExitStack) -> _Begun:
        """An experiment before its next step. stack: is given what has to be closed at its end."""
        options = self.options
        with left_out.gathering() as notes, refused_row(plan.folder, notes):
            choice = choose(plan, options)  # may read rows, too
            lock = stack.enter_context(claim_folder(choice.plan, options))
            record = stack.enter_context(self._record(choice.plan))
            on_main(functools.partial(self._note, choice.plan))
            with self.preemption.nothing_to_save():
                run = prepare(choice, options, record.startup.lap)
                footing = self.footing.of(run)
                ready = start(run, options, record, self.preemption, lock, footing)
        self.footing.add_rows(run, end=choice.plan.cfg.train.steps)
        return _Begun(choice.plan, ready, record)

    @contextlib.contextmanager
    def _record(self, plan: RunPlan) -> Iterator[RunRecord]:
        """The record of an experiment in its folder, and as lines on the console. It keeps the
        error that the block ends with.
        """
        total, unit = plan.cfg.train.steps, f"{plan.name or plan.id[:8]} step"
        record = RunRecord(
            plan.folder,
            total=total,
            name=plan.name,
            console=Console(file=io.StringIO(), quiet=True),  # a bar is of one run
            began_at=self.options.began_at,
            others=lambda: [Lines(screen(), total, unit=unit)],
        )
        self.records[plan.id] = record
        try:
            yield record
        except BaseException as error:
            with contextlib.suppress(StorageError):  # a full disk must not hide what went wrong
                record.fail(error)
            raise
        finally:
            del self.records[plan.id]
            record.close()

    def _note(self, plan: RunPlan) -> None:
        """Write down with whom an experiment is trained, and warn where that changes."""
        path = plan.folder / FILE
        now = {"group": [one.id for one in self.plans], "tokens": self.footing.most_tokens}
        if has_begun(plan) and read_json(path) != now:
            text = "%s was begun alone, or in another group: from here on its last bits differ"
            logger.warning(text, plan.folder)
        write_json(path, now)

    def _fail(self, error: BaseException) -> None:
        """Record an error that ends the process."""
        for record in self.records.values():
            record.fail(error)

    def _end_all(self, error: BaseException) -> None:
        """End every experiment by an error of the whole process, or by a signal."""
        for course in self.courses.values():
            with contextlib.suppress(BaseException):
                course.throw(error)
        self.courses.clear()
