"""Tasks of MTEB (the Massive Text Embedding Benchmark) on a trained retriever, without an export by
hand.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer import tasks
from trainer.config.userfile import execute
from trainer.errors import ConfigError, nearest
from trainer.evaluation.run import open_model
from trainer.files.packages import extra
from trainer.harness.records import (
    Evaluation,
    Gain,
    ModelScores,
    TaskScore,
    TaskScores,
    model_name,
)
from trainer.harness.searcher import TrainedSearcher, form_of
from trainer.protocol.abilities import Side
from trainer.retrieval.embeddings import Encoder, encoder_of, fingerprint
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.evaluation.run import Question
    from trainer.harness.flags import HarnessFlags
    from trainer.training.options import Options

FILE = "mteb.json"  # in the run folder
EXTRA = "mteb"
_ALL = "default"  # MTEB's name of the one subset of a task that has no others
log = logging.getLogger(__name__)


class TrainedEncoder:
    """A retriever as MTEB's EncoderProtocol: its own prefixes, limits, pooling and normalisation.

    Queries and passages have their own sides. Texts of tasks that have no sides, such as sentences
    that are compared, are read as queries.
    """

    def __init__(self, encoders: Mapping[Side, Encoder], meta: Any) -> None:
        self._encoders = encoders
        self.mteb_model_meta = meta

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Tensor:
        """(N, D) fp32 vectors of the texts of a loader of batches, each computed by one rank."""
        side: Side = "passage" if prompt_type is not None and prompt_type == "document" else "query"
        rows = [row for batch in inputs for row in _rows(batch)]
        rank, world = distributed.rank(), distributed.world()
        own = rows[rank::world]
        # a rank without a text computes one, to know how wide vectors are
        vectors = self._encoders[side](own or rows[:1])[: len(own)]
        parts = distributed.gather_rows(vectors)
        whole = vectors.new_empty(len(rows), vectors.shape[1])
        for number, part in enumerate(parts):
            whole[number::world] = part
        return whole

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """(N, M) dot products, by which the retriever was trained."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """(N,) dot products of vectors that stand in the same places."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(-1)


def _rows(batch: Mapping[str, Any]) -> list[dict[str, str]]:
    """The texts of a batch of MTEB; of documents title and body, which it also gives joined."""
    if "text" not in batch:
        raise ConfigError(
            f"--mteb: got rows of {', '.join(batch)}, and the model reads texts. Leave such tasks "
            "out."
        )
    texts = batch.get("body", batch["text"])
    titles = batch.get("title") or [""] * len(texts)
    return [
        {"title": title, "text": text} if title else {"text": text}
        for title, text in zip(titles, texts, strict=True)
    ]


def version() -> str:
    """Of mteb. ConfigError where it is not installed."""
    extra("mteb", EXTRA)
    return importlib.import_module("importlib.metadata").version("mteb")


def evaluate(
    questions: Sequence[Question], flags: HarnessFlags, options: Options
) -> tuple[Evaluation, dict[str, Any]]:
    """The tasks on one retriever, or on two that are compared; and how they were asked.

    A collective. ConfigError for tasks that MTEB does not have, and for a model that embeds no
    texts.
    """
    mteb = extra("mteb", EXTRA)
    logging.getLogger("mteb").setLevel(logging.WARNING)
    for question in questions:
        package = tasks.parse(question.values).package
        kind = importlib.import_module(f"trainer.tasks.{package}.task").Task
        if not any(hasattr(kind, name) for name in ("embed", "token_vectors", "embed_words")):
            raise ConfigError(
                f"--mteb: task {package!r} computes no vectors of texts. Give a run of a retriever."
            )
    if questions[0].limit is not None:
        raise ConfigError(
            "--limit: MTEB's tasks are run as a whole, for a passage that is left out would be "
            "found by nobody. Leave it out."
        )
    selection = _tasks(mteb, flags)
    of_models = [_of_model(mteb, question, selection, options) for question in questions]
    how = {"tasks": flags.mteb_tasks}
    if len(of_models) == 1:
        return Evaluation(of_models[0]), how
    of, against = of_models
    gains = {
        name: {
            metric: Gain(score.value - against.tasks[name].scores[metric].value)
            for metric, score in of_task.scores.items()
            if metric in against.tasks[name].scores
        }
        for name, of_task in of.tasks.items()
    }
    return Evaluation(of, against, gains), how


