"""Groups of experiments: how one is derived from another, and how a user's file of groups is read.
Imports no torch.
"""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any, cast

from trainer.config import userfile
from trainer.config.differences import names_by_difference
from trainer.config.identity import exp_id
from trainer.config.readers import group_file
from trainer.config.sweeps import sweep
from trainer.config.sweeps.sweep import SweepGroup
from trainer.errors import ConfigError, nearest

Values = dict[str, Any]
# Set by submission for a job, which reads its own dictionary and knows no group.
GROUP, NAME = "LATHE_GROUP", "LATHE_NAME"
_ID = re.compile(r"[0-9a-f]{32}")


def vary(parent: Values, **changes: Any) -> Values:
    """A copy of `parent` with `changes`: where both hold a dictionary the keys are merged, one
    level deep.

    `base` is replaced as a whole, because its kinds (a name, random weights, another experiment) do
    not mix.
    """
    child = copy.deepcopy(parent)
    for key, value in changes.items():
        is_block = key != "base" and isinstance(value, dict) and isinstance(child.get(key), dict)
        child[key] = {**child[key], **copy.deepcopy(value)} if is_block else copy.deepcopy(value)
    return child


def cartesian_exp_group(form: Values, remove_none: bool = False) -> list[Values]:
    """One experiment for each combination of the values in `form`; the last key varies fastest.

    A list at the top level is an axis, anything else stands for itself: a hyper-parameter that is
    itself a list is written [[...]]. remove_none: leave out the keys whose value is None.
    ConfigError for an axis without values. Source: haven-ai 0.7.3, cartesian_exp_group; there an
    empty axis silently yields no experiment at all.
    """
    axes = {
        key: cast(list[Any], value) if isinstance(value, list) else [value]
        for key, value in form.items()
    }
    empty = [key for key, axis in axes.items() if not axis]
    if empty:
        raise ConfigError(
            f"{', '.join(map(repr, empty))}: an empty list is an axis without values, and a "
            "product over it is empty. "
            "Give at least one value, or write [[]] for a hyper-parameter that is an empty list."
        )
    points = (zip(axes, values, strict=True) for values in itertools.product(*axes.values()))
    return [
        {key: copy.deepcopy(value) for key, value in point if not (remove_none and value is None)}
        for point in points
    ]


def experiments_of_group(
    groups: dict[str, list[Values]], group: str, steps: int | None
) -> list[Values]:
    """The experiments of one group, with `steps` written in where it is given.

    ConfigError for an unknown group, and for two experiments that are the same.
    """
    if group not in groups:
        if not _ID.fullmatch(group):
            raise ConfigError(f"-e {group}: no such group. {nearest(group, sorted(groups))}")
        holding = [
            name
            for name, experiments in groups.items()
            if any(_id_or_none(values) == group for values in experiments)
        ]
        advice = f"--exp_id {group} goes on with a run, whose dictionary is in its folder"
        if holding:
            advice = f"It is one of {', '.join(holding)}: -e {holding[0]} --exp_id {group}"
        raise ConfigError(
            f"-e {group}: this is the id of an experiment, and a group's name is wanted. {advice}."
        )
    if isinstance(groups[group], SweepGroup) and not groups[group]:
        raise ConfigError(
            f"-e {group}: Optuna chooses its experiments one after the other, so there is no list "
            f"of them. Start it by `lathe sweep -e {group}`."
        )
    experiments = with_steps(groups[group], steps)
    ids = [exp_id(values) for values in experiments]
    if len(set(ids)) < len(ids):
        twice = sorted({name for name in ids if ids.count(name) > 1})
        raise ConfigError(
            f"-e {group}: some of its experiments are the same ({', '.join(twice)}). Remove the "
            "copies."
        )
    return experiments


def _id_or_none(values: Values) -> str | None:
    try:
        return exp_id(values)
    except ConfigError:  # of another experiment than the one that is asked for
        return None


def names(group: str, experiments: list[Values]) -> dict[str, str]:
    """By id what people call each experiment of a group: its place in it, and what tells it from
    its siblings: "sweep 2/6 lr=0.0003 seed=2".
    """
    apart = names_by_difference(experiments)
    return {
        exp_id(values): f"{group} {place}/{len(apart)} {difference}".strip()
        for place, (values, difference) in enumerate(zip(experiments, apart, strict=True), start=1)
    }


