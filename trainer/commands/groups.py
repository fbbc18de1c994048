"""Which groups of experiments there are, and what stands in one."""

from __future__ import annotations

import pprint
from collections import Counter
from typing import Annotated, Any

import typer

from trainer.commands.options import ExpConfigs, guarded, id_of
from trainer.errors import ConfigError, nearest

Experiments = list[dict[str, Any]]
WIDTH = 100  # columns


@guarded
def groups(
    name: Annotated[
        str | None, typer.Argument(help="A group, shown whole; or a part of the names to list.")
    ] = None,
    exp_configs: ExpConfigs = None,
) -> None:
    """The groups that -e takes: their tasks and steps, or one of them as dictionaries."""
    from exp_configs import read_groups

    known = read_groups(exp_configs)
    if name in known:
        typer.echo(whole(known[name]))
        return
    chosen = [group for group in known if name is None or name in group]
    if not chosen:
        raise ConfigError(f"{name}: no such group. {nearest(str(name), sorted(known))}")
    width = max(map(len, chosen))
    for group in sorted(chosen):
        typer.echo(f"{group:{width}}  {summary(known[group])}")


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
