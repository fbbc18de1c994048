"""rerank: the passages of a ranking, or of training rows, scored by a cross-encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.commands import options
from trainer.commands.retrieval import Depth, Format, OfSplit, check_run
from trainer.config.flags import Strict
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from trainer.data.readers.rankings import Rankings
    from trainer.protocol.task import Row
    from trainer.retrieval.false_negatives import JudgeLimits
    from trainer.retrieval.reranking import TextList


_OF_RUNS = ("queries", "passages", "depth", "split", "run_format", "tag")  # not of --rows


@dataclass(frozen=True)
class RerankOptions:
    """What is scored, and where it goes."""

    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The run file to write, or with --rows the file of rows. What an interrupted "
            "command has scored lies beside it (OUT.scores), and the next one goes on with it.",
        ),
    ]
    run: Annotated[
        Path | None, typer.Option("--run", help="The run file whose first hits are scored.")
    ] = None
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            help='Training rows in Tevatron\'s layout (see mine), which get "scores", one for each '
            "passage, positives first: a teacher's.",
        ),
    ] = None
    drop_above: Annotated[
        float | None,
        typer.Option(
            "--drop_above",
            help="With --rows: leave out negatives whose score is above this one, as unknown "
            "positives.",
        ),
    ] = None
    drop_margin: Annotated[
        float | None,
        typer.Option(
            "--drop_margin",
            help="With --rows: leave out negatives whose score is above that of the best positive "
            "less this margin.",
        ),
    ] = None
    queries: Annotated[
        Path | None, typer.Option("--queries", help="With --run: JSON lines of questions.")
    ] = None
    passages: Annotated[
        Path | None, typer.Option("--passages", help="With --run: the corpus that was searched.")
    ] = None
    depth: Depth = 100
    split: OfSplit = None
    run_format: Format = "trec"
    tag: Annotated[str, typer.Option("--tag", help="trec: the name of the run.")] = "rerank"

    def verdict(self) -> JudgeLimits:
        """Which negatives of --rows are left out."""
        from trainer.retrieval.false_negatives import checked

        flags = ("--drop_above", "--drop_margin")
        verdict = checked(self.drop_above, self.drop_margin, flags)
        if verdict.is_given and self.rows is None:
            raise ConfigError(
                f"{' and '.join(flags)} leave negatives of training rows out: give --rows, or "
                "leave them out."
            )
        return verdict

    def kept(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The scored rows without what the verdict leaves out, which is told."""
        from trainer.data import left_out
        from trainer.retrieval.false_negatives import judged_rows

        verdict = self.verdict()
        if not verdict.is_given:
            return rows
        return left_out.refusing(judged_rows(rows, verdict), str(self.rows), strict=False)


@options.guard
def rerank(
    which: options.ExperimentOptions,
    what: RerankOptions,
    model: options.Model = "best",
    batch: options.BatchSize = 64,
    precision: Annotated[
        str, typer.Option("--precision", help="Precision of the model: fp32 or bf16.")
    ] = "fp32",
    strict: Strict = False,
) -> None:
    """Order the first passages of every question anew, by a cross-encoder (form: "cross") or late
    interaction, or let it score training rows; under torchrun, every rank scores some.
    """
    from trainer.data import left_out
    from trainer.runtime import distributed
    from trainer.runtime.distributed import on_main

    _check(what, precision)
    what.verdict()
    distributed.init()
    read = cache(lambda: _of_rows(what.rows) if what.rows is not None else _of_run(what))

    def refuse() -> None:
        # on rank 0 alone, and inside of on_main: the others get the refusal of --strict, too
        with left_out.one_reading(str(what.rows or what.run), strict=strict):
            read()

    on_main(refuse)
    work = read()
    scores = _scored(work.lists, which, what, model=model, batch=batch or 64, precision=precision)
    if distributed.is_main():
        typer.echo(f"{what.out}: {work.write(what, scores)}")
    from trainer.retrieval import reranking

    reranking.forget(_folder(what))


