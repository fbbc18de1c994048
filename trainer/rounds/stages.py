"""The stages of a round. Each leaves a file when it is done, and is not repeated; encoding, judging
and training go on where they were killed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer import tasks
from trainer.data import left_out
from trainer.data.readers.jsonl import objects
from trainer.data.readers.rankings import Rankings, read_run
from trainer.data.shard_folder import META
from trainer.errors import ConfigError
from trainer.evaluation.run import Question, model_folder, open_model
from trainer.files.atomic import read_json, write_json
from trainer.retrieval import (
    embeddings,
    exact_search,
    false_negatives,
    negatives,
    rankings,
    reranking,
    stored_forms,
)
from trainer.rounds.plan import BATCH
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.protocol.abilities import Side
    from trainer.protocol.task import Row
    from trainer.retrieval.embeddings import Embeddings
    from trainer.rounds.plan import Loop, NegativeJudge, Precision
    from trainer.rounds.sources import Corpus, LoopTexts, Questions
    from trainer.training.options import Options

SECONDS = "seconds.json"
SHARD_ROWS = 512  # vectors of a file: what a kill costs. The bits of vectors depend on it.
AT = (1, 10, 20, 100)  # where rankings are cut
log = logging.getLogger(__name__)


@contextmanager
def timed(folder: Path, stage: str) -> Iterator[None]:
    """Time a stage that is not done yet. When it ends well, the seconds that this process spent on
    it are written to seconds.json. A collective.
    """
    begin = time.monotonic()
    yield
    spent = time.monotonic() - begin

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds = read_json(folder / SECONDS) or {}
        write_json(folder / SECONDS, {**seconds, stage: round(spent, 2)})

    on_main(write)


@dataclass(frozen=True)
class Model:
    """The model after some rounds: its vectors, rankings and measures."""

    question: Question
    folder: Path  # of its files
    options: Options
    precision: Precision

    @cached_property
    def fingerprint(self) -> str:
        """Names its weights. A collective."""
        task = tasks.load(tasks.parse(self.question.values), self.options.places)
        weights = model_folder(self.question, self.options)
        return on_main(lambda: embeddings.fingerprint(weights, task.fingerprint()))

    def vectors(self, name: str, side: Side, texts: Questions | Corpus) -> Embeddings:
        """The vectors of texts, made if need be. ConfigError when the folder holds those of another
        model. A collective.
        """
        digest, count = texts.digest_and_count
        plan = embeddings.EmbeddingsPlan(
            self.fingerprint,
            digest,
            side,
            "float16",
            count,
            shard_rows=SHARD_ROWS,
            precision=self.precision,
        )
        out = self.folder / name

        def encode(of_shard: Sequence[Row]) -> Any:
            task, model = self._opened
            how: Any = {"side": side, "batch": BATCH, "precision": self.precision}
            return embeddings.encoder_of(task, model, **how)(of_shard)

        if on_main((out / META).is_file):
            return embeddings.write(out, texts.rows, encode, plan=plan)  # which compares the plans
        with timed(self.folder, f"encode {name}"):
            return embeddings.write(out, texts.rows, encode, plan=plan)

    @cached_property
    def _opened(self) -> tuple[Any, Any]:
        task, model, _ = open_model(self.question, self.options)
        return task, model

    def ranking(self, name: str, questions: Questions, loop: Loop, sources: LoopTexts) -> Rankings:
        """The best passages of questions. A collective."""
        path = self.folder / f"{name}.trec"
        own = self.vectors(name, "query", questions)
        corpus = self.vectors("passages", "passage", sources.corpus)
        if not on_main(path.is_file):
            with timed(self.folder, f"search {name}"):
                exact = np.concatenate([stored_forms.floats(shard) for shard in own.vectors])
                hits = exact_search.search(exact, corpus.vectors, depth=loop.depth)
                ranked = rankings.of_search(
                    own.ids, corpus.ids, rows=hits.rows, scores=hits.scores, depth=loop.depth
                )
                on_main(lambda: rankings.write_run(path, ranked))
        return read_run(path)

    def measures(self, loop: Loop, sources: LoopTexts) -> dict[str, float]:
        """Of the validation questions. A collective."""
        ranked = self.ranking("valid", sources.valid, loop, sources)
        found = rankings.mean_measures(ranked, sources.valid.qrels, at=AT)
        on_main(lambda: write_json(self.folder / "measures.json", found))
        return found


# Mining
# --------------------------------------------------------------------------------------------------


def rankings_to_mine(loop: Loop, sources: LoopTexts, miner: Model, *, of: str) -> list[Rankings]:
    """The rankings out of which negatives are taken, for the training or the validation questions
    (`of`: train or valid). A collective.
    """
    questions: Questions = getattr(sources, of)
    runs: list[Rankings] = []
    if loop.mining.by != "bm25":
        runs.append(miner.ranking(of, questions, loop, sources))
    if loop.mining.by != "model":
        path = loop.out / f"bm25.{of}.trec"

        def write() -> None:
            if not path.is_file():
                ranked = negatives.bm25(
                    list(questions.queries), sources.corpus.rows(), depth=loop.depth
                )
                rankings.write_run(path, ranked, tag="bm25")

        on_main(write)
        runs.append(read_run(path))
    return runs


def mine(loop: Loop, sources: LoopTexts, miner: Model, path: Path, *, of: str, number: int) -> None:
    """Write the training rows that a model mines, once. A collective. number: of the round, which
    the sample of negatives depends on.
    """
    if on_main(path.is_file):
        return
    runs = rankings_to_mine(loop, sources, miner, of=of)
    on_main(lambda: _write_mined(loop, sources, runs, path, of=of, number=number))


def _write_mined(
    loop: Loop, sources: LoopTexts, runs: list[Rankings], path: Path, *, of: str, number: int
) -> None:
    questions: Questions = getattr(sources, of)
    path.parent.mkdir(parents=True, exist_ok=True)
    window = replace(loop.mining.window, seed=loop.mining.window.seed + number)
    needed = {hit.passage for hits in negatives.in_turn(runs, window).values() for hit in hits}
    needed.update(*(questions.positives[one.id] for one in questions.queries))
    rows = negatives.training_rows(
        runs,
        questions.queries,
        sources.corpus.texts(needed),
        positives=questions.positives,
        window=window,
    )
    negatives.write_rows(path, left_out.refusing(rows, str(path), strict=False))


@dataclass(frozen=True)
class Judged:
    """How many negatives a judge has seen, and how many of them it took for positives."""

    judged: int = 0
    false: int = 0

    @property
    def share(self) -> float:
        return self.false / self.judged if self.judged else 0.0


def judge(
    verdict_of: NegativeJudge,
    mined: Path,
    out: Path,
    folder: Path,
    *,
    precision: Precision,
    options: Options,
) -> Judged:
    """Write mined rows with the judge's scores, and without the negatives that it takes for
    positives. A collective.
    """
    rows = [row for _, row in objects(mined)]
    lists = [reranking.list_of(row, f"{mined}, row {at}") for at, row in enumerate(rows, 1)]
    how: dict[str, Any] = {"precision": precision}
    plan = reranking.ScoresPlan(
        model=fingerprint_of_judge(verdict_of, options),
        texts=reranking.digest_of(lists),
        count=len(lists),
        shard_questions=reranking.SHARD_QUESTIONS,
        **how,
    )
    opened: list[reranking.Scorer] = []

    def score(of_shard: Sequence[reranking.TextList]) -> np.ndarray:
        if not opened:
            task, model, _ = open_model(verdict_of.question, options)
            opened.append(reranking.scorer_of(task, model, batch=BATCH, **how))  # pyright: ignore
        return opened[0](of_shard)

    scores = reranking.scores_of(folder, lists, score, plan=plan)

    def write() -> list[int]:
        with_scores = list(reranking.with_scores(rows, scores))
        kept = with_scores
        if verdict_of.verdict.is_given:
            kept = false_negatives.judged_rows(with_scores, verdict_of.verdict)
            kept = list(left_out.refusing(kept, str(mined), strict=False))
        negatives.write_rows(out, kept)
        counts = [
            sum(len(row["negative_passages"]) for row in some) for some in (with_scores, kept)
        ]
        return [counts[0], counts[0] - counts[1]]

    return Judged(*on_main(write))


def fingerprint_of_judge(verdict_of: NegativeJudge, options: Options) -> str:
    """Names the judge's weights. ConfigError when its run is no cross-encoder. A collective."""
    from trainer.protocol.abilities import Reranks

    task = tasks.load(tasks.parse(verdict_of.question.values), options.places)
    if not isinstance(task, Reranks):
        raise ConfigError(
            f"--judge: task {verdict_of.question.values['task']!r} scores no pairs. "
            'Name a run of a retriever with form="cross".'
        )
    folder = model_folder(verdict_of.question, options)
    return on_main(lambda: embeddings.fingerprint(folder, task.fingerprint()))
