"""Prepares data for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.commands import options
from trainer.config.flags import NumProc, Strict
from trainer.errors import ConfigError, LatheError

if TYPE_CHECKING:
    from filelock import FileLock

Out = Annotated[
    Path, typer.Option("--out", help="The folder to write; an interrupted one is continued.")
]
Source = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME=FOLDER_OR_HUB_ID",
        help="Where a published set is; may be given several times.",
    ),
]
Shuffles = Annotated[
    int,
    typer.Option(
        "--hotpotqa_shuffles",
        min=1,
        help="How often each training row of HotpotQA is written, each time with its "
        "passages in another order.",
    ),
]
BatchTokens = Annotated[
    int,
    typer.Option("--batch_tokens", min=1, help="Tokens per device and forward, padding included."),
]
ShardTokens = Annotated[
    int | None,
    typer.Option(
        "--shard_tokens", min=1, help="Tokens per file; a kill loses at most the file in progress."
    ),
]


@options.guard
def prepare(
    out: Out,
    which: options.UntrainedOptions,
    source: Source = None,
    hotpotqa_shuffles: Shuffles = 3,
    batch_tokens: BatchTokens = 16_384,
    shard_tokens: ShardTokens = None,
    num_proc: NumProc = None,
    strict: Strict = False,
) -> None:
    """Write the rows of a group, and its frozen base's states of their contexts; under torchrun, on
    every device.

    The folder is then the --data_path of its runs. data.encode='cached' reads the states, 'online'
    leaves them alone.
    """
    from filelock import FileLock

    from trainer import tasks
    from trainer.runtime import distributed
    from trainer.runtime.distributed import on_main
    from trainer.tasks.cross_attention.encoder_states.writing import gib

    values = which.values()
    module = options.module_of(values["task"], "preparation", "prepare", room="recipes")
    places = which.run_options(num_proc=num_proc).places
    if which.data_path is not None and out.resolve() == which.data_path.resolve():
        raise ConfigError(f"--out {out}: is --data_path itself. Name another folder.")
    pairs = [text.partition("=") for text in source or ()]
    wrong = [name for name, _, place in pairs if not place]
    if wrong:
        raise ConfigError(
            f"--source {wrong[0]}: want NAME=FOLDER_OR_HUB_ID, such as squad_v2=rajpurkar/squad_v2."
        )
    sources = {name: place for name, _, place in pairs}
    distributed.init()
    request = module.Preparation(
        out, sources, hotpotqa_shuffles, batch_tokens, shard_tokens, strict=strict
    )
    cfg = tasks.parse(values)
    lock = FileLock(out.with_name(f".{out.name}.lock"), timeout=0)  # a killed process lets go of it
    on_main(lambda: _claim(out, lock))
    on_main(lambda: module.write_rows(cfg, places, request))
    content = module.write_states(cfg, places, request)
    if distributed.is_main():
        size, plan = content.bytes_on_disk, content.plan
        rows = ", ".join(f"{count} {split}" for split, count in content.rows.items())
        typer.echo(
            f"{content.folder}: {plan.count} distinct contexts of {content.met} in {rows} rows, "
            f"{plan.tokens} tokens, "
            f"{gib(size)}, {size / (plan.tokens * plan.width):.4f} bytes per element"
        )


def _claim(out: Path, lock: FileLock) -> None:
    """Hold `out` for this process alone."""
    from filelock import Timeout

    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"--out {out}: another process is preparing it. Wait for it, or name another."
        ) from None


@options.guard
def fetch(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The set to fetch: nq, scifact, ..., or tokenizers; without it, all sets "
            "are listed."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder to write; for a set it must not exist yet."),
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(
            "--mirror",
            help="Read SET/FILE below this address or folder, instead of the publisher's files.",
        ),
    ] = None,
) -> None:
    """Fetch a public set, check its digests, and write it in the layout of the built-in groups."""
    from trainer.files import hub
    from trainer.files.atomic import refuse_existing
    from trainer.recipes.public_sets import catalogue, fetching

    if name is None:
        for each, public in catalogue.SETS.items():
            groups = f"; read by {', '.join(public.groups)}" if public.groups else ""
            typer.echo(f"{each}: {public.about}. Licence: {public.licence}{groups}")
        typer.echo(f"tokenizers: {', '.join(catalogue.TOKENIZERS)}, of the built-in groups")
        return
    public = None if name == "tokenizers" else fetching.set_of(name)
    if out is None:
        raise ConfigError("--out is missing: name the folder to write.")
    if public is None:
        hub.use_cache_where_unreachable()
        missing = fetching.fetch_tokenizers(out)
        if missing:
            names = "; ".join(f"{each} ({why})" for each, why in missing.items())
            raise LatheError(f"not had: {names}. Put such a folder at {out} by hand.")
        return
    refuse_existing(out)
    if mirror is not None and Path(mirror).is_dir():
        mirror = Path(mirror).resolve().as_uri()
    fetching.fetch(name, out, mirror=mirror)
    typer.echo(f"{out}: {public.about}. Licence: {public.licence}")
