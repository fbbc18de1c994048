"""Evaluates a trained model on a whole split: answers, scores, and scores of passages."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer import tasks
from trainer.config.identity import exp_id
from trainer.config.schema import Experiment, RandomBase
from trainer.data import left_out
from trainer.data.content import rows_of
from trainer.data.order import evaluation_batches
from trainer.data.token_store import TokenStore, store_of
from trainer.errors import ConfigError, nearest
from trainer.evaluation.search import check_search
from trainer.files.atomic import aside, write_json
from trainer.metrics import own
from trainer.metrics.intervals import RowSums, intervals
from trainer.metrics.mergeable import answer_scores, cut_at, scores_by_dataset
from trainer.metrics.similarity import BERTSCORE_MODEL, check, similarities
from trainer.models import base_model, base_source
from trainer.models.weights import unsound, weight_files
from trainer.protocol.abilities import (
    GREEDY,
    Answers,
    JudgesAnswers,
    ReadsContexts,
    ScoresPassages,
    Search,
    question_of,
)
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.telemetry.wandb_run import tell_wandb
from trainer.training.options import Options
from trainer.training.scoring import Frozen, answer, evaluate, evaluate_rows, pool

if TYPE_CHECKING:
    from trainer.protocol.task import Places, Row, Task

logger = logging.getLogger(__name__)

_EXPORTS = ("best", "final")
_UNTRAINED = "base"
TEST = "test"  # the split whose scores have intervals
_UNUSABLE = "What the model computes is not finite"


@dataclass(frozen=True)
class Question:
    """The model and rows to evaluate, and the files to write."""

    values: dict[str, Any]  # the experiment
    # best or final of its run folder, base, or any folder that the task's export wrote
    model: str = "best"
    split: str = "valid"
    limit: int | None = None  # the first rows only
    batch: int | None = None  # rows per device and forward; None: train.eval_batch
    search: Search = GREEDY
    predictions: Path | None = None  # JSON lines to write, and a summary beside them
    # rows with the same question and context count as one question with all their references
    best_answer: bool = False
    cut_at: Sequence[str] = ()  # answers end before the first of these texts
    # every row is answered with the context of another row, to measure the use of the context
    another_context: bool = False
    measures: Sequence[str] = ()  # of trainer.metrics.similarity, besides the task's own
    bertscore_model: str = BERTSCORE_MODEL
    # .json (a list) or .jsonl to write: the rows with ctxs[].score
    passage_scores: Path | None = None


@dataclass(frozen=True)
class Evaluated:
    """The scores of one model over one split."""

    scores: dict[str, float]
    # by score that is a mean over rows: its percentiles (trainer/metrics/intervals.py), of the test
    # split alone
    intervals: dict[str, tuple[float, float]]
    num_rows: int
    digest: str  # of the rows
    folder: Path  # of the model
    seconds: float


def run(question: Question, options: Options) -> dict[str, float]:
    """The scores of `evaluated`."""
    return evaluated(question, options).scores


def evaluated(
    question: Question, options: Options, *, stop: Callable[[], None] | None = None
) -> Evaluated:
    """The metrics of one model over one split; each row counts exactly once on any number of ranks.
    The files that the question names are written. stop: is called before every batch, equally often
    on all ranks, and raises to end the evaluation.

    A collective: every rank of a launcher calls it. A task that answers is scored by its answers,
    any other by its validation metrics. Raises ConfigError for a model that is not there, or
    something that the task cannot do.
    """
    _check(question)
    start = time.monotonic()
    settings = options.wandb(question.values)
    task = _task(question, options)
    if question.passage_scores is not None and not isinstance(task, ScoresPassages):
        name = question.values["task"]
        raise ConfigError(
            f"--write_scores: task {name!r} reads no passages that it could score. Leave it out."
        )
    if question.another_context and not isinstance(task, ReadsContexts):
        raise ConfigError(
            f"--another_context: task {question.values['task']!r} answers from no context. Leave "
            "it out."
        )
    if not isinstance(task, Answers):
        _refuse_answering(question)
    folder = model_folder(question, options)
    with left_out.settling(None, strict=options.strict):
        store = _store(task, question, options)
    loaded = task.load_export(folder).to(distributed.device()).eval()
    _check_weights(loaded, task.cfg, folder, options.places)
    model = Frozen(loaded)
    batch = _batch(question)
    raw = [question_of(task, row) for row in _rows(task, question)]
    logger.info("%s: %d rows of %s, %d at a time", folder, len(raw), question.split, batch)
    predicted_rows: list[Row] = []
    sums: dict[str, RowSums] = {}
    if isinstance(task, Answers):
        how: dict[str, Any] = {"batch": batch, "search": question.search, "stop": stop}
        scores, answers = answer(model, task, store, raw, **how)
        scores, predicted_rows = _final_answers(question, task, raw, answers, scores)
        scores |= _own_scores(question, task, options, predicted_rows)
        sums = _sums_of_answers(scores, predicted_rows)
        exact, seconds = _exact(scores, predicted_rows), time.monotonic() - start
        equal = "" if exact is None else f"{exact[0]:,} of {exact[1]:,} answers are exact; "
        logger.info("%s: %s%.1f s", question.split, equal, seconds)
        if question.predictions is not None:
            summary = {
                "model": str(folder),
                "split": question.split,
                "search": asdict(question.search),
                "scores": scores,
                "exact": exact,
                "seconds": round(seconds, 1),
            }
            path = question.predictions.with_suffix(".summary.json")
            on_main(lambda: write_json(path, summary, is_durable=False))
    else:
        count: dict[str, Any] = {"batch": batch, "num_rows": len(raw), "stop": stop}
        if question.split == TEST:
            scores, sums = evaluate_rows(model, task, store, **count)
        else:
            scores = evaluate(model, task, store, **count)
        if not all(map(math.isfinite, scores.values())):
            _refuse_unsound(task.cfg, folder, options.places)
    if question.passage_scores is not None and isinstance(task, ScoresPassages):
        passage_scores = _passage_scores(model, task, store, len(raw), batch=batch)
        path = question.passage_scores
        on_main(lambda: _write(path, _with_scores(_rows(task, question), passage_scores)))
    if settings is not None and distributed.is_main():
        tell_wandb(
            settings,
            options.savedir_base / settings.id,
            question.split,
            scores,
            [_table_cells(row) for row in predicted_rows],
        )
    return Evaluated(
        scores,
        intervals(sums) if question.split == TEST else {},
        len(predicted_rows or raw),
        str(store.digest),
        folder,
        time.monotonic() - start,
    )


def _sums_of_answers(scores: Mapping[str, float], rows: Sequence[Row]) -> dict[str, RowSums]:
    """What each answered row adds to those scores that are means of rows' own scores, over all rows
    or over those of a data set (em_nq).
    """
    answerable = [row for row in rows if row["answers"]]
    datasets = {str(row["dataset"]) for row in answerable if "dataset" in row}
    sums: dict[str, RowSums] = {}
    for name in {name for row in answerable for name in row["scores"]}:
        num_N = np.array([row["scores"].get(name, 0.0) for row in answerable], dtype=np.float64)
        sums[name] = RowSums(num_N, np.ones_like(num_N))
        for dataset in datasets:
            of_set_N = np.array([row.get("dataset") == dataset for row in answerable], np.float64)
            sums[f"{name}_{dataset}"] = RowSums(num_N * of_set_N, of_set_N)
    return {
        name: one
        for name, one in sums.items()
        if name in scores and math.isclose(one.value(), scores[name], rel_tol=1e-9, abs_tol=1e-12)
    }


def _refuse_unsound(cfg: Experiment, folder: Path, places: Places) -> None:
    """ConfigError names the weights that are not finite, of the model and of the base below it."""
    sources = [str(folder), base_source.resolve(cfg.base, places)]
    folders = [source for source in sources if isinstance(source, str)]
    dtype = base_model.DTYPES[cfg.train.precision]
    happened = "The scores of the model are not finite"
    on_main(lambda: unsound.refuse(folders, dtype, happened=happened))


def _table_cells(row: Row) -> dict[str, Any]:
    return {
        "question": row["question"],
        "answers": " | ".join(row["answers"]),
        "prediction": row["prediction"],
        **dict(sorted(row["scores"].items())),
    }


@dataclass(frozen=True)
class _Rewritten:
    """A store whose rows are changed as they are read."""

    store: TokenStore
    rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    @property
    def digest(self) -> str:
        return self.store.digest

    @property
    def lengths(self) -> Any:
        return self.store.lengths

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rewrite(self.store[index])


def _store(task: Task, question: Question, options: Options) -> Any:
    store = store_of(task, question.split, options.cache_dir)
    if not question.another_context:
        return store
    assert isinstance(task, ReadsContexts), "run() refuses others"
    return _Rewritten(store, task.under_another_context)


def pooled_values(question: Question, options: Options, name: str) -> Tensor:
    """The values that the task collects under `name` over one split, every row once; the same on
    all ranks.

    A collective. ConfigError for a task that collects none under this name.
    """
    task = _task(question, options)
    with left_out.settling(None, strict=options.strict):
        store = store_of(task, question.split, options.cache_dir)
    model = Frozen(
        task.load_export(model_folder(question, options)).to(distributed.device()).eval()
    )
    values = pool(model, task, store, name=name, batch=_batch(question))
    if values is None:
        raise ConfigError(f"task {question.values['task']!r} has no {name} to be calibrated on.")
    return values


def open_model(question: Question, options: Options) -> tuple[Task, nn.Module, Path]:
    """An experiment's task, its trained model, and the model's folder.

    The model is on this rank's device, in evaluation mode.
    """
    task, folder = _task(question, options), model_folder(question, options)
    model = task.load_export(folder).to(distributed.device()).eval()
    _check_weights(model, task.cfg, folder, options.places)
    return task, model, folder


def _check_weights(model: nn.Module, cfg: Experiment, folder: Path, places: Places) -> None:
    """ConfigError if a weight is no finite number: what is generated or ranked does not show it.

    Every rank reads the weights, and tells by itself.
    """
    floats = (one.detach() for one in model.parameters() if one.is_floating_point())
    if all(bool(torch.isfinite(torch.stack(one.aminmax())).all()) for one in floats if one.numel()):
        return
    sources = [str(folder), base_source.resolve(cfg.base, places)]
    folders = [source for source in sources if isinstance(source, str)]
    unsound.refuse(folders, base_model.DTYPES[cfg.train.precision], happened=_UNUSABLE)
    raise ConfigError(
        f"{folder}: the model that it gives has weights that are not finite, though its files are. "
        "Export it anew."
    )


def _task(question: Question, options: Options) -> Task:
    return tasks.load(tasks.parse(question.values), options.places)


def _batch(question: Question) -> int:
    train = tasks.parse(question.values).train
    return question.batch or train.eval_batch or train.micro_batch


def _check(question: Question) -> None:
    check_search(question.search)
    check(question.measures)
    if "" in question.cut_at:
        raise ConfigError('--cut_at "": got an empty text, which stands everywhere. Leave it out.')
    for path in (question.predictions, question.passage_scores):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist. Make it, or write elsewhere.")


def model_folder(question: Question, options: Options) -> Path:
    """The folder of the model that is evaluated; ConfigError when there is none."""
    if question.model == _UNTRAINED:
        source = base_source.resolve(tasks.parse(question.values).base, options.places)
        if isinstance(source, RandomBase):
            raise ConfigError(
                "--model base: this experiment's base has random weights and no folder. Use "
                f"{' or '.join(_EXPORTS)}, or give --model a folder."
            )
        files = [weight_files.find_file(source, "config.json"), *weight_files.of(source)]
        if files[0] is None:
            raise ConfigError(
                f"--model base: {source!r} is neither a folder with config.json nor a model that "
                "the Hub gives out. Give --model a folder."
            )
        return files[0].parent
    if question.model not in _EXPORTS:
        folder = Path(base_source.folder_or_id(question.model, options.cache_dir))
        if not folder.is_dir():
            legal = [*_EXPORTS, _UNTRAINED]
            raise ConfigError(
                f"--model {question.model}: no such folder. {nearest(question.model, legal)}"
            )
        return folder
    run_folder = options.savedir_base / exp_id(question.values)
    there = [name for name in _EXPORTS if (run_folder / name).is_dir()]
    if question.model in there:
        return run_folder / question.model
    other = f"Use --model {there[0]}" if there else "Train it first, into the same --savedir_base"
    raise ConfigError(
        f"{run_folder} holds no {question.model}/ folder. {other}, or give --model a folder."
    )


def _rows(task: Task, question: Question) -> Iterator[Row]:
    return islice(rows_of(task, question.split)(), question.limit)


def _refuse_answering(question: Question) -> None:
    is_set = {
        "--pred": question.predictions is not None,
        "--num_beams, --num_answers, --temperature": question.search != GREEDY,
        "--best_answer": question.best_answer,
        "--cut_at": bool(question.cut_at),
        "--measure": bool(question.measures),
    }
    if any(is_set.values()):
        flags = ", ".join(flag for flag, is_on in is_set.items() if is_on)
        raise ConfigError(
            f"{flags}: task {question.values['task']!r} gives no answers. Leave that out."
        )


def _final_answers(
    question: Question,
    task: Task,
    raw: Sequence[Row],
    answers: Sequence[list[str]],
    scores: dict[str, float],
) -> tuple[dict[str, float], list[Row]]:
    """The final scores, and the rows with their predictions; --pred is written.

    scores: of the answers as they were generated. They are computed again where the question cuts
    answers, merges equal questions, or adds measures.
    """
    if question.cut_at:
        answers = [[cut_at(text, question.cut_at) for text in texts] for texts in answers]
    if question.best_answer:
        raw, answers = _merge_equal_questions(raw, answers, _rows(task, question))
    rows: list[Row] = []
    for row, texts in zip(raw, answers, strict=True):
        references = row["answers"]
        row_scores: dict[str, float] = {}
        if references and isinstance(task, JudgesAnswers):
            row_scores = task.answer_scores(texts[0], references)
        elif references:
            ratios = answer_scores([texts[0]], [references])
            row_scores = {name: float(ratio.num) for name, ratio in ratios.items()}
        rows.append({**row, "prediction": texts[0], "scores": row_scores})
        if question.search.num_answers > 1:
            rows[-1]["n_best"] = texts
    answerable = [row for row in rows if row["answers"]]
    if question.measures:
        extra = similarities(
            [row["prediction"] for row in answerable],
            [row["answers"] for row in answerable],
            measures=question.measures,
            bertscore_model=question.bertscore_model,
        )
        for row, more_scores in zip(answerable, extra, strict=True):
            row["scores"] |= more_scores
    if question.cut_at or question.best_answer or question.measures:
        scores = {
            name: fmean(row["scores"][name] for row in answerable)
            for name in (answerable[0]["scores"] if answerable else ())
        }
        scores |= scores_by_dataset(rows, [row["prediction"] for row in rows])
    if question.predictions is not None:
        path = question.predictions
        on_main(lambda: _write(path, rows))
    return scores, rows


def _own_scores(
    question: Question, task: Task, options: Options, rows: Sequence[Row]
) -> dict[str, float]:
    """The user's own metrics of the predicted rows (`metrics`). A collective."""
    specs: list[str] = task.cfg.own_metrics
    folder = options.savedir_base / exp_id(question.values)
    predictions = [row["prediction"] for row in rows]
    return on_main(lambda: own.scores(own.load(specs, folder), predictions, rows)) if specs else {}


