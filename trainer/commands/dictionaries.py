"""Shows which keys an experiment's dictionary may have, and which groups there are."""

from __future__ import annotations

import json
import pprint
import textwrap
from collections import Counter
from typing import Annotated, Any

import typer

from trainer.commands.options import ExpConfigs, guard, id_of
from trainer.config import reference
from trainer.config.mistakes import other_place
from trainer.config.synonyms import SYNONYMS
from trainer.errors import ConfigError, nearest

Experiments = list[dict[str, Any]]
WIDTH = 100  # columns


@guard
def keys(
    task: Annotated[str, typer.Argument(help="Name of a task, such as causal_lm.")],
    key: Annotated[
        str | None, typer.Argument(help="A key or a block, such as train or optim.lr.")
    ] = None,
    is_schema: Annotated[
        bool, typer.Option("--json_schema", help="Print the JSON Schema of the whole dictionary.")
    ] = False,
) -> None:
    """List the keys of a task's dictionary with their types, defaults and meanings."""
    from trainer import tasks

    config = tasks.config_of(task)
    if is_schema:
        if key is not None:
            raise ConfigError(f"--json_schema is of the whole dictionary: leave {key!r} out.")
        typer.echo(json.dumps(reference.json_schema(config), indent=2))
        return
    matches = all_keys = reference.keys(config)
    if key is not None:
        matches = [one for one in all_keys if one.path == key or one.path.startswith(f"{key}.")]
        if not matches:
            legal = [one.path for one in all_keys]
            elsewhere = other_place(key, legal, SYNONYMS)
            raise ConfigError(f"{key}: no such key. {elsewhere or nearest(key, legal)}")
    for one in matches:
        typer.echo(text_of(one))


def text_of(key: reference.Key) -> str:
    """A key and its description as lines for a terminal."""
    default = "required" if key.default is None else f"default {key.default}"
    lines = textwrap.wrap(f"{key.path}: {key.kind}; {default}", WIDTH, subsequent_indent="    ")
    lines += textwrap.wrap(key.description, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


# Groups
# --------------------------------------------------------------------------------------------------


@guard
def groups(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A group, to print its experiments; or a part of a name, to list the "
            "groups that contain it."
        ),
    ] = None,
    exp_configs: ExpConfigs = None,
) -> None:
    """List the groups for -e with their tasks and steps, or print the dictionaries of one."""
    from exp_configs import read_groups

    all_groups = read_groups(exp_configs)
    if name in all_groups:
        typer.echo(whole(all_groups[name]))
        return
    matches = [group for group in all_groups if name is None or name in group]
    if not matches:
        raise ConfigError(f"{name}: no such group. {nearest(str(name), sorted(all_groups))}")
    width = max(map(len, matches))
    for group in sorted(matches):
        typer.echo(f"{group:{width}}  {summary(all_groups[group])}")


def summary(experiments: Experiments) -> str:
    """One line: how many experiments of which tasks, and their steps."""
    tasks = Counter(str(values.get("task")) for values in experiments)
    counts = ", ".join(f"{count} {task}" for task, count in tasks.items())
    steps = [values.get("train", {}).get("steps") for values in experiments]
    return f"{counts}; steps {', '.join(map(str, dict.fromkeys(steps)))}"


def whole(experiments: Experiments) -> str:
    """Every dictionary of a group with its id, as Python."""
    texts = [
        f"# {place} of {len(experiments)}: {id_of(values)}\n"
        + pprint.pformat(values, width=WIDTH, sort_dicts=False)
        for place, values in enumerate(experiments, start=1)
    ]
    return "\n\n".join(texts)
