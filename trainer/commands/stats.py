"""Shows statistics of an experiment's data before training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands import options
from trainer.config.flags import Strict

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder to write; default <cache_dir>/stats/<exp_id>.")
]
Splits = Annotated[
    str, typer.Option("--splits", help="Splits, separated by commas: train, valid, test.")
]


@options.guard
def stats(
    which: options.UntrainedOptions,
    splits: Splits = "train,valid",
    out: Out = None,
    strict: Strict = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text, and no files.")
    ] = False,
) -> None:
    """Show lengths, what limits cut off, padding, duplicates and three decoded rows, and write
    stats.json and stats.png, and left_out.jsonl where rows are left out.
    """
    from trainer import tasks
    from trainer.data import left_out
    from trainer.files.atomic import refusals, write_json
    from trainer.files.packages import require
    from trainer.statistics import picture, table
    from trainer.statistics.report import report

    if as_json:
        options.log_to_stderr()
    else:
        require("matplotlib", "plots")
    values = which.values()
    cfg = tasks.parse(values)
    task = tasks.load(cfg, which.run_options().places)
    names = [name.strip() for name in splits.split(",") if name.strip()]
    statistics: dict[str, Any] = {"experiment": options.id_of(values)}
    folder = None
    if not as_json:
        folder = out or which.cache_dir / "stats" / options.id_of(values)
        with refusals(folder):
            folder.mkdir(parents=True, exist_ok=True)
    with left_out.settling(folder, strict=strict):
        statistics |= report(cfg, task, names, cache_dir=which.cache_dir)
    if folder is None:
        typer.echo(json.dumps(statistics))
        return
    write_json(folder / "stats.json", statistics, is_durable=False)
    picture.draw(folder / "stats.png", statistics)
    typer.echo(table.text(statistics, is_coloured=sys.stdout.isatty()))
    typer.echo(f"wrote {folder / 'stats.json'} and {folder / 'stats.png'}")
