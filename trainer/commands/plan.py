"""Before training: statistics of an experiment's data, its memory and its time. And how fast a
device is.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.commands import options
from trainer.config.flags import Strict
from trainer.errors import ConfigError, DataError, DoesNotFitError

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.plan.memory.subject import Subject
    from trainer.plan.time.target import Target
    from trainer.protocol.task import Task
    from trainer.training.options import Options

DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Plan for h200, 8xh100-80, a size such as 24GiB, or the file of "
        "calibrate-device; default: the GPU here.",
    ),
]
World = Annotated[
    int | None, typer.Option("--world", min=1, help="Number of devices that train together.")
]
Nodes = Annotated[
    int,
    typer.Option("--nodes", min=1, help="Number of machines; each has the same number of devices."),
]
Fastest = Annotated[
    bool, typer.Option("--fastest", help="Show the ten fastest ways to train that fit into memory.")
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price_per_gpu_hour",
        min=0.0,
        help="Price of a device for an hour; --fastest then shows what each way costs.",
    ),
]
DeepSpeed = Annotated[
    str | None,
    typer.Option(
        "--deepspeed",
        help="Plan for this DeepSpeed file: a JSON file, a name in ds_configs/, or auto.",
    ),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Plan for another value of a key, such as data.source_tokens=512.",
    ),
]
StatsFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder to write; default <cache_dir>/stats/<exp_id>.")
]
Splits = Annotated[
    str, typer.Option("--splits", help="Splits, separated by commas: train, valid, test.")
]


@options.guard
def stats(
    which: options.UntrainedOptions,
    splits: Splits = "train,valid",
    out: StatsFolder = None,
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


@options.guard
def plan(
    which: options.UntrainedOptions,
    device: DeviceName = None,
    world: World = None,
    nodes: Nodes = 1,
    deepspeed: DeepSpeed = None,
    change: Change = None,
    fastest: Fastest = False,
    price_per_gpu_hour: Price = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
    strict: Strict = False,
) -> None:
    """Predict the memory of a run by category, what would fit, and how long it takes. It runs the
    steps without computing anything.
    """
    gc.disable()  # garbage collections of imported objects took a fifth of a plan's time
    _import_models_without_scipy()
    from trainer.data import left_out
    from trainer.plan.memory.measure import with_value
    from trainer.plan.time.target import target_of

    if as_json:
        options.log_to_stderr()
    values = which.values()
    for text in change or []:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text}: want KEY=VALUE, such as data.source_tokens=512.")
        with suppress(json.JSONDecodeError):  # text that is not JSON is the value itself
            value = json.loads(value)
        values = with_value(values, key.strip(), value)
    target = target_of(device, world=world, nodes=nodes)
    run_options = which.run_options(deepspeed=deepspeed)
    with left_out.settling(None, strict=strict):
        subject = subject_for(values, run_options, target.cluster.world)
    if fastest:
        _show_fastest(subject, target, price_per_gpu_hour, as_json=as_json)
    else:
        _show_plan(subject, target, as_json=as_json)


def _import_models_without_scipy() -> None:
    """Import the models of transformers (5.23) without scipy.optimize, which only the losses for
    object detection need. It would take 0.3 s of CPU time.
    """
    from trainer.models.packed.replaced import replaced

    utils = importlib.import_module("transformers.utils")
    with replaced(utils, "is_scipy_available", lambda: False):
        importlib.import_module("transformers.modeling_utils")


def _show_plan(subject: Subject, target: Target, *, as_json: bool) -> None:
    from trainer.plan.forecast import forecast
    from trainer.plan.memory.fake_step import answer_all
    from trainer.plan.memory.measure import measuring

    with measuring(answer_all):
        estimate = forecast(subject, target)
    typer.echo(json.dumps(estimate.plain(), indent=1) if as_json else estimate)


def _show_fastest(subject: Subject, target: Target, price: float | None, *, as_json: bool) -> None:
    from trainer.plan.memory.fake_step import answer_all
    from trainer.plan.memory.measure import measuring
    from trainer.plan.time import text
    from trainer.plan.time.fastest import ways, why

    if target.rates is None or target.device is None:
        raise ConfigError(f"--fastest: {target.no_time}")
    if subject.sharding.sharing > 1:
        raise ConfigError(
            f"--fastest with sequence_parallel_size={subject.sharding.sharing}: it tries the files "
            "of ds_configs/, in which no devices share rows. Plan without --fastest."
        )
    world = target.cluster.world
    planned = subject.of_processor() if target.device.is_processor else subject
    with measuring(answer_all):
        all_ways = ways(
            planned,
            target.rates,
            target.cluster,
            usable=target.device.usable(world),
        )
    if not all_ways:
        raise DoesNotFitError(
            f"--fastest: no way to train fits into {target.device.name}, not even one row at a "
            "time with recomputation and offload. Give more or larger devices, or shorter rows."
        )
    best = all_ways[0].changes(subject.values)
    if as_json:
        ten = [asdict(way) | {"step_s": way.time.total} for way in all_ways[:10]]
        typer.echo(json.dumps({"ways": ten, "values": best}, indent=1))
        return
    steps = subject.cfg.train.steps
    reason = why(all_ways[0], all_ways[1:])
    typer.echo(text.fastest(all_ways, reason, steps=steps, world=world, price=price, values=best))


def subject_for(values: dict[str, Any], run_options: Options, world: int) -> Subject:
    """The subject of a plan, with the rows that a run would read."""
    from trainer.config.mistakes import OFFLOAD_OF_NOTHING, takes_nothing_away
    from trainer.data.stream.store import is_streamed
    from trainer.data.token_store import store_of
    from trainer.plan.memory.subject import subject_of
    from trainer.training import run_plan

    checked = run_plan.plan(values, run_options, world=world, rank=0)
    if takes_nothing_away(checked.values["train"]):  # as a run would refuse it
        raise ConfigError(OFFLOAD_OF_NOTHING)

    def store(task: Task, split: str) -> TokenStore:
        if is_streamed(task):
            raise DataError("data.stream encodes rows only while they are trained on")
        return store_of(task, split, run_options.cache_dir)

    return subject_of(
        values,
        ds=checked.ds,
        sharding=checked.sharding,
        places=run_options.places,
        store_of=store,
        answers=bool(checked.cfg.train.answers or run_options.extra_evals),
    )


@options.guard
def calibrate_device(
    out: Annotated[
        Path, typer.Option("--out", help="JSON to write; `plan --device FILE` reads it.")
    ] = Path("device.json"),
) -> None:
    """Measure how fast this device multiplies, moves memory, launches and writes to disk; under
    torchrun also the links between all ranks.
    """
    from trainer.files.atomic import write_json
    from trainer.plan.time.calibration import calibrate
    from trainer.plan.time.rates import plain
    from trainer.runtime import distributed

    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {out}: there is no folder {out.parent}. Make it, or give another."
        )
    distributed.init()
    rates = calibrate(out.absolute().parent)
    if distributed.is_main():
        write_json(out, plain(rates))
        products = max(rate for _, rate in rates.matmul["float32"])
        typer.echo(
            f"{out}: {rates.name}: fp32 products {products / 1e9:.1f} GFLOP/s, "
            f"memory {rates.memory_bytes_per_s / 1e9:.1f} GB/s, "
            f"{rates.launch_s * 1e6:.1f} us an operator, "
            f"AdamW {rates.update_s * 1e9:.2f} ns a number"
        )
