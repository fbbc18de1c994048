"""Passages that a first search ranked, scored again by a model that reads them with their question.

The scores of a call that was interrupted lie in a folder of shards (trainer/data/shard_folder.py)
beside its output, and the next call goes on with them:

plan.json         model, texts, questions, questions per shard, precision
scores-<n>.npy    float32 scores of the questions of a shard, one after the other
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.data.readers.rankings import Hit, Rankings
from trainer.data.shard_folder import ShardFolder
from trainer.errors import ConfigError, DataError, DivergedError
from trainer.files.atomic import refusals
from trainer.files.safetensors_file import WrittenFile, checksum_problem
from trainer.protocol.task import Row
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query
    from trainer.protocol.abilities import Reranks

logger = logging.getLogger(__name__)

# What a kill costs a rank at most. It does not depend on the number of ranks: the last bits of a
# score depend on the pairs that are read together with it, and those are of one shard.
SHARD_QUESTIONS = 16
_POSITIVES, _NEGATIVES = "positive_passages", "negative_passages"

TextList = tuple[str, Sequence[Row]]  # a question, and its passages: {"title"?, "text"}
Scorer = Callable[[Sequence[TextList]], np.ndarray]  # lists -> (P,) float32, list by list


@dataclass(frozen=True)
class ScoresPlan:
    """What a folder of scores is to hold; a folder that was begun with another plan is not
    continued.
    """

    model: str  # names the weights that give the scores, see embeddings.fingerprint
    texts: str  # digest of questions and passages
    count: int  # questions
    shard_questions: int
    precision: Literal["fp32", "bf16"]

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_questions)


def digest_of(lists: Sequence[TextList]) -> str:
    """A digest of questions with their passages."""
    digest = hashlib.sha256()
    for question, passages in lists:
        texts = [[passage.get("title") or "", passage["text"]] for passage in passages]
        digest.update(json.dumps([question, texts]).encode())
    return digest.hexdigest()


def scorer_of(
    task: Reranks, model: nn.Module, *, batch: int, precision: Literal["fp32", "bf16"]
) -> Scorer:
    """A function that scores lists, `batch` pairs of like length at a time.

    model: in evaluation mode, on the device to be used. precision: bf16 runs it under autocast.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def score(lists: Sequence[TextList]) -> np.ndarray:
        ids = task.lists_of(lists)
        pairs = [(query, [passage]) for query, passages in ids for passage in passages]
        # what needs most memory first
        order = sorted(range(len(pairs)), key=lambda at: -len(pairs[at][0]) - len(pairs[at][1][0]))
        scores = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                of_batch = task.relevance(model, [pairs[at] for at in places])
            scores[places] = of_batch.float().cpu().numpy()
        return scores

    return score


def scores_of(
    folder: Path, lists: Sequence[TextList], scorer: Scorer, *, plan: ScoresPlan
) -> list[np.ndarray]:
    """The float32 scores of each list. What `folder` holds already is not computed again.

    A collective, in which each rank scores some of the shards and all read them. ConfigError when
    the folder was begun with another model, other texts or another precision.
    """
    how: Any = {"refusal": ConfigError, "notes_kernels": True}
    shards = ShardFolder(folder, "scores", ".npy", "rerank", **how)
    with shards.alone():
        return _scores_of(shards, lists, scorer, plan)


def _scores_of(
    shards: ShardFolder, lists: Sequence[TextList], scorer: Scorer, plan: ScoresPlan
) -> list[np.ndarray]:
    folder = shards.path
    plan = ScoresPlan(**shards.begin(asdict(plan), choice="shard_questions"))
    for number in shards.own_missing(plan.num_shards):
        start = number * plan.shard_questions
        of_shard = scorer(lists[start : start + plan.shard_questions])
        if not np.isfinite(of_shard).all():
            raise DivergedError(
                f"shard {number}: a score is NaN or infinity. Use another model, or fp32."
            )
        written = io.BytesIO()
        np.save(written, of_shard, allow_pickle=False)
        block = np.frombuffer(written.getvalue(), dtype=np.uint8)
        shards.write_shard(number, [block.data], pairs=len(of_shard))
        logger.info("%s: shard %d of %d", folder, number + 1, plan.num_shards)
    shards.finish(plan.num_shards)
    lengths = [len(passages) for _, passages in lists]
    flat = np.concatenate([_read(shards, number) for number in range(plan.num_shards)])
    if len(flat) != sum(lengths):
        raise DataError(
            f"{folder} holds {len(flat)} scores, want {sum(lengths)}. Delete it and rerank anew."
        )
    return np.split(flat, np.cumsum(lengths)[:-1])


def _read(shards: ShardFolder, number: int) -> np.ndarray:
    """The scores of a shard; DataError when they are not those that were written."""
    path, record = shards.shard(number), shards.record(number) or {}
    written = WrittenFile(path.name, path.stat().st_size, record.get("sha256", ""))
    problem = checksum_problem(path.parent, written)
    if problem is not None:
        raise DataError(
            f"{path.parent}: {problem}. Delete this file, and run the same rerank command again."
        )
    return np.load(path, allow_pickle=False)


def forget(folder: Path) -> None:
    """Delete the scores of a call whose output is written. A collective."""
    distributed.barrier()
    if distributed.is_main():
        with refusals(folder):
            shutil.rmtree(folder)


# Rankings
# --------------------------------------------------------------------------------------------------


def first_hits(rankings: Rankings, queries: Sequence[Query], *, depth: int) -> Rankings:
    """The first `depth` hits of each question. Questions that the run lacks are noted. DataError
    when it has none of them.
    """
    of_queries: Rankings = {}
    for query in queries:
        hits = rankings.get(query.id, [])[:depth]
        if hits:
            of_queries[query.id] = hits
        else:
            note(f"question {query.id!r}", "questions that the run lacks (no passages)")
    if not of_queries:
        raise DataError(
            f"the run ranks passages for none of the {len(queries)} questions: its ids are like "
            f"{next(iter(rankings), None)!r}, theirs like {queries[0].id!r}. Give these questions' "
            "run."
        )
    return of_queries


def reordered(rankings: Rankings, scores: Sequence[np.ndarray]) -> Rankings:
    """The hits of each question by their new scores, best first; equal scores keep their order."""
    ordered: Rankings = {}
    for (question, hits), of_hits in zip(rankings.items(), scores, strict=True):
        order = np.argsort(-of_hits, kind="stable")
        ordered[question] = [Hit(hits[at].passage, float(of_hits[at])) for at in order]
    return ordered


# Rows of a teacher
# --------------------------------------------------------------------------------------------------


def list_of(row: Row, place: str) -> TextList:
    """The question of a row in Tevatron's layout, and its passages, positives first. DataError for
    a passage without a text.
    """
    name, question = fields.first_given(row, fields.QUESTIONS)
    passages = [
        (f"{key}[{number}]", passage)
        for key in (_POSITIVES, _NEGATIVES)
        for number, passage in enumerate(fields.passages(row.get(key) or [], place, key))
    ]
    for where, passage in passages:
        fields.text(passage.get("text"), place, f"{where}.text")
    if not passages:
        raise DataError(
            f"{place}: want {_POSITIVES} and {_NEGATIVES} (keys: {fields.keys(row)}).", place=place
        )
    return fields.text(question, place, name), [passage for _, passage in passages]


def with_scores(rows: Sequence[Row], scores: Sequence[np.ndarray]) -> Iterator[Row]:
    """The same rows with "scores", one for each passage, positives first."""
    for row, of_row in zip(rows, scores, strict=True):
        yield {**row, "scores": [float(np.float32(score)) for score in of_row]}
