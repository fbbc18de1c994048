#!/usr/bin/env python
"""Train a group of experiments here, or submit it: `trainval.py -e GROUP -sb DIR`.

Works under python, torchrun and deepspeed. Imports no torch until an experiment really runs.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands.options import CacheDir, DataPath, NumProc, id_of
from trainer.config.userfile import kind
from trainer.config.version import Version
from trainer.errors import EXIT_OK, ConfigError
from trainer.files.survive import Survival, parse
from trainer.launch.ending import end, last_words

_NO_BASE = "-sb/--savedir_base is required: the folder that holds all runs. For example -sb results"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _switch(value: str) -> str:
    """on/off, true/false, yes/no, 1/0, as researchers of this lineage write them."""
    text = value.strip().lower()
    if text not in _SWITCHES:
        close = difflib.get_close_matches(text, _SWITCHES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise typer.BadParameter(
            f"{value!r} is neither on nor off. Use one of {', '.join(_SWITCHES)}.{hint}"
        )
    return text


_SWITCHES = {
    "true": True,
    "false": False,
    "on": True,
    "off": False,
    "yes": True,
    "no": False,
    "1": True,
    "0": False,
}

# The flags, spelled as researchers of this lineage know them.
ExpGroup = Annotated[
    str | None, typer.Option("-e", "--exp_group", help="Group of experiments to run.")
]
SavedirBase = Annotated[
    Path | None, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")
]
Reset = Annotated[
    int,
    typer.Option(
        "-r", "--reset", min=0, max=1, help="1: move old folders aside and start over; 0: resume."
    ),
]
ExpId = Annotated[
    str | None,
    typer.Option("--exp_id", help="Run this one; its dictionary is read from its folder."),
]
ExpConfigs = Annotated[
    Path | None,
    typer.Option("--exp_configs", help="Python file with EXP_GROUPS, instead of the built-in one."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, help="Optimizer steps; shapes the schedule, so it changes the id."
    ),
]
LogEvery = Annotated[
    int | None,
    typer.Option(
        "--log_every",
        min=1,
        help="Steps between log lines, evaluations and saves where the dictionary does not say; "
        "default: a hundred lines a run, the others every 1000 steps.",
    ),
]
DeepSpeed = Annotated[
    str | None,
    typer.Option(
        "--deepspeed",
        help="DeepSpeed JSON, a name in ds_configs/, or auto: what fits; never changes the id.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="Plan memory for it: h200, 24GiB, ...; default: the GPU here."),
]
Force = Annotated[bool, typer.Option("--force", help="Run what does not fit by the memory plan.")]
Entity = Annotated[
    str | None, typer.Option("--wandb_entity_name", help="With a project: wandb on.")
]
Project = Annotated[
    str | None, typer.Option("--wandb_project_name", help="With an entity: wandb on.")
]
RunName = Annotated[
    str | None, typer.Option("--wandb_run_name", help="Shown name; the id is the exp_id.")
]
Trackers = Annotated[
    str | None,
    typer.Option("--trackers", help="Besides wandb: tensorboard, mlflow, or both, by a comma."),
]
LogGradients = Annotated[
    str,
    typer.Option(
        "--wandb_log_gradients",
        metavar="BOOL",
        callback=_switch,
        help="Gradient norms per parameter.",
    ),
]
ExtraEvals = Annotated[
    str,
    typer.Option(
        "--do_extra_evals",
        metavar="BOOL",
        callback=_switch,
        help="Evaluate by generated answers too.",
    ),
]
SampleSize = Annotated[
    int,
    typer.Option(
        "--generation_eval_max_sample_size", min=1, help="Rows that are answered per evaluation."
    ),
]
PushToHub = Annotated[
    str,
    typer.Option(
        "--push_to_hub", metavar="BOOL", callback=_switch, help="Upload final/ when done."
    ),
]
JobScheduler = Annotated[
    str | None,
    typer.Option(
        "-j", "--j", "--job_scheduler", help="Submit the group instead of running it here."
    ),
]
PythonBinary = Annotated[
    str,
    typer.Option(
        "--python_binary", help="With -j: launch line; NGPUS stands for the GPUs of the job."
    ),
]
JobConfigs = Annotated[
    Path | None,
    typer.Option(
        "--job_configs", help="With -j: Python file with JOB_CONFIGS, instead of the built-in one."
    ),
]
AllowDirty = Annotated[
    bool,
    typer.Option(
        "--allow_dirty", "--allow-dirty", help="With -j: send uncommitted code, with its patch."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry_run", help="Check everything, show what would run, train nothing.")
]
Survive = Annotated[
    str | None,
    typer.Option(
        "--survive",
        metavar="RANKS[+SPARES][,hang_s=S][,every=K]",
        help="Start so many ranks here, instead of torchrun, and go on when one dies or makes no "
        "progress for 60 s; they keep what they go on from in memory, every step.",
    ),
]
LocalRank = Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)]
DistUrl = Annotated[str, typer.Option("--dist_url", hidden=True)]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    exp_group: ExpGroup = None,
    savedir_base: SavedirBase = None,
    reset: Reset = 0,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    steps: Steps = None,
    log_every: LogEvery = None,
    deepspeed: DeepSpeed = None,
    device: DeviceName = None,
    force: Force = False,
    num_proc: NumProc = None,
    wandb_entity_name: Entity = None,
    wandb_project_name: Project = None,
    wandb_run_name: RunName = None,
    wandb_log_gradients: LogGradients = "false",
    trackers: Trackers = None,
    do_extra_evals: ExtraEvals = "false",
    generation_eval_max_sample_size: SampleSize = 100,
    push_to_hub: PushToHub = "false",
    job_scheduler: JobScheduler = None,
    python_binary: PythonBinary = "",
    job_configs: JobConfigs = None,
    allow_dirty: AllowDirty = False,
    dry_run: DryRun = False,
    survive: Survive = None,
    local_rank: LocalRank = None,
    dist_url: DistUrl = "env://",
    version: Version = False,
) -> None:
    """Train every experiment of a group, in order, each in its own folder SAVEDIR_BASE/<exp_id>."""
    del dist_url, version  # launch scripts pass the one; the launcher's environment decides
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))

    def command() -> int:
        if savedir_base is None:
            raise ConfigError(_NO_BASE)
        experiments = _experiments(exp_group, exp_id, exp_configs, savedir_base, steps)
        options = {
            "savedir_base": savedir_base,
            "data_path": data_path,
            "cache_dir": cache_dir,
            "reset": bool(reset) and not _is_restart(),
            "log_every": log_every,
            "deepspeed": _given(deepspeed),
            "wandb_entity": _given(wandb_entity_name),
            "wandb_project": _given(wandb_project_name),
            "wandb_run_name": _given(wandb_run_name),
            "log_gradients": _SWITCHES[wandb_log_gradients],
            "extra_evals": generation_eval_max_sample_size if _SWITCHES[do_extra_evals] else 0,
            "push_to_hub": _SWITCHES[push_to_hub],
            "device": device,
            "force": force,
            "num_proc": num_proc,
            "trackers": trackers,
            "is_shortened": steps is not None,
        }
        if job_scheduler in (None, "None", "0"):
            options["names"] = _names(exp_group, exp_configs, steps)
            return _begin(experiments, options, survive, is_dry=dry_run)
        from jobs.commands.of_trainval import submit_group

        job: dict[str, Any] = {"backend": job_scheduler, "file": job_configs, "survive": survive}
        job |= {"python_binary": python_binary, "is_dry": dry_run, "allow_dirty": allow_dirty}
        return submit_group(exp_group, experiments, options, **job)

    end(command)


def _given(text: str | None) -> str | None:
    """What launch scripts of this lineage mean by "None"."""
    return None if text in ("None", "none") else text


def _is_restart() -> bool:
    """Whether a launcher or a scheduler runs this same command again: -r 1 was obeyed the first
    time.
    """
    return any(
        int(os.environ.get(name, "0")) > 0
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def _experiments(
    group: str | None, exp_id: str | None, file: Path | None, savedir_base: Path, steps: int | None
) -> list[dict[str, Any]]:
    """The dictionaries to run, with --steps written in: of a whole group, or of one folder."""
    from exp_configs import experiments_of

    if exp_id is not None and group is not None:
        chosen = {id_of(values): values for values in experiments_of(group, file, steps)}
        if exp_id not in chosen:
            raise ConfigError(
                f"--exp_id {exp_id} is not in -e {group}, which has {', '.join(chosen)}. Leave -e "
                "out to go on with a run of that id, or --exp_id to train the group."
            )
        return [chosen[exp_id]]
    if exp_id is not None:
        values = _stored(savedir_base, exp_id)
        if id_of(values) != exp_id:
            raise ConfigError(
                f"--exp_id {exp_id}: the dictionary in that folder has id {id_of(values)}. Give "
                "the folder that name."
            )
        if steps is not None and steps != values.get("train", {}).get("steps"):
            raise ConfigError(
                f"--steps {steps} with --exp_id: the folder's dictionary fixes its steps. Leave "
                "--steps out."
            )
        return [values]
    if group is None:
        raise ConfigError(
            "-e/--exp_group is required: the name of a group in exp_configs.py. For example -e "
            "crossattn_tiny"
        )
    return experiments_of(group, file, steps)


def _names(group: str | None, file: Path | None, steps: int | None) -> dict[str, str]:
    """What people call the experiments of a group, by id; nothing of a run that is named by its
    id alone.
    """
    from exp_configs import experiments_of
    from trainer.config.groups import names

    return {} if group is None else names(group, experiments_of(group, file, steps))


def _stored(savedir_base: Path, exp_id: str) -> dict[str, Any]:
    path = savedir_base / exp_id / "exp_dict.json"
    if Path(exp_id).name != exp_id:
        raise ConfigError(
            f"--exp_id {exp_id!r} is not the name of a folder. Give the id of a run in "
            f"{savedir_base}: 32 hexadecimal digits."
        )
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"--exp_id {exp_id}: {path} does not exist. Give the id of a run in {savedir_base}; a "
            "group is trained with -e."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--exp_id {exp_id}: {path} is not JSON ({error}). Put it back from a copy, or start "
            "the experiment from its group with -e, into another --savedir_base."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--exp_id {exp_id}: {path} holds {kind(values)}, want the dictionary of an experiment."
        )
    return values


def _train(experiments: list[dict[str, Any]], options: dict[str, Any]) -> int:
    from trainer.runtime import device_defaults

    device_defaults.before_torch()
    from trainer.launch.run import run_group
    from trainer.runtime import distributed, watch
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = Options(**options)
    plans = [plan(values, chosen, world=world, rank=rank) for values in experiments]
    distributed.init()
    with watch.watched(last_words):
        return run_group(plans, chosen)


def _begin(
    experiments: list[dict[str, Any]], options: dict[str, Any], survive: str | None, *, is_dry: bool
) -> int:
    ranks = parse(survive) if survive else None
    if is_dry:
        return _dry_run(experiments, options, ranks)
    return _outlive(experiments, options, ranks) if ranks else _train(experiments, options)


def _outlive(experiments: list[dict[str, Any]], options: dict[str, Any], ranks: Survival) -> int:
    from trainer.survival.agent import Agent

    options["mirror_every"] = ranks.every
    return Agent(ranks, "trainer.launch.rank", experiments, options).run()


def _dry_run(
    experiments: list[dict[str, Any]], options: dict[str, Any], ranks: Survival | None
) -> int:
    from trainer.launch.preflight import look, show
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    chosen = Options(**options)
    world = ranks.ranks if ranks else int(os.environ.get("WORLD_SIZE", "1"))
    refused: list[str] = []
    earlier: set[str] = set()  # whose weights a later experiment of the group may start from
    for values in experiments:
        planned = plan(values, chosen, world=world, rank=0)
        base = values.get("base")
        needs = base.get("experiment") if isinstance(base, dict) else None
        is_awaited = needs is not None and id_of(needs) in earlier
        findings = look(planned, chosen, is_awaited=is_awaited)
        typer.echo(show(planned, findings))
        refused += [f"{planned.id}: {problem}" for problem in findings.problems]
        earlier.add(planned.id)
    if refused:
        raise ConfigError("a run would be refused.\n" + "\n".join(refused))
    return EXIT_OK


if __name__ == "__main__":
    app()
