"""What a model scores on each row of a split, so that two models can be compared row by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from trainer.config.identity import exp_id
from trainer.config.own_rows import OwnRows
from trainer.data import left_out
from trainer.data.content import reader_of, rows_of
from trainer.data.mixed.store import parts_of
from trainer.data.order import evaluation_batches
from trainer.data.readers.own_rows import own_rows
from trainer.data.token_store import store_of
from trainer.errors import LatheError
from trainer.evaluation.row_scores import own_scores
from trainer.evaluation.run import Question, batch_of, check_weights, model_folder, read_start
from trainer.metrics.intervals import RowSums
from trainer.protocol.abilities import Answers, Replies, ReplyText, question_of
from trainer.runtime import distributed, rng
from trainer.training.scoring import Frozen, answer, evaluate_rows, scores_of_answer
from trainer.verdict.judgement import ScoredRows

if TYPE_CHECKING:
    from trainer.protocol.task import Row, Task
    from trainer.training.options import Options

logger = logging.getLogger(__name__)

START = "start"  # in the place of a model: what a run begins with
# Tokens of a reply: twice those of the longest reference, and so many, but no more than the most.
_MORE_TOKENS, _MOST_TOKENS = 16, 256
_RIGHT = "em"

Stop = Callable[[], None]


@dataclass(frozen=True)
class RowTexts:
    """What stands in the rows of a split."""

    rows: Sequence[
        Row
    ]  # as they were read, with columns of their files that the task does not read
    references: Sequence[Sequence[str]]  # the right answers of each, where there are any


def results_of(
    task: Task, question: Question, options: Options, *, num_replies: int, stop: Stop | None = None
) -> tuple[ScoredRows, RowTexts]:
    """Every score of question.model over the rows of question.split, and what each row adds.

    A task that answers is scored by its answers besides its validation metrics; a language model
    replies to the first num_replies rows that have a prompt. A collective.
    """
    with left_out.settling(None, strict=options.strict):
        store: Any = store_of(task, question.split, options.cache_dir)
    raw = [*islice(rows_of(task, question.split)(), question.limit)]
    read_start(task, store, question)
    model = Frozen(model_of(task, question, options))
    logger.info("%s: %d rows of %s", question.model, len(raw), question.split)
    how: dict[str, Any] = {"batch": batch_of(question), "stop": stop}
    scores, sums = evaluate_rows(model, task, store, num_rows=len(raw), **how)
    labels: list[str | None] = [None] * len(raw)  # the data set, or the source of a mix
    for source, numbers in parts_of(store, len(raw)):
        labels[numbers.start : numbers.stop] = [source] * len(numbers)
    texts: list[str | None] = [None] * len(raw)
    references: list[Sequence[str]] = [[] for _ in raw]
    confidence_N = np.full(len(raw), np.nan)
    if isinstance(task, Answers):
        questions = [question_of(task, row) for row in raw]
        references = [row["answers"] for row in questions]
        labels = [row.get("dataset", label) for row, label in zip(questions, labels, strict=True)]
        _, n_best = answer(model, task, store, questions, **how)
        texts = [best for best, *_ in n_best]
        rows = [{**row, "prediction": text} for row, text in zip(questions, texts, strict=True)]
        run_folder = options.savedir_base / exp_id(question.values)
        scores |= own_scores(task.cfg.own_metrics, run_folder, rows)
    elif isinstance(task, Replies):
        asked = _reply_rows(task, store, len(raw), num_replies)
        for row, reply in _replies(model.model, task, asked, **how):
            texts[row], references[row] = reply.text, [asked[row]["reference"]]
            confidence_N[row] = reply.probability
    for name, one in _sums_of_texts(task, texts, references).items():
        scores[name], sums[name] = one.value(), one
    for name, one in sums_by_label(sums, labels).items():
        scores[name], sums[name] = one.value(), one
    return ScoredRows(scores, sums, texts, confidence_N), RowTexts(
        _with_columns(task, store, question, raw), references
    )


def model_of(task: Any, question: Question, options: Options) -> nn.Module:
    """The model on this rank's device, in evaluation mode."""
    if question.model == START:
        rng.seed_everything(task.cfg.train.seed, 0)  # new weights are the same on every rank
        return task.model().to(distributed.device()).eval()
    folder = model_folder(question, options)
    model = task.load_export(folder).to(distributed.device()).eval()
    check_weights(model, task.cfg, folder, options.places)
    return model


