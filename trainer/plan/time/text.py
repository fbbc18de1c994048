"""Predicted time as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.devices import GIB

if TYPE_CHECKING:
    from trainer.plan.time.fastest import Way
    from trainer.plan.time.run_time import RunTime
    from trainer.plan.time.step_time import StepTime

_SHOWN_WAYS = 10
_LEAST = 0.005  # parts below this share of a step are not named


def page(time: RunTime) -> str:
    """The time of a step with its parts, and of the run with its parts."""
    source = "measured rates" if time.is_measured else "rates of its data sheet, not measured"
    mfu = "" if time.mfu is None else f", MFU {time.mfu:.1%}"
    rest = {
        "evaluations": time.evaluation_s,
        "generation": time.generation_s,
        "saving": time.saving_s,
        "start-up": time.startup_s,
    }
    besides = ", ".join(f"{name} {duration(value)}" for name, value in rest.items() if value)
    lines = [
        f"time on {time.world} x {time.device} ({source}):",
        f"  a step {duration(time.step.total)}, {time.units / time.step.total:,.0f} {time.unit}/s"
        f"{mfu}",
        f"  of it {shares(time.step)}",
        f"  the run: {time.steps} steps {duration(time.steps * time.step.total)}, {besides}",
        f"  together {time.total_s / 3600:.3g} hours, "
        f"{time.world * time.total_s / 3600:.3g} device hours",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in time.notes)])


def shares(step: StepTime) -> str:
    """The parts of a step, the largest first."""
    ordered = sorted(step.shares().items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered if share > _LEAST)


def duration(seconds: float) -> str:
    """Seconds in the units that people use, such as 3.2 min."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def fastest(
    ways: Sequence[Way],
    reason: str,
    *,
    steps: int,
    world: int,
    price: float | None,
    values: Mapping[str, Any],
) -> str:
    """The best ways with their time, memory and price, why the first one wins, and its command."""
    money = "" if price is None else f"{'money':>10s}"
    lines = [f"{'a step':>10s}{'hours':>9s}{money}{'GiB':>8s}{'host':>8s}  way"]
    for way in ways[:_SHOWN_WAYS]:
        hours = steps * way.time.total / 3600
        cost = "" if price is None else f"{hours * world * price:>10.2f}"
        lines.append(
            f"{duration(way.time.total):>10s}{hours:>9.3g}{cost}{way.peak / GIB:>8.2f}"
            f"{way.host / GIB:>8.2f}  {way.text}"
        )
    best = ways[0]
    lines += [
        f"the first wins: {reason}",
        f"its step: {shares(best.time)}",
        f"run it with --deepspeed {best.preset} and this dictionary:",
        json.dumps(values),
    ]
    return "\n".join(lines)
