"""Process groups that are let go of while other ranks may be gone, with all that remembers them.

Beside trainer/training/engine.py, this imports deepspeed: its memory of groups is emptied here.
"""

from __future__ import annotations

import gc
import importlib
import traceback
from typing import Any

import deepspeed

from trainer.errors import LatheError
from trainer.runtime import distributed
from trainer.survival import lifeline
from trainer.survival.lifeline import PeerLost


def is_peer_lost(error: Exception) -> bool:
    """Whether `error` came of another rank's end and this one, under `--survive`, is to take its
    next place. It has left its groups by then: who waits for it there feels it, too.
    """
    line = lifeline.current()
    if line is None or isinstance(error, (LatheError, PeerLost)):
        return isinstance(error, PeerLost)  # one that was asked about already
    cause: BaseException | None = error
    while cause is not None:  # locals of what failed hold the engine, and that its connections
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    leave_groups()
    gc.collect()
    return line.is_peer_lost(error)


def import_late_parts() -> None:
    """Import what DeepSpeed 0.19.8 imports when its first engine is made: 600 modules of torch's
    compiler come with it, 1.5 CPU seconds a process.
    """
    late = (
        "comm.mori",
        "module_inject.auto_ep_layer",
        "runtime.superoffload.superoffload_stage3",
        "runtime.zero.muon.muon_optimizer",
    )
    for name in late:
        importlib.import_module(f"deepspeed.{name}")


def leave_groups() -> None:
    """Drop every process group, though other ranks may be gone; distributed.init() may follow."""
    # deepspeed 0.19.8 remembers its backend and the groups that it made
    deepspeed.utils.groups._release_process_group_references(None)
    deepspeed.comm.comm.cdb = None
    # ZeRO-3 compares the numbers of weights and modules over ranks, and a new rank counts from 0;
    # the modules of a forward that failed are still open
    offload: Any = deepspeed.runtime.zero.parameter_offload
    deepspeed.zero.Init.param_id = 0
    offload.FWD_MODULE_STACK.clear()
    offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    distributed.leave_group()