def with_steps(experiments: list[Values], steps: int | None) -> list[Values]:
    """The experiments with `steps` written in, in place of epochs, also into those that others name
    as their base or teacher.
    """
    if steps is None:
        return experiments
    changed: dict[str, Values] = {}  # by the id that each had before
    changed_experiments: list[Values] = []
    for values in experiments:
        name = exp_id(values)
        if isinstance(values.get("train"), dict):
            train = {key: value for key, value in values["train"].items() if key != "epochs"}
            values = {**values, "train": {**train, "steps": steps}}
        values = _with_changed_base(values, changed)
        teacher = values.get("teacher")
        if isinstance(teacher, dict):
            values = {**values, "teacher": _with_changed_base(teacher, changed)}
        changed[name] = values
        changed_experiments.append(values)
    return changed_experiments


def _with_changed_base(block: Values, changed: dict[str, Values]) -> Values:
    """A block whose base is another experiment, with what became of that one."""
    base = block.get("base")
    if not (isinstance(base, dict) and isinstance(base.get("experiment"), dict)):
        return block
    before = base["experiment"]
    return {**block, "base": {**base, "experiment": changed.get(exp_id(before), before)}}


def read(path: Path) -> dict[str, list[Values]]:
    """EXP_GROUPS of the Python file at `path`, which is executed; or what a YAML or JSON file says.

    A group given as a dictionary is a form: cartesian_exp_group makes its experiments, or those of
    its `sweep` are made (sweeps/sweep.py). Raises ConfigError, with file and line, for whatever
    goes wrong in that file, and with every mistake at once when its EXP_GROUPS is not a dictionary
    of forms and non-empty lists of dictionaries.
    """
    if path.suffix.lower() in group_file.READERS:
        groups: Any = group_file.read(path)
    else:
        defined = userfile.execute(path, flag="--exp_configs", defines="EXP_GROUPS")
        groups = defined.get("EXP_GROUPS")
    return expanded(groups, source=str(path))


def expanded(groups: Any, *, source: str) -> dict[str, list[Values]]:
    """Groups as a file states them, with the experiments that forms and sweeps stand for.
    ConfigError names every mistake.
    """
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(
            f"{source}: EXP_GROUPS is {userfile.kind(groups)}. Want a dictionary: group -> list of "
            "experiments."
        )
    read: dict[Any, Any] = {}
    mistakes: list[str] = []
    for group, form in cast(dict[Any, Any], groups).items():
        try:
            read[group] = _experiments(form)
        except ConfigError as error:
            mistakes.append(f"  EXP_GROUPS[{group!r}] {error}")
        else:
            mistakes += [
                f"  EXP_GROUPS[{group!r}] {problem}"
                for problem in _group_mistakes(group, read[group])
            ]
    if mistakes:
        raise ConfigError(f"{source}: {len(mistakes)} mistake(s)\n" + "\n".join(mistakes))
    return cast(dict[str, list[Values]], read)


def _experiments(form: Any) -> Any:
    """The experiments of a group, of which a dictionary is a sweep or a form of haven's."""
    if isinstance(form, dict):
        return sweep.group_of(form) if "sweep" in form else cartesian_exp_group(cast(Values, form))
    members = cast("list[Any]", form) if isinstance(form, list) else []
    swept = [one for one in members if isinstance(one, dict) and "sweep" in one]
    if swept and len(members) > 1:
        raise ConfigError(
            "holds a dictionary with `sweep` and others beside it. Want the sweep alone in its "
            "group."
        )
    return sweep.group_of(cast(Values, swept[0])) if swept else form


def _group_mistakes(group: Any, experiments: Any) -> list[str]:
    if not isinstance(group, str):
        return [f"is named by {userfile.kind(group)}. Want a string."]
    if not isinstance(experiments, list):
        return [
            f"is {userfile.kind(experiments)}. Want a list of experiments, or a dictionary whose "
            "lists are axes."
        ]
    # haven's cartesian_exp_group returns one for a hyper-parameter without values
    if not experiments and not isinstance(experiments, SweepGroup):
        return [
            "is an empty list. Want at least one experiment: does a hyper-parameter of the "
            "product have no values?"
        ]
    wrong = [
        index
        for index, item in enumerate(cast(list[Any], experiments))
        if not isinstance(item, dict)
    ]
    return [
        f"[{index}] is {userfile.kind(experiments[index])}. Want a dictionary." for index in wrong
    ]
