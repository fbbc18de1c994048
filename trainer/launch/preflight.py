"""Finds in the first seconds what a run would refuse in its first minutes.

A dry run makes all checks, the rows' on the first rows of every split. A run makes the others
before it encodes anything, and the rows' once they are encoded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer import tasks
from trainer.config import deepspeed_config
from trainer.config.identity import base_id, teacher_id
from trainer.config.mistakes import (
    OFFLOAD_OF_NOTHING,
    OPTIMIZER_ON_NVME,
    doubts_of,
    foreign_best,
    long_warmup,
    takes_nothing_away,
)
from trainer.data import left_out
from trainer.data.content import reader_of, valid_splits
from trainer.data.control_tokens import controls_of, reason
from trainer.data.formats.normal_form import row_hash
from trainer.devices import refuse_without_fp8
from trainer.errors import ConfigError, DataError, LatheError
from trainer.evaluation.run import TEST
from trainer.files.atomic import size_of
from trainer.judging.compare import refuse_overlap
from trainer.judging.end_of_run import early_problems
from trainer.launch.origin import going_on
from trainer.metrics.own import OwnMetric, load, try_out
from trainer.models import base_model, base_source, recomputation
from trainer.models.frozen import fp8
from trainer.models.frozen.freezing import trainable_report
from trainer.models.optimizers import saved_nbytes
from trainer.models.optimizers.rates import freeze_whole, places, rules
from trainer.models.weights import weight_files
from trainer.plan.time.target import target_of
from trainer.protocol.abilities import Answers, LearnsFromTeacher, Mixes, refuse_sharing
from trainer.protocol.task import DRAW, EPOCH, STEP, Encoded, Places
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.statistics.examples import Segment, texts
from trainer.statistics.ledger import refuse_lost_labels
from trainer.statistics.overlap import shared_rows
from trainer.training import checkpoint
from trainer.training.scoring import first_questions

if TYPE_CHECKING:
    from torch import nn

    from trainer.config.schema import Experiment
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row, Task
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

FIRST_ROWS = 64  # how many rows of each split a dry run encodes
SHOWN_ROWS = 2
TRIED_ROWS = 8  # on which a user's own metrics are tried

log = logging.getLogger(__name__)


@dataclass
class Findings:
    """The results of a dry run."""

    problems: list[str] = field(default_factory=list)  # a run would end with these, exit code 2
    warnings: list[str] = field(default_factory=list)
    parameters: str = ""
    # the first training rows as the model gets them: {name of a text: its segments}
    rows: list[dict[str, list[Segment]]] = field(default_factory=list)


def look(plan: RunPlan, options: Options, *, earlier: Collection[str] = ()) -> Findings:
    """Check everything that needs no training. Reads the first rows and headers of weights.

    earlier: the ids of the experiments that the same group trains before. What the run begins with,
    its teacher, and the model that it is compared with may be theirs, and need not be there yet.
    """
    is_awaited = any(one in earlier for one in (base_id(plan.values), teacher_id(plan.values)))
    findings = Findings([*_of_device(plan, options), *foreign_best(plan.cfg), *_of_folder(plan)])
    findings.problems += _of_offload(plan)
    (findings.warnings if options.is_shortened else findings.problems).extend(_of_schedule(plan))
    (findings.problems if options.strict else findings.warnings).extend(doubts_of(plan.cfg))
    try:
        going_on.refuse_absent(plan, options)
    except LatheError as error:
        (findings.warnings if is_awaited else findings.problems).append(str(error))
    try:
        task = tasks.load(plan.cfg, options.places)
        refuse_sharing(task, plan.sharding.sharing)
        if isinstance(task, LearnsFromTeacher):
            task.teacher_fingerprint()
        findings.parameters, problems = _of_model(plan, options.places, task)
        findings.problems += problems
    except LatheError as error:
        findings.parameters = f"not counted: {error}"
        (findings.warnings if is_awaited else findings.problems).append(str(error))
        return findings
    try:
        own_metrics(plan, options, task)
    except LatheError as error:
        findings.problems.append(str(error))
    if plan.cfg.is_driven:  # a client will send the rows
        return findings
    how = plan.cfg.judge
    first: dict[str, list[Encoded]] = {}
    is_test_read = options.test or (how is not None and how.split == TEST)
    for split in ("train", *valid_splits(plan.cfg), *([TEST] if is_test_read else [])):
        with left_out.reading() as notes:
            first[split] = _first_rows(task, split, findings.problems)
        if notes:
            doubts = findings.problems if options.strict else findings.warnings
            doubts.append(f"{split}: {notes.line(with_places=True)}")
    findings.problems += [
        problem
        for split, rows in first.items()
        if (problem := _lost_labels(rows, split, most=plan.cfg.train.max_lost_labels))
    ]
    findings.rows = [
        texts(task, task.collate([_with_draw(row)])) for row in first["train"][:SHOWN_ROWS]
    ]
    if first["train"] and not _units(task, first["train"]):
        findings.problems.append(_no_label(len(first["train"])))
    shared = len(_shared(first["train"], first["valid"]))
    if shared:
        (findings.problems if options.strict else findings.warnings).append(
            f"{shared:,} of {len(first['valid']):,} of the first validation rows are also first "
            "training rows: what is measured on them is remembered, not learnt. Take them out of "
            "one of the two."
        )
    if how is not None:
        problems, warnings = early_problems(plan, options, earlier)
        findings.problems += problems
        findings.warnings += warnings
        try:
            refuse_overlap(how, _shared(first["train"], first[how.split]), len(first[how.split]))
        except LatheError as error:
            findings.problems.append(str(error))
    # Two splits of one file are read up to the same row, which is wrong once.
    findings.problems = [*dict.fromkeys(findings.problems)]
    return findings


def _steps(cfg: Experiment) -> str:
    """The steps of a dry run, which counts no rows."""
    steps = cfg.train.steps
    if not steps:
        return f"those of {cfg.train.epochs:g} epochs, once the rows are counted"
    return f"{steps}, of which {cfg.schedule.warmup_of(steps)} warm-up"


def show(plan: RunPlan, findings: Findings) -> str:
    """The preview of a dry run as text: id, dictionaries, batch arithmetic, parameter counts, rows
    as the model gets them, and what a run would refuse.
    """
    rows = [
        ("experiment", plan.id),
        *([("name", plan.name)] if plan.name else []),
        ("folder", str(plan.folder)),
        ("task", plan.cfg.task),
        ("steps", _steps(plan.cfg)),
        *deepspeed_config.summary(plan.ds),
        ("parameters", findings.parameters),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += ["", "resolved.json", json.dumps(plan.cfg.model_dump(mode="json"), indent=2)]
    lines += ["", "ds_config.json", json.dumps(plan.ds, indent=2)]
    for number, row in enumerate(findings.rows, start=1):
        is_over_tokens = any(one["in_loss"] is not None for text in row.values() for one in text)
        mark = "; «in the loss»" if is_over_tokens else ""
        lines += ["", f"training row {number}, as the model gets it{mark}"]
        for name, segments in row.items():
            marked = (f"«{one['text']}»" if one["in_loss"] else one["text"] for one in segments)
            lines.append(f"  {name}: {''.join(marked)}")
    lines += ["", *(f"warning: {text}" for text in findings.warnings)] if findings.warnings else []
    lines += ["", *(f"refused: {text}" for text in findings.problems)] if findings.problems else []
    return "\n".join(lines) + "\n"


def refuse_early(plan: RunPlan, options: Options, task: Task) -> None:
    """Raise one ConfigError with every problem that shows before a row is read. On one rank."""
    problems = [*foreign_best(plan.cfg), *_of_offload(plan), *_of_folder(plan)]
    on_disk = deepspeed_config.offload_device(plan.ds, "offload_optimizer") == "nvme"
    if options.memory and on_disk:
        problems.append(OPTIMIZER_ON_NVME)
    for problem in _of_schedule(plan):
        if options.is_shortened:  # --steps shortens a run, but not its schedule
            log.warning("%s", problem)
        else:
            problems.append(problem)
    for doubt in doubts_of(plan.cfg):
        if options.strict:
            problems.append(f"--strict: {doubt}")
        else:
            log.warning("%s", doubt)
    refuse_sharing(task, plan.sharding.sharing)
    if plan.cfg.train.base_bits == "fp8" and (problem := fp8.problem_of(distributed.device())):
        problems.append(problem)
    if not has_begun(plan):
        problems += _of_model(plan, options.places, task)[1]
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_rows(task: Task, stores: Mapping[str, TokenStore], *, most_lost: float) -> None:
    """Raise what is wrong with encoded rows, and note the validation rows that are also trained
    on.
    """
    for store in stores.values():
        refuse_lost_labels(store, most=most_lost)
    train = stores["train"]
    count = min(len(train), FIRST_ROWS)
    refuse_unlabelled(task, [train[row] for row in range(count)])
    for split, valid in stores.items():
        if split == "train":
            continue
        overlap = left_out.Notes()
        for row, trained_as in shared_rows(train, valid):
            text = f"row {row + 1}, which is training row {trained_as + 1}"
            overlap.add(left_out.Note(text, left_out.IN_TRAIN))
        left_out.gather(f"{split} in train", overlap)


def try_own_metrics(plan: RunPlan, options: Options) -> None:
    """Refuse a user's own metrics that cannot be used, before anything is written. A collective."""
    if plan.cfg.own_metrics:
        own_metrics(plan, options, tasks.load(plan.cfg, options.places))


