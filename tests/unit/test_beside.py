"""trainer/runtime/beside.py: what is done with a copy of the training state gives way to the run."""

from __future__ import annotations

import os
import threading

import torch

from trainer.runtime.beside import NICE, Beside, StateCopy


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_from_the_copy_on_a_save_takes_the_cores_that_the_run_leaves() -> None:
    copies, beside, ours = StateCopy(), Beside(), priority()
    copies.of({"weight": torch.arange(3.0)})
    seen: list[int] = []

    def save() -> None:
        seen.append(priority())  # the next update waits for the copy
        copies.copy()
        seen.append(priority())
        hasher = threading.Thread(target=lambda: seen.append(priority()))
        hasher.start()
        hasher.join()

    beside.start(save)
    beside.wait()
    lowered = max(ours, NICE)
    assert seen == [ours, lowered, lowered]
    assert priority() == ours, "the run's own thread stays as it was"
    copies.of({"weight": torch.arange(3.0)})
    copies.copy()
    assert priority() == ours, "nor does a copy of its own change that"
