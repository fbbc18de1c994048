"""Abandons process groups while other ranks may be gone, with everything that refers to them.

Like trainer/training/engine.py, this module imports deepspeed, to empty its caches of groups.
"""

from __future__ import annotations

import gc
import importlib
import traceback
from typing import Any

from trainer.errors import LatheError
from trainer.runtime import distributed
from trainer.runtime.deepspeed_optimizers import without_mlflow
from trainer.survival import lifeline
from trainer.survival.lifeline import PeerLost

with without_mlflow():
    import deepspeed


def is_peer_lost(error: Exception) -> bool:
    """Whether the end of another rank caused `error`, so that this one, under `--survive`, must
    take its next place. By then it has left its groups, so that ranks which wait for it notice,
    too.
    """
    line = lifeline.current()
    if line is None or isinstance(error, (LatheError, PeerLost)):
        return isinstance(error, PeerLost)  # this error was asked about before
    cause: BaseException | None = error
    while cause is not None:  # the frames hold the engine, and the engine holds connections
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    leave_groups()
    gc.collect()
    return line.is_peer_lost(error)


def import_late_parts() -> None:
    """Import now what DeepSpeed 0.19.8 imports when its first engine is made: it takes 600 modules
    of torch's compiler and 1.5 CPU seconds for each process.
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
    """Leave every process group, even if other ranks are gone; distributed.init() may follow."""
    forget_groups()
    distributed.leave_group()


def forget_groups() -> None:
    """Make DeepSpeed forget the process groups, which are about to end."""
    # deepspeed 0.19.8 keeps its backend and the groups that it made
    deepspeed.utils.groups._release_process_group_references(None)
    deepspeed.comm.comm.cdb = None
    # ZeRO-3 compares the numbers of weights and modules between ranks, and a new rank counts from
    # 0; the modules of the failed forward are still on its stack
    offload: Any = deepspeed.runtime.zero.parameter_offload
    deepspeed.zero.Init.param_id = 0
    offload.FWD_MODULE_STACK.clear()
    offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