def _exact(scores: Mapping[str, float], rows: Sequence[Row]) -> tuple[int, int] | None:
    """How many answers of how many are exact, as published results count; None without a score."""
    if "em" not in scores:
        return None
    of = sum(bool(row["answers"]) for row in rows)
    return round(scores["em"] * of), of


def _merge_equal_questions(
    raw: Sequence[Row], answers: Sequence[list[str]], rows_of_task: Iterable[Row]
) -> tuple[list[Row], list[list[str]]]:
    """The first row of each group of equal questions, with the references of the whole group, and
    the answers to that row. Two questions are equal when their texts and contexts are.
    """
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows_of_task):
        parts = [row.get(name) for name in ("question", "context", "contexts", "ctxs")]
        key = json.dumps(parts, sort_keys=True)
        groups.setdefault(key, []).append(number)
    rows: list[Row] = []
    for numbers in groups.values():
        references = [text for number in numbers for text in raw[number]["answers"]]
        rows.append({**raw[numbers[0]], "answers": references})
    return rows, [answers[first] for first, *_ in groups.values()]


@torch.no_grad()
def _passage_scores(
    model: Frozen, task: ScoresPassages, store: TokenStore, num_rows: int, *, batch: int
) -> list[list[float]]:
    """The scores of each of the first `num_rows` rows of `store`, on all ranks."""
    lengths, world, rank = store.lengths[:num_rows], distributed.world(), distributed.rank()
    own: dict[int, list[float]] = {}
    for rows, counted in evaluation_batches(num_rows, lengths, batch=batch, world=world, rank=rank):
        scores = task.passage_scores(model.model, [store[int(row)] for row in rows])
        if counted:
            own.update(zip(rows.tolist(), scores, strict=True))
    by_row = {row: of_row for part in distributed.gather(list(own.items())) for row, of_row in part}
    return [by_row[row] for row in range(num_rows)]


def _with_scores(rows: Iterable[Row], scores: Sequence[Sequence[float]]) -> Iterator[Row]:
    for row, of_row in zip(rows, scores, strict=True):
        ctxs: list[Mapping[str, Any]] = row["ctxs"]
        yield {
            **row,
            "ctxs": [{**ctx, "score": score} for ctx, score in zip(ctxs, of_row, strict=True)],
        }


def _write(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object a line, or (.json) a list of them. An error leaves an older file as it
    was.
    """
    with aside(path, is_durable=False) as part, part.open("w", encoding="utf-8") as file:
        if path.suffix == ".json":
            file.write("[")
            for number, row in enumerate(rows):
                file.write(("," if number else "") + "\n" + json.dumps(row, ensure_ascii=False))
            file.write("\n]\n")
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    logger.info("wrote %s", path)
