"""What `--survive` says, how many ranks go on, who is a straggler, and which state is gone back to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.facts import EVENT
from tests.ranks import run_alone
from tests.survivors import share_fork_server
from tests.wording import refused, says
from trainer.files import survival_events as events
from trainer.files.survive import Survival, parse
from trainer.survival import mirror
from trainer.survival.agent import MOST_IN_VAIN, Agent, fitting
from trainer.survival.member import Break, Member
from trainer.survival.stragglers import SAMPLES, Stragglers
from trainer.telemetry.chain import StepChain
from trainer.telemetry.source_losses import SourceSums
from trainer.training.session import Progress


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
    with refused("survive_form"):
        parse(text, environment={})


def test_it_is_refused_under_a_launcher_that_starts_ranks_itself() -> None:
    with refused("survive_with_torchrun"):
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


def test_losses_by_source_go_on_from_what_every_rank_has_summed_up(tmp_path: Path) -> None:
    memory = [[str(tmp_path / f"{rank}-{slot}") for slot in range(2)] for rank in range(2)]
    live: Any = SimpleNamespace(average=None)
    inner = SimpleNamespace(state={"a weight": {}})
    live.optimizer = SimpleNamespace(inner=lambda: inner, pieces=list, scalars=dict)
    progress = Progress(step=4, by_source=[[9.0, 9.0]])  # as the last checkpoint has them
    for files, own in zip(memory, ([[1.5, 2.0]], [[0.25, 3.0]]), strict=True):
        for file in files:
            Path(file).touch()
        copies = mirror.Mirror(files, "a")
        copies.keep(live, progress, StepChain(), SourceSums(["general"], own))
    states = [mirror.newest([files], "a") for files in memory]
    headers = [state.headers[0] for state in states if state is not None]
    state = mirror.MirroredState(4, headers, []).state()
    assert state["progress"]["by_source"] == [[1.75, 5.0]]


def test_what_does_not_fit_into_host_memory_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = torch.nn.Linear(1000, 1000)
    live: Any = SimpleNamespace(model=SimpleNamespace(module=module), average=None)
    memory = [["/dev/null"] * 2]
    room = SimpleNamespace(available=2 * 12 * 1_001_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: room)
    assert mirror.of_this_rank(memory, "a", live, step=0, every=1) is not None
    room.available -= 1
    with refused("survive_memory"):
        mirror.of_this_rank(memory, "a", live, step=0, every=1)
    assert mirror.of_this_rank([], "a", live, step=0, every=1) is None


def test_what_not_all_ranks_kept_is_forgotten_by_those_that_go_on(tmp_path: Path) -> None:
    memory = [[str(tmp_path / f"{rank}-{slot}") for slot in range(2)] for rank in range(2)]
    for rank in range(2):
        kept(Path(memory[rank][0]), step=8, world=2)
        kept(Path(memory[rank][1]), step=9, world=2, is_whole=rank == 1)
    mirror.Mirror(memory[1], "a").forget_after(8)
    kept(Path(memory[0][1]), step=9, world=2)  # of the next generation, whose bits may be others
    found = mirror.newest(memory, "a")
    assert found is not None
    assert found.step == 8


def member(rank: int = -1, **how: Any) -> Member:
    """A process that the agent knows; a real one, which has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    line = SimpleNamespace(send_bytes=lambda text: None, close=lambda: None)
    process: Any = SimpleNamespace(pid=ended.pid, exitcode=-9, join=lambda wait=0: None)
    return Member(process, line, os.memfd_create("stacks"), rank=rank, **how)  # pyright: ignore


def running(ranks: int, spares: int = 0) -> Agent:
    """An agent in the midst of its first generation."""
    agent = Agent(Survival(ranks, spares), "unused")
    agent._generation = 1
    agent._members = [member(rank, state="running", has_joined=True) for rank in range(ranks)]
    return agent


def test_a_signal_and_a_look_at_stacks_may_come_when_a_process_has_just_died() -> None:
    agent = running(2)
    agent._ask(signal.SIGTERM, None)
    assert agent._members[0].stack_text() == ""


