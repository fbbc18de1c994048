"""How much memory an experiment will need, before it is launched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands import options
from trainer.commands.options import CacheDir, DataPath, ExpConfigs, ExpGroup, ExpId, Steps
from trainer.errors import ConfigError

DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="a100-80, h200, ..., or a size such as 24GiB; default: the GPU here."
    ),
]
World = Annotated[int | None, typer.Option("--world", min=1, help="Devices that train together.")]
DeepSpeed = Annotated[
    str | None, typer.Option("--deepspeed", help="DeepSpeed JSON, or a name in ds_configs/; auto.")
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Plan for another value: data.source_tokens=512."
    ),
]


@options.guarded
def plan(
    savedir_base: Annotated[
        Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")
    ] = Path("results"),
    exp_group: ExpGroup = None,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    steps: Steps = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    device: DeviceName = None,
    world: World = None,
    deepspeed: DeepSpeed = None,
    change: Change = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Say how much memory a run needs, by category, and what would fit; runs its steps without
    computing anything.
    """
    from trainer.memory import launch, plan_text
    from trainer.memory.advice import advise
    from trainer.memory.measure import measuring
    from trainer.memory.plan import make
    from trainer.training.options import Options

    values = options.experiment(exp_group, exp_id, exp_configs, savedir_base, steps)
    for text in change or []:
        values = _changed(values, text)
    ranks = world or int(os.environ.get("WORLD_SIZE", "1"))
    given = Options(
        savedir_base,
        data_path=data_path,
        cache_dir=cache_dir,
        deepspeed=deepspeed,
        device=device,
    )
    target = launch.device(device)
    cublas = launch.cublas(target)
    subject = _subject(values, given, ranks)
    with measuring():
        made = make(subject, cublas=cublas)
        advice = advise(subject, made, target, cublas=cublas)
    if as_json:
        typer.echo(json.dumps({"plan": made.plan.plain(), "advice": advice.plain()}, indent=1))
    else:
        typer.echo(plan_text.shown(made.plan, advice, target, world=ranks))


def _subject(values: dict[str, Any], given: Any, world: int) -> Any:
    from trainer.data.token_store import store_of
    from trainer.memory.subject import subject_of
    from trainer.training import run_plan

    checked = run_plan.plan(values, given, world=world, rank=0)
    return subject_of(
        values,
        ds=checked.ds,
        sharding=checked.sharding,
        places=given.places,
        store_of=lambda task, split: store_of(task, split, given.cache_dir),
        answers=bool(checked.cfg.train.answers or given.extra_evals),
    )


def _changed(values: dict[str, Any], text: str) -> dict[str, Any]:
    from trainer.memory.measure import changed

    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text}: want KEY=VALUE, such as data.source_tokens=512.")
    try:
        return changed(values, key.strip(), json.loads(value))
    except json.JSONDecodeError:
        return changed(values, key.strip(), value)