def own_metrics(plan: RunPlan, options: Options, task: Task) -> list[OwnMetric]:
    """The user's own metrics, tried on the first validation rows; [] on ranks other than 0. A
    collective.

    ConfigError for one that cannot be loaded or fails, and where no rows would be answered.
    """
    if not plan.cfg.own_metrics:
        return []
    count = plan.cfg.train.answers or options.extra_evals
    if isinstance(task, Answers) and not count:
        raise ConfigError(
            f"metrics={plan.cfg.metrics!r}: got no row to answer, want some, for the function gets "
            'answers. Set train.answers to a number of validation rows, or to "all".'
        )
    if not isinstance(task, Answers):
        raise ConfigError(
            f"metrics={plan.cfg.metrics!r}: task {plan.cfg.task!r} writes no answers in its "
            "evaluations, and the function would get none. Leave it out, or measure what "
            "`lathe predict` writes."
        )
    metrics: list[OwnMetric] = []
    rows = first_questions(task, TRIED_ROWS)
    on_main(lambda: metrics.extend(try_out(load(plan.cfg.own_metrics, plan.folder), rows)))
    return metrics


def refuse_unlabelled(task: Task, rows: Sequence[Mapping[str, Any]]) -> None:
    """DataError when none of these rows has anything that the loss is over."""
    if not _units(task, rows):
        raise DataError(_no_label(len(rows)))


