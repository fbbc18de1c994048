"""A process of `--survive`. It takes the place of one rank after another, until the run is done.

Importing this module imports everything that a rank needs, so that a forked process can start
at once.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from trainer import tasks
from trainer.errors import EXIT_OK, EXIT_PAUSED
from trainer.launch.ending import end
from trainer.launch.group import run_each
from trainer.runtime import device_defaults, distributed
from trainer.runtime.preemption import Preemption
from trainer.survival import groups, lifeline
from trainer.survival.lifeline import Lifeline, Seat
from trainer.training.options import Options
from trainer.training.run_plan import plan

groups.import_late_parts()
# A table of 900 regular expressions that every from_pretrained of transformers 5.23 compiles first.
get_checkpoint_conversion_mapping("t5")
# these objects stay for ever: each garbage collection would look at them again, for 0.4 s
gc.collect()
gc.freeze()


def become(
    line: Any,
    stacks: str,
    memory: list[list[str]],
    outputs: list[Any],
    environment: dict[str, str],
    experiments: list[dict[str, Any]],
    options: dict[str, Any],
) -> NoReturn:
    """Be a rank until the run is done, in a process that the agent has started.

    outputs: the agent's standard output and error.
    """
    os.setsid()  # a Ctrl-C goes to the agent, which passes it on
    os.environ.clear()
    os.environ.update(environment)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
    device_defaults.before_torch()
    own = lifeline.attach(line, stacks, memory)
    end(lambda: train(experiments, Options(**options), own))


def train(experiments: Sequence[dict[str, Any]], options: Options, line: Lifeline) -> int:
    """Train every experiment as the rank that the agent assigns to this process. Returns the exit
    code of the run.
    """
    # forked from a process that may have been started for another number of threads
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cfgs = [tasks.parse(values, source="--survive") for values in experiments]
    for cfg in cfgs:
        importlib.import_module(f"trainer.tasks.{cfg.package}.task")
    line.tell("warm", batches=[cfg.train.global_batch for cfg in cfgs])
    seat = line.seat()
    preemption = Preemption()
    while seat is not None:
        code = _as_rank(experiments, options, line, seat, preemption)
        if code is not None:
            return code
        seat = line.seat()
    return EXIT_OK


def _as_rank(
    experiments: Sequence[dict[str, Any]],
    options: Options,
    line: Lifeline,
    seat: Seat,
    preemption: Preemption,
) -> int | None:
    """Train as this rank. Returns the exit code; None when another rank was lost."""
    logging.getLogger().setLevel(logging.INFO if seat.rank == 0 else logging.WARNING)
    here = replace(options, memory=seat.memory, begun=tuple(seat.begun))
    plans = [
        plan(values, here, world=seat.world, rank=seat.rank, may_be_smaller=True)
        for values in experiments
    ]
    try:
        distributed.init()
        line.tell("joined")
        code = run_each(plans, here, preemption)
        if code in (EXIT_OK, EXIT_PAUSED):
            distributed.barrier()  # a rank that passes it knows that all ranks are done
        return code
    except Exception as error:
        if not groups.is_peer_lost(error):
            raise
    return None
