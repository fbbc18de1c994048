"""Applies a trained model to new rows, and lets a reader answer questions about texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands import options
from trainer.commands.evaluate import Seed, Temperature, TopP
from trainer.commands.options import BatchSize, NumAnswers, NumBeams
from trainer.config.flags import CacheDir, Strict
from trainer.errors import ConfigError

Trained = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_EXPORT",
        help="The trained model: results/ID, its final/, or a folder that export wrote.",
    ),
]
Rows = Annotated[
    Path,
    typer.Option(
        "--data_path", help="A file of rows, or a folder of such files; they need no answers."
    ),
]
Out = Annotated[
    Path, typer.Option("--out", help="The file to write: one JSON line for each row, in order.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max_tokens",
        min=1,
        help="Largest number of tokens in a text; default: as in the experiment.",
    ),
]


@options.guard
def predict(
    model: Trained,
    data_path: Rows,
    out: Out,
    batch: BatchSize = None,
    max_tokens: MaxTokens = None,
    num_beams: NumBeams = 1,
    num_answers: NumAnswers = 1,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    cache_dir: CacheDir = Path("tmp-cache"),
    strict: Strict = False,
) -> None:
    """Write the predictions of a trained model for each row of a file; under torchrun, on all
    ranks. After a kill, the same command goes on where it was.
    """
    from trainer.evaluation import predict as prediction
    from trainer.protocol.abilities import Prediction, Search

    how = Prediction(Search(num_beams, num_answers, temperature, top_p, seed), max_tokens)
    rows: dict[str, Any] = {"batch": batch, "cache_dir": cache_dir, "strict": strict}
    request = prediction.RowsToPredict(model, data_path, out, how, **rows)
    typer.echo(f"{prediction.predict(request)} rows in {out}")


Contexts = Annotated[
    list[Path], typer.Option("--context", help="A text file to read; may be given several times.")
]
Questions = Annotated[
    list[str] | None,
    typer.Option(
        "--question",
        help="A question; may be given several times. Without it, each line of "
        "standard input is one.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]


@options.guard
def read(
    model: Trained,
    context: Contexts,
    question: Questions = None,
    device: Device = "cpu",
    cache_dir: CacheDir = Path("tmp-cache"),
) -> None:
    """Read texts once with a cross_attention model, and answer questions about them. Each answer is
    a line, printed while it is generated.
    """
    from trainer.evaluation.predict import export_of

    options.log_to_stderr()  # standard output is for answers
    texts: list[str] = []
    for file in context:
        try:
            texts.append(file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--context {file}: cannot be read ({error}). Give a text file in UTF-8."
            ) from None
    values, folder = export_of(model)
    reader = options.module_of(values["task"], "reader", "read texts with")
    reading = reader.Reader(folder, device=device, cache_dir=cache_dir).read(texts)
    for text in question or (line.strip() for line in sys.stdin):
        if text:
            for piece in reading.stream(text):
                typer.echo(piece, nl=False)
            typer.echo()