def has_begun(plan: RunPlan) -> bool:
    """Whether an earlier start of the run has saved a whole checkpoint. A run that was killed in
    its first save begins again, with the random numbers of a new run.
    """
    return bool(checkpoint.candidates(plan.checkpoints))


# What is wrong without a row
# --------------------------------------------------------------------------------------------------


def _of_schedule(plan: RunPlan) -> Iterator[str]:
    if not has_begun(plan):  # runs of older versions go on
        yield from long_warmup(plan.cfg)


def _of_device(plan: RunPlan, options: Options) -> Iterator[str]:
    """The error of a --device that is unknown, or multiplies no FP8 where the run wants that."""
    try:
        if options.device is not None:
            device = target_of(options.device, world=None).device
            if plan.cfg.train.base_bits == "fp8" and device is not None:
                refuse_without_fp8(device.name)
    except ConfigError as error:
        yield str(error)


def _of_offload(plan: RunPlan) -> Iterator[str]:
    """Why inputs of blocks cannot wait on the host."""
    train = plan.values["train"]
    if not train.get("activation_offload"):
        return
    if takes_nothing_away(train):
        yield OFFLOAD_OF_NOTHING
    if os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native":
        yield (
            "train.activation_offload=true with DS_PIN_MEMORY_BACKEND=native: DeepSpeed's pinned "
            "memory is free again while a copy may still be on its way. Unset the variable."
        )


def _of_folder(plan: RunPlan) -> Iterator[str]:
    """The problem of a --savedir_base that is no folder, or not writable."""
    base = plan.folder.parent
    nearest = _nearest(base)
    if not nearest.is_dir():
        yield f"--savedir_base {base}: {nearest} is a file. Give a folder."
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"--savedir_base {base}: this user may not write into {nearest}. Give another one."


def _nearest(path: Path) -> Path:
    """The path itself if it exists, or its first parent that exists."""
    return next((one for one in (path, *path.parents) if one.exists()), Path.cwd())


def _of_model(plan: RunPlan, places: Places, task: Task) -> tuple[str, list[str]]:
    """(the number of parameters as text, why the base cannot be trained: a family that does not
    fit, damaged files, or checkpoints too large for the disk).
    """
    try:
        model = task.skeleton()
        _check_patterns(model, plan.cfg)
        recomputation.check(plan.cfg.train.recompute_every, recomputation.num_blocks(model))
        source = base_source.resolve(plan.cfg.base, places)
        if isinstance(source, str):
            weight_files.check_whole(source)
    except LatheError as error:
        return f"not counted: {error}", [str(error)]
    free, needed = shutil.disk_usage(_nearest(plan.folder)).free, checkpoint_nbytes(model, plan)
    problem = (
        f"{plan.folder}: {size_of(free)} free, a checkpoint needs at least {size_of(needed)}. "
        "Free some space, or save elsewhere with --savedir_base."
    )
    return str(trainable_report(model)), [problem] if free < needed else []


