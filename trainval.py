#!/usr/bin/env python
"""Train a group of experiments here, or submit it: `trainval.py -e GROUP -sb DIR`.

Works under python, torchrun and deepspeed. Imports no torch until an experiment really runs.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.commands.options import FlagsOnOff, spread
from trainer.config.flags import RunFlags
from trainer.config.identity import exp_id as id_of
from trainer.config.origin.continues import continued
from trainer.config.userfile import kind
from trainer.errors import EXIT_OK, ConfigError
from trainer.files.survive import Survival, parse
from trainer.launch.ending import end, last_words
from trainer.version import Version

if TYPE_CHECKING:
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

_NO_SCHEDULER = (None, "None", "0")
_NO_BASE = "-sb/--savedir_base is required: the folder that holds all runs. For example -sb results"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


# Flags keep the spelling of earlier projects, so that launch scripts still work.
@dataclass(frozen=True)
class WhichRuns:
    """Which experiments to run, and where their folders are."""

    exp_group: Annotated[
        str | None, typer.Option("-e", "--exp_group", help="Group of experiments to run.")
    ] = None
    savedir_base: Annotated[
        Path | None, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")
    ] = None
    reset: Annotated[
        int,
        typer.Option(
            "-r",
            "--reset",
            min=0,
            max=1,
            help="1: move old folders aside and start over; 0: resume.",
        ),
    ] = 0
    exp_id: Annotated[
        str | None,
        typer.Option(
            "--exp_id",
            help="Run the experiment with this id; its dictionary is read from its folder.",
        ),
    ] = None
    exp_configs: Annotated[
        Path | None,
        typer.Option(
            "--exp_configs",
            help="File of groups (.py, .yaml or .json), instead of the built-in one.",
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Train for this many optimizer steps; the schedule depends on it, so the "
            "id changes.",
        ),
    ] = None
    continue_id: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="ID",
            help="Go on with this finished run, to --steps or --epochs in all: weights, optimizer, "
            "random state and place in the data. It is a new experiment with an id of its own.",
        ),
    ] = None
    continue_from: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="STEP",
            help="With --continue: final, best, or a saved step of that run.",
        ),
    ] = "final"
    epochs: Annotated[
        float | None,
        typer.Option(
            "--epochs", min=0, help="With --continue of a run that counts epochs: how many in all."
        ),
    ] = None


@dataclass(frozen=True)
class Launch:
    """How the runs are started: here or as jobs, for real or not."""

    job_scheduler: Annotated[
        str | None,
        typer.Option(
            "-j", "--j", "--job_scheduler", help="Submit the group instead of running it here."
        ),
    ] = None
    python_binary: Annotated[
        str,
        typer.Option(
            "--python_binary",
            help="With -j: the command that starts the ranks; NGPUS stands for the job's "
            "number of GPUs.",
        ),
    ] = ""
    job_configs: Annotated[
        Path | None,
        typer.Option(
            "--job_configs",
            help="With -j: Python file with JOB_CONFIGS, instead of the built-in one.",
        ),
    ] = None
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow_dirty",
            "--allow-dirty",
            help="With -j: also send uncommitted changes, and keep them as a patch.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry_run", help="Check everything, show what would run, train nothing."),
    ] = False
    survive: Annotated[
        str | None,
        typer.Option(
            "--survive",
            metavar="RANKS[+SPARES][,hang_s=S][,every=K]",
            help="Start this many ranks here, instead of torchrun. When a rank dies or "
            "makes no progress for 60 s, it is replaced, and training goes on from a "
            "copy of its state that the ranks keep in memory after every step.",
        ),
    ] = None
    together: Annotated[
        int | None,
        typer.Option(
            "--together",
            min=1,
            metavar="TOKENS",
            help="Train all experiments of the group at once, on one frozen base in this process: "
            "adapters of task causal_lm. At most so many tokens are read at once.",
        ),
    ] = None


LocalRank = Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)]
DistUrl = Annotated[str, typer.Option("--dist_url", hidden=True)]


@app.command(cls=FlagsOnOff, context_settings={"help_option_names": ["-h", "--help"]})
@spread
def main(
    which: WhichRuns,
    flags: RunFlags,
    launch: Launch,
    local_rank: LocalRank = None,
    dist_url: DistUrl = "env://",
    version: Version = False,
) -> None:
    """Train every experiment of a group, in order, each in its own folder SAVEDIR_BASE/<exp_id>."""
    del dist_url, version  # launch scripts pass the one; the launcher's environment decides
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    end(lambda: _train_or_send(which, flags, launch))


def _train_or_send(which: WhichRuns, flags: RunFlags, launch: Launch) -> int:
    if which.savedir_base is None:
        raise ConfigError(_NO_BASE)
    _refuse_together(which, launch)
    experiments = _experiments(which, which.savedir_base)
    resets = bool(which.reset) and not _is_restart()
    if launch.job_scheduler in _NO_SCHEDULER:
        options: dict[str, Any] = {
            **vars(flags),
            "savedir_base": which.savedir_base,
            "reset": resets,
            "is_shortened": which.steps is not None and which.continue_id is None,
            **_names(which),
        }
        return begin(experiments, options, launch)
    from jobs.commands.of_trainval import submit_group

    return submit_group(
        which.exp_group or (which.continue_id and f"continue-{which.continue_id[:8]}"),
        experiments,
        flags,
        steps=which.steps if which.continue_id is None else None,
        base=which.savedir_base,
        resets=resets,
        backend=launch.job_scheduler,
        file=launch.job_configs,
        survive=launch.survive,
        python_binary=launch.python_binary,
        is_dry=launch.dry_run,
        allow_dirty=launch.allow_dirty,
    )


def _is_restart() -> bool:
    """Whether a launcher or a scheduler has restarted this command, which has then obeyed -r 1
    already.
    """
    return any(
        int(os.environ.get(name, "0")) > 0
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def _experiments(which: WhichRuns, savedir_base: Path) -> list[dict[str, Any]]:
    """The dictionaries of a group, or of one folder, with the value of --steps in them."""
    from exp_configs import experiments_of

    group, exp_id, steps = which.exp_group, which.exp_id, which.steps
    if which.continue_id is not None:
        if group is not None or exp_id is not None:
            raise ConfigError(
                f"--continue {which.continue_id} with {'-e' if group else '--exp_id'}: want one of "
                "them. --continue takes the dictionary of that run."
            )
        how: dict[str, Any] = {"at": which.continue_from, "steps": steps, "epochs": which.epochs}
        return [continued(savedir_base, which.continue_id, **how)]
    if which.epochs is not None or which.continue_from != "final":
        raise ConfigError("--epochs and --from go with --continue ID. Leave them out, or give it.")
    if exp_id is not None and group is not None:
        by_id = {
            id_of(values): values for values in experiments_of(group, which.exp_configs, steps)
        }
        if exp_id not in by_id:
            raise ConfigError(
                f"--exp_id {exp_id} is not in -e {group}, which has {', '.join(by_id)}. Leave -e "
                "out to go on with a run of that id, or --exp_id to train the group."
            )
        return [by_id[exp_id]]
    if exp_id is not None:
        values = _read_dictionary(savedir_base, exp_id)
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
            "-e/--exp_group is required: the name of a group in exp_configs.py, such as -e "
            "crossattn_tiny. `lathe train FILE` takes a file of your own: .py, .yaml or .json."
        )
    return experiments_of(group, which.exp_configs, steps)


def _names(which: WhichRuns) -> dict[str, Any]:
    """The group, and the names of its experiments for people, by id. A job, which is given by its
    id alone, is told both by whoever sent it.
    """
    from exp_configs import experiments_of
    from trainer.config.groups import GROUP, NAME, names

    group = which.exp_group
    if group is not None:
        known = names(group, experiments_of(group, which.exp_configs, which.steps))
        return {"group": group, "names": known}
    name = os.environ.get(NAME)
    by_id = {which.exp_id: name} if name and which.exp_id else {}
    return {"group": os.environ.get(GROUP, ""), "names": by_id}


def _read_dictionary(savedir_base: Path, exp_id: str) -> dict[str, Any]:
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
    from trainer.launch.group import run_group
    from trainer.runtime import distributed, watch

    plans, run_options = _plans(experiments, options)
    distributed.init()
    with watch.watch_ranks(last_words):
        return run_group(plans, run_options)


def _plans(
    experiments: list[dict[str, Any]], options: dict[str, Any]
) -> tuple[list[RunPlan], Options]:
    """The checked experiments, and the flags."""
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    run_options = Options(**options)
    plans = [plan(values, run_options, world=world, rank=rank) for values in experiments]
    return plans, run_options


def _refuse_together(which: WhichRuns, launch: Launch) -> None:
    """ConfigError where --together is not of a group that this process trains."""
    given = {
        "--exp_id": which.exp_id,
        "--continue": which.continue_id,
        "-j": None if launch.job_scheduler in _NO_SCHEDULER else launch.job_scheduler,
        "--survive": launch.survive,
    }
    foreign = [flag for flag, value in given.items() if value is not None]
    if launch.together is not None and foreign:
        raise ConfigError(
            f"--together with {', '.join(foreign)}: one process here trains a whole group (-e). "
            "Leave one of the two out."
        )


def _train_together(
    experiments: list[dict[str, Any]], options: dict[str, Any], tokens: int, *, is_dry: bool
) -> int:
    from trainer.runtime import device_defaults

    device_defaults.before_torch()
    from trainer.launch.together.refusals import refuse
    from trainer.launch.together.run_together import run_together
    from trainer.runtime import distributed, watch

    plans, run_options = _plans(experiments, options)
    if is_dry:
        refuse(plans, run_options)
        return _dry_run(experiments, options, None)
    distributed.init()
    with watch.watch_ranks(last_words):
        return run_together(plans, run_options, most_tokens=tokens)


def begin(experiments: list[dict[str, Any]], options: dict[str, Any], launch: Launch) -> int:
    if launch.together is not None:
        return _train_together(experiments, options, launch.together, is_dry=launch.dry_run)
    ranks = parse(launch.survive) if launch.survive else None
    if launch.dry_run:
        return _dry_run(experiments, options, ranks)
    if ranks is None:
        return _train(experiments, options)
    from trainer.survival.agent import Agent

    options["mirror_every"] = ranks.every
    return Agent(ranks, "trainer.launch.rank", experiments, options).run()


def _dry_run(
    experiments: list[dict[str, Any]], options: dict[str, Any], ranks: Survival | None
) -> int:
    from trainer.switches import refuse_other_words

    refuse_other_words(os.environ)
    from trainer.launch.preflight import look, show
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    run_options = Options(**options)
    world = ranks.ranks if ranks else int(os.environ.get("WORLD_SIZE", "1"))
    refused: list[str] = []
    earlier: set[str] = set()  # whose models a later experiment of the group may need
    for values in experiments:
        run_plan = plan(values, run_options, world=world, rank=0)
        findings = look(run_plan, run_options, earlier=earlier)
        typer.echo(show(run_plan, findings))
        refused += [f"{run_plan.id}: {problem}" for problem in findings.problems]
        earlier.add(run_plan.id)
    if refused:
        raise ConfigError("a run would be refused.\n" + "\n".join(refused))
    return EXIT_OK


if __name__ == "__main__":
    app()