@dataclass(frozen=True)
class _Work:
    """Lists that are scored, and the hits or the rows that they are of."""

    lists: list[TextList]
    hits: Rankings | None = None
    rows: list[Row] | None = None

    def write(self, what: RerankOptions, scores: list[np.ndarray]) -> str:
        """Write the output, and say what it holds."""
        from trainer.retrieval import negatives, rankings, reranking

        if self.rows is not None:
            rows = what.kept(reranking.with_scores(self.rows, scores))
            return f"{negatives.write_rows(what.out, rows)} rows with scores"
        assert self.hits is not None
        ordered, how = reranking.reordered(self.hits, scores), {"format": what.run_format}
        rankings.write_run(what.out, ordered, tag=what.tag, **how)  # pyright: ignore
        return f"{len(ordered)} questions, {sum(map(len, ordered.values()))} hits"


def _of_run(what: RerankOptions) -> _Work:
    from trainer.data.readers import passages as corpora
    from trainer.data.readers.questions import queries as read_queries
    from trainer.data.readers.rankings import read_run
    from trainer.retrieval import reranking

    assert what.run is not None
    assert what.queries is not None
    assert what.passages is not None
    questions = list(read_queries(what.queries, what.split))
    hits = reranking.first_hits(read_run(what.run), questions, depth=what.depth)
    needed = {hit.passage for of_question in hits.values() for hit in of_question}
    texts = corpora.passages_with_ids(what.passages, needed)
    by_id = {query.id: query.text for query in questions}
    lists: list[TextList] = [
        (by_id[name], [texts[hit.passage] for hit in of_one]) for name, of_one in hits.items()
    ]
    return _Work(lists, hits=hits)


def _of_rows(path: Path) -> _Work:
    from trainer.data.readers.jsonl import objects
    from trainer.errors import DataError
    from trainer.retrieval import reranking

    placed = list(objects(path))
    if not placed:
        raise DataError(f"{path} holds no row. Give the file that mine wrote.")
    lists = [reranking.list_of(row, place) for place, row in placed]
    return _Work(lists, rows=[row for _, row in placed])


def _scored(
    lists: list[TextList],
    which: options.ExperimentOptions,
    what: RerankOptions,
    *,
    model: str,
    batch: int,
    precision: str,
) -> list[np.ndarray]:
    from trainer.evaluation.run import Question, open_model
    from trainer.protocol.abilities import Reranks
    from trainer.retrieval import embeddings, reranking
    from trainer.runtime.distributed import on_main

    values = which.values()
    task, ranker, folder = open_model(Question(values, model=model), which.run_options())
    if not isinstance(task, Reranks):
        raise ConfigError(
            f"task {task.cfg.package!r} scores no pairs. Name an experiment of a retriever with "
            'form="cross" or form="late".'
        )
    how: Any = {"precision": precision}
    plan = reranking.ScoresPlan(
        model=on_main(lambda: embeddings.fingerprint(folder, task.fingerprint())),
        texts=reranking.digest_of(lists),
        count=len(lists),
        shard_questions=reranking.SHARD_QUESTIONS,
        **how,
    )
    scorer = reranking.scorer_of(task, ranker, batch=batch, **how)
    return reranking.scores_of(_folder(what), lists, scorer, plan=plan)


def _folder(what: RerankOptions) -> Path:
    """Where the scores lie until the output is written."""
    return what.out.with_name(f"{what.out.name}.scores")


def _check(what: RerankOptions, precision: str) -> None:
    if (what.run is None) == (what.rows is None):
        raise ConfigError("give --run or --rows, one of them.")
    if what.run is not None and (what.queries is None or what.passages is None):
        raise ConfigError("--run names ids alone: give --queries and --passages, too.")
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"--precision {precision}: want fp32, bf16.")
    check_run(what.run_format, what.out, what.tag)
    given = [
        f"--{field.name.removeprefix('run_')}"
        for field in fields(RerankOptions)
        if field.name in _OF_RUNS and getattr(what, field.name) != field.default
    ]
    if what.rows is not None and given:
        raise ConfigError(
            f"rerank: got {', '.join(given)} with --rows, whose rows hold their own questions and "
            "passages. Leave them out."
        )
