"""Several sources of rows in one run: how often each is drawn, and where its rows are. Imports no
torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from trainer.config.block import Positive, Strict
from trainer.errors import nearest

if TYPE_CHECKING:
    from trainer.config.own_rows import OwnRows

WEIGHT = "weight"  # the key of a source's block that is not one of `data`
_ROUNDING = 1e-6  # 0.333333 three times is taken for 1
_SUFFIX = re.compile(r"\.(?:jsonl|ndjson|json|csv|tsv|parquet)(?:\.gz)?(?:\[.*\])?$", re.IGNORECASE)
_TAKEN = ("", "scale")  # loss_scale is another metric
Name = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(ge=0, le=1)]


# The tags pick one kind, so that a mistake is reported for that kind alone.
MixedSource = Annotated[
    Annotated[Weight | None, Tag("<weight>")] | Annotated[dict[str, Any], Tag("<block>")],
    Discriminator(lambda value: "<block>" if isinstance(value, dict) else "<weight>"),
]


class Change(Strict):
    """Other weights from a step of the run on."""

    after: Positive
    """So many steps have the weights of before."""
    weights: dict[Name, Weight]
    """Of every source of `mix`; they sum to 1. A source with 0 is not read until a later change."""


class Mixing(Strict):
    """How the sources of `mix` are mixed."""

    temperature: Annotated[float, Field(gt=0)] | None = None
    """Of a mix without weights: each source weighs its rows to the power 1/temperature. None or 1:
    by its rows; a high temperature: all alike.
    """
    ends: Literal["again", "stop"] = "again"
    """What the end of a source does. again: it starts its next epoch. stop: the run ends with the
    last step that all sources have rows for; schedules are of that many steps.
    """
    changes: list[Change] = []  # noqa: RUF012 (the block is frozen)
    """Weights that change on the way (a curriculum): [{"after": 1000, "weights": {...}}]."""


def weights_of(data: OwnRows) -> dict[str, float] | None:
    """The first weight of each source of `data.mix`; None where they follow from its rows."""
    weights = {name: _weight(value) for name, value in data.mix.items()}
    numbers = {name: weight for name, weight in weights.items() if weight is not None}
    return numbers if len(numbers) == len(weights) else None


def _weight(value: float | dict[str, Any] | None) -> Any:
    return value.get(WEIGHT) if isinstance(value, dict) else value


def exact(weights: Mapping[str, float], names: Sequence[str]) -> tuple[Fraction, ...]:
    """The weights of these names, which sum to 1 exactly."""
    parts = [Fraction(str(float(weights[name]))) for name in names]
    return tuple(part / sum(parts) for part in parts)


def problems(data: OwnRows) -> Iterator[str]:
    """What is wrong with the mix of a `data` block, but for the blocks of its sources."""
    names, mixing = list(data.mix), data.mixing
    if not names:
        if mixing != Mixing():
            yield "mixing says how sources are mixed: name them in `mix`, or leave it out"
        return
    for key in ("dataset", "subset", "revision"):
        if getattr(data, key) is not None:
            yield f"{key} is of one source: put it into the block of that source in `mix`"
    if data.files.train is not None or data.splits.train is not None:
        yield "files.train and splits.train are of one source: `mix` names what is trained on"
    weights = [_weight(value) for value in data.mix.values()]
    numbers = [weight for weight in weights if weight is not None]
    wrong = [one for one in numbers if type(one) not in (int, float) or not 0 <= one <= 1]
    for weight in wrong:
        yield f"mix: a weight is {weight!r}, want a number from 0 to 1"
    without = [name for name, weight in zip(names, weights, strict=True) if weight is None]
    if wrong:
        return
    if without and len(without) < len(names):
        yield (
            f"mix: {' and '.join(map(repr, without))} without a weight, and others with one: give "
            "all of them a weight, or none (then each weighs its rows)"
        )
    elif not without:
        yield from _sum_problems("mix", dict(zip(names, weights, strict=True)))
        if mixing.temperature is not None:
            yield "mixing.temperature is of a mix without weights: leave one of the two out"
    yield from _change_problems(names, mixing.changes, has_weights=not without)
    if not without:
        ever = {name for name, weight in zip(names, weights, strict=True) if weight}
        ever |= {name for one in mixing.changes for name, weight in one.weights.items() if weight}
        for name in (name for name in names if name not in ever):
            yield f"mix: {name!r} has the weight 0 in the whole run: leave it out"


def _sum_problems(where: str, weights: Mapping[str, float]) -> Iterator[str]:
    total = sum(weights.values())
    if abs(total - 1) > _ROUNDING:
        shares = {name: round(weight / total, 4) for name, weight in weights.items() if total}
        advice = f". In these proportions: {shares}" if shares else ""
        yield f"{where}: the weights sum to {total:g}, want 1{advice}"


def _change_problems(
    names: list[str], changes: Sequence[Change], *, has_weights: bool
) -> Iterator[str]:
    if changes and not has_weights:
        yield "mixing.changes: the mix has no weights that could change. Give every source one"
        return
    before = 0
    for place, change in enumerate(changes):
        where = f"mixing.changes[{place}]"
        if change.after <= before:
            yield f"{where}: after={change.after} is not behind {before}: name steps that rise"
        before = change.after
        missing = [name for name in names if name not in change.weights]
        if missing:
            yield f"{where}: no weight of {', '.join(map(repr, missing))} (0 leaves it out)"
        for name in (name for name in change.weights if name not in names):
            yield f"{where}: {name!r} is no source of `mix`. {nearest(name, names)}"
        yield from _sum_problems(where, change.weights)


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """By its name, what metrics call a source: "loss_general" of "data/general.jsonl". It is the
    last part of the name without its ending, or where two sources would share it, the whole name.
    """
    short = {name: _SUFFIX.sub("", name.rstrip("/").rpartition("/")[2]) for name in names}
    counts = Counter(short.values())
    labels: dict[str, str] = {}
    for name, label in short.items():
        is_free = label not in _TAKEN and counts[label] == 1
        # a metric of training has no stroke in its name
        labels[name] = label if is_free else f":{name}".replace("/", ":")
    return labels
