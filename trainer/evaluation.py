"""A trained model over a whole split: answers and their scores, and how much each passage was read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from trainer import distributed, tasks
from trainer.config import exp_id, nearest
from trainer.data.store import TokenStore
from trainer.data.windows import evaluation_batches
from trainer.disk import refusals
from trainer.errors import ConfigError
from trainer.loop import Frozen, answer, evaluate, pool
from trainer.metrics import answer_scores
from trainer.run import Options, on_main, store_of
from trainer.task import GREEDY, Answers, Row, ScoresPassages, Search, Task

logger = logging.getLogger(__name__)

_EXPORTS = ("best", "final")


@dataclass(frozen=True)
class Question:
    """What is evaluated, and what is written of it."""

    values: dict[str, Any]  # the experiment
    model: str = "best"  # best or final of its run folder, or any folder that the task's export wrote
    split: str = "valid"
    limit: int | None = None  # the first rows only
    batch: int | None = None  # rows per device and forward; None: train.eval_batch
    search: Search = GREEDY
    predictions: Path | None = None  # JSON lines to write
    passage_scores: Path | None = None  # .json (a list) or .jsonl to write: the rows with ctxs[].score


def run(asked: Question, options: Options) -> dict[str, float]:
    """The metrics of one model over one split, every row exactly once on any number of ranks; files are written too.

    A collective: every rank of a launcher calls it. A task that answers is scored by its answers, any other by its
    validation metrics. Raises ConfigError for a model that is not there, or something that the task cannot do.
    """
    _check(asked)
    task = _task(asked, options)
    if asked.passage_scores is not None and not isinstance(task, ScoresPassages):
        name = asked.values["task"]
        raise ConfigError(f"--write_scores: task {name!r} reads no passages that it could score. Leave it out.")
    if not isinstance(task, Answers) and (asked.predictions is not None or asked.search != GREEDY):
        name = asked.values["task"]
        raise ConfigError(f"--pred, --num_beams, --num_answers: task {name!r} gives no answers. Leave them out.")
    folder = model_folder(asked, options)
    store = store_of(task, asked.split, options)
    model = Frozen(task.exported(folder).to(distributed.device()).eval())
    batch = _batch(asked)
    raw = [{key: row[key] for key in ("id", "question", "answers") if key in row} for row in _rows(task, asked)]
    logger.info("%s: %d rows of %s, %d at a time", folder, len(raw), asked.split, batch)
    if isinstance(task, Answers):
        found, answers = answer(model, task, store, raw, batch=batch, search=asked.search)
        if asked.predictions is not None:
            path = asked.predictions
            on_main(lambda: _write(path, _predictions(raw, answers, is_n_best=asked.search.num_answers > 1)))
    else:
        found = evaluate(model, task, store, batch=batch, num_rows=len(raw))
    if asked.passage_scores is not None and isinstance(task, ScoresPassages):
        scores = _passage_scores(model, task, store, len(raw), batch=batch)
        path = asked.passage_scores
        on_main(lambda: _write(path, _scored(_rows(task, asked), scores)))
    return found


def pooled(asked: Question, options: Options, name: str) -> Tensor:
    """The values of the pool `name` of the task's scores over one split, every row once; the same on all ranks.

    A collective. ConfigError for a task without such a pool.
    """
    task = _task(asked, options)
    store = store_of(task, asked.split, options)
    model = Frozen(task.exported(model_folder(asked, options)).to(distributed.device()).eval())
    found = pool(model, task, store, name=name, batch=_batch(asked))
    if found is None:
        raise ConfigError(f"task {asked.values['task']!r} has no {name} to be calibrated on.")
    return found


def opened(asked: Question, options: Options) -> tuple[Task, nn.Module, Path]:
    """The task of an experiment, its trained model on this rank's device in evaluation mode, and the model's folder."""
    task, folder = _task(asked, options), model_folder(asked, options)
    return task, task.exported(folder).to(distributed.device()).eval(), folder


def _task(asked: Question, options: Options) -> Task:
    return tasks.load(tasks.parse(asked.values), options.places)


def _batch(asked: Question) -> int:
    train = tasks.parse(asked.values).train
    return asked.batch or train.eval_batch or train.micro_batch


def _check(asked: Question) -> None:
    search = asked.search
    if search.num_answers > search.num_beams:
        raise ConfigError(
            f"--num_answers {search.num_answers} with --num_beams {search.num_beams}: that many beams end in no more "
            f"answers than beams. Use --num_beams {search.num_answers} or more."
        )
    for path in (asked.predictions, asked.passage_scores):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist. Make it, or write elsewhere.")


def model_folder(asked: Question, options: Options) -> Path:
    """Where the model that is asked for stands; ConfigError when it stands nowhere."""
    if asked.model not in _EXPORTS:
        if not Path(asked.model).is_dir():
            raise ConfigError(f"--model {asked.model}: no such folder. {nearest(asked.model, list(_EXPORTS))}")
        return Path(asked.model)
    run_folder = options.savedir_base / exp_id(asked.values)
    there = [name for name in _EXPORTS if (run_folder / name).is_dir()]
    if asked.model in there:
        return run_folder / asked.model
    other = f"Use --model {there[0]}" if there else "Train it first, into the same --savedir_base"
    raise ConfigError(f"{run_folder} holds no {asked.model}/ folder. {other}, or give --model a folder.")


def _rows(task: Task, asked: Question) -> Iterator[Row]:
    return islice(task.rows(asked.split), asked.limit)


def _predictions(raw: Sequence[Row], answers: Sequence[list[str]], *, is_n_best: bool) -> Iterator[Row]:
    for row, texts in zip(raw, answers, strict=True):
        scores = answer_scores(texts[:1], [row["answers"]]) if row["answers"] else {}
        of_row = {name: score.value() for name, score in scores.items()}
        yield {**row, "prediction": texts[0], "scores": of_row, **({"n_best": texts} if is_n_best else {})}


@torch.no_grad()
def _passage_scores(
    model: Frozen, task: ScoresPassages, store: TokenStore, num_rows: int, *, batch: int
) -> list[list[float]]:
    """The scores of each of the first `num_rows` rows of `store`, on all ranks."""
    lengths, world, rank = store.lengths[:num_rows], distributed.world(), distributed.rank()
    own: dict[int, list[float]] = {}
    for rows, counted in evaluation_batches(num_rows, lengths, batch=batch, world=world, rank=rank):
        found = task.passage_scores(model.model, [store[int(row)] for row in rows])
        if counted:
            own.update(zip(rows.tolist(), found, strict=True))
    by_row = {row: scores for part in distributed.gather(list(own.items())) for row, scores in part}
    return [by_row[row] for row in range(num_rows)]


def _scored(rows: Iterable[Row], scores: Sequence[Sequence[float]]) -> Iterator[Row]:
    for row, of_row in zip(rows, scores, strict=True):
        ctxs: list[Mapping[str, Any]] = row["ctxs"]
        yield {**row, "ctxs": [{**ctx, "score": score} for ctx, score in zip(ctxs, of_row, strict=True)]}


def _write(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line, or (.json) a list of them; whole, or as it was before."""
    with _replaced(path) as file:
        if path.suffix == ".json":
            file.write("[")
            for number, row in enumerate(rows):
                file.write(("," if number else "") + "\n" + json.dumps(row, ensure_ascii=False))
            file.write("\n]\n")
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    logger.info("wrote %s", path)


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    temporary = path.with_name(f".{path.name}.tmp")
    with refusals(path):
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        temporary.replace(path)
