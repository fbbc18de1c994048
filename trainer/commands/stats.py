"""The statistics of an experiment's data, before anything is trained on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer.commands import options
from trainer.commands.options import CacheDir, DataPath, ExpConfigs, ExpGroup, ExpId, Steps

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder to write; default <cache_dir>/stats/<exp_id>.")
]
Splits = Annotated[
    str, typer.Option("--splits", help="Names with commas between: train, valid, test.")
]
Root = Annotated[
    Path,
    typer.Option("-sb", "--savedir_base", help="Where a base that is an experiment was trained."),
]


@options.guarded
def stats(
    exp_group: ExpGroup = None,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    steps: Steps = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    savedir_base: Root = Path("results"),
    splits: Splits = "train,valid",
    out: Out = None,
) -> None:
    """Lengths, what limits cut off, padding, duplicates and three decoded rows: a table,
    stats.json, stats.png.
    """
    from trainer import tasks
    from trainer.files.atomic import refusals, write_json
    from trainer.protocol.task import Places
    from trainer.statistics import picture, table
    from trainer.statistics.report import report

    values = options.experiment(exp_group, exp_id, exp_configs, savedir_base, steps)
    cfg = tasks.parse(values)
    task = tasks.load(cfg, Places(data_path, cache_dir, savedir_base))
    names = [name.strip() for name in splits.split(",") if name.strip()]
    found = {
        "experiment": options.id_of(values),
        **report(cfg, task, names, cache_dir=cache_dir),
    }
    folder = out or cache_dir / "stats" / options.id_of(values)
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "stats.json", found, is_durable=False)
    picture.draw(folder / "stats.png", found)
    typer.echo(table.text(found, is_coloured=sys.stdout.isatty()))
    typer.echo(f"wrote {folder / 'stats.json'} and {folder / 'stats.png'}")