def test_a_rank_that_has_not_joined_is_asked_to_stop_when_it_has_and_spares_stay() -> None:
    asked = list[int]()
    agent = running(2, spares=1)
    agent._members += [member(state="spare")]
    agent._members[1].has_joined = False
    for one in agent._members:
        one.send_signal = lambda number, one=one: asked.append(one.rank)
    agent._ask(signal.SIGTERM, None)
    assert asked == [0]
    agent._take(agent._members[1], {"is": "joined"})
    assert asked == [0, 1]


def test_a_rank_that_is_lost_while_others_recover_begins_another_recovery() -> None:
    agent = running(3)
    first, second, third = agent._members
    agent._reached = 5
    agent._bury(first)
    agent._generation = 2  # the others go on from step 5
    agent._take(second, {"is": "resumed", "step": 5, "source": "memory"})
    agent._bury(third)
    agent._take(second, {"is": "moved", "step": 6, "place": "step"})  # told late
    assert agent._break is not None
    assert [one["rank"] for one in agent._break.lost] == [0, 2]


def test_a_recovery_may_take_longer_than_ranks_may_hold_on_to_a_broken_group() -> None:
    agent, killed = running(3), list[int]()
    agent._bury(agent._members[0])
    assert agent._break is not None
    agent._break.at = agent._break.ended_at = time.monotonic() - 1000
    for one in agent._members:
        one.process.kill = lambda one=one: killed.append(one.rank)
        one.heard_at = time.monotonic()
        one.stack_text = str
    agent._generation = 2  # begun, and loading
    agent._act()
    assert killed == []
    agent._generation = 1
    agent._act()
    assert killed == [1, 2]


def test_a_rank_that_still_waits_for_the_others_after_it_was_told_to_let_go_is_replaced_soon() -> (
    None
):
    agent, killed = running(3), list[int]()
    agent._bury(agent._members[0])
    assert agent._break is not None
    agent._break.ended_at = time.monotonic() - 12
    for one in agent._members:
        one.process.kill = lambda one=one: killed.append(one.rank)
        one.heard_at, one.stack_text = time.monotonic(), str
    agent._take(agent._members[1], {"is": "beat", "waited_s": 11.5, "busy": 0, "of": 0})
    agent._act()
    assert killed == [2]


def test_an_error_of_its_own_in_a_recovery_is_not_put_down_to_the_loss_before_it() -> None:
    agent, told = running(2), list[str]()
    agent._bury(agent._members[0])
    agent._generation = 2
    one = agent._members[0]
    one.send = lambda **message: told.append(message["do"])
    agent._take(one, {"is": "stranded", "error": "ValueError: its own"})
    assert agent._break is not None
    agent._break.ended_at -= 6
    agent._act()
    assert told == ["let go", "fail"]


def test_a_rank_is_lost_for_its_own_end_not_for_what_it_had_felt_of_anothers() -> None:
    agent = running(2)
    agent._take(agent._members[1], {"is": "stranded", "error": "RuntimeError: connection closed"})
    agent._bury(agent._members[1])
    assert agent._break is not None
    assert [one["why"] for one in agent._break.lost] == ["ended by SIGKILL"]


def test_a_rank_that_is_told_to_leave_is_not_killed_before_it_has_heard_it() -> None:
    agent, told, killed = running(2), list[str](), list[int]()
    stranded, done = agent._members
    agent._start = lambda: None
    agent._context = SimpleNamespace(set_forkserver_preload=lambda names: None)
    stranded.send = lambda **message: told.append(message["do"])
    stranded.process.kill = lambda: killed.append(stranded.rank)

    def hear() -> None:
        if done in agent._members:
            agent._take(stranded, {"is": "stranded", "error": "RuntimeError: connection closed"})
            agent._take(done, {"is": "leaving", "code": 0})
            agent._bury(done)
        else:
            assert told[-1] == "leave"
            agent._take(stranded, {"is": "leaving", "code": 0})
            agent._bury(stranded)

    agent._hear = hear
    assert agent.run() == 0
    assert killed == []


