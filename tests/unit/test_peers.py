"""Ranks that watch each other: silence is told and ends a run, a long step does neither."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.wording import refused, says
from trainer.errors import DataError, RankLostError
from trainer.runtime import process, watch
from trainer.runtime.peers import Patience, Peer
from trainer.runtime.watch import Hub, PeerWatch, Spoke

SHORT = Patience(silence_s=0.6, grace_s=0.2, own_end_s=0.2)


def until(claim: Callable[[], Any], wait_s: float = 20.0) -> None:
    end = time.monotonic() + wait_s
    while not claim():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


class Ranks:
    """The watches of several ranks, in one process."""

    def __init__(self) -> None:
        self.lost: dict[int, RankLostError] = {}
        self.hub = Hub(SHORT, lambda error: self.lost.__setitem__(0, error))
        self.hub.start()
        self.all: list[PeerWatch] = [self.hub]

    def join(self, rank: int) -> Spoke:
        place = {"host": "127.0.0.1", "port": self.hub.port, "token": self.hub.token}
        made = Spoke(rank, SHORT, lambda error: self.lost.__setitem__(rank, error), place)
        made.start()
        self.all.append(made)
        until(lambda: rank in [peer.rank for peer in self.hub.peers()] and made.peers())
        return made

    def silent(self, rank: int) -> socket.socket:
        """A rank that says who it is, and nothing more."""
        line = socket.create_connection(("127.0.0.1", self.hub.port))
        hello = {"is": "hello", "token": self.hub.token, "rank": rank, "name": "process 7 on b"}
        line.sendall(json.dumps(hello).encode() + b"\n")
        until(lambda: rank in [peer.rank for peer in self.hub.peers()])
        return line


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for one in made.all:
        one.leave("", is_orderly=True)


def test_a_rank_that_is_silent_for_too_long_is_named_on_every_other_one(ranks: Ranks) -> None:
    ranks.join(2)
    line = ranks.silent(1)
    until(lambda: {0, 2} <= ranks.lost.keys())
    line.close()
    for error in ranks.lost.values():
        says("rank_silent", error, rank=1, process="7 on b", fix=re.compile(".*LATHE_SILENCE_S"))


def test_a_main_thread_that_computes_for_long_is_not_missed(ranks: Ranks) -> None:
    ranks.join(1)
    end = time.monotonic() + 2 * SHORT.silence_s
    while time.monotonic() < end:
        sum(range(10_000))
    assert not ranks.lost


def test_rank_0_that_falls_silent_is_named_by_the_others(ranks: Ranks) -> None:
    spoke = ranks.join(1)
    ranks.hub.has_left.set()  # its thread ends, its connections stay
    until(lambda: 1 in ranks.lost)
    assert "rank 0 (process" in str(ranks.lost[1])
    assert spoke.lost is ranks.lost[1]


def test_a_broken_connection_explains_a_failed_exchange_and_ends_the_run(ranks: Ranks) -> None:
    other = ranks.join(2)
    ranks.silent(1).close()
    until(lambda: other.suspicion)
    for one in (ranks.hub, other):
        told = one.cause_of(RuntimeError("Connection closed by peer"))
        assert isinstance(told, RankLostError)
        says("rank_ended", told, rank=1, process="7 on b")
    until(lambda: {0, 2} <= ranks.lost.keys())


def test_an_error_of_this_ranks_own_stays_what_it_is(ranks: Ranks) -> None:
    ranks.silent(1).close()
    until(lambda: ranks.hub.suspicion)
    for error in (DataError("row 3"), KeyError("x"), torch.OutOfMemoryError("full")):
        assert ranks.hub.cause_of(error) is error


def test_a_failed_exchange_that_nothing_explains_stays_what_it_is(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FEEL_S", 0.1)
    ranks.join(1)
    error = RuntimeError("shape [3] is invalid")
    assert ranks.hub.cause_of(error) is error


def test_a_connection_that_is_made_again_clears_the_suspicion(ranks: Ranks) -> None:
    spoke = ranks.join(1)
    assert spoke._line is not None
    spoke._line.connection.shutdown(socket.SHUT_RDWR)
    until(lambda: spoke._line is not None and not ranks.hub.suspicion and not spoke.suspicion)
    time.sleep(2 * SHORT.grace_s)
    assert not ranks.lost


def test_a_rank_that_leaves_in_order_is_not_missed(ranks: Ranks) -> None:
    ranks.join(1).leave("", is_orderly=True)
    ranks.silent(2).close()
    until(lambda: 0 in ranks.lost)
    assert "rank 2" in str(ranks.lost[0])


def test_the_failure_of_a_rank_is_told_by_its_own_words(ranks: Ranks) -> None:
    other = ranks.join(2)
    ranks.join(1).leave("DataError: row 3", is_orderly=False)
    until(lambda: 2 in ranks.lost)
    assert str(ranks.lost[2]).endswith("has ended: DataError: row 3")
    assert other.cause_of(RuntimeError("gloo")) is ranks.lost[2]


def test_whoever_does_not_know_the_token_is_hung_up_on(ranks: Ranks) -> None:
    with socket.create_connection(("127.0.0.1", ranks.hub.port)) as line:
        line.sendall(b'{"is": "hello", "token": "none", "rank": 1, "name": "x"}\n')
        assert line.recv(10) == b""
    with socket.create_connection(("127.0.0.1", ranks.hub.port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert line.recv(10) == b""
    assert ranks.hub.peers() == []


def test_a_silence_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    patience, peer = Patience(), Peer(3, "process 7 on b", heard_at=100.0)
    assert peer.warning(129.0, patience) == ""
    assert "the run ends if that lasts for 180 s" in peer.warning(131.0, patience)
    assert peer.warning(132.0, patience) == ""
    assert peer.verdict(280.0, patience) == ""
    assert "for 180 s" in peer.verdict(281.0, patience)
    peer.hear(282.0)
    assert "rank 3 (process 7 on b) is heard of again, after 182 s" in caplog.text
    assert peer.verdict(300.0, patience) == ""


def test_who_was_stopped_itself_has_heard_nobody_in_that_time() -> None:
    peer = Peer(3, "process 7 on b", heard_at=100.0)
    peer.delay(1000.0)
    assert peer.verdict(1110.0, Patience()) == ""
    assert peer.verdict(1281.0, Patience()) != ""


def test_the_environment_says_how_long_silence_may_last() -> None:
    assert Patience.of({}) == Patience(180.0)
    assert Patience.of({"LATHE_SILENCE_S": "600"}) == Patience(600.0)
    assert Patience.of({"LATHE_SILENCE_S": "0"}) is None
    for text in ("soon", "-1", "inf", "nan", ""):
        with refused("silence_wanted"):
            Patience.of({"LATHE_SILENCE_S": text})


_LAUNCHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {rank!r}])
{then}
"""
_RANK = """
import sys; sys.path.insert(0, {root!r})
from trainer.runtime.process import end_launcher_if_stuck
end_launcher_if_stuck(0.5)
"""


@pytest.mark.parametrize(
    ("then", "restarts", "code"),
    [
        ("import time; time.sleep(60)", "3", -9),  # never looks at its child
        ("child.wait(); import time; time.sleep(60)", "0", -9),  # has, and has no restart left
        ("child.wait(); import time; time.sleep(2)", "3", 0),  # may start it again
        ("child.wait()", "0", 0),
    ],
)
def test_a_launcher_that_hangs_is_ended_after_its_rank(then: str, restarts: str, code: int) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(process.__file__)))
    launcher = _LAUNCHER.format(rank=_RANK.format(root=root), then=then)
    variables = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": restarts}
    done = subprocess.run(
        [sys.executable, "-S", "-c", launcher], env=os.environ | variables, timeout=50, check=False
    )
    assert done.returncode == code
