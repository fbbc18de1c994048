"""What a run changes of its whole process, put back when it ends: a notebook stays as it was, and
its next run gives the numbers of a command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

from trainer.launch.ending import LIBRARIES, quieten

# Options of torch's compiler that train.compile sets (trainer/models/fused.py).
_OF_COMPILER = {
    "torch._dynamo.config": ("nested_graph_breaks", "recompile_limit"),
    "torch._inductor.config": ("deterministic",),
}


@contextlib.contextmanager
def as_found(*, compiles: bool = False) -> Iterator[None]:
    """Inside, the process is as a command has it; afterwards environment, loggers, random state,
    torch's defaults and process groups are as they were, and the memory of a run is free.

    compiles: whether torch's compiler may be used.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())  # rich draws when it is imported
        stack.enter_context(_environment())
        from trainer.runtime import device_defaults

        device_defaults.before_torch()
        import torch

        from trainer.runtime import distributed, host_memory, rng

        stack.callback(host_memory.let_go)
        stack.enter_context(_logging())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        for module, names in _OF_COMPILER.items() if compiles else ():
            config = importlib.import_module(module)
            for name in (name for name in names if hasattr(config, name)):
                stack.callback(setattr, config, name, getattr(config, name))
        if distributed.is_gpu():
            _keep_of_gpu(stack)
        stack.callback(rng.restore, rng.capture())
        stack.callback(_end_groups)
        yield


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Inside, our log lines are shown as a command shows them, unless this program logs them
    itself: then its handlers get them.
    """
    ours, root = logging.getLogger("trainer"), logging.getLogger()
    loggers = [ours, *(logging.getLogger(name) for name in LIBRARIES)]
    levels = [logger.level for logger in loggers]
    handler: logging.Handler | None = None
    is_propagated = ours.propagate
    if not (root.handlers and root.level <= logging.INFO) and not ours.handlers:
        from trainer.telemetry.console import ConsoleHandler

        handler = ConsoleHandler()
        ours.addHandler(handler)
        ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    quieten()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        ours.propagate = is_propagated
        if handler is not None:
            ours.removeHandler(handler)


def _keep_of_gpu(stack: contextlib.ExitStack) -> None:
    """Let the stack restore what device_defaults.settle() sets."""
    import torch

    backends: Any = torch.backends
    stack.callback(backends.cuda.enable_cudnn_sdp, backends.cuda.cudnn_sdp_enabled())
    for owner in (backends.cuda.matmul, backends.cudnn):
        stack.callback(setattr, owner, "allow_tf32", owner.allow_tf32)
    torch.cuda.reset_peak_memory_stats()  # which a run compares with its plan


def _end_groups() -> None:
    """End the process group of a run, and free what the engine holds, in cycles of references."""
    import torch

    from trainer.runtime import distributed

    if distributed.has_group():
        if "trainer.survival.groups" in sys.modules:  # a run imports it, with DeepSpeed
            from trainer.survival import groups

            groups.forget_groups()
        distributed.end_group()
        gc.collect()
        if distributed.is_gpu():
            torch.cuda.empty_cache()
