"""One run on two nodes: network namespaces of this machine with addresses of their own and a wire
between them, torchrun on each, rendezvous over the wire.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import untimed
from tests.facts import experiment, write_facts
from tests.forked import ROOT, TRAINVAL, run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("ip") is None, reason="no iproute2: apt-get install iproute2"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
]

_NUMBERS = itertools.count()
_ENDS_S = 800.0  # of a busy machine: far more than the processes need
# torchrun on a node whose clock is off
_AGENT = """
import datetime, os, sys, time
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main
off = float(os.environ["NODE_CLOCK_S"])
if off:
    real, Real = time.time, datetime.datetime
    time.time = lambda: real() + off
    class Shifted(Real):
        @classmethod
        def now(cls, tz=None):
            return Real.now(tz) + datetime.timedelta(seconds=off)
    dynamic_rendezvous.datetime = Shifted
main(sys.argv[1:])
"""
_MAIN = """
import os, runpy, sys
sys.path.insert(0, {root!r})
from tests.counted_collectives import install
from pathlib import Path
import time
real, off = time.time, float(os.environ["NODE_CLOCK_S"])
time.time = lambda: real() + off
install(Path(os.environ["NODE_FOLDER"]))
sys.argv = [{trainval!r}, *sys.argv[1:]]
runpy.run_path({trainval!r}, run_name="__main__")
"""


@dataclass
class Node:
    """A namespace with one end of the wire."""

    name: str
    wire: str
    address: str
    folder: Path

    def ip(self, *argv: str) -> str:
        return _ip("-n", self.name, *argv)

    def processes(self) -> list[int]:
        """Those that live in it."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def sent(self) -> int:
        """Bytes that it has put on the wire."""
        argv = ["ip", "netns", "exec", self.name, "cat", f"/sys/class/net/{self.wire}/statistics"]
        return int(subprocess.check_output([*argv[:-1], f"{argv[-1]}/tx_bytes"]))


def _ip(*argv: str) -> str:
    return subprocess.run(["ip", *argv], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    number = f"{os.getpid() % 10000}{next(_NUMBERS)}"
    made = [
        Node(f"lathe{number}n{n}", f"w{number}n{n}", f"10.77.0.{n + 1}", tmp_path / f"node{n}")
        for n in (0, 1)
    ]
    try:
        for node in made:
            node.folder.mkdir()
            _ip("netns", "add", node.name)
        one, two = made
        _ip("link", "add", one.wire, "netns", one.name, "type", "veth", "peer", "name", two.wire)
        _ip("link", "set", two.wire, "netns", two.name)
        for node in made:
            node.ip("addr", "add", f"{node.address}/24", "dev", node.wire)
            node.ip("link", "set", "lo", "up")
            node.ip("link", "set", node.wire, "up")
        yield made
    finally:
        for node in made:
            subprocess.run(["ip", "netns", "del", node.name], check=False, capture_output=True)


@dataclass
class Launch:
    """The same experiment by torchrun on both nodes."""

    nodes: list[Node]
    folder: Path
    argv: list[str]

    def start(
        self, *, clocks: tuple[float, float] = (0.0, 0.0), **variables: str
    ) -> list[subprocess.Popen[str]]:
        agent = self.folder / "agent.py"
        agent.write_text(_AGENT)
        main = self.folder / "main.py"
        main.write_text(_MAIN.format(root=str(ROOT), trainval=TRAINVAL[0]))
        started = []
        for node, clock in zip(self.nodes, clocks, strict=True):
            for file in node.folder.glob("*"):
                file.unlink()
            how = ["ip", "netns", "exec", node.name, sys.executable, str(agent)]
            how += ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
            how += ["--rdzv-endpoint", f"{self.nodes[0].address}:29400", "--rdzv-id", "two"]
            # as two machines know it: a namespace shares the name of its host
            is_host = f"is_host={int(node is self.nodes[0])}"
            how += ["--rdzv-conf", is_host, "--local-addr", node.address, str(main), *self.argv]
            settings = os.environ | {
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": node.wire,
                "NODE_CLOCK_S": str(clock),
                "NODE_FOLDER": str(node.folder),
                **variables,
            }
            with (self.folder / f"{node.name}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        how, env=settings, stdout=log, stderr=log, text=True, start_new_session=True
                    )
                )
        return started

    def end(self, agents: list[subprocess.Popen[str]]) -> list[int]:
        """Their exit codes, once both have ended by themselves."""
        until = time.monotonic() + _ENDS_S
        try:
            return [agent.wait(timeout=max(1.0, until - time.monotonic())) for agent in agents]
        finally:
            for agent in agents:
                kill(agent)

    def said(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))

    def said_by(self, node: Node) -> str:
        """What one node has said, without the line breaks of its console."""
        return " ".join((self.folder / f"{node.name}.log").read_text().split())

    def reach_step(self, step: int, agents: list[subprocess.Popen[str]]) -> None:
        """Wait until the run has done so many steps."""
        until = time.monotonic() + _ENDS_S
        while not any(
            f'"step": {step},' in path.read_text()
            for path in self.folder.glob("out/*/metrics.jsonl")
        ):
            assert [agent.poll() for agent in agents] == [None, None], self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.1)