def _check_patterns(model: nn.Module, cfg: Experiment) -> None:
    """Freeze what never trains. ConfigError for names of weights that name none."""
    freeze = cfg.train.freeze
    freeze_whole(model, freeze)
    places(model, cfg.optim, plus=1.0, freeze=freeze)


def checkpoint_nbytes(model: nn.Module, plan: RunPlan) -> int:
    """The least bytes of a checkpoint: trained weights and the optimizer's state."""
    cfg = plan.cfg
    nbytes = 0
    for weight in model.parameters():
        if weight.requires_grad:
            nbytes += weight.numel() * base_model.DTYPES[cfg.train.precision].itemsize
    parameters = dict(model.named_parameters())
    for name, rule in rules(model, cfg.optim).items():
        nbytes += saved_nbytes(cfg.optim, parameters[name].shape, rule=rule)
    return nbytes


# What is wrong with rows
# --------------------------------------------------------------------------------------------------


def _first_rows(task: Task, split: str, problems: list[str]) -> list[Encoded]:
    """The first rows of a split, encoded. [] if a row fails to encode; its error goes to
    `problems`.
    """
    rows: list[Encoded] = []
    controls = controls_of(task)
    try:
        for number, row in enumerate(_some_rows(task, split), start=1):
            rows.append(task.encode(row))
            rows[-1].row_hash = row_hash(row)
            for control in controls.in_row(row) if controls else ():
                left_out.note(f"row {number}", reason(control), field=control[0])
    except LatheError as error:
        problems.append(str(error))
        return []
    if not rows:
        problems.append(f"the {split} split has no rows. Give it at least one.")
    return rows


def _some_rows(task: Task, split: str) -> Iterator[Row]:
    """The first rows of a split; of a mix, as many of every source."""
    reader, own_split = reader_of(task, split)
    if not isinstance(reader, Mixes):
        yield from islice(reader.rows(own_split), FIRST_ROWS)
        return
    sources = len(reader.sources(own_split))
    for rows in reader.rows_by_source(own_split):
        yield from islice(rows, -(-FIRST_ROWS // sources))


def _lost_labels(rows: Sequence[Encoded], split: str, *, most: float) -> str | None:
    """The problem of limits that cut off more than the share `most` of these rows' labels."""
    lost, of = (sum(row.lost_labels[part] for row in rows) for part in (0, 1))
    if lost <= most * of:
        return None
    return (
        f"limits cut {lost:,} of the {of:,} label tokens off the first {len(rows)} rows of the "
        f"{split} split ({lost / of:.1%}), more than train.max_lost_labels={most}. Raise the "
        "limit, or train.max_lost_labels; `python -m trainer stats` looks at all rows."
    )


def _units(task: Task, rows: Iterable[Mapping[str, Any]]) -> int:
    """The number of units in the loss of these rows."""
    return sum(int(task.units(task.collate([_with_draw(row)]))) for row in rows)


def _with_draw(row: Mapping[str, Any]) -> dict[str, Any]:
    """An encoded row with the fields that training adds for collate."""
    zero = np.zeros(1, dtype=np.int64)
    return {
        **{name: np.asarray(ids) for name, ids in row.items()},
        DRAW: zero,
        EPOCH: zero,
        STEP: zero + 1,
    }


def _no_label(count: int) -> str:
    return (
        f"none of the first {count} training rows has anything that the loss is over: their texts "
        "are empty, or a limit of the experiment cuts off all that is learnt. "
        "`python -m trainer stats` shows rows as the model gets them."
    )


def _shared(train: Sequence[Encoded], rows: Sequence[Encoded]) -> list[tuple[int, int]]:
    """(row, training row) of those rows that are among these training rows, as shared_rows()
    compares them.
    """
    common = set.intersection(*(set(row) for row in (*train, *rows))) if train else set[str]()

    def ids_of(row: Encoded) -> str:
        return repr([list(row[name]) for name in sorted(common)])

    hashes = {row.row_hash: number for number, row in enumerate(train)}
    contents = {ids_of(row): number for number, row in enumerate(train)}
    places = (hashes.get(row.row_hash, contents.get(ids_of(row))) for row in rows)
    return [(number, place) for number, place in enumerate(places) if place is not None]
