"""A run that has been checked: everything known before a weight is read."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.config import deepspeed_config
from trainer.config.auto import placeholder, with_micro_batch, with_steps
from trainer.config.identity import exp_id
from trainer.config.mistakes import late_stop
from trainer.config.schema import Experiment
from trainer.data.arranged import told
from trainer.data.mixed.mixture import Mix, Mixture
from trainer.data.mixed.task import refuse_missing
from trainer.data.order import Sharding, Sizes, padding_share
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import read_json
from trainer.metrics.judge_record import refusals_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.training.options import Options

logger = logging.getLogger(__name__)

_PADDING_STEPS = 20  # whose padding is counted and told at the start


@dataclass(frozen=True)
class RunPlan:
    """What will run: everything known before a weight is read."""

    values: dict[str, Any]
    cfg: Experiment
    id: str
    folder: Path
    ds: dict[str, Any]  # the complete DeepSpeed dictionary
    sharding: Sharding
    name: str = ""  # for people: the group, the place in it and what differs from its siblings

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.folder / "checkpoints"


def plan(
    values: dict[str, Any],
    options: Options,
    *,
    world: int,
    rank: int,
    may_be_smaller: bool = False,
) -> RunPlan:
    """Check an experiment against its schema, its DeepSpeed file and the world size.

    Touches no disk but to read. may_be_smaller: a micro-batch that this world cannot deal evenly
    is taken smaller, for a run that may lose ranks.
    """
    name = exp_id(values)
    data = options.data_path
    if data is not None and not data.is_dir():
        raise DataError(_no_folder(data))
    cfg = tasks.parse(values, source=f"experiment {name}")
    refuse_missing(getattr(cfg, "data", None), data)
    if cfg.train.micro_batch == 0:  # "auto": `run` chooses
        cfg = with_micro_batch(cfg, 1)
    if may_be_smaller:
        cfg = _with_fewer_rows(cfg, world)
    train, file = cfg.train, placeholder(options.deepspeed or cfg.deepspeed, cfg)
    ds = deepspeed_config.build(
        _preset(file, cfg, may_lose_ranks=may_be_smaller),
        train=train,
        optim=cfg.optim,
        world=world,
        source=f"DeepSpeed file {file!r} with experiment {name}",
    )
    sharding = Sharding(
        train.global_batch,
        train.micro_batch,
        world,
        rank,
        micro_tokens=train.micro_tokens,
        bucket_steps=train.bucket_steps,
        is_whole=train.epochs is not None,
        mix=Mix.of(getattr(cfg, "data", None)),
        sharing=deepspeed_config.sequence_ranks(ds),
    )
    _refuse_late_stop(options.until, train.steps)
    folder = options.savedir_base / name
    return RunPlan(values, cfg, name, folder, ds, sharding, options.names.get(name, ""))


def _with_fewer_rows(cfg: Experiment, world: int) -> Experiment:
    """The experiment with the largest micro-batch up to its own that so many ranks can deal evenly;
    unchanged where there is none.
    """
    if cfg.train.global_batch % world:
        return cfg
    each = cfg.train.global_batch // world
    rows = range(cfg.train.micro_batch, 0, -1)
    return with_micro_batch(cfg, next(count for count in rows if each % count == 0))


def _preset(file: str, cfg: Experiment, *, may_lose_ranks: bool) -> dict[str, Any]:
    """The DeepSpeed file. ConfigError where it lets ranks share rows in a run that cannot do so."""
    preset = deepspeed_config.read(file)
    ranks = deepspeed_config.sequence_ranks(preset)
    why = "--survive goes on with any number of ranks" if may_lose_ranks else cfg.unshared
    if ranks > 1 and why is not None:
        raise ConfigError(
            f"sequence_parallel_size={ranks} in the DeepSpeed file: {why}. Only task causal_lm on "
            "rows of files shares a row among ranks. Delete the key, or use another --deepspeed "
            "(docs/long-rows.md)."
        )
    return preset


def _no_folder(data: Path) -> str:
    """Why --data_path is no folder of rows."""
    problem = f"there is no such folder (from {Path.cwd()}). Give the folder of the data."
    if data.parts[:1] == ("~",):
        problem += " A shell writes the home for ~ behind a space, and not behind =."
    if data.exists():
        problem = f"it is a file, and its folder is wanted, which holds every split: {data.parent}."
    return f"--data_path {data}: {problem}"


def with_rows(
    plan: RunPlan, num_rows: int, sources: Sequence[int] = (), *, until: int | None = None
) -> RunPlan:
    """The plan with its steps, now that the training rows are counted: those that train.epochs are,
    and of a mix that ends with a source (mixing.ends) no more than it has rows for. ConfigError
    when train.steps says another number than train.epochs, when a key does not go with it, or when
    --until names a step beyond them.

    sources: the rows of each source of a mix.
    """
    train = plan.cfg.train
    if train.epochs is None and plan.sharding.mix is None:
        return plan
    all_epochs = plan.sharding.epochs(num_rows, train.seed, sources)
    steps = train.steps
    if train.epochs is not None:
        count = all_epochs.count(train.epochs)
        steps = math.ceil(count)
        line = (
            f"{train.epochs:g} epochs of {num_rows:,} rows in steps of {train.global_batch} are "
            f"{steps:,} steps"
        )
        if train.steps not in (0, steps):
            raise ConfigError(f"train.steps={train.steps}, but {line}. Leave one of the two out.")
        filled = round((steps - count) * train.global_batch)
        more = f"; {filled} rows of one more epoch fill the last" if filled else ""
        logger.info("%s%s", line, more)
        own = {**plan.values, "train": {**plan.values["train"], "steps": steps}}
        tasks.parse(own, source=f"experiment {plan.id}, with its {steps} steps")
    if isinstance(all_epochs, Mixture):
        last = all_epochs.steps_of(steps)
        if last < steps:
            logger.info("the run has %d steps of %d: then a source has no rows", last, steps)
        steps = last
        logger.info("%s", mixed_line(all_epochs, steps))
    _refuse_late_stop(until, steps)
    return replace(plan, cfg=with_steps(plan.cfg, steps))


def mixed_line(mixture: Mixture, steps: int) -> str:
    """The rows of each source, how many a run takes of them, and how often it reads them."""
    counts, epochs_of_sources = mixture.taken(steps), mixture.epochs_after(steps)
    parts = [
        f"{name}: {count:,} of {sum(counts):,} rows, {epochs:.2f} epochs of its {size:,}"
        for name, count, epochs, size in zip(
            mixture.mix.names, counts, epochs_of_sources, mixture.sizes, strict=True
        )
    ]
    return f"mix of {steps:,} steps: {'; '.join(parts)}"


def _refuse_late_stop(until: int | None, steps: int) -> None:
    """ConfigError for a --until beyond the run. steps: 0 while the rows of its epochs are not
    counted.
    """
    if until is not None and 0 < steps < until:
        raise ConfigError(late_stop(until, steps))


def say_steps(plan: RunPlan, sizes: Sizes) -> None:
    """Log what becomes of the rows of an epoch where data.batches puts rows together, and which
    part of the first steps is padding. DataError where such rows fill no step.
    """
    train = plan.cfg.train
    if sizes.arrangement is not None:
        epochs = plan.sharding.epochs(len(sizes), train.seed, sizes.sources)
        logger.info("%s", told.line(told.facts(epochs, sizes.arrangement)))
    if sizes.is_packed:
        return logger.info("micro-batches are packed: no padding, but inside attention")
    seed = train.seed if train.order == "shuffled" else None
    steps = min(train.steps, max(_PADDING_STEPS, train.bucket_steps))
    share = padding_share(sizes, plan.sharding, seed=seed, steps=steps)
    logger.info(
        "micro-batches of rows padded to their longest are %.1f%% padding (first %d steps)",
        100 * share,
        steps,
    )


def rests(plan: RunPlan, until: int | None) -> bool:
    """True when an earlier run of the same dictionary was stopped by --until at this step, or at a
    later one.
    """
    if until is None:
        return False
    status = read_json(plan.folder / "status.json") or {}
    step = status.get("step")
    is_there = status.get("state") == "paused" and type(step) is int and step >= until
    if is_there:
        logger.info("%s: step %d is done, and --until is %d", plan.folder, step, until)
    return is_there


def is_finished(plan: RunPlan) -> bool:
    """True when an earlier run of the same dictionary reached its end and left final/, or a model
    that its gate refused.
    """
    has_ended = (read_json(plan.folder / "status.json") or {}).get("state") == "succeeded"
    is_refused = bool(refusals_of(plan.folder))  # by its gate, which keeps the model back
    has_export = is_refused or any((plan.folder / "final").glob("*"))
    if has_ended and not has_export:
        logger.warning('%s says "succeeded", but there is no final/: it goes on', plan.folder)
    return has_ended and has_export
