"""`fuse`: one run file of several, such as words and vectors, or a search and its reranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from trainer.commands import options
from trainer.commands.retrieval import Depth, Format, check_run, write_run
from trainer.config.flags import Strict
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.retrieval.rankings import Rankings


@options.guard
def fuse(
    runs: Annotated[
        list[Path], typer.Option("--run", help="A run file; given twice or more often.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The run file to write.")],
    weights: Annotated[
        list[float] | None,
        typer.Option("--weight", help="Of each --run, in their order; all 1 without it."),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="What is added: scores, scaled to 0..1 for each question, or ranks "
            "(reciprocal rank fusion).",
        ),
    ] = "scores",
    depth: Depth = 100,
    run_format: Format = "trec",
    tag: Annotated[str, typer.Option("--tag", help="trec: the name of the run.")] = "fused",
    strict: Strict = False,
) -> None:
    """Order the passages of several run files by the sum of their scores or ranks: a search by
    words with one by vectors, or a search with its reranking.
    """
    from trainer.data import left_out
    from trainer.data.readers.rankings import read_run
    from trainer.retrieval import rankings

    check_run(run_format, out, tag)
    of_each = _checked(len(runs), weights)
    if by not in get_args(rankings.Fusion):
        raise ConfigError(f"--by {by}: want {', '.join(get_args(rankings.Fusion))}.")
    how: Any = {"by": by, "depth": depth}
    with left_out.one_reading("questions", strict=strict):
        read = [read_run(path) for path in runs]
        _refuse_strangers(runs, read)
        of_run = rankings.fused(read, of_each, **how)
    write_run(out, of_run, run_format, tag)


def _refuse_strangers(paths: Sequence[Path], runs: Sequence[Rankings]) -> None:
    """ConfigError for a run that has no question in common with the others."""
    for number, (path, run) in enumerate(zip(paths, runs, strict=True)):
        others = [other for at, other in enumerate(runs) if at != number]
        if not any(question in other for other in others for question in run):
            first = next(iter(run), None)
            raise ConfigError(
                f"--run {path}: its questions, such as {first!r}, are in no other run, so that "
                "nothing would be fused. Give runs of the same questions."
            )


def _checked(num_runs: int, weights: list[float] | None) -> list[float]:
    """The weight of each run. ConfigError for one run alone, and for weights that do not fit."""
    if num_runs < 2:
        raise ConfigError("--run is given once: want two run files or more to fuse.")
    weights = weights or [1.0] * num_runs
    if len(weights) != num_runs:
        raise ConfigError(f"{len(weights)} --weight for {num_runs} --run: give one for each run.")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"--weight {weight}: want a number of at least 0.")
    if not any(weights):
        raise ConfigError("every --weight is 0: nothing would order the passages. Raise one.")
    return weights
