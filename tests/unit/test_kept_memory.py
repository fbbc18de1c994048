"""Freed memory that malloc keeps for the next step of a run on a processor."""

from __future__ import annotations

import dataclasses
import os
import platform
import resource

import pytest

from tests.ranks import run_alone
from trainer.devices import KEPT
from trainer.plan.time.rates import of_data_sheet
from trainer.runtime import device_defaults, host_memory

NUMBERS = 16 << 20  # 64 MiB of float32, which malloc maps and unmaps by itself
PAGES = 4 * NUMBERS // os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another one")


def new_pages() -> int:
    """How many pages a tensor takes from the system after a larger one was freed."""
    import torch

    torch.set_num_threads(1)
    torch.ones(NUMBERS + NUMBERS // 4)  # larger, for torch's tensors are aligned
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(NUMBERS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _of_a_run(environment: dict[str, str]) -> int:
    os.environ.update(environment)
    assert device_defaults.settle("fp32", optimizer="adamw", compiles=False) is None
    return new_pages()


@pytest.mark.parametrize(
    ("environment", "is_kept"),
    [
        ({}, True),
        ({"LATHE_KEEP_MEMORY": "0"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}, True),
    ],
)
def test_a_run_on_a_processor_keeps_freed_memory_unless_it_is_told_not_to(
    environment: dict[str, str], is_kept: bool
) -> None:
    pages = run_alone(_of_a_run, environment)
    assert pages < PAGES / 10 if is_kept else pages > PAGES / 2


def _after_reading() -> list[int]:
    """New pages outside and inside of what reads a base, and after it."""
    assert host_memory.keep({})
    with host_memory.returned_at_once():
        inside = new_pages()
    return [inside, new_pages()]


def test_a_base_is_read_without_kept_memory_and_the_steps_keep_it_again() -> None:
    inside, after = run_alone(_after_reading)
    assert inside > PAGES / 2
    assert after < PAGES / 10


STEPS, MIB = 12, 2**20


def _around_a_longer_step() -> tuple[int, bool, int]:
    """MiB that the process holds more after a longer step, whether it gave back, and then."""
    import torch

    assert host_memory.keep({})
    torch.ones(MIB)
    assert not host_memory.give_back_excess()
    before = host_memory._held()
    torch.ones(4 * NUMBERS)
    longer = host_memory._held() - before
    is_returned = host_memory.give_back_excess()
    return longer // MIB, is_returned, (host_memory._held() - before) // MIB


def test_what_is_held_beyond_a_step_is_given_back() -> None:
    longer, is_returned, after = run_alone(_around_a_longer_step)
    assert is_returned
    assert longer > 200
    assert after < 20


def test_free_memory_is_given_back_when_the_heap_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step behind a return shows what a step needs; the longest of these counts."""
    held = iter([1000, 1139, 1141, 900, 1140, 1150, 1200, 1300, 1369])
    monkeypatch.setattr(host_memory, "_held", lambda: next(held))
    monkeypatch.setattr(host_memory, "_return_free", lambda: None)
    monkeypatch.setattr(host_memory, "_is_kept", True)
    monkeypatch.setattr(host_memory, "_is_empty", True)
    monkeypatch.setattr(host_memory, "_needed", 0)
    returns = [host_memory.give_back_excess() for _ in range(9)]
    assert returns == [False, False, True, False, False, True, False, False, True]


def _after_equal_steps() -> int:
    import torch

    assert host_memory.keep({})
    returns = 0
    torch.ones(NUMBERS + NUMBERS // 4)  # as new_pages() has it
    for _ in range(STEPS):
        torch.ones(NUMBERS)
        returns += host_memory.give_back_excess()
    return returns


def test_equal_steps_return_nothing() -> None:
    assert run_alone(_after_equal_steps) == 0


def test_malloc_that_keeps_nothing_has_no_excess() -> None:
    assert not host_memory.give_back_excess()


def _after_a_run_in_a_notebook() -> tuple[int, int]:
    from trainer.api.process_state import as_found

    with as_found():
        device_defaults.settle("fp32", optimizer="adamw", compiles=False)
        inside = new_pages()
    return inside, new_pages()


def test_the_program_that_a_run_was_a_part_of_has_its_malloc_back() -> None:
    inside, after = run_alone(_after_a_run_in_a_notebook)
    assert inside < PAGES / 10
    assert after > PAGES / 2


def test_a_plan_for_a_processor_leaves_room_for_kept_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = of_data_sheet("h200")
    assert rates is not None
    gpu = rates.device
    assert gpu.kept == 0
    processor = dataclasses.replace(rates, overlaps_launches=False).device
    assert processor.kept == KEPT
    assert processor.usable(1) == int(gpu.usable(1) / (1 + KEPT))
    for name, word in (("LATHE_KEEP_MEMORY", "0"), ("MALLOC_MMAP_MAX_", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, word)
            given_back = dataclasses.replace(rates, overlaps_launches=False).device
        assert given_back.usable(1) == gpu.usable(1), "the run returns what it frees"
