"""Evaluates a trained model on a whole split: answers, scores, and scores of passages."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer import tasks
from trainer.config.identity import exp_id
from trainer.config.schema import Experiment, RandomBase
from trainer.data import left_out
from trainer.data.content import rows_of
from trainer.data.token_store import TokenStore, store_of
from trainer.errors import ConfigError, nearest
from trainer.evaluation.passages import passage_scores, with_scores, write_rows
from trainer.evaluation.row_scores import (
    exact_answers,
    merge_equal_questions,
    own_scores,
    sums_of_answers,
)
from trainer.evaluation.search import check_search
from trainer.files.atomic import check_output, write_json
from trainer.metrics.intervals import intervals
from trainer.metrics.judge_record import CANDIDATE
from trainer.metrics.mergeable import cut_at, scores_by_dataset
from trainer.metrics.similarity import BERTSCORE_MODEL, check, similarities
from trainer.models import base_model, base_source
from trainer.models.weights import unsound, weight_files
from trainer.protocol.abilities import (
    GREEDY,
    Answers,
    ComparesWithStart,
    ReadsContexts,
    ScoresPassages,
    Search,
    question_of,
)
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.telemetry.wandb_run import tell_wandb
from trainer.training.options import Options
from trainer.training.scoring import (
    Frozen,
    answer,
    evaluate,
    evaluate_rows,
    pool,
    scores_of_answer,
)

if TYPE_CHECKING:
    from trainer.protocol.task import Places, Row, Task

logger = logging.getLogger(__name__)

_EXPORTS = ("best", "final")
_SAVED_STEP = re.compile(r"step-[1-9]\d*")  # exported by averages/saved_step.py
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
    _check_abilities(question, task)
    folder = model_folder(question, options)
    with left_out.settling(None, strict=options.strict):
        store = _store(task, question, options)
    read_start(task, store, question)
    loaded = task.load_export(folder).to(distributed.device()).eval()
    check_weights(loaded, task.cfg, folder, options.places)
    model = Frozen(loaded)
    batch = batch_of(question)
    raw = [question_of(task, row) for row in _rows(task, question)]
    logger.info("%s: %d rows of %s, %d at a time", folder, len(raw), question.split, batch)
    predicted_rows: list[Row] = []
    if isinstance(task, Answers):
        how: dict[str, Any] = {"batch": batch, "search": question.search, "stop": stop}
        scores, answers = answer(model, task, store, raw, **how)
        scores, predicted_rows = _final_answers(question, task, raw, answers, scores)
        run_folder = options.savedir_base / exp_id(question.values)
        scores |= own_scores(task.cfg.own_metrics, run_folder, predicted_rows)
        sums = sums_of_answers(scores, predicted_rows)
        _tell_answers(question, folder, scores, predicted_rows, seconds=time.monotonic() - start)
    else:
        count: dict[str, Any] = {"batch": batch, "num_rows": len(raw), "stop": stop}
        if question.split == TEST:
            scores, sums = evaluate_rows(model, task, store, **count)
        else:
            scores, sums = evaluate(model, task, store, **count), {}
        if not all(map(math.isfinite, scores.values())):
            _refuse_unsound(task.cfg, folder, options.places)
    if question.passage_scores is not None and isinstance(task, ScoresPassages):
        by_passage = passage_scores(model, task, store, len(raw), batch=batch)
        path = question.passage_scores
        on_main(lambda: write_rows(path, with_scores(_rows(task, question), by_passage)))
    if settings is not None and distributed.is_main():
        table = [
            {
                "question": row["question"],
                "answers": " | ".join(row["answers"]),
                "prediction": row["prediction"],
                **dict(sorted(row["scores"].items())),
            }
            for row in predicted_rows
        ]
        run = options.savedir_base / settings.id
        tell_wandb(settings, run, question.split, scores, table)
    return Evaluated(
        scores,
        intervals(sums) if question.split == TEST else {},
        len(predicted_rows or raw),
        str(store.digest),
        folder,
        time.monotonic() - start,
    )


def read_start(task: Any, store: Any, question: Question) -> None:
    """Let a task that compares with the model that its run began with compute what it needs of it.
    A collective.
    """
    if isinstance(task, ComparesWithStart):
        begun: Any = task
        task.read_start(
            lambda: begun.model().to(distributed.device()).eval(),
            {question.split: store},
            batch=batch_of(question),
        )


def _check_abilities(question: Question, task: Task) -> None:
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
    if isinstance(task, Answers):
        return
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


def _tell_answers(
    question: Question,
    folder: Path,
    scores: Mapping[str, float],
    rows: Sequence[Row],
    *,
    seconds: float,
) -> None:
    """Log how many answers are exact, and write the summary beside the predictions."""
    exact = exact_answers(scores, rows)
    equal = "" if exact is None else f"{exact[0]:,} of {exact[1]:,} answers are exact; "
    logger.info("%s: %s%.1f s", question.split, equal, seconds)
    if question.predictions is None:
        return
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


def _refuse_unsound(cfg: Experiment, folder: Path, places: Places) -> None:
    """ConfigError names the weights that are not finite, of the model and of the base below it."""
    sources = [str(folder), base_source.resolve(cfg.base, places)]
    folders = [source for source in sources if isinstance(source, str)]
    dtype = base_model.DTYPES[cfg.train.precision]
    happened = "The scores of the model are not finite"
    on_main(lambda: unsound.refuse(folders, dtype, happened=happened))


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
    values = pool(model, task, store, name=name, batch=batch_of(question))
    if values is None:
        raise ConfigError(f"task {question.values['task']!r} has no {name} to be calibrated on.")
    return values


def open_model(question: Question, options: Options) -> tuple[Task, nn.Module, Path]:
    """An experiment's task, its trained model, and the model's folder.

    The model is on this rank's device, in evaluation mode.
    """
    task, folder = _task(question, options), model_folder(question, options)
    model = task.load_export(folder).to(distributed.device()).eval()
    check_weights(model, task.cfg, folder, options.places)
    return task, model, folder


def check_weights(model: nn.Module, cfg: Experiment, folder: Path, places: Places) -> None:
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


def batch_of(question: Question) -> int:
    """Rows of one forward."""
    train = tasks.parse(question.values).train
    return question.batch or train.eval_batch or train.micro_batch


def _check(question: Question) -> None:
    check_search(question.search)
    check(question.measures)
    if "" in question.cut_at:
        raise ConfigError('--cut_at "": got an empty text, which stands everywhere. Leave it out.')
    for path in (question.predictions, question.passage_scores):
        if path is not None:
            check_output(path)


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
    is_own = question.model in (*_EXPORTS, CANDIDATE) or _SAVED_STEP.fullmatch(question.model)
    if not is_own:
        folder = Path(base_source.folder_or_id(question.model, options.cache_dir))
        if not folder.is_dir():
            legal = [*_EXPORTS, _UNTRAINED]
            raise ConfigError(
                f"--model {question.model}: no such folder. {nearest(question.model, legal)}"
            )
        return folder
    run_folder = options.savedir_base / exp_id(question.values)
    there = [name for name in (*_EXPORTS, CANDIDATE) if (run_folder / name).is_dir()]
    if (run_folder / question.model).is_dir():
        return run_folder / question.model
    other = f"Use --model {there[0]}" if there else "Train it first, into the same --savedir_base"
    raise ConfigError(
        f"{run_folder} holds no {question.model}/ folder. {other}, or give --model a folder."
    )


def _rows(task: Task, question: Question) -> Iterator[Row]:
    return islice(rows_of(task, question.split)(), question.limit)


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
        raw, answers = merge_equal_questions(raw, answers, _rows(task, question))
    rows: list[Row] = []
    for row, texts in zip(raw, answers, strict=True):
        row_scores = scores_of_answer(task, texts[0], row["answers"])
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
        on_main(lambda: write_rows(path, rows))
    return scores, rows