def _tasks(mteb: Any, flags: HarnessFlags) -> list[Any]:
    """MTEB's tasks of these names; those of --include_path replace its own."""
    own = {} if flags.include_path is None else _tasks_of_file(mteb, flags.include_path)
    selection: list[Any] = []
    for name in flags.mteb_tasks:
        if name in own:
            selection.append(own[name])
            continue
        try:
            selection.append(mteb.get_task(name))
        except KeyError:
            names = [*own, *(one.metadata.name for one in mteb.get_tasks())]
            raise ConfigError(
                f"--mteb {name}: mteb {version()} has no such task. {nearest(name, names)}"
            ) from None
    return selection


def _tasks_of_file(mteb: Any, path: Path) -> dict[str, Any]:
    """By name, the tasks that a Python file defines."""
    of_file = [
        one
        for one in execute(path, flag="--include_path", defines="tasks of MTEB").values()
        if isinstance(one, type) and issubclass(one, mteb.AbsTask) and "metadata" in vars(one)
    ]
    if not of_file:
        raise ConfigError(
            f"--include_path {path}: got no class of a task in it, want one that derives from "
            "mteb.AbsTaskRetrieval, say, with its metadata."
        )
    return {one.metadata.name: one() for one in of_file}


def _of_model(mteb: Any, question: Question, selection: list[Any], options: Options) -> ModelScores:
    task, model, folder = open_model(question, options)
    train = task.cfg.train
    batch = question.batch or train.eval_batch or train.micro_batch
    weights = on_main(lambda: fingerprint(folder, task.fingerprint()))
    model_meta: Any = importlib.import_module("mteb.models.model_meta")
    meta = model_meta.ModelMeta.create_empty(
        {"name": f"lathe/{folder.name}", "revision": weights, "modalities": ["text"]}
    )
    form = form_of(task)
    of_task: Any = task  # evaluate() refuses others
    if form is None:
        encoders: dict[Side, Encoder] = {
            "query": encoder_of(of_task, model, side="query", batch=batch),
            "passage": encoder_of(of_task, model, side="passage", batch=batch),
        }
        asked: Any = TrainedEncoder(encoders, meta)
    else:
        _refuse_others(mteb, selection, of_task.cfg.form)
        asked = TrainedSearcher(form, task, model, batch=batch, meta=meta)
    log.info("%s: tasks of MTEB, %d texts at a time", folder, batch)
    try:
        results = mteb.evaluate(
            asked,
            selection,
            co2_tracker=False,
            cache=None,
            show_progress_bar=False,
        )
    except OSError as error:  # of datasets and the Hub, which name no task
        names = ",".join(one.metadata.name for one in selection)
        raise ConfigError(
            f"--mteb {names}: their data cannot be read ({type(error).__name__}: {error}). Fetch "
            "them where there is a network."
        ) from error
    of_tasks = {
        one.task_name: _scores(one, of_task.metadata)
        for one, of_task in zip(results.task_results, selection, strict=True)
    }
    return ModelScores(model_name(question.model, folder), folder, weights, of_tasks)


def _refuse_others(mteb: Any, selection: list[Any], form: str) -> None:
    """ConfigError for a task that does not search, such as one that compares sentences."""
    others = [one.metadata.name for one in selection if not isinstance(one, mteb.AbsTaskRetrieval)]
    if others:
        raise ConfigError(
            f'--mteb {others[0]}: it compares one vector of each text, and form="{form}" makes '
            "none. Name tasks of retrieval or reranking."
        )


def _scores(result: Any, metadata: Any) -> TaskScores:
    """Every metric of a result of MTEB, under "test/ndcg_at_10", and "test/german/ndcg_at_10" where
    a task has subsets. Its main metric is told, the others stand in the file.
    """
    scores: dict[str, TaskScore] = {}
    for split, subsets in result.scores.items():
        for of_subset in subsets:
            subset = of_subset["hf_subset"]
            place = split if subset == _ALL else f"{split}/{subset}"
            for metric, value in of_subset.items():
                is_number = isinstance(value, Real) and not isinstance(value, bool)
                if is_number and metric != "main_score":
                    is_main = metric == metadata.main_score
                    scores[f"{place}/{metric}"] = TaskScore(float(value), is_told=is_main)
    return TaskScores(result.dataset_revision, None, scores, {"type": metadata.type})
