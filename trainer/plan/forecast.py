"""The memory and the time of a run, predicted together."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.devices import refuse_without_fp8
from trainer.plan.memory import plan_text
from trainer.plan.memory.advice import advise, choose_recomputation
from trainer.plan.memory.plan import make
from trainer.plan.time import text
from trainer.plan.time.run_time import run_time

if TYPE_CHECKING:
    from trainer.plan.memory.advice import Advice
    from trainer.plan.memory.plan import MemoryPlan
    from trainer.plan.memory.subject import Subject
    from trainer.plan.time.run_time import RunTime
    from trainer.plan.time.target import Target


@dataclass(frozen=True)
class Forecast:
    """The memory and the time of a run, predicted. Printed, it is the text of `lathe plan`."""

    memory: MemoryPlan
    advice: Advice  # what would fit
    time: RunTime | None  # None: how fast the device is, is not known
    target: Target  # the devices

    def plain(self) -> dict[str, Any]:
        """What `lathe plan --json` prints, bytes and seconds: {"plan", "advice"}, and "time" if how
        fast the device is, is known.
        """
        content = {"plan": self.memory.plain(), "advice": self.advice.plain()}
        return content if self.time is None else {**content, "time": self.time.plain()}

    def __str__(self) -> str:
        device, world = self.target.device, self.target.cluster.world
        page = plan_text.page(self.memory, self.advice, device, world=world)
        return f"{page}\n{self.target.no_time if self.time is None else text.page(self.time)}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def forecast(subject: Subject, target: Target) -> Forecast:
    """Predict a run on these devices. Call it inside of measuring(), which keeps one process for
    all of its fake steps. ConfigError for products of FP8 on a GPU that has none.
    """
    device, rates = target.device, target.rates
    if subject.cfg.train.base_bits == "fp8" and device is not None:
        refuse_without_fp8(device.name)
    if device is not None and device.is_processor:
        subject = subject.of_processor()
    cublas = 0 if device is None else device.cublas_nbytes
    subject = choose_recomputation(subject, device)
    memory = make(subject, cublas=cublas)
    advice = advise(subject, memory, device, cublas=cublas)
    time = None if rates is None else run_time(subject, rates, target.cluster)
    return Forecast(memory.plan, advice, time, target)
