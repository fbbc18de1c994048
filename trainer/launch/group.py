"""Runs the experiments of a group, one after another, on every rank or alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED
from trainer.launch.prepare import is_in_memory
from trainer.launch.run import run, test_finished
from trainer.launch.run_folder import tell_changed_data
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Preemption
from trainer.training.run_plan import is_finished, rests

if TYPE_CHECKING:
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)


def run_group(plans: Sequence[RunPlan], options: Options) -> int:
    """Train the experiments in order, without those that are finished. Stops at the first one that
    neither finishes nor comes to the step of --until, or at a signal between two of them. Returns
    the last exit code; that of --until when one of them stopped there.
    """
    preemption = Preemption()
    try:
        return run_each(plans, options, preemption)
    finally:
        preemption.close()


def run_each(plans: Sequence[RunPlan], options: Options, preemption: Preemption) -> int:
    """run_group with the caller's Preemption."""
    last = EXIT_OK
    for plan in plans:
        if not options.resets(plan.id) and on_main(functools.partial(is_finished, plan)):
            logger.info("%s is finished; -r 1 starts it over", plan.folder)
            on_main(functools.partial(tell_changed_data, plan, options))
            if options.test and (code := test_finished(plan, options, preemption)) != EXIT_OK:
                return code
            continue
        if not options.resets(plan.id) and on_main(functools.partial(rests, plan, options.until)):
            last = EXIT_PAUSED
            continue
        is_asked_to_stop = torch.tensor(int(preemption.requested))
        if not is_in_memory(plan, options) and int(distributed.total(is_asked_to_stop)):
            return EXIT_PREEMPTED
        code = run(plan, options, preemption)
        if code not in (EXIT_OK, EXIT_PAUSED):
            return code
        last = max(last, code)
    return last
