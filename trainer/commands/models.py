"""Imports published models, and exports, merges and averages trained ones."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands import options
from trainer.config.flags import CacheDir, DataPath
from trainer.errors import ConfigError
from trainer.files.atomic import refusals

TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="The task that trains such models, such as fid.")
]
Out = Annotated[Path, typer.Option("--out", help="The folder to write; it must not exist yet.")]
CompatCrossBias = Annotated[
    bool,
    typer.Option("--compat_cross_bias", help="fid: keep the position bias of cross-attention."),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Write the tokenizer of this folder or Hub id into the folder, too."
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", help="fid: the layout to write, t5 (default), or fid for facebookresearch/FiD."
    ),
]

Merge = Annotated[
    bool,
    typer.Option("--merge", help="cross_attention: also write the base's weights into the folder."),
]


@options.guard
def import_(
    task: TaskName,
    source: Annotated[
        Path,
        typer.Argument(metavar="FOLDER_OR_FILE", help="A published model: a folder or a file."),
    ],
    out: Out,
    compat_cross_bias: CompatCrossBias = False,
    tokenizer: TokenizerName = None,
) -> None:
    """Read a published model and write a folder that experiments take as their base."""
    options = {"compat_cross_bias": compat_cross_bias or None, "tokenizer": tokenizer}
    _interchange(task, "import_model", options)(source, out=out)
    _tell(out)


@options.guard
def export(
    task: TaskName,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A model of ours: the best/ or final/ folder of a run."
        ),
    ],
    out: Out,
    layout: Layout = None,
    merge: Merge = False,
) -> None:
    """Read a trained model and write it in the format of other programs."""
    from trainer import tasks
    from trainer.exports import card, record
    from trainer.models import adapters

    has_export = (Path(tasks.__file__).parent / task / "interchange.py").is_file()
    if task in tasks.names() and not has_export and (folder / "config.json").is_file():
        raise ConfigError(
            f"export {task} {folder}: this folder is already as the Hub has models; nothing is to "
            f"be done. Load it with AutoModel....from_pretrained({str(folder)!r}), or upload it."
        )
    options = {"layout": layout, "merge": merge or None}
    if task != "cross_attention":  # whose own folders hold adapters beside the added layers
        adapters.refuse(folder, because="which other programs do not read")
    write = _interchange(task, "export_model", options)
    write(folder, out=out)
    source_record = record.read(folder)
    if source_record is not None:
        with refusals(out):
            own = source_record.model_copy(update={"files": record.digests(out)})
            record.write(out, own)
            card.write(out, own)
    _tell(out)


@options.guard
def merge(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="best/ or final/ of a run with adapters, or the run's folder."
        ),
    ],
    out: Out,
    savedir_base: options.SavedirBase = Path("results"),
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
) -> None:
    """Fold the adapters of a trained model into its base, and write the whole model."""
    from trainer.exports.merge import merge
    from trainer.protocol.task import Places

    merge(folder, out, Places(data_path, cache_dir, savedir_base))
    _tell(out)


@options.guard
def average(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="The folder of a run, with --last; or best/ or final/ of several runs, or runs.",
        ),
    ],
    out: Out,
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="So many of the run's last saved steps.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="One for each, such as 0.7,0.3; they sum up to 1."),
    ] = None,
    savedir_base: options.SavedirBase = Path("results"),
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
) -> None:
    """Average the last saved steps of a run, or several trained models, and write the model."""
    try:
        shares = None if weights is None else [float(word) for word in weights.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {weights}: want numbers, such as 0.7,0.3.") from None
    if last is None and len(folders) == 1:
        raise ConfigError(
            f"average {folders[0]}: one model has no average. Give --last N, which averages the N "
            "last saved steps of a run, or several folders."
        )
    if last is not None and len(folders) > 1:
        raise ConfigError(
            f"--last {last}: got {len(folders)} folders, want the folder of one run. Leave --last "
            "out to average the models of several."
        )
    from trainer.averages.average import average_folders, average_steps
    from trainer.protocol.task import Places

    if last is None:
        average_folders(folders, out, weights=shares)
    else:
        places = Places(data_path, cache_dir, savedir_base)
        average_steps(folders[0], last, out, places, weights=shares)
    _tell(out)


def _tell(out: Path) -> None:
    typer.echo(f"wrote {out}")


def _interchange(task: str, function: str, options: dict[str, Any]) -> Callable[..., None]:
    """A function of trainer/tasks/<task>/interchange.py with those options that are not None."""
    from trainer import tasks

    names = sorted(
        file.parent.name for file in Path(tasks.__file__).parent.glob("*/interchange.py")
    )
    if task not in names:
        raise ConfigError(
            f"task {task!r} has no models to import or export. Those that have: {', '.join(names)}."
        )
    code = getattr(importlib.import_module(f"trainer.tasks.{task}.interchange"), function, None)
    if code is None:
        raise ConfigError(
            f"task {task!r} has no {function}. Give a published folder to an experiment's "
            "init_from."
        )
    options = {name: value for name, value in options.items() if value is not None}
    foreign = sorted(options.keys() - inspect.signature(code).parameters.keys())
    if foreign:
        raise ConfigError(
            f"{task} knows no {', '.join(f'--{name}' for name in foreign)}. Leave it out."
        )
    return lambda path, **always: code(path, **always, **options)
