"""A session from its next step to its last one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trainer.training.loop import fit
from trainer.training.validation import refuse_unknown_best

if TYPE_CHECKING:
    from trainer.training.session import Progress, Session


def run(session: Session, progress: Progress, *, inside: AbstractContextManager[None]) -> bool:
    """Train every step that is left. True when all are done, False when a signal came before.

    inside: what is enforced while steps run, such as a memory plan. The caller exports the weights
    and destroys the engine. A collective.
    """
    with inside:
        refuse_unknown_best(session, progress)
        session.record.goodput.begin_steps()
        return fit(session, progress)
