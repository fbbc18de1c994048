"""RunPlan -> Chosen: counts the steps of an experiment in epochs, and replaces every "auto" by
planning memory and time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.config import auto
from trainer.config.auto import AUTO, presets_of, with_frozen
from trainer.data.content import Content, content_of
from trainer.data.mixed.store import sources_in
from trainer.errors import ConfigError, DoesNotFitError
from trainer.launch import preflight, run_folder
from trainer.launch.origin import going_on
from trainer.launch.prepare import PreparedRun, is_in_memory, open_stores
from trainer.plan.memory.advice import (
    RECOMPUTED,
    fits_recomputed,
    largest_divisor,
    largest_rows,
    least_recomputed,
    recomputation_line,
    recomputing,
)
from trainer.plan.memory.measure import MeasuringError, measuring, with_value
from trainer.plan.memory.plan import make
from trainer.plan.memory.planned_rows import training_batches
from trainer.plan.time.fastest import ways
from trainer.plan.time.target import target_of
from trainer.plan.time.text import duration
from trainer.runtime.distributed import on_main
from trainer.training.run_plan import with_rows

if TYPE_CHECKING:
    from trainer.devices import Device
    from trainer.plan.memory.subject import Subject
    from trainer.plan.time.target import Target
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """A run plan with its steps, and without any "auto"."""

    plan: RunPlan
    # (digest, number of rows) of each split that was read in order to choose
    content: Mapping[str, Content] = field(default_factory=dict[str, Content])


def choose(plan: RunPlan, options: Options) -> Chosen:
    """Look whether the saved step is there that the run goes on with, if it goes on with one, and
    whether that was trained on the same rows. Count the steps that train.epochs are, and choose
    all that is "auto". Rank 0 loads the task and the rows once for that. A collective.

    ConfigError if the device is not known; DoesNotFitError if nothing fits.
    """
    if options.device is not None:
        target_of(options.device, world=None)  # refuses an unknown device at once
    on_main(lambda: going_on.refuse_absent(plan, options))
    train = plan.cfg.train
    preset = options.deepspeed or plan.cfg.deepspeed
    is_open = AUTO in (preset, plan.values["train"]["micro_batch"])
    settled = (train.gradient_checkpointing, train.frozen, auto.chunk_tokens(plan.cfg))
    is_auto = is_open or AUTO in settled
    # read before anything is written: the sources of a mix, and the rows of a run that goes on with
    # another one
    other = None if on_main(lambda: _has_begun(plan, options)) else plan.cfg.continues
    if not is_auto and train.epochs is None and plan.sharding.mix is None and other is None:
        return Chosen(plan)

    def choices() -> dict[str, Any]:
        task = tasks.load(plan.cfg, options.places)
        content: dict[str, Content] = {}

        def read(split: str) -> Content:
            content[split] = content_of(task, split, options.cache_dir)
            return content[split]

        stores = open_stores(task, options, read)
        values: dict[str, Any] = {
            "content": {name: list(of) for name, of in content.items()},
            "num_rows": len(stores["train"]),
            "sources": sources_in(stores["train"]),
        }
        if other is not None:
            now = run_folder.identity_of(plan, task, stores, options.places)
            going_on.refuse_other_rows(other, now, options.savedir_base)
        run = PreparedRun(_with_choices(plan, values, options.until), task, stores, options.places)
        if is_open:
            values["preset"], values["rows"] = _preset_and_rows(run, preset, options.device)
            run = replace(run, plan=_with_choices(plan, values, options.until))
        if train.gradient_checkpointing == AUTO:
            values["recomputed"] = settled_recomputation(run, options)
            run = replace(run, plan=_with_choices(plan, values, options.until))
        if train.frozen == AUTO:
            values["frozen"] = frozen(run, name=options.device)
        if auto.chunk_tokens(plan.cfg) == AUTO:
            run = replace(run, plan=_with_choices(plan, values, options.until))
            values["chunk"] = settled_chunks(run, options)
        return values

    values = on_main(choices)
    content = {name: (str(of[0]), int(of[1])) for name, of in values["content"].items()}
    return Chosen(_with_choices(plan, values, options.until), content)


def _has_begun(plan: RunPlan, options: Options) -> bool:
    """Whether an earlier start of the run has saved a state that this one goes on from."""
    is_on_disk = preflight.has_begun(plan) and not options.resets(plan.id)
    return is_on_disk or is_in_memory(plan, options)


def _with_choices(plan: RunPlan, chosen: Mapping[str, Any], until: int | None) -> RunPlan:
    plan = with_rows(plan, chosen["num_rows"], chosen["sources"], until=until)
    cfg, ds, sharding = plan.cfg, plan.ds, plan.sharding
    if "preset" in chosen:
        cfg = auto.with_micro_batch(cfg, chosen["rows"])
        ds = auto.rebuilt(cfg, chosen["preset"], world=sharding.world)
        sharding = replace(sharding, micro_batch=chosen["rows"])
    if "recomputed" in chosen:
        cfg = auto.with_recomputation(cfg, chosen["recomputed"])
    if "frozen" in chosen:
        cfg = with_frozen(cfg, chosen["frozen"])
    if "chunk" in chosen:
        cfg = auto.with_chunk_tokens(cfg, chosen["chunk"])
    return replace(plan, cfg=cfg, ds=ds, sharding=sharding)


def _preset_and_rows(run: PreparedRun, preset: str, name: str | None) -> tuple[str, int]:
    """The DeepSpeed file and the micro-batch of a run that says "auto" for one of them.

    If the rates of the device are known, this is the fastest way that fits. Otherwise it is the
    first of presets_of() that fits, with its largest micro-batch that fits and divides a rank's
    rows of a step, so that global_batch stays. DoesNotFitError if nothing fits.

    preset: the file, or "auto".
    """
    target = target_of(name, world=run.plan.sharding.world)
    device = target.device
    if device is None:
        raise ConfigError(
            f'"{AUTO}" needs to know the device. Run on a GPU, or give --device, such as '
            "--device 24GiB."
        )
    presets = presets_of(run.plan.cfg) if preset == AUTO else (preset,)
    if target.rates is not None:
        choice = _fastest(run, presets, target, device)
    else:
        choice = _first_that_fits(run, presets, device)
    if choice is None:
        raise DoesNotFitError(
            f"{device.name}: the longest rows do not fit under {', '.join(presets)}. "
            "`python -m trainer plan` names what would make them fit."
        )
    return choice


def _picks_rows(run: PreparedRun) -> bool:
    return run.plan.values["train"]["micro_batch"] == AUTO


def _fastest(
    run: PreparedRun, presets: Sequence[str], target: Target, device: Device
) -> tuple[str, int] | None:
    """The way with the shortest predicted time among those that fit; None if none fits."""
    train = run.plan.cfg.train
    assert target.rates is not None, "the caller has looked"
    fitting = ways(
        run.subject(),
        target.rates,
        target.cluster,
        usable=device.bytes_to_fill(run.plan.sharding.world),
        presets=presets,
        micro_batches=None if _picks_rows(run) else (train.micro_batch,),
        recomputed=None if train.gradient_checkpointing == AUTO else (train.recompute_every,),
    )
    if not fitting:
        return None
    best = fitting[0]
    logger.info(
        "time: %s, %s a step predicted, the fastest of %d ways that fit",
        best.text,
        duration(best.time.total),
        len(fitting),
    )
    return best.preset, best.micro_batch


def _first_that_fits(
    run: PreparedRun, presets: Sequence[str], device: Device
) -> tuple[str, int] | None:
    """The first file under which the longest rows fit, without recomputation if possible."""
    train, world = run.plan.cfg.train, run.plan.sharding.world
    groups = run.plan.sharding.groups
    recomputed = train.gradient_checkpointing
    for how in (False, True) if recomputed == AUTO else (recomputed,):
        subject = recomputing(run.subject(), how)
        fitting = largest_rows(
            subject, presets, usable=device.bytes_to_fill(world), cublas=device.cublas_nbytes
        )
        for preset, most_rows in fitting.items():
            if most_rows < (1 if _picks_rows(run) else train.micro_batch):
                continue
            rows = train.micro_batch
            if _picks_rows(run):
                rows = largest_divisor(train.global_batch // groups, most_rows)
            logger.info(
                "memory: %s with micro-batches of %d, for %d of the longest rows fit",
                preset,
                rows,
                most_rows,
            )
            return preset, rows
    return None


def settled_recomputation(run: PreparedRun, options: Options) -> bool | int:
    """The value for train.gradient_checkpointing="auto", after a look at earlier starts."""
    goes_on = _has_begun(run.plan, options)
    recorded = run_folder.recorded_recomputation(run.plan.folder) if goes_on else None
    return recomputation(run, name=options.device, recorded=recorded)


def recomputation(run: PreparedRun, *, name: str | None, recorded: bool | int | None) -> bool | int:
    """The value for train.gradient_checkpointing="auto": that of an earlier start of the run,
    unless it does not fit this device. ConfigError if memory cannot be planned.
    """
    device = target_of(name, world=run.plan.sharding.world).device
    if recorded is not None and (
        device is None or fits_recomputed(run.subject(), recorded, device)
    ):
        logger.info("memory: %s computed again, as this run began", recomputation_line(recorded))
        return recorded
    how = least_recomputed(run.subject(), device)
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


def frozen(run: PreparedRun, *, name: str | None) -> str:
    """The value for train.frozen="auto": "replicate" if the run then fits its device."""
    plan = run.plan
    target = target_of(name, world=plan.sharding.world).device
    if target is None or plan.ds["zero_optimization"]["stage"] < 3:
        return "shard"
    whole = replace(run, plan=replace(plan, cfg=with_frozen(plan.cfg, "replicate")))
    try:
        memory = make(whole.subject(), cublas=target.cublas_nbytes)
    except MeasuringError:
        return "shard"
    fits = memory.plan.peak.peak.total <= target.bytes_to_fill(plan.sharding.world)
    how = "replicate" if fits else "shard"
    logger.info("memory: frozen weights: %s (train.frozen is auto)", how)
    return how


def settled_chunks(run: PreparedRun, options: Options) -> int:
    """The value for chunks of "auto" tokens: that of an earlier start of the run, so that it goes
    on with the same bits, else chunk_tokens().
    """
    goes_on = _has_begun(run.plan, options)
    recorded = run_folder.recorded_chunk_tokens(run.plan.folder) if goes_on else None
    return recorded or chunk_tokens(run, name=options.device)


@measuring()
def chunk_tokens(run: PreparedRun, *, name: str | None) -> int:
    """The value for chunks of "auto" tokens: the most tokens with which the heaviest micro-batch
    fits the device, out of the longest text's and the doubles of it, up to those with which every
    side of a micro-batch is one chunk. ConfigError without a device, or if memory cannot be
    planned.
    """
    target = target_of(name, world=run.plan.sharding.world).device
    if target is None:
        raise ConfigError(
            'loss.chunk_tokens="auto" needs to know the device. Run on a GPU, give --device, such '
            "as --device 24GiB, or say a number."
        )
    subject = run.subject()
    least = max(run.task.limits().values())
    most = max(int(subject.train.lengths[one.numbers].sum()) for one in training_batches(subject))
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    try:
        fitting = (size for size in reversed(sizes) if _fits_in_chunks(subject, size, target))
        tokens = next(fitting, least)  # where nothing fits, the plan of the run says so
    except MeasuringError as error:
        raise ConfigError(
            f'loss.chunk_tokens="auto": no plan could be made. Say a number.\n{error}'
        ) from error
    logger.info("memory: chunks of %d tokens (loss.chunk_tokens is auto)", tokens)
    return tokens


def _fits_in_chunks(subject: Subject, tokens: int, device: Device) -> bool:
    values = with_value(subject.values, auto.CHUNKS, tokens)
    cfg = auto.with_chunk_tokens(subject.cfg, tokens)
    memory = make(replace(subject, values=values, cfg=cfg), cublas=device.cublas_nbytes)
    return memory.total <= device.bytes_to_fill(subject.sharding.world)
