"""The flags of trainval.py that a run reads. Imports no torch.

This is their one table: trainval.py takes them, a run reads them (trainer/training/options.py),
and `trainval.py -j` and `lathe-jobs submit ... -- FLAGS` pass them on to the command of a job.
docs/add-a-flag.md adds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from trainer.errors import nearest

TRACKERS = ("tensorboard", "mlflow")
ENTITY_ALONE = (
    "--wandb_entity_name and --wandb_project_name: got the entity alone, want the "
    "project too (or alone: then it is your default entity's), or neither."
)


@dataclass(frozen=True)
class OnOff:
    """A flag with a value of on or off, such as `--push_to_hub true`; without a value it is on."""

    name: str
    help: str


def names_of_trackers(text: str | None) -> tuple[str, ...]:
    """The trackers that a flag "tensorboard,mlflow" names."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def unknown_tracker(text: str | None) -> Iterator[str]:
    """The problem of each name in such a flag that is no tracker."""
    for name in names_of_trackers(text):
        if name not in TRACKERS:
            yield f"--trackers: {name!r} does not exist. {nearest(name, list(TRACKERS))}"


DataPath = Annotated[Path | None, typer.Option("--data_path", help="Folder of the data set.")]
CacheDir = Annotated[
    Path, typer.Option("--cache_dir", help="Folder for token caches and tokenizers.")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse data of which anything would be left out, or warned about."
    ),
]
NumProc = Annotated[
    int | None,
    typer.Option(
        "--num_proc",
        min=1,
        help="Processes that encode rows; default: one for few rows, else one for each core.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags that a run reads besides its dictionary. They never change the experiment's id."""

    data_path: DataPath = None
    cache_dir: CacheDir = Path("tmp-cache")
    log_every: Annotated[
        int | None,
        typer.Option(
            "--log_every",
            min=1,
            help="Steps between log lines, evaluations and saves, if the dictionary does "
            "not say it; default: a hundred log lines in a run, evaluations and saves"
            " every 1000 steps.",
        ),
    ] = None
    until: Annotated[
        int | None,
        typer.Option(
            "--until",
            min=1,
            metavar="STEP",
            help="Stop when this step is done: the run is saved there, evaluated, and goes on with "
            "a later --until, or with none. Exit code 10; never changes the id.",
        ),
    ] = None
    deepspeed: Annotated[
        str | None,
        typer.Option(
            "--deepspeed",
            help="A DeepSpeed JSON file, a name in ds_configs/, or auto, which takes one "
            "that fits; never changes the id.",
        ),
    ] = None
    wandb_entity_name: Annotated[
        str | None,
        typer.Option(
            "--wandb_entity_name",
            help="wandb entity, where it is not your default one.",
        ),
    ] = None
    wandb_project_name: Annotated[
        str | None,
        typer.Option(
            "--wandb_project_name",
            help="wandb project; it switches wandb on.",
        ),
    ] = None
    wandb_run_name: Annotated[
        str | None,
        typer.Option(
            "--wandb_run_name",
            help="Name that wandb shows; the id is the exp_id.",
        ),
    ] = None
    wandb_log_gradients: Annotated[
        bool, OnOff("--wandb_log_gradients", help="Log the gradient norm of every parameter.")
    ] = False
    wandb_artifacts: Annotated[
        bool,
        OnOff(
            "--wandb_artifacts",
            help="Log final/ and the digests of the data to wandb, as references.",
        ),
    ] = True
    trackers: Annotated[
        str | None,
        typer.Option(
            "--trackers", help="More trackers: tensorboard, mlflow, or both with a comma between."
        ),
    ] = None
    push_to_hub: Annotated[
        bool, OnOff("--push_to_hub", help="Upload final/ to the Hub when the run is finished.")
    ] = False
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="Score the test split after the last step, with best/, else final/.",
        ),
    ] = False
    do_extra_evals: Annotated[
        bool,
        OnOff("--do_extra_evals", help="Also generate answers in evaluations, and score them."),
    ] = False
    generation_eval_max_sample_size: Annotated[
        int,
        typer.Option(
            "--generation_eval_max_sample_size",
            min=1,
            help="Rows for which an evaluation generates answers.",
        ),
    ] = 100
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="Plan memory for this device: h200, 24GiB, ...; default: the GPU here."
        ),
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Run even if the memory plan says that it does not fit.")
    ] = False
    strict: Strict = False
    num_proc: NumProc = None

    @property
    def extra_evals(self) -> int:
        """Rows that are answered by generation at each evaluation; 0: none."""
        return self.generation_eval_max_sample_size if self.do_extra_evals else 0

    def as_text(self) -> dict[str, str]:
        """The flags that the command of a job gets, by name: {"data_path": "/data"}; "" of a
        switch that is on.
        """
        values: dict[str, Any] = {flag.name: getattr(self, flag.name) for flag in fields(RunFlags)}
        if not self.do_extra_evals:
            del values["generation_eval_max_sample_size"]
        texts: dict[str, str] = {}
        for name, value in values.items():
            if name in SWITCHES:
                if value:
                    texts[name] = ""
            elif value is not None:
                texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return texts


_ANNOTATIONS = {
    name: get_args(annotation)
    for name, annotation in get_type_hints(RunFlags, include_extras=True).items()
}
RUN_FLAGS = tuple(_ANNOTATIONS)
ON_OFF = tuple(  # flags whose value may be left out
    name
    for name, (_, *declarations) in _ANNOTATIONS.items()
    if any(isinstance(one, OnOff) for one in declarations)
)
SWITCHES = tuple(  # flags without a value
    name for name, (kind, *_) in _ANNOTATIONS.items() if kind is bool and name not in ON_OFF
)


def has_no_value(words: Sequence[str]) -> bool:
    """Whether an OnOff flag stands without a value before `words`, the rest of a command line."""
    return not words or words[0].startswith("-")


PATHS = tuple(  # a job runs in another folder
    name for name, (kind, *_) in _ANNOTATIONS.items() if kind is Path or Path in get_args(kind)
)
