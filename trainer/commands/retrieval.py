"""The commands between a corpus and a reader: encode, bm25, mine, contexts (search: vectors/); and
the measures of a run file, which judge tells.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from trainer.commands import options
from trainer.config.flags import Strict
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query
    from trainer.data.readers.rankings import Rankings

_BM25 = "bm25"  # the tag of its runs
RunFile = Annotated[
    Path,
    typer.Option(
        "--run", help="The run file: TREC's columns, or question, passage, and score or rank."
    ),
]
QueriesFile = Annotated[Path, typer.Option("--queries", help="JSON lines of questions.")]
PassagesFile = Annotated[
    Path,
    typer.Option(
        "--passages", help="Tevatron's or BEIR's JSON lines (.gz), or a TSV of id, text, title."
    ),
]
QrelsFile = Annotated[
    Path | None,
    typer.Option(
        "--qrels",
        help="Relevance judgements, TREC's or BEIR's; without it, the positives of --queries.",
    ),
]
OfSplit = Annotated[
    str | None, typer.Option("--split", help='Use only questions whose "split" is this one.')
]
Scored = Annotated[
    Path | None,
    typer.Option(
        "--scored",
        help="The file of evaluate --write_scores, to measure how far reader and ranking agree.",
    ),
]
Depth = Annotated[int, typer.Option("--depth", min=1, help="Passages per question.")]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format of the run file: trec, tevatron (id, id, score) or msmarco (id, id, rank).",
    ),
]
Texts = Annotated[
    Path, typer.Option("--in", help="A corpus (see search), or JSON lines of questions.")
]
FormOfVectors = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Form of the vectors on disk: float16, float32, or, for passages, int8 or binary.",
    ),
]
PoolFactor = Annotated[
    float | None,
    typer.Option(
        "--pool_factor",
        min=1.0,
        help='Passages of a model of form "late": leave about one vector of so many, by joining '
        "those that are alike.",
    ),
]
At = Annotated[
    list[int] | None, typer.Option("--at", min=1, help="A cut-off k; may be given several times.")
]


@options.guard
def encode(
    which: options.ExperimentOptions,
    source: Texts,
    side: Annotated[str, typer.Option("--side", help="What to encode: query or passage.")],
    out: Annotated[
        Path,
        typer.Option("--out", help="The folder for the vectors; an interrupted one is continued."),
    ],
    model: options.Model = "best",
    split: OfSplit = None,
    batch: options.BatchSize = 64,
    dtype: FormOfVectors = "float16",
    precision: Annotated[
        str, typer.Option("--precision", help="Precision of the model: fp32 or bf16.")
    ] = "fp32",
    shard_rows: options.ShardRows = None,
    dims: options.Dims = None,
    layers: options.Layers = None,
    pool_factor: PoolFactor = None,
    strict: Strict = False,
) -> None:
    """Write the vectors of a corpus or of questions; under torchrun, every rank writes a shard at a
    time.
    """
    from trainer.commands.vectors.forms import writer_of
    from trainer.data import left_out
    from trainer.data.readers.passages import distinct_passages
    from trainer.evaluation.run import Question, open_model
    from trainer.retrieval import embeddings
    from trainer.runtime import distributed
    from trainer.runtime.distributed import on_main

    _check_flags(side, dtype, precision, split)
    values = which.values()
    distributed.init()
    task, retriever, folder = open_model(Question(values, model=model), which.run_options())
    flags: dict[str, Any] = {"dims": dims, "factor": pool_factor, "layers": layers}
    writer = writer_of(task, side=side, dtype=dtype, **flags)
    weights = on_main(lambda: embeddings.fingerprint(folder, task.fingerprint()))
    shortened: Any = task  # writer_of has looked that its form can be
    if dims is not None:
        shortened.shorten(retriever, dims)
        weights += f", first {dims}"  # comparable with one another alone
    if layers is not None:
        shortened.keep_layers(retriever, layers)
        weights += f", {layers} layers"

    def read() -> list[Any]:
        # on rank 0 alone, and inside of on_main: the others get the refusal of --strict, too
        with left_out.one_reading(str(source), strict=strict):
            rows = distinct_passages(source) if side == "passage" else _rows(source, side, split)
            return list(embeddings.digest_of(rows))

    texts, count = on_main(read)
    rows = shard_rows or writer.store.shard_rows(count, distributed.world())
    plan = {"side": side, "dtype": dtype, "count": count, "model": weights, "texts": texts}
    plan["precision"] = precision
    how = {"side": side, "batch": batch or 64, "precision": precision}
    vectors = writer.store.write(
        out,
        lambda: _rows(source, side, split),
        writer.store.encoder_of(task, retriever, **how, **writer.of_encoder),
        plan=writer.plan(**plan, **writer.of_plan, shard_rows=rows),
    )
    if distributed.is_main():
        for line in vectors.told:
            typer.echo(f"{out}: {line}")


def _check_flags(side: str, dtype: str, precision: str, split: str | None) -> None:
    from trainer.retrieval import stored_forms

    for name, value, legal in (
        ("side", side, ("query", "passage")),
        ("dtype", dtype, stored_forms.FORMS),
        ("precision", precision, ("fp32", "bf16")),
    ):
        if value not in legal:
            raise ConfigError(f"--{name} {value}: want {' or '.join(legal)}.")
    if side == "query" and dtype in stored_forms.SMALL:
        raise ConfigError(
            f"--dtype {dtype} is for passages: questions are few, and their exact vectors find "
            "more. Use float16 or float32."
        )
    if side == "passage" and split is not None:
        raise ConfigError("--split is for questions; a corpus is encoded whole. Leave it out.")


@options.guard
def bm25(
    queries: QueriesFile,
    passages: PassagesFile,
    out: Annotated[Path, typer.Option("--out", help="The run file to write.")],
    depth: Depth = 100,
    split: OfSplit = None,
    run_format: Format = "trec",
) -> None:
    """Find passages by their words (BM25), to compare with or to mine from; requires the extra
    bm25.
    """
    from trainer.data.readers import passages as corpora
    from trainer.data.readers.questions import queries as read_queries
    from trainer.retrieval import negatives

    check_run(run_format, out, _BM25)
    questions = list(read_queries(queries, split))
    write_run(
        out,
        negatives.bm25(questions, corpora.distinct_passages(passages), depth=depth),
        run_format,
        _BM25,
    )


@dataclass(frozen=True)
class RankingOptions:
    """What of a run file is measured."""

    run: Annotated[
        Path | None, typer.Option("--run", help="The run file to measure; mine says which formats.")
    ] = None
    qrels: QrelsFile = None
    queries: Annotated[Path | None, typer.Option("--queries", help="JSON lines of questions.")] = (
        None
    )
    passages: Annotated[
        Path | None,
        typer.Option(
            "--passages", help="The corpus, to measure answer_recall@k of questions with answers."
        ),
    ] = None
    only: Annotated[
        Path | None,
        typer.Option(
            "--only", help="A file with one question id per line; only these questions count."
        ),
    ] = None
    at: At = None
    remove_query: Annotated[
        bool,
        typer.Option("--remove_query", help="Leave out the passage with the question's own id."),
    ] = False
    scored: Scored = None


def measures_of(asked: RankingOptions, split: str | None, *, strict: bool) -> dict[str, float]:
    """The measures of a run file: recall, MRR, nDCG and MAP as trec_eval defines them, and DPR's
    answer recall; or how far a reader agrees with a ranking.
    """
    from trainer.config.own_rows import OwnRows, Splits
    from trainer.data import left_out
    from trainer.data.readers import retrieved
    from trainer.data.readers.jsonl import lines
    from trainer.data.readers.rankings import read_run
    from trainer.retrieval import rankings
    from trainer.retrieval.judging import run_measures

    if (asked.run is None) == (asked.scored is None):
        raise ConfigError("give --run or --scored, one of them.")
    _refuse_unread(asked, split)
    if asked.run is None:
        path = asked.scored or Path()
        of_file = OwnRows(files=Splits(test=path.name))
        how: dict[str, Any] = {"source": "fid", "contexts": 10**9, "sort_by_score": False}
        rows = retrieved.rows(path.parent, "test", own=of_file, **how)
        scores = ([ctx["score"] for ctx in row["ctxs"] if "score" in ctx] for row in rows)
        return rankings.mean_agreement(scores, at=asked.at or [1, 2, 5])
    questions = _queries(asked.queries, split)
    only = None if asked.only is None else lines(asked.only)
    only_ids = None if only is None else {one for _, text in only for one in text.split()}
    read = read_run(asked.run)
    if asked.remove_query:
        read = rankings.without_query(read)
    of_split = {query.id for query in questions} if split is not None else None
    for names in (only_ids, of_split):
        read = read if names is None else {name: read[name] for name in read if name in names}
    cuts = asked.at or [1, 5, 10, 20, 100]
    with left_out.one_reading(str(asked.run), strict=strict):
        return run_measures(
            read, questions, asked.qrels, passages=asked.passages, only=only_ids, at=cuts
        )


def _refuse_unread(asked: RankingOptions, split: str | None) -> None:
    """ConfigError for flags that nothing would read."""
    if asked.scored is not None:
        given = [
            f"--{field.name}"
            for field in fields(RankingOptions)
            if field.name not in ("scored", "at") and getattr(asked, field.name) != field.default
        ]
        given += [] if split is None else ["--split"]
        if given:
            raise ConfigError(
                f"judge: got {', '.join(given)} with --scored, whose rows are measured as they "
                "are. Leave them out."
            )
    if split is not None and asked.queries is None:
        raise ConfigError(
            f"--split {split} says which of --queries count, and there are none. Give --queries, "
            "or the ids by --only."
        )


@options.guard
def mine(
    runs: Annotated[
        list[Path],
        typer.Option(
            "--run",
            help="The run file: TREC's columns, or question, passage, and score or rank. May be "
            "given several times: their hits are taken in turn.",
        ),
    ],
    queries: QueriesFile,
    passages: PassagesFile,
    out: Annotated[
        Path, typer.Option("--out", help="Tevatron's training file to write, JSON lines.")
    ],
    qrels: QrelsFile = None,
    split: OfSplit = None,
    most: Annotated[
        int, typer.Option("--count", min=1, help="The largest number of negatives per question.")
    ] = 30,
    first: Annotated[
        int, typer.Option("--first", min=1, help="The first rank that may be a negative.")
    ] = 1,
    last: Annotated[
        int, typer.Option("--last", min=1, help="The last rank that may be a negative.")
    ] = 200,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", help="Random seed of the sample, if more passages qualify than are wanted."
        ),
    ] = 42,
    keep_answers: Annotated[
        bool,
        typer.Option("--keep_answers", help="Allow passages that hold an answer as negatives."),
    ] = False,
    strict: Strict = False,
) -> None:
    """Write a training file with hard negatives: passages that rank high and are not relevant."""
    from trainer.data import left_out
    from trainer.data.readers import passages as corpora
    from trainer.data.readers.questions import queries as read_queries
    from trainer.data.readers.rankings import read_qrels, read_run
    from trainer.files.atomic import check_output
    from trainer.retrieval import negatives

    check_output(out)
    window = negatives.RankRange(most, first, last, seed, keep_answers)
    questions = list(read_queries(queries, split))
    read = [read_run(run) for run in runs]
    judgements = None if qrels is None else read_qrels(qrels)
    positives = negatives.positives_of(questions, judgements)
    hits = negatives.in_turn(read, window)
    needed = {hit.passage for query in questions for hit in hits.get(query.id, [])}
    texts = corpora.passages_with_ids(passages, needed.union(*positives.values()))
    rows = negatives.training_rows(read, questions, texts, positives=positives, window=window)
    strangers = {*hits, *(judgements or ())} if split is None else ()
    rows = negatives.noting_strangers(rows, strangers, questions)
    names = ", ".join(map(str, runs))
    count = negatives.write_rows(out, left_out.refusing(rows, names, strict=strict))
    typer.echo(f"{out}: {count} of {len(questions)} questions")


@options.guard
def contexts(
    run: RunFile,
    queries: QueriesFile,
    passages: PassagesFile,
    out: Annotated[
        Path,
        typer.Option("--out", help="FiD's file to write: a JSON list, or JSON lines (.jsonl)."),
    ],
    depth: Depth = 100,
    split: OfSplit = None,
    strict: Strict = False,
) -> None:
    """Write the input of a reader: every question with its answers and the passages of a run
    file.
    """
    from trainer.data import left_out
    from trainer.data.readers import passages as corpora
    from trainer.data.readers.questions import queries as read_queries
    from trainer.data.readers.rankings import read_run
    from trainer.files.atomic import check_output
    from trainer.retrieval import negatives

    check_output(out)
    questions, of_run = list(read_queries(queries, split)), read_run(run)
    needed = {hit.passage for query in questions for hit in of_run.get(query.id, [])[:depth]}
    texts = corpora.passages_with_ids(passages, needed)
    rows = negatives.reader_rows(of_run, questions, texts, depth=depth)
    rows = negatives.noting_strangers(rows, of_run if split is None else (), questions)
    count = negatives.write_rows(out, left_out.refusing(rows, str(run), strict=strict))
    typer.echo(f"{out}: {count} questions")


def _rows(source: Path, side: str, split: str | None) -> Any:
    from trainer.data.readers.passages import passages
    from trainer.data.readers.questions import queries

    if side == "passage":
        return passages(source)
    return ({"id": query.id, "text": query.text} for query in queries(source, split))


def check_run(run_format: str, out: Path, tag: str) -> None:
    """ConfigError for a format that is none of run files, for a file that cannot be written
    (check_output), and for a tag that would be no column, or several.
    """
    from trainer.files.atomic import check_output
    from trainer.retrieval.rankings import RunFormat

    if run_format not in get_args(RunFormat):
        raise ConfigError(f"--format {run_format}: want {', '.join(get_args(RunFormat))}.")
    if len(tag.split()) != 1 or tag != tag.strip():
        raise ConfigError(f"--tag {tag!r}: want one word, for it is a column of the run file.")
    check_output(out)


def write_run(out: Path, of_run: Rankings, run_format: Any, tag: str) -> None:
    """Write rankings as a run file, and tell how much it holds."""
    from trainer.retrieval import rankings

    rankings.write_run(out, of_run, format=run_format, tag=tag)
    typer.echo(f"{out}: {len(of_run)} questions, {sum(map(len, of_run.values()))} hits")


def _queries(path: Path | None, split: str | None) -> list[Query]:
    from trainer.data.readers.questions import queries

    return [] if path is None else list(queries(path, split))