def kill(agent: subprocess.Popen[str]) -> None:
    """The end of a node: its agent and its rank at once."""
    if agent.poll() is None:
        import psutil

        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            process.send_signal(signal.SIGKILL)
        agent.wait()


@pytest.fixture
def launch(nodes: list[Node], tmp_path: Path) -> Launch:
    facts = write_facts(tmp_path / "facts")
    values: dict[str, Any] = experiment("causal_lm", facts, train={"save_every": 2})
    values |= {"deepspeed": "zero2"}
    (tmp_path / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    how = ["-e", "one", "--exp_configs", str(tmp_path / "groups.py"), "-sb", str(tmp_path / "out")]
    how += ["--data_path", str(facts), "--cache_dir", str(tmp_path / "cache")]
    return Launch(nodes, tmp_path, how)


_SILENCE_S = 24


@pytest.fixture
def long_launch(launch: Launch, tmp_path: Path) -> Launch:
    """One that does not end by itself in the time of a test."""
    values = experiment("causal_lm", tmp_path / "facts", train={"save_every": 10, "steps": 100_000})
    groups = f"EXP_GROUPS = {{'one': [{values | {'deepspeed': 'zero2'}!r}]}}\n"
    (tmp_path / "groups.py").write_text(groups)
    return launch


def rank_of(agent: subprocess.Popen[str]) -> Any:
    import psutil

    (rank,) = psutil.Process(agent.pid).children()
    return rank


def losses(folder: Path) -> list[dict[str, Any]]:
    (metrics,) = folder.glob("*/metrics.jsonl")
    return [line for line in untimed(metrics) if "loss" in line]


def on_one_machine(launch: Launch, folder: Path) -> list[dict[str, Any]]:
    """What two ranks without nodes log."""
    ranks = run_ranks(2, *TRAINVAL, *launch.argv, "-sb", str(folder))
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-2000:]
    return losses(folder)


def test_two_nodes_train_as_two_ranks_do_and_an_hour_between_their_clocks_changes_nothing(
    launch: Launch, tmp_path: Path
) -> None:
    before = launch.nodes[0].sent()
    assert launch.end(launch.start(clocks=(0.0, 3600.0))) == [0, 0], launch.said()
    wired = launch.nodes[0].sent() - before
    assert losses(tmp_path / "out") == on_one_machine(launch, tmp_path / "alone")
    lines = (launch.nodes[0].folder / "collectives.jsonl").read_text().splitlines()
    assert lines, "the node's share of every step was counted"
    counted = sum(int(line.rpartition(": ")[2].rstrip("}")) for line in lines)
    print(f"{wired} bytes on the wire, {counted} in collectives")
    assert wired > counted > 0


def test_a_wire_that_is_cut_is_told_and_both_nodes_end_by_themselves(
    long_launch: Launch, tmp_path: Path
) -> None:
    agents = long_launch.start(LATHE_SILENCE_S=str(_SILENCE_S))
    long_launch.reach_step(12, agents)
    one, two = long_launch.nodes
    two.ip("link", "set", two.wire, "down")
    cut_at = time.monotonic()
    codes = long_launch.end(agents)
    print(f"ended {time.monotonic() - cut_at:.0f} s after the cut, with {codes}")
    assert 0 not in codes
    for node, other in ((one, 1), (two, 0)):
        said = long_launch.said_by(node)
        assert f"rank {other} (process" in said, said
        assert f"the run ends if that lasts for {_SILENCE_S} s" in said, said
        assert f", for {_SILENCE_S} s: its machine or the network to it is gone" in said, said
        assert node.processes() == []
    (status,) = tmp_path.glob("out/*/status.json")
    told = json.loads(status.read_text())
    assert told["state"] == "failed"
    assert "has not been heard of since" in told["error"]


@pytest.mark.parametrize("is_whole_node", [True, False])
def test_a_rank_that_is_killed_on_another_node_ends_the_run_by_name(
    long_launch: Launch, tmp_path: Path, is_whole_node: bool
) -> None:
    agents = long_launch.start()
    long_launch.reach_step(12, agents)
    killed_at = time.monotonic()
    rank = rank_of(agents[1])
    if is_whole_node:
        kill(agents[1])
    else:
        rank.kill()
    codes = long_launch.end(agents)
    print(f"ended {time.monotonic() - killed_at:.0f} s after the kill, with {codes}")
    assert 0 not in codes
    said = long_launch.said_by(long_launch.nodes[0])
    assert f"RankLostError: rank 1 (process {rank.pid} on" in said, said
    assert "ended without a word" in said, said
    assert [node.processes() for node in long_launch.nodes] == [[], []]
    (status,) = tmp_path.glob("out/*/status.json")
    assert "ended without a word" in json.loads(status.read_text())["error"]