def test_a_rank_that_does_not_leave_is_killed_after_a_while() -> None:
    agent, killed = running(2), list[int]()
    stranded, done = agent._members
    stranded.process.kill = lambda: killed.append(stranded.rank)
    agent._take(stranded, {"is": "stranded", "error": "RuntimeError: connection closed"})
    agent._take(done, {"is": "leaving", "code": 0})
    agent._bury(done)
    agent._act()
    assert killed == []
    assert agent._ending is not None
    agent._ending.at -= 31
    agent._act()
    assert killed == [0]


def test_steps_of_any_length_are_no_hang_before_one_was_timed() -> None:
    agent = running(2)
    begun = time.monotonic() - 100
    for one in agent._members:
        one.moved_at = begun
    agent._move(agent._members[0], 1, "step")
    assert agent._patience_s() > 900
    agent._move(agent._members[0], 2, "step")
    agent._stragglers.begin()
    assert agent._patience_s() > 300, "what is known of steps outlasts a generation"


def test_processes_that_cannot_import_end_the_run_and_later_ones_are_not_tried_for_ever() -> None:
    assert run_alone(code_of, "tests.no_such_module") == 1
    agent = running(2, spares=1)
    agent._start = lambda: agent._members.append(member(state="warming"))
    agent._start()
    for _ in range(MOST_IN_VAIN):
        agent._bury(agent._members[-1])
    assert [one.state for one in agent._members] == ["running", "running"]


def test_a_run_that_is_given_up_says_how_often_in_a_row_a_rank_was_lost() -> None:
    agent = running(2)
    agent._break_generation()
    for _ in range(MOST_IN_VAIN):
        agent._refuse_hopeless(agent._members)
    with refused("survive_in_vain", times=MOST_IN_VAIN + 1):
        agent._refuse_hopeless(agent._members)


def code_of(module: str) -> int:
    share_fork_server()
    return Agent(Survival(2), module).run()


def test_an_ignored_signal_stays_ignored() -> None:
    assert run_alone(hangup_while_it_runs) == "SIG_IGN"


def hangup_while_it_runs() -> str:
    share_fork_server()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    agent = Agent(Survival(1), "tests.no_such_module")
    found = list[Any]()
    agent._start = lambda: found.append(signal.getsignal(signal.SIGHUP))
    agent.run()
    return found[0].name


def test_a_run_that_is_given_up_is_not_left_running(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "running", "step": 3}')
    agent = running(0)
    agent._folder = str(tmp_path)
    agent._members = [member(state="warming")]
    agent._break = Break(time.monotonic(), 3, 1, is_explained=True)
    agent._survival = Survival(0)
    agent._hear = agent._members.clear
    agent._context = SimpleNamespace(set_forkserver_preload=lambda names: None)
    with refused("survive_every_rank_lost"):
        agent.run()
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["state"] == "failed"
    says("survive_every_rank_lost", told["error"])


def test_what_a_run_has_been_through_is_summed_up_and_a_torn_line_is_none(tmp_path: Path) -> None:
    assert events.summary(tmp_path) is None
    events.add(tmp_path, EVENT)
    events.add(tmp_path, EVENT | {"world": 2, "recovery_s": 1.5})
    with (tmp_path / events.FILE).open("a") as file:
        file.write('{"lost": [{"ra')
    assert events.summary(tmp_path) == {
        "count": 2,
        "steps_lost": 2,
        "seconds": 2.3,
        "ranks": 2,
        "last": "rank 1 ended by SIGKILL, at step 6: on from step 5 (memory) with 2 rank(s) after 1.5 s",
    }


def test_a_step_that_is_told_after_a_death_but_was_done_before_it_ends_no_recovery() -> None:
    agent = running(3)
    agent._reached = 5
    agent._bury(agent._members[0])
    one = agent._members[0]
    agent._move(one, 6, "step")
    assert agent._break is not None
    agent._generation, agent._break.step = 2, 5
    agent._move(one, 5, "start")
    assert agent._break is not None
    agent._move(one, 6, "step")
    assert agent._break is None
