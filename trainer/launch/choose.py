"""The memory plan of a run that is being launched: made, obeyed, and compared with what came."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.auto import AUTO, presets_of, with_frozen
from trainer.config.identity import digest
from trainer.config.schema import Experiment
from trainer.errors import ConfigError, DoesNotFitError
from trainer.files.atomic import read_json, write_json
from trainer.plan.memory import plan_text
from trainer.plan.memory.advice import (
    RECOMPUTED,
    advise,
    fits_recomputed,
    largest_divisor,
    largest_rows,
    least_recomputed,
    recomputation_line,
    recomputing,
)
from trainer.plan.memory.measure import MeasuringError, measuring, with_value
from trainer.plan.memory.plan import MemoryPlan, make
from trainer.plan.memory.planned_rows import StoredRows
from trainer.plan.memory.subject import Subject
from trainer.plan.time.target import target_of
from trainer.plan.time.text import duration
from trainer.protocol.task import DRAW, EPOCH, Places, Task
from trainer.runtime import distributed, rng
from trainer.runtime.batch import batch_of, name_batch_when_out_of_memory, to_device
from trainer.runtime.gpus import Device
from trainer.training.engine import Engine, trainable

if TYPE_CHECKING:
    from trainer.data.order import Sharding
    from trainer.data.token_store import TokenStore
    from trainer.plan.time.fastest import Way
    from trainer.plan.time.target import Target
    from trainer.training.options import Options

logger = logging.getLogger(__name__)

FILE, TIME = "memory_plan.json", "time"  # the key of the run's predicted time in it


@dataclass(frozen=True)
class UpcomingRun:
    """What a run is about to do."""

    values: dict[str, Any]
    cfg: Experiment
    ds: dict[str, Any]
    sharding: Sharding
    task: Task
    places: Places
    stores: dict[str, TokenStore]
    answers: bool

    def subject(self) -> Subject:
        rows = {split: StoredRows(store, self.task, split) for split, store in self.stores.items()}
        how = self.cfg.train.gradient_checkpointing
        return Subject(
            with_value(self.values, RECOMPUTED, how),
            self.cfg,
            self.ds,
            self.sharding,
            self.task,
            self.places,
            rows["train"],
            rows["valid"],
            self.answers,
        )

    def key(self, target: Device) -> str:
        """Names everything that a plan depends on."""
        digests = {split: store.digest for split, store in self.stores.items()}
        versions = {"torch": version("torch"), "transformers": version("transformers")}
        shards = [self.sharding.world, self.sharding.micro_batch, self.answers]
        shards += [self.cfg.train.frozen, self.cfg.train.gradient_checkpointing]
        return digest(
            {"values": self.values, "ds": self.ds, "shards": shards, "device": target.name}
            | digests
            | versions
        )


@measuring()
def before_launch(
    launch: UpcomingRun,
    folder: Path,
    options: Options,
    predict: Callable[[Subject, Target], dict[str, Any] | None],
) -> dict[str, Any] | None:
    """The plan as plain values, shown in one line and kept in the run folder; None without a device
    to plan for.

    predict: the time of the run, late.predicted. DoesNotFitError, with what would fit, unless
    they force it. A step that cannot be measured is reported, not refused.
    """
    meant = target_of(options.device, world=launch.sharding.world)
    target = meant.device
    if target is None:
        logger.info(
            "memory: not planned, for there is no GPU here; `python -m trainer plan --device "
            "24GiB` plans"
        )
        return None
    key = launch.key(target)
    try:
        made, plan = None, _kept(folder / FILE, key)
        if plan is None:
            made = make(launch.subject(), cublas=target.cublas_nbytes)
            plan = made.plan
        logger.info("%s", plan_text.summary(plan, target))
        time = predict(launch.subject(), meant)
        write_json(folder / FILE, {"key": key, "plan": plan.plain(), TIME: time})
        if not plan.fits(target, launch.sharding.world) and not options.force:
            subject = launch.subject()
            made = made or make(subject, cublas=target.cublas_nbytes)
            advice = advise(subject, made, target, cublas=target.cublas_nbytes)
            raise DoesNotFitError(
                plan_text.refusal(plan, advice, target, world=launch.sharding.world)
            )
    except MeasuringError as error:
        logger.warning("memory: not planned. %s", error)
        return None
    return plan.plain()


def _kept(path: Path, key: str) -> MemoryPlan | None:
    """The plan of an earlier start of the same run."""
    stored = read_json(path)
    if stored is None or stored.get("key") != key:
        return None
    try:
        return MemoryPlan.of(stored["plan"])
    except (KeyError, TypeError, ValueError):  # not whole, or an older form: it is made again
        return None


# "auto"
# --------------------------------------------------------------------------------------------------


def chosen(
    launch: UpcomingRun, asked: str, name: str | None, ways: Callable[..., list[Way]]
) -> tuple[str, int]:
    """The DeepSpeed file and the micro-batch that a run takes where it says "auto".

    asked: the file, or "auto". ways: those of timing.fastest. Where the device's rates are known,
    the fastest of them; else the first of presets_of() that fits, with the largest micro-batch that
    does and divides a rank's rows of a step, so that global_batch stays. DoesNotFitError when
    nothing fits.
    """
    meant = target_of(name, world=launch.sharding.world)
    target = meant.device
    if target is None:
        raise ConfigError(
            f'"{AUTO}" needs to know the device. Run on a GPU, or give --device, such as '
            "--device 24GiB."
        )
    train, world = launch.cfg.train, launch.sharding.world
    presets = presets_of(launch.cfg) if asked == AUTO else (asked,)
    picks_rows = launch.values["train"]["micro_batch"] == AUTO
    usable = target.bytes_to_fill(world)
    if meant.rates is not None:
        found = _fastest(launch, ways, presets, meant, usable=usable, picks_rows=picks_rows)
        if found is not None:
            return found
        raise _nothing_fits(target, presets)
    now = train.gradient_checkpointing
    for how in (False, True) if now == AUTO else (now,):
        subject = recomputing(launch.subject(), how)
        fitting = largest_rows(subject, presets, usable=usable, cublas=target.cublas_nbytes)
        for preset, rows in fitting.items():
            if rows >= (1 if picks_rows else train.micro_batch):
                found_rows = (
                    largest_divisor(train.global_batch // world, rows)
                    if picks_rows
                    else train.micro_batch
                )
                logger.info(
                    "memory: %s with micro-batches of %d, for %d of the longest rows fit",
                    preset,
                    found_rows,
                    rows,
                )
                return preset, found_rows
    raise _nothing_fits(target, presets)


def _nothing_fits(target: Device, presets: Sequence[str]) -> DoesNotFitError:
    return DoesNotFitError(
        f"{target.name}: the longest rows do not fit under {', '.join(presets)}. "
        "`python -m trainer plan` names what would make them fit."
    )


def recomputed(launch: UpcomingRun, *, name: str | None, recorded: bool | int | None) -> bool | int:
    """What train.gradient_checkpointing "auto" becomes: what it was in an earlier start of the run,
    unless that does not fit this device. ConfigError where nothing can be planned.
    """
    device = target_of(name, world=launch.sharding.world).device
    if recorded is not None and (
        device is None or fits_recomputed(launch.subject(), recorded, device)
    ):
        logger.info("memory: %s computed again, as this run began", recomputation_line(recorded))
        return recorded
    how = least_recomputed(launch.subject(), device)
    logger.info("memory: %s computed again (%s is auto)", recomputation_line(how), RECOMPUTED)
    if device is not None and recorded not in (None, how):
        logger.warning(
            "%s: with %s computed again, as this run began, a step does not fit into %s; from here "
            "on its losses may differ in the last bits",
            RECOMPUTED,
            recomputation_line(recorded),
            device.name,
        )
    return how


def frozen(launch: UpcomingRun, *, name: str | None) -> str:
    """What train.frozen "auto" becomes: "replicate" where the run then fits its device."""
    target = target_of(name, world=launch.sharding.world).device
    if target is None or launch.ds["zero_optimization"]["stage"] < 3:
        return "shard"
    whole = replace(launch, cfg=with_frozen(launch.cfg, "replicate"))
    try:
        made = make(whole.subject(), cublas=target.cublas_nbytes)
    except MeasuringError:
        return "shard"
    fits = made.plan.peak.peak.total <= target.bytes_to_fill(launch.sharding.world)
    how = "replicate" if fits else "shard"
    logger.info("memory: frozen weights: %s (train.frozen is auto)", how)
    return how


def _fastest(
    launch: UpcomingRun,
    ways: Callable[..., list[Way]],
    presets: Sequence[str],
    meant: Target,
    *,
    usable: int,
    picks_rows: bool,
) -> tuple[str, int] | None:
    """The way that is predicted to take least, among those that fit; None when none does."""
    train = launch.cfg.train
    found = ways(
        launch.subject(),
        meant.rates,
        meant.cluster,
        usable=usable,
        presets=presets,
        micro_batches=None if picks_rows else (train.micro_batch,),
        recomputed=None if train.gradient_checkpointing == AUTO else (train.recompute_every,),
    )
    if not found:
        return None
    best = found[0]
    logger.info(
        "time: %s, %s a step predicted, the fastest of %d ways that fit",
        best.text,
        duration(best.time.total),
        len(found),
    )
    return best.preset, best.micro_batch


# In the run
# --------------------------------------------------------------------------------------------------


@contextmanager
def obeyed(
    memory: dict[str, Any] | None, engine: Engine, launch: UpcomingRun, folder: Path
) -> Iterator[None]:
    """A run inside: the heaviest batches come first, and memory is compared with its plan
    afterwards.

    memory: what before_launch gave. DoesNotFitError, with the page of it, for an OutOfMemoryError
    inside.
    """
    plan = MemoryPlan.of(memory) if memory is not None else None
    try:
        if plan is not None:
            rehearse(engine, launch, plan.heaviest, plan.heaviest_evaluated)
        elif launch.cfg.train.compile:
            # equal runs compile for the same rows, wherever they begin: equal kernels, equal bits
            first = list(range(launch.sharding.micro_batch))
            rehearse(engine, launch, first, first)
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(plan, engine, folder, error) from error
    if plan is not None:
        compare(plan, folder)


def rehearse(
    engine: Engine, launch: UpcomingRun, trained_rows: Sequence[int], evaluated_rows: Sequence[int]
) -> None:
    """Run a micro-batch and an evaluation batch of these rows before step 1: now is the time to
    fail, and to compile.

    Nothing that counts is changed: no optimizer step, gradients that no weight keeps, random state
    put back. Every rank calls it, for a forward may be a collective.
    """
    state = rng.capture()
    engine.train()
    task, train, valid = launch.task, launch.stores["train"], launch.stores["valid"]
    rows = [
        {
            **train[row % len(train)],
            DRAW: np.zeros(1, dtype=np.int64),
            EPOCH: np.zeros(1, dtype=np.int64),
        }
        for row in trained_rows
    ]
    module = engine.model.module
    weights = list(trainable(module).values())
    trained = task.collate(rows)
    with name_batch_when_out_of_memory([trained]):
        for loss in task.losses(module, [to_device(trained)]):
            with _dropped(weights):
                # not backward(): DeepSpeed's hooks would add what it gives to the first step's
                # gradient
                torch.autograd.grad(loss, weights, allow_unused=True)
            del loss
    engine.eval()
    evaluated = task.collate([valid[row % len(valid)] for row in evaluated_rows])
    with torch.no_grad(), name_batch_when_out_of_memory([evaluated]):
        task.scores(engine.model, to_device(evaluated))
    engine.train()
    rng.restore(state)


@contextmanager
def _dropped(weights: Sequence[Tensor]) -> Iterator[None]:
    """Inside, autograd.grad keeps no gradient of these: all of them at once are as large as the
    model, and from ZeRO-2 on no step holds them.
    """
    hooks = [
        weight.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient))
        for weight in weights
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compare(plan: MemoryPlan, folder: Path) -> None:
    """Say and keep what was planned and what came, on a GPU."""
    if not torch.cuda.is_available():
        return
    planned, measured = plan.peak.peak.total, torch.cuda.max_memory_allocated()
    logger.info("%s", plan_text.comparison(planned, measured))
    if distributed.is_main() and (path := folder / FILE).is_file():
        write_json(path, json.loads(path.read_text()) | {"measured": measured})


def out_of_memory(
    plan: MemoryPlan | None, engine: Engine, folder: Path, error: torch.OutOfMemoryError
) -> DoesNotFitError:
    """The page on an OutOfMemoryError, which is also written into the run folder."""
    held = engine.held_bytes()
    taken = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else sum(held.values())
    text = plan_text.out_of_memory(
        plan, held | {"rest": taken - sum(held.values())}, batch_of(error), str(error)
    )
    if distributed.is_main():
        (folder / "out_of_memory.txt").write_text(text + "\n")
    return DoesNotFitError(text)
