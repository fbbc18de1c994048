"""An experiment that goes on with a finished run: more steps with its weights, its optimizer, its
random state and its place in the data. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field

from trainer.config.block import Positive, Strict
from trainer.config.differences import differing, flatten
from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.files.atomic import read_json, sha256_of

if TYPE_CHECKING:
    from trainer.config.schema import Experiment

Values = dict[str, Any]
MANIFEST = "manifest.json"  # of a saved step: the sha256 of each of its files
# The keys that a run which goes on may have otherwise than the run before: they say how long it
# trains and how fast, and what is logged, saved and chosen. All others say what a step is made of.
_FREE = ("label", "deepspeed", "continues", "optim", "schedule", "train", "lora.export")
_FREE += ("teacher.store",)
_BOUND = ("optim.name",)
_BOUND += tuple(
    f"train.{key}"
    for key in (
        *("global_batch", "bucket_steps", "precision", "base_bits", "seed", "order", "freeze"),
        *("label_smoothing", "z_loss", "neftune_alpha"),
    )
)


class Continues(Strict):
    """The run that this one goes on with, from one of its saved steps."""

    experiment: dict[str, Any]
    """The whole dictionary of that run, which lies in the same --savedir_base."""
    step: Positive
    """The saved step. The steps of this run count on from it, up to train.steps."""
    manifest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """sha256 of the step's manifest.json, which holds the sha256 of each of its files; None: any
    state of that step.
    """

    @property
    def id(self) -> str:
        """The id of the run before."""
        return exp_id(self.experiment)

    def folder(self, savedir_base: Path) -> Path:
        """Of the saved step."""
        return savedir_base / self.id / "checkpoints" / f"step-{self.step}"


# The dictionary
# --------------------------------------------------------------------------------------------------


def continued(
    savedir_base: Path,
    name: str,
    *,
    at: str = "final",
    steps: int | None = None,
    epochs: float | None = None,
) -> Values:
    """The dictionary of a run that goes on with the run `name`, to `steps` steps or `epochs` epochs
    in all, those of the run before counted.

    at: "final", "best", or a saved step. ConfigError when the run, or that step, is not there, or
    when nothing would be left to train.
    """
    values = _dictionary(savedir_base, name)
    train = cast("Values", values.get("train", {}))
    in_epochs = train.get("epochs") is not None
    flag, want = ("--steps", "--epochs") if in_epochs else ("--epochs", "--steps")
    if (epochs if in_epochs else steps) is None:
        is_other = (steps if in_epochs else epochs) is not None
        raise ConfigError(
            f"--continue {name}: "
            + (f"got {flag}, but " if is_other else "")
            + f"that run counts {want[2:]}, in which its rows have another order than in "
            f"{flag[2:]}. Give {want} N: all of them, with the {train.get(want[2:])} that it "
            "was made for."
        )
    step = _step_of(savedir_base / name, at)
    if steps is not None and steps <= step:
        raise ConfigError(
            f"--continue {name} --steps {steps}: step {step} is done there, and --steps counts "
            f"from the beginning of that run. For {steps} more steps: --steps {step + steps}."
        )
    if epochs is not None and epochs <= train["epochs"] and at == "final":
        raise ConfigError(
            f"--continue {name} --epochs {epochs:g}: {train['epochs']:g} are done there, and "
            "--epochs counts from the beginning of that run. Give more."
        )
    manifest = savedir_base / name / "checkpoints" / f"step-{step}" / MANIFEST
    length = {"epochs": epochs} if in_epochs else {"steps": steps}
    own = {key: value for key, value in train.items() if not (in_epochs and key == "steps")}
    continues = {"experiment": values, "step": step, "manifest": sha256_of(manifest)}
    rest = {key: value for key, value in values.items() if key != "continues"}
    return {**rest, "train": {**own, **length}, "continues": continues}


def _dictionary(savedir_base: Path, name: str) -> Values:
    path = savedir_base / name / "exp_dict.json"
    problem = f"{path} does not exist"
    try:
        values = read_json(path) if Path(name).name == name else None
    except (OSError, ValueError) as error:
        values, problem = None, f"{path} is not JSON ({error})"
    if values is None:
        raise ConfigError(f"--continue {name}: {problem}. Give the id of a run in {savedir_base}.")
    if exp_id(values) != name:
        raise ConfigError(
            f"--continue {name}: the dictionary in that folder has id {exp_id(values)}. Give the "
            "folder that name."
        )
    return values


def _step_of(folder: Path, at: str) -> int:
    """The saved step that "final", "best" or a number means. ConfigError when it is not there."""
    saved = saved_steps(folder)
    status = read_json(folder / "status.json") or {}
    if at == "final":
        if status.get("state") != "succeeded":
            raise ConfigError(
                f"{folder} is {status.get('state') or 'no run yet'} and not finished. Train it to "
                "its end first, by the same command as before, or say from which saved step: "
                f"--from {saved[-1] if saved else 'STEP'}."
            )
        step = int(status.get("checkpoint") or status.get("step") or 0)
    elif at == "best":
        record = read_json(folder / "best" / "lathe.json") or {}
        step = int(record.get("scores", {}).get("step", 0))
        if not step:
            raise ConfigError(
                f"{folder}: it has no best/ that says its step. Give --from final, or one of its "
                f"saved steps: {_text(saved)}."
            )
    elif at.isdecimal():
        step = int(at)
    else:
        raise ConfigError(
            f"--from {at}: want final, best or a saved step of {folder}: {_text(saved)}."
        )
    if step not in saved:
        raise ConfigError(
            f"--from {at}: {folder} holds no saved step {step}, only {_text(saved)}. Give one of "
            "them; where the weights alone are left, begin a new run with "
            '"base": {"experiment": ...} of that run.'
        )
    return step


def saved_steps(folder: Path) -> list[int]:
    """The saved steps of a run, by their manifests, in order."""
    paths = folder.glob(f"checkpoints/step-*/{MANIFEST}")
    steps = [path.parent.name.removeprefix("step-") for path in paths]
    return sorted(int(step) for step in steps if step.isdecimal())


def _text(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


# What goes on with what
# --------------------------------------------------------------------------------------------------


def refuse_other(cfg: Experiment, before: Experiment) -> None:
    """ConfigError that names the keys in which an experiment differs from the run that it goes on
    with, though they make up a step: data, task, base, batch, seed.
    """
    continues = cfg.continues
    assert continues is not None, "the caller has looked"
    theirs, ours = (flatten(one.model_dump(mode="json")) for one in (before, cfg))
    wrong = [
        f"{key} (was {theirs.get(key)!r}, is {ours.get(key)!r})"
        for key in differing([theirs, ours])
        if key in _BOUND or not any(key == free or key.startswith(f"{free}.") for free in _FREE)
    ]
    if (before.train.epochs is None) != (cfg.train.epochs is None):
        counts = ["steps" if one.train.epochs is None else "epochs" for one in (before, cfg)]
        wrong.append(f"train.epochs (was counted in {counts[0]}, is in {counts[1]})")
    if before.train.ema is None and cfg.train.ema is not None:  # no saved step has an average
        wrong.append(f"train.ema (was None, is {cfg.train.ema})")
    if wrong:
        raise ConfigError(
            f"continues: this experiment is not that of run {continues.id}: {'; '.join(wrong)}.\n"
            "Put them back, or begin a new run with the weights of that one: "
            '"base": {"experiment": ...}.'
        )
    steps, epochs = cfg.train.steps, cfg.train.epochs
    if 0 < steps <= continues.step:
        length = "steps" if epochs is None else "epochs"
        of_epochs = "" if epochs is None else f" (train.epochs={epochs:g})"
        raise ConfigError(
            f"train.steps={steps}{of_epochs} with continues.step={continues.step}: nothing is left "
            f"to train. train.{length} counts from the beginning of the first run; give more."
        )
    if 0 < before.train.steps < continues.step:
        raise ConfigError(
            f"continues.step={continues.step}: the run before has {before.train.steps} steps. Give "
            "one that it saved."
        )


def refuse_absent(continues: Continues, savedir_base: Path) -> None:
    """ConfigError when the saved step is not there, or is another than the dictionary says."""
    folder = continues.folder(savedir_base)
    if not (folder / MANIFEST).is_file():
        saved = saved_steps(folder.parent.parent)
        raise ConfigError(
            f"continues: {folder} is no saved step. Train run {continues.id} first, into the same "
            f"--savedir_base, or go on from another of its saved steps: {_text(saved)}."
        )
    got = sha256_of(folder / MANIFEST)
    if continues.manifest not in (None, got):
        raise ConfigError(
            f"continues: {folder / MANIFEST} has the sha256 {got}, but the experiment wants "
            f"{continues.manifest}: the step was saved anew since. Put the folder back, or say "
            "--continue again for a new experiment."
        )