# Replies of language models
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _replies(
    model: nn.Module,
    task: Replies,
    rows: Mapping[int, Row],
    *,
    batch: int,
    stop: Stop | None,
) -> Iterator[tuple[int, ReplyText]]:
    """(number, reply) of each of the rows of reply_row(), on every rank."""
    places = list(rows)
    if not places:
        return
    lengths = np.array([len(rows[place]["ids"]) for place in places], dtype=np.int64)
    longest = max(row["reference_tokens"] for row in rows.values())
    most = min(2 * longest + _MORE_TOKENS, _MOST_TOKENS)
    own: list[tuple[int, str, float]] = []
    shares = evaluation_batches(
        len(places), lengths, batch=batch, world=distributed.world(), rank=distributed.rank()
    )
    for of_batch, _ in shares:
        if stop is not None:
            stop()
        numbers = [places[int(one)] for one in of_batch]
        replies = task.replies(model, [rows[one] for one in numbers], max_tokens=most)
        own += [
            (number, reply.text, reply.probability)
            for number, reply in zip(numbers, replies, strict=True)
        ]
    by_row = {number: reply for part in distributed.gather(own) for number, *reply in part}
    for number in places:
        text, probability = by_row[number]
        yield number, ReplyText(text, probability)


def _reply_rows(task: Replies, store: Any, num_rows: int, most: int) -> dict[int, Row]:
    """The first `most` rows of a store that have a prompt and an answer, by their numbers."""
    pairs = ((number, task.reply_row(store[number])) for number in range(num_rows))
    return dict(islice(((number, row) for number, row in pairs if row is not None), most))


# Rows
# --------------------------------------------------------------------------------------------------


def _sums_of_texts(
    task: Task, texts: Sequence[str | None], references: Sequence[Sequence[str]]
) -> dict[str, RowSums]:
    """What each row adds to the scores of its answer; a row without references counts for none."""
    of_rows = [
        {} if text is None else scores_of_answer(task, text, [*wanted])
        for text, wanted in zip(texts, references, strict=True)
    ]
    names = sorted({name for row in of_rows for name in row})
    return {
        name: RowSums(
            np.array([row.get(name, 0.0) for row in of_rows], dtype=np.float64),
            np.array([float(name in row) for row in of_rows]),
        )
        for name in names
    }


def sums_by_label(sums: Mapping[str, RowSums], labels: Sequence[str | None]) -> dict[str, RowSums]:
    """The same scores over the rows of each data set or source alone, "em_nq"; none of them where
    every row has the same label.
    """
    parts: dict[str, RowSums] = {}
    kinds = sorted({label for label in labels if label is not None})
    for label in kinds if len(kinds) > 1 or None in labels else ():
        has_label_N = np.array([one == label for one in labels], dtype=np.float64)
        for name, one in sums.items():
            parts[f"{name}_{label}"] = RowSums(one.num_N * has_label_N, one.den_N * has_label_N)
    return parts


def _with_columns(task: Any, store: Any, question: Question, raw: Sequence[Row]) -> list[Row]:
    """The rows, with the source of a mix, or with the columns of their file that the task does not
    read: a label, a language.
    """
    parts = [*parts_of(store, len(raw))]
    if any(source is not None for source, _ in parts):
        return [
            {"source": source, **raw[number]} for source, numbers in parts for number in numbers
        ]
    data = getattr(task.cfg, "data", None)
    if not isinstance(data, OwnRows) or (layout := data.layout()) is None:
        return [*raw]
    reader, split = reader_of(task, question.split)
    try:
        placed = own_rows(
            reader.cfg.data,
            split,
            task.places.data_path,
            layout=layout,
            first=".jsonl",
            cache_dir=task.places.cache_dir,
        )
        of_file = [dict(row) for _, row in islice(placed, question.limit)]
    except LatheError as error:
        logger.info("columns of the files are no slices: %s", str(error).splitlines()[0])
        return [*raw]
    if len(of_file) != len(raw):  # a text of several pieces, a row that was left out
        logger.info("the files have %d rows, of which %d were read", len(of_file), len(raw))
        return [*raw]
    return [{**other, **row} for other, row in zip(of_file, raw, strict=True)]
