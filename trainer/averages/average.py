"""`lathe average`: a mean of weights, written as an exported folder.

The weights are those of the last saved steps of a run (Izmailov et al. 2018, arXiv 1803.05407), or
of several trained models with one architecture (Wortsman et al. 2022, arXiv 2203.05482). Sums are
in fp32, and rounded once. Adapters are averaged as adapters: each matrix A and each B for itself,
so that their product is not the mean of the products.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import tasks
from trainer.averages.folders import Sources, tensors_of_folder
from trainer.averages.frozen import frozen_weights
from trainer.config.schema import Train
from trainer.errors import ConfigError
from trainer.exports import card, record
from trainer.files.atomic import read_json, refusals
from trainer.files.safetensors_file import write_tensors
from trainer.protocol.task import Places
from trainer.training import checkpoint
from trainer.training.optimizer_state import MASTER

logger = logging.getLogger(__name__)

SLACK = 1e-6  # by which weights may miss a sum of 1: 0.3333333 three times


def average_steps(
    run: Path, last: int, out: Path, places: Places, *, weights: Sequence[float] | None
) -> None:
    """Write the average of the last saved steps of a run to `out`, as the run would export it.

    weights: of each step, oldest first; None: equal ones. Below fp32 the optimizer's fp32 weights
    are averaged. ConfigError for a folder that is no run, or that has not kept so many steps.
    """
    values = read_json(run / "exp_dict.json")
    if values is None:
        raise ConfigError(f"{run} has no exp_dict.json. Give the folder of a run: results/ID.")
    cfg = tasks.parse(values, source=str(run / "exp_dict.json"))
    steps = _last_steps(run, last, cfg.train)
    shares = _shares(weights, len(steps), "step")
    saved = [checkpoint.read_tensors(folder, "weights") for folder in steps.values()]
    masters = [checkpoint.read_tensors(folder, "optimizer") for folder in steps.values()]
    averages: dict[str, Tensor] = {}
    for name in saved[0]:
        master = f"{name}|{MASTER}"
        is_exact = master in masters[0]
        parts = [one[master] for one in masters] if is_exact else [one[name] for one in saved]
        averages[name] = mean(parts, shares).to(saved[0][name].dtype)
    task = tasks.load(cfg, places)
    averages |= frozen_weights(cfg, task)
    with _written(out) as temporary:
        task.export(averages, temporary)
        result = record.of_run(temporary, values=values, task=task, run_folder=run)
        of = [{"step": n, "weight": x} for n, x in zip(steps, shares, strict=True)]
        _conclude(temporary, result.model_copy(update={"scores": {}, "average": {"of": of}}))
    what = "adapters (A and B each for itself)" if cfg.exports_adapters else "weights"
    names = ", ".join(map(str, steps))
    logger.info("%d %s of steps %s of %s averaged: %s", len(averages), what, names, run, out)


def _last_steps(run: Path, last: int, train: Train) -> dict[int, Path]:
    """The checkpoints of the last saved steps, oldest first."""
    whole: dict[int, Path] = {}
    for step, folder in checkpoint.candidates(run / "checkpoints"):
        wrong = checkpoint.problems(folder)
        if wrong:
            logger.warning(checkpoint.DAMAGED, folder, "; ".join(wrong))
        else:
            whole[step] = folder
    # the best one is kept besides, however old it is
    newest = list(whole)[-train.keep_last :]
    if len(newest) < last:
        steps = f"steps {', '.join(map(str, newest))}" if newest else "no saved step"
        fewer = f"use --last {len(newest)}, or " if newest else ""
        raise ConfigError(
            f"--last {last}: {run} has {steps} to average; train.keep_last={train.keep_last} "
            f"removes older ones. {fewer[:1].upper()}{fewer[1:]}"
            f"{'train' if fewer else 'Train'} with train.keep_last={max(last, train.keep_last)} "
            "and a train.save_every that fits so many saves into the run."
        )
    return {step: whole[step] for step in newest[-last:]}


def average_folders(folders: Sequence[Path], out: Path, *, weights: Sequence[float] | None) -> None:
    """Write the average of exported folders to `out`, laid out as the first of them.

    folders: best/ or final/ of runs, or runs, of which best/ comes before final/. weights: of each;
    None: equal ones. ConfigError names what differs: tasks, bases, tensors and their shapes.
    """
    sources = Sources.of(folders)
    shares = _shares(weights, len(sources.folders), "folder")
    first, of = sources.folders[0], list[dict[str, Any]]()
    for source, share in zip(sources.records, shares, strict=True):
        nested = {} if source.average is None else {"average": source.average}
        of.append({"exp_id": source.exp_id, "weight": share, "files": source.files, **nested})
    everyone = [tensors_of_folder(folder) for folder in sources.folders]
    with _written(out) as temporary:
        shutil.copytree(first, temporary, ignore=shutil.ignore_patterns("*.safetensors"))
        for path in sorted(first.rglob("*.safetensors")):
            place = path.relative_to(first)
            (temporary / place).parent.mkdir(parents=True, exist_ok=True)
            averages = {
                key[1]: _mean_of_files([tensors[key] for tensors in everyone], shares, key[1])
                for key, entry in everyone[0].items()
                if entry.path == path
            }
            write_tensors((temporary / place).parent, place.name, averages)
        data = [source.data for source in sources.records]
        changed = {"scores": {}, "average": {"of": of}, "files": record.digests(temporary)}
        changed["data"] = data[0] if all(one == data[0] for one in data) else {}
        _conclude(temporary, sources.records[0].model_copy(update=changed))
    logger.info(
        "%d tensors of %s averaged%s: %s",
        len(everyone[0]),
        ", ".join(map(str, sources.folders)),
        " as adapters (A and B each for itself)" if sources.are_adapters else "",
        out,
    )


def _mean_of_files(stored: Sequence[Any], shares: Sequence[float], name: str) -> Tensor:
    tensors = [one.read() for one in stored]
    if tensors[0].is_floating_point():
        return mean(tensors, shares).to(tensors[0].dtype)
    if not all(torch.equal(tensors[0], other) for other in tensors):
        raise ConfigError(
            f"{stored[0].path}: {name} holds integers, and others than {stored[1].path.parent}: "
            "there is no mean of them. Average models of one kind."
        )
    return tensors[0]


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """fp32: the sum of the tensors, each times its share."""
    total = torch.zeros(tensors[0].shape, dtype=torch.float32)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor.float(), alpha=share)
    return total


def _shares(weights: Sequence[float] | None, count: int, what: str) -> list[float]:
    """The share of each source. ConfigError unless they are as many, positive, and sum up to 1."""
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ConfigError(
            f"--weights: got {len(weights)} for {count} {what}s. Give one for each, in their order."
        )
    if not all(math.isfinite(one) and one > 0 for one in weights):
        raise ConfigError(
            f"--weights: got {list(weights)}, want numbers above 0. Leave others out."
        )
    if abs(sum(weights) - 1) > SLACK:
        proportions = ",".join(f"{one / sum(weights):.6g}" for one in weights)
        raise ConfigError(
            f"--weights: got a sum of {sum(weights):.6g}, want 1. In these proportions: "
            f"{proportions}."
        )
    return list(weights)


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """A path beside `out` for the new folder, which then becomes `out`; nothing is left of it after
    an error.
    """
    if out.exists():
        raise ConfigError(f"--out {out}: it exists already, and nothing is overwritten.")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with refusals(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, out)
    finally:  # on a full disk these files take the room
        shutil.rmtree(temporary, ignore_errors=True)


def _conclude(folder: Path, made: record.Record) -> None:
    record.write(folder, made)
    card.write(folder, made)
