"""The memory plan of a run as it is launched: made, shown, cached in its folder, obeyed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.memory import page
from trainer.memory.advice import Advice, advise
from trainer.memory.devices import Device, device_here, device_of
from trainer.memory.plan import Made, Subject, make
from trainer.memory.prepare import subject_of
from trainer.run import Options, plan, store_of


@dataclass(frozen=True)
class Planned:
    """A whole plan, for the command."""

    made: Made
    advice: Advice
    device: Device | None
    world: int

    def text(self) -> str:
        return page.shown(self.made.plan, self.advice, self.device, world=self.world)

    def plain(self) -> dict[str, Any]:
        return {"plan": self.made.plan.plain(), "advice": self.advice.plain()}


def planned(values: dict[str, Any], options: Options, *, world: int) -> Planned:
    """The plan of one experiment with every advice. Measures in processes of their own; touches no run folder."""
    subject = _subject(values, options, world)
    device = device_of(options.device) if options.device is not None else device_here()
    cublas = device.cublas_nbytes if device is not None else 0
    made = make(subject, cublas=cublas)
    return Planned(made, advise(subject, made, device, cublas=cublas), device, world)


def _subject(values: dict[str, Any], options: Options, world: int) -> Subject:
    checked = plan(values, options, world=world, rank=0)
    return subject_of(
        values,
        ds=checked.ds,
        sharding=checked.sharding,
        places=options.places,
        store_of=lambda task, split: store_of(task, split, options),
        answers=bool(checked.cfg.train.answers or options.extra_evals),
    )
