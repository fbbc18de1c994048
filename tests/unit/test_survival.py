"""What `--survive` says, how many ranks go on, who is a straggler, and which state is gone back to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import ConfigError, DoesNotFitError
from trainer.survival import mirror
from trainer.survival.agent import Agent, Break, Member, fitting
from trainer.survival.spec import Survival, parse
from trainer.survival.stragglers import SAMPLES, Stragglers


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("3", Survival(3)),
        ("3+1", Survival(3, 1)),
        ("8+2,hang_s=120,every=4", Survival(8, 2, 120, 4)),
    ],
)
def test_what_survive_says(text: str, want: Survival) -> None:
    assert parse(text, environment={}) == want


@pytest.mark.parametrize("text", ["", "0", "3+", "+1", "3+1+1", "three", "3,every=0", "3,hang=4"])
def test_another_text_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="want RANKS or RANKS"):
        parse(text, environment={})


def test_it_is_refused_under_a_launcher_that_starts_ranks_itself() -> None:
    with pytest.raises(ConfigError, match="not with torchrun"):
        parse("3", environment={"RANK": "0"})


def test_so_many_ranks_go_on_as_every_global_batch_can_be_dealt_to() -> None:
    assert [fitting(n, [12]) for n in (6, 5, 3, 1)] == [6, 4, 3, 1]
    assert fitting(5, [12, 8]) == 4
    assert fitting(3, [7]) == 1


def test_a_rank_that_computes_while_the_others_wait_is_named_once() -> None:
    ranks, told = Stragglers(), list[str]()
    for _ in range(2):
        ranks.step(0, 2.0)
        for rank, busy in ((0, 40), (1, 90), (2, 45)):
            ranks.add(rank, busy, SAMPLES)
        told += ranks.lines()
    (line,) = told
    assert "rank 1 " in line
    assert "1.800 s of a step, the others 0.850 s (2.1 times)" in line


def test_ranks_that_compute_alike_are_not_named_and_few_samples_say_nothing() -> None:
    ranks = Stragglers()
    ranks.add(0, 1, SAMPLES - 1)
    ranks.add(1, SAMPLES, SAMPLES)
    assert ranks.lines() == []
    ranks.add(0, SAMPLES - 20, 1)
    assert ranks.lines() == []


def kept(file: Path, *, step: int, world: int, run: str = "a", is_whole: bool = True) -> None:
    """What a rank leaves in a memory file."""
    header = {"run": run, "step": step, "world": world, "tensors": []}
    text = json.dumps(header).encode()
    start = mirror._HEAD.size
    head = mirror._HEAD.pack(step + 1 if is_whole else 0, start, len(text))
    file.write_bytes(head + text + bytes(os.sysconf("SC_PAGESIZE")))


def test_the_newest_step_that_all_ranks_kept_whole_is_gone_back_to(tmp_path: Path) -> None:
    memory = [[str(tmp_path / f"{rank}-{slot}") for slot in range(2)] for rank in range(3)]
    for files in memory:
        for file in files:
            Path(file).touch()
    assert mirror.newest(memory, "a") is None
    for rank in range(3):
        kept(Path(memory[rank][0]), step=8, world=3)
        kept(Path(memory[rank][1]), step=9, world=3, is_whole=rank != 1)
    found = mirror.newest(memory, "a")
    assert found is not None
    assert (found.step, found.world) == (8, 3)
    assert mirror.newest(memory, "b") is None
    for rank in range(2):  # fewer ranks went on
        kept(Path(memory[rank][1]), step=9, world=2)
    found = mirror.newest(memory, "a")
    assert found is not None
    assert (found.step, found.world) == (9, 2)


def test_what_does_not_fit_into_host_memory_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live: Any = SimpleNamespace(model=SimpleNamespace(module=torch.nn.Linear(1000, 1000)))
    room = SimpleNamespace(available=2 * 12 * 1_001_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: room)
    assert mirror.of_this_rank([["/dev/null"] * 2], "a", live, every=1) is not None
    room.available -= 1
    with pytest.raises(DoesNotFitError, match="12 bytes a trained parameter, twice"):
        mirror.of_this_rank([["/dev/null"] * 2], "a", live, every=1)
    assert mirror.of_this_rank([], "a", live, every=1) is None


def test_a_step_that_is_told_after_a_death_but_was_done_before_it_ends_no_recovery() -> None:
    agent = Agent(Survival(3), "unused")
    process: Any = SimpleNamespace(pid=0)
    member = Member(process, line=process, stacks=-1, state="running", rank=1)
    agent._generation, agent._reached = 1, 5
    agent._break = Break(at=0.0, generation=1, reached=5)
    agent._move(member, 6, "step")
    assert agent._break is not None
    agent._generation, agent._break.step = 2, 5
    agent._move(member, 5, "start")
    assert agent._break is not None
    agent._move(member, 6, "step")
    assert agent._break is None
