"""The commands of the plausibility verifier: convert, calibrate, score."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands import options
from trainer.config.flags import CacheDir, Strict
from trainer.errors import ConfigError

Declarer = Annotated[
    str,
    typer.Option(
        "--declarer",
        help="How statements are made: original, or rules, which tries more rules "
        "before the converter.",
    ),
]
OnlySplit = Annotated[
    str | None,
    typer.Option("--split", help="Convert only this split; default: every split that is there."),
]
Variant = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME=VALUE", help="A variant of the data set, such as case=fit."
    ),
]


@options.guard
def convert(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET", help="The data set: copa, qasc, ..., or unifiedqa for its TSV files."
        ),
    ],
    raw: Annotated[
        Path, typer.Option("--in", help="The publisher's folder, or the one file of a split.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="The folder in which to write <task>/<split>.json, .tsv and report.json."
        ),
    ],
    split: OnlySplit = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Name of the folder below --out; default DATASET.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on rows that would be left out.")
    ] = False,
    converter: Annotated[
        str | None,
        typer.Option("--converter", help="Question converter: the folder or Hub id of a T5."),
    ] = None,
    declarer: Declarer = "original",
    variant: Variant = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Texts per forward of the converter.")
    ] = 64,
    cache_dir: CacheDir = Path("tmp-cache"),
) -> None:
    """Make statement groups for the plausibility verifier from publishers' question-answering
    data.
    """
    from trainer.recipes.vera import convert as conversion

    model = None
    if converter is not None:
        from trainer.recipes.vera.neural import QuestionConverter

        model = QuestionConverter(converter, cache_dir=cache_dir, batch=batch)
    request = conversion.Conversion(
        dataset,
        raw,
        out,
        split=split,
        task=task,
        variants=conversion.values_by_name(variant or []),
        declarer=conversion.declarer_of(declarer),
        is_strict=strict,
    )
    for report in conversion.convert(request, model):
        typer.echo("\n".join(report.lines()))


@options.guard
def calibrate(
    which: options.ExperimentOptions,
    model: options.Model = "best",
    split: options.Split = "valid",
    batch: options.BatchSize = None,
    objective: Annotated[
        str, typer.Option("--objective", help="What the temperature minimises: ece or nll.")
    ] = "ece",
    strict: Strict = False,
) -> None:
    """Fit the temperature of a trained verifier on a split, and store it with the model."""
    from trainer.evaluation.run import Question, model_folder, pooled_values
    from trainer.runtime import distributed
    from trainer.runtime.distributed import on_main

    values = which.values()
    use = options.module_of(values["task"], "use", "calibrate or score")
    if objective not in ("ece", "nll"):
        raise ConfigError(f"--objective {objective}: no such objective. Use ece or nll.")
    distributed.init()
    run_options = which.run_options(strict=strict)
    question = Question(values, model=model, split=split, batch=batch)
    table = pooled_values(question, run_options, use.POOL)
    folder = model_folder(question, run_options)
    report = which.savedir_base / options.id_of(values) / f"calibration-{folder.name}"

    def store() -> dict[str, Any]:
        return asdict(
            use.calibrate_model(folder, table, split=split, objective=objective, report=report)
        )

    for name, value in on_main(store).items():
        if distributed.is_main():
            typer.echo(f"{name} {value:.6f}" if isinstance(value, float) else f"{name} {value}")


@options.guard
def score(
    which: options.ExperimentOptions,
    model: options.Model = "best",
    source: Annotated[
        Path | None,
        typer.Option("--in", help="A file with one statement per line; default: standard input."),
    ] = None,
) -> None:
    """Write a line for each statement: its plausibility from 0 to 1, a tab, and the statement."""
    from trainer.data.readers.jsonl import lines
    from trainer.evaluation.run import Question, open_model

    options.log_to_stderr()  # standard output is for scores
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("score runs on one device: start it with python, not with torchrun.")
    values = which.values()
    use = options.module_of(values["task"], "use", "calibrate or score")
    texts = (text for _, text in lines(source)) if source else sys.stdin
    statements = [text.strip() for text in texts if text.strip()]
    task, verifier, folder = open_model(Question(values, model=model), which.run_options())
    for text, plausibility in zip(
        statements, use.plausibilities(task, verifier, statements, folder=folder), strict=True
    ):
        typer.echo(f"{plausibility:.6f}\t{text}")
