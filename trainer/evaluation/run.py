"""A trained model over a whole split: answers, scores, and how much each passage was read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer import tasks
from trainer.config.identity import exp_id
from trainer.config.schema import RandomBase
from trainer.data.order import evaluation_batches
from trainer.data.token_store import TokenStore, store_of
from trainer.errors import ConfigError, nearest
from trainer.files.atomic import aside, write_json
from trainer.metrics.mergeable import answer_scores, cut_at, scores_by_dataset
from trainer.metrics.similarity import BERTSCORE_MODEL, check, similarities
from trainer.models import base_source
from trainer.models.weights import weight_files
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
from trainer.training.scoring import Frozen, answer, evaluate, pool

if TYPE_CHECKING:
    from trainer.protocol.task import Row, Task

logger = logging.getLogger(__name__)

_EXPORTS = ("best", "final")
_UNTRAINED = "base"


@dataclass(frozen=True)
class Question:
    """What is evaluated, and what is written of it."""

    values: dict[str, Any]  # the experiment
    # best or final of its run folder, base, or any folder that the task's export wrote
    model: str = "best"
    split: str = "valid"
    limit: int | None = None  # the first rows only
    batch: int | None = None  # rows per device and forward; None: train.eval_batch
    search: Search = GREEDY
    predictions: Path | None = None  # JSON lines to write, and a summary beside them
    # rows that ask the same of the same context are one question with all their references
    best_answer: bool = False
    cut_at: Sequence[str] = ()  # answers end before the first of these texts
    # every row answered under another row's context, to see what reading is worth
    another_context: bool = False
    measures: Sequence[str] = ()  # of trainer.metrics.similarity, besides the task's own
    bertscore_model: str = BERTSCORE_MODEL
    # .json (a list) or .jsonl to write: the rows with ctxs[].score
    passage_scores: Path | None = None


def run(asked: Question, options: Options) -> dict[str, float]:
    """The metrics of one model over one split, every row exactly once on any number of ranks; files
    are written too.

    A collective: every rank of a launcher calls it. A task that answers is scored by its answers,
    any other by its validation metrics. Raises ConfigError for a model that is not there, or
    something that the task cannot do.
    """
    _check(asked)
    settings = options.wandb(asked.values)
    task = _task(asked, options)
    if asked.passage_scores is not None and not isinstance(task, ScoresPassages):
        name = asked.values["task"]
        raise ConfigError(
            f"--write_scores: task {name!r} reads no passages that it could score. Leave it out."
        )
    if asked.another_context and not isinstance(task, ReadsContexts):
        raise ConfigError(
            f"--another_context: task {asked.values['task']!r} answers from no context. Leave it "
            "out."
        )
    if not isinstance(task, Answers):
        _refuse_answering(asked)
    folder = model_folder(asked, options)
    store = _store(task, asked, options)
    model = Frozen(task.load_export(folder).to(distributed.device()).eval())
    batch = _batch(asked)
    raw = [question_of(task, row) for row in _rows(task, asked)]
    logger.info("%s: %d rows of %s, %d at a time", folder, len(raw), asked.split, batch)
    answered: list[Row] = []
    if isinstance(task, Answers):
        found, answers = answer(model, task, store, raw, batch=batch, search=asked.search)
        found, answered = _answered(asked, task, raw, answers, found)
        if asked.predictions is not None:
            summary = {
                "model": str(folder),
                "split": asked.split,
                "search": asdict(asked.search),
                "scores": found,
            }
            path = asked.predictions.with_suffix(".summary.json")
            on_main(lambda: write_json(path, summary, is_durable=False))
    else:
        found = evaluate(model, task, store, batch=batch, num_rows=len(raw))
    if asked.passage_scores is not None and isinstance(task, ScoresPassages):
        scores = _passage_scores(model, task, store, len(raw), batch=batch)
        path = asked.passage_scores
        on_main(lambda: _write(path, _scored(_rows(task, asked), scores)))
    if settings is not None and distributed.is_main():
        tell_wandb(
            settings,
            options.savedir_base / settings.id,
            asked.split,
            found,
            list(map(_flat, answered)),
        )
    return found


def _flat(row: Row) -> dict[str, Any]:
    """A predicted row as cells of a table."""
    return {
        "question": row["question"],
        "answers": " | ".join(row["answers"]),
        "prediction": row["prediction"],
        **{name: row["scores"].get(name) for name in sorted(row["scores"])},
    }


@dataclass(frozen=True)
class _Rewritten:
    """A store whose rows are changed as they are read."""

    store: TokenStore
    rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    @property
    def lengths(self) -> Any:
        return self.store.lengths

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rewrite(self.store[index])


def _store(task: Task, asked: Question, options: Options) -> Any:
    store = store_of(task, asked.split, options.cache_dir)
    if not asked.another_context:
        return store
    assert isinstance(task, ReadsContexts), "run() refuses others"
    return _Rewritten(store, task.under_another_context)


def pooled(asked: Question, options: Options, name: str) -> Tensor:
    """The values of the pool `name` of the task's scores over one split, every row once; the same
    on all ranks.

    A collective. ConfigError for a task without such a pool.
    """
    task = _task(asked, options)
    store = store_of(task, asked.split, options.cache_dir)
    model = Frozen(task.load_export(model_folder(asked, options)).to(distributed.device()).eval())
    found = pool(model, task, store, name=name, batch=_batch(asked))
    if found is None:
        raise ConfigError(f"task {asked.values['task']!r} has no {name} to be calibrated on.")
    return found


def opened(asked: Question, options: Options) -> tuple[Task, nn.Module, Path]:
    """An experiment's task, its trained model, and the model's folder.

    The model is on this rank's device, in evaluation mode.
    """
    task, folder = _task(asked, options), model_folder(asked, options)
    return task, task.load_export(folder).to(distributed.device()).eval(), folder


def _task(asked: Question, options: Options) -> Task:
    return tasks.load(tasks.parse(asked.values), options.places)


def _batch(asked: Question) -> int:
    train = tasks.parse(asked.values).train
    return asked.batch or train.eval_batch or train.micro_batch


def _check(asked: Question) -> None:
    search = asked.search
    check(asked.measures)
    if search.temperature is None and search.top_p < 1.0:
        raise ConfigError(
            f"--top_p {search.top_p} says what is drawn from, but nothing is. Add --temperature "
            "1.0."
        )
    if search.temperature is not None and search.num_beams > 1:
        raise ConfigError(
            f"--temperature draws, --num_beams {search.num_beams} searches. Leave one of the two "
            "out."
        )
    if search.temperature is None and search.num_answers > search.num_beams:
        raise ConfigError(
            f"--num_answers {search.num_answers} with --num_beams {search.num_beams}: that many "
            "beams end in no more "
            f"answers than beams. Use --num_beams {search.num_answers} or more."
        )
    for path in (asked.predictions, asked.passage_scores):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist. Make it, or write elsewhere.")


def model_folder(asked: Question, options: Options) -> Path:
    """Where the model that is asked for stands; ConfigError when it stands nowhere."""
    if asked.model == _UNTRAINED:
        return _base_folder(asked, options)
    if asked.model not in _EXPORTS:
        named = Path(base_source.folder_or_id(asked.model, options.cache_dir))
        if not named.is_dir():
            legal = [*_EXPORTS, _UNTRAINED]
            raise ConfigError(
                f"--model {asked.model}: no such folder. {nearest(asked.model, legal)}"
            )
        return named
    run_folder = options.savedir_base / exp_id(asked.values)
    there = [name for name in _EXPORTS if (run_folder / name).is_dir()]
    if asked.model in there:
        return run_folder / asked.model
    other = f"Use --model {there[0]}" if there else "Train it first, into the same --savedir_base"
    raise ConfigError(
        f"{run_folder} holds no {asked.model}/ folder. {other}, or give --model a folder."
    )


def _base_folder(asked: Question, options: Options) -> Path:
    """The folder of the base that an experiment starts from, before any training."""
    source = base_source.resolve(tasks.parse(asked.values).base, options.places)
    if isinstance(source, RandomBase):
        raise ConfigError(
            "--model base: this experiment's base has random weights and no folder. Use "
            f"{' or '.join(_EXPORTS)}, or give --model a folder."
        )
    files = [weight_files.find_file(source, "config.json"), *weight_files.of(source)]
    if files[0] is None:
        raise ConfigError(
            f"--model base: {source!r} is neither a folder with config.json nor a model that the "
            "Hub gives out. Give --model a folder."
        )
    return files[0].parent


def _rows(task: Task, asked: Question) -> Iterator[Row]:
    return islice(task.rows(asked.split), asked.limit)


def _refuse_answering(asked: Question) -> None:
    given = {
        "--pred": asked.predictions is not None,
        "--num_beams, --num_answers, --temperature": asked.search != GREEDY,
        "--best_answer": asked.best_answer,
        "--cut_at": bool(asked.cut_at),
        "--measure": bool(asked.measures),
    }
    if any(given.values()):
        flags = ", ".join(flag for flag, is_given in given.items() if is_given)
        raise ConfigError(
            f"{flags}: task {asked.values['task']!r} gives no answers. Leave that out."
        )


def _answered(
    asked: Question,
    task: Task,
    raw: Sequence[Row],
    answers: Sequence[list[str]],
    found: dict[str, float],
) -> tuple[dict[str, float], list[Row]]:
    """The scores of all answers as the question wants them, `found` being those as they came, and
    the rows with their predictions; --pred is written.
    """
    if asked.cut_at:
        answers = [[cut_at(text, asked.cut_at) for text in texts] for texts in answers]
    if asked.best_answer:
        raw, answers = _merged(raw, answers, [_asks(row) for row in _rows(task, asked)])
    rows = list(_predictions(task, raw, answers, is_n_best=asked.search.num_answers > 1))
    known = [row for row in rows if row["answers"]]
    if asked.measures:
        texts, references = [row["prediction"] for row in known], [row["answers"] for row in known]
        how: dict[str, Any] = {"measures": asked.measures, "bertscore_model": asked.bertscore_model}
        for row, scores in zip(known, similarities(texts, references, **how), strict=True):
            row["scores"] |= scores
    if asked.cut_at or asked.best_answer or asked.measures:
        found = {
            name: fmean(row["scores"][name] for row in known)
            for name in (known[0]["scores"] if known else ())
        }
        found |= scores_by_dataset(rows, [row["prediction"] for row in rows])
    if asked.predictions is not None:
        path = asked.predictions
        on_main(lambda: _write(path, rows))
    return found, rows


def _asks(row: Row) -> str:
    """The same for rows that ask the same of the same context."""
    return json.dumps(
        [row.get(key) for key in ("question", "context", "contexts", "ctxs")], sort_keys=True
    )


def _merged(
    raw: Sequence[Row], answers: Sequence[list[str]], asks: Sequence[str]
) -> tuple[list[Row], list[list[str]]]:
    """The first row of each group that asks the same, with the references of all of them, and the
    answers to it.
    """
    groups: dict[str, list[int]] = {}
    for number, key in enumerate(asks):
        groups.setdefault(key, []).append(number)
    rows: list[Row] = []
    for numbers in groups.values():
        references = [text for number in numbers for text in raw[number]["answers"]]
        rows.append({**raw[numbers[0]], "answers": references})
    return rows, [answers[first] for first, *_ in groups.values()]


def _predictions(
    task: Task, raw: Sequence[Row], answers: Sequence[list[str]], *, is_n_best: bool
) -> Iterator[Row]:
    for row, texts in zip(raw, answers, strict=True):
        scores = _judged(task, texts[0], row["answers"]) if row["answers"] else {}
        predicted = {**row, "prediction": texts[0], "scores": scores}
        yield predicted | {"n_best": texts} if is_n_best else predicted


def _judged(task: Task, prediction: str, references: Sequence[str]) -> dict[str, float]:
    if isinstance(task, JudgesAnswers):
        return task.answer_scores(prediction, references)
    return {
        name: float(score.num) for name, score in answer_scores([prediction], [references]).items()
    }


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
        yield {
            **row,
            "ctxs": [{**ctx, "score": score} for ctx, score in zip(ctxs, of_row, strict=True)],
        }


def _write(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line, or (.json) a list of them; whole, or as it was before."""
    with aside(path, is_durable=False) as part, part.open("w", encoding="utf-8") as file:
        if path.suffix == ".json":
            file.write("[")
            for number, row in enumerate(rows):
                file.write(("," if number else "") + "\n" + json.dumps(row, ensure_ascii=False))
            file.write("\n]\n")
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    logger.info("wrote %s", path)
