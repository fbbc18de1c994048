"""A session from its next step to its last one, or to the one at which --until stops it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from trainer.training.loop import steps
from trainer.training.validation import (
    evaluate_pause,
    refuse_unknown_best,
    refuse_unknown_gate,
)

if TYPE_CHECKING:
    from trainer.data.order import StepBatches
    from trainer.training.session import Progress, Session

End = Literal["succeeded", "paused", "preempted"]  # as the state in status.json


def run(
    session: Session, progress: Progress, *, inside: AbstractContextManager[None]
) -> Generator[StepBatches, StepBatches, End]:
    """Train every step that is left (loop.steps), or those up to --until ("paused").

    inside: what is enforced while steps run, such as a memory plan. The caller exports the weights
    and destroys the engine. A collective.
    """
    with inside:
        refuse_unknown_best(session, progress)
        refuse_unknown_gate(session)
        session.record.goodput.begin_steps()
        is_done = yield from steps(session, progress)
        if not is_done:
            return "preempted"
        if not session.pauses(progress):
            return "succeeded"
        return "paused" if evaluate_pause(session, progress) else "preempted"
