"""A plan as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.devices import GIB, Device
from trainer.plan.memory.measure import TEACHING, TRAINING
from trainer.switches import KEEP_MEMORY

if TYPE_CHECKING:
    from trainer.plan.memory.advice import Advice
    from trainer.plan.memory.deepspeed_terms import Breakdown
    from trainer.plan.memory.plan import MemoryPlan

_SHOWN_FIXES = 8


def page(plan: MemoryPlan, advice: Advice, device: Device | None, *, world: int) -> str:
    """The whole plan as text: a table of phases and categories, host memory and disk, and what
    fits.
    """
    lines = [
        *_phases(plan),
        "",
        f"host memory of a rank  {_gib(plan.host)} GiB",
        f"checkpoints on disk    {_gib(plan.checkpoints)} GiB",
        f"to download            {_gib(plan.download)} GiB",
        "",
        *_verdict(plan, device, world),
        "",
    ]
    lines += [
        f"under other DeepSpeed files ({world} device(s)), GiB per device in the training step:"
    ]
    for stage in advice.stages:
        beside = f", and {_gib(stage.host)} of host memory" if stage.host else ""
        lines.append(
            f"  {stage.preset:14s} "
            f"{_gib(stage.peak.total):>8s}{_mark(stage.peak, device, world)}{beside}"
        )
    if device is not None and advice.largest_rows == 0:
        lines += ["", "largest micro-batch: not even one row of the longest kind fits"]
    elif device is not None:
        longest = plan.phases[0].longest
        lines += [
            "",
            f"largest micro-batch: {advice.largest_rows} rows of the longest kind ({longest}), "
            f"{advice.largest_rows * longest} padded tokens",
        ]
    if advice.fixes:
        lines += ["", "what saves most:"]
        lines += [
            f"  {number}. {line}"
            for number, line in enumerate(fix_lines(advice, device, world), start=1)
        ]
    lines += [f"note: {note}" for note in plan.notes]
    if device is not None and device.kept:
        lines.append(
            f"note: malloc keeps freed memory on a processor: {device.kept:.0%} beside what is "
            f"alive, so {_gib(device.usable(world))} GiB are there to give ({KEEP_MEMORY}=0 gives "
            "freed memory back, and steps take longer)"
        )
    lines.append(
        f"CPU time: {plan.seconds:.1f} s for the plan, {advice.seconds:.1f} s for what would fit"
    )
    return "\n".join(lines)


def summary(plan: MemoryPlan, device: Device | None) -> str:
    """The peak and its largest categories, in one line."""
    peak = plan.peak
    of = f" of {_gib(device.nbytes)} ({device.name})" if device is not None else ""
    parts = ", ".join(
        f"{name} {_gib(size)}"
        for name, size in peak.peak.parts().items()
        if size > 0.01 * peak.peak.total
    )
    before = "".join(
        f"; {_gib(phase.peak.total)} in the {phase.name}, which is over before the others begin"
        for phase in plan.phases
        if phase.name == TEACHING and phase is not peak
    )
    return f"memory: {_gib(peak.peak.total)} GiB{of} in the {peak.name}: {parts}{before}"


def comparison(plan: int, measured: int) -> str:
    """Planned against measured memory, at the end of a run."""
    return (
        f"memory: planned {_gib(plan)}, measured {_gib(measured)} GiB ({plan / measured - 1:+.1%})"
    )


def refusal(plan: MemoryPlan, advice: Advice, device: Device, *, world: int) -> str:
    """The message when a run is not launched: why it does not fit, and what would."""
    lines = [
        f"this run needs {_gib(plan.peak.peak.total)} GiB per device in the {plan.peak.name}, and "
        f"{device.name} has {_gib(device.usable(world))} GiB to give.",
        *[f"  {line}" for line in fix_lines(advice, device, world)],
        "--force runs it all the same; `python -m trainer plan` shows everything.",
    ]
    return "\n".join(lines)


def out_of_memory(
    plan: MemoryPlan | None,
    actual: Mapping[str, int],
    batch: Mapping[str, Sequence[int]],
    message: str,
) -> str:
    """The report of an OutOfMemoryError: planned against actual bytes by category, the batch, and
    the largest tensors.
    """
    lines = ["out of memory", "", f"{'GiB':14s}{'planned':>10s}{'actual':>10s}"]
    plan_parts = plan.phases[0].peak.parts() if plan is not None else {}
    rest = {"activations", "logits", "workspace"}
    if "rest" in actual:
        plan_parts = {
            **{k: v for k, v in plan_parts.items() if k not in rest},
            "rest": sum(plan_parts.get(k, 0) for k in rest),
        }
    for name in dict.fromkeys([*actual, *plan_parts]):
        lines.append(
            f"{name:14s}{_gib(plan_parts.get(name, 0)):>10s}{_gib(actual.get(name, 0)):>10s}"
        )
    lines += ["", f"the batch: {_shapes(batch) or 'not known'}"]
    if plan is not None:
        lines += [
            f"planned for: {_shapes(plan.phases[0].shapes)}",
            "largest tensors of the planned step:",
        ]
        lines += [f"  {name}  {_gib(size)} GiB" for name, size in plan.phases[0].tensors]
    lines += [
        "",
        message.strip().splitlines()[0],
        "`python -m trainer plan -e GROUP` names what would fit.",
    ]
    return "\n".join(lines)


def fix_lines(advice: Advice, device: Device | None, world: int) -> list[str]:
    """The changes that save most, each with its peak and whether that fits."""
    lines: list[str] = []
    shown_fixes = advice.fixes[:_SHOWN_FIXES]
    is_all_training = all(fix.phase == TRAINING for fix in shown_fixes)
    for fix in shown_fixes:
        fits = (
            ""
            if device is None
            else (", fits" if fix.total <= device.usable(world) else ", does not fit yet")
        )
        where = "" if is_all_training else f" in the {fix.phase}"
        lines.append(f"{fix.what}: {_gib(fix.total)} GiB{where} (saves {_gib(fix.saving)}{fits})")
    return lines


def _shapes(batch: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in batch.items())


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes < 100 * GIB else f"{nbytes / GIB:.1f}"


def _phases(plan: MemoryPlan) -> list[str]:
    names = [phase.name for phase in plan.phases]
    lines = [f"{'GiB per device':16s}" + "".join(f"{name:>16s}" for name in names)]
    for category in plan.phases[0].peak.parts():
        lines.append(
            f"{category:16s}"
            + "".join(f"{_gib(phase.peak.parts()[category]):>16s}" for phase in plan.phases)
        )
    lines.append(
        f"{'together':16s}" + "".join(f"{_gib(phase.peak.total):>16s}" for phase in plan.phases)
    )
    lines.append(
        f"{'rows x longest':16s}"
        + "".join(f"{f'{p.rows} x {p.longest}':>16s}" for p in plan.phases)
    )
    return lines


def _verdict(plan: MemoryPlan, device: Device | None, world: int) -> list[str]:
    if device is None:
        return ["no device is known: give --device, such as 24GiB or h200, to see whether it fits"]
    total, usable = plan.peak.peak.total, device.usable(world)
    word = "fits" if total <= usable else "DOES NOT FIT"
    return [
        f"{word}: {_gib(total)} of {_gib(usable)} GiB that {device.name} gives to tensors "
        f"({total / usable:.0%})"
    ]


def _mark(peak: Breakdown, device: Device | None, world: int) -> str:
    if device is None:
        return ""
    return "  fits" if peak.total <= device.usable(world) else "  too large"
