"""Jobs of several nodes: each attempt meets at a port and under an id of its own, and two jobs that
begin on one host at one moment are two worlds.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jobs.node import rendezvous
from jobs.protocol import token_of
from jobs.record import events as record
from tests.jobs.conftest import Place, wait_until
from tests.jobs.real_slurm import RealSlurm, need_slurm, real_slurm
from tests.wording import refused

WORDS = ("torchrun", "--rdzv-endpoint", "HEAD_NODE:RDZV_PORT", "--rdzv-id", "RDZV_ID")
TOKEN = token_of("ab" * 16, "0a0b0c", 1)
NONCE = "0a0b0c"

# What torchrun and the training do, without torch: the first node listens, the other one comes.
MEETING = """#!{python} -S
import json, os, socket, sys
words = sys.argv[1:]
where = words[words.index("--rdzv-endpoint") + 1]
flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
folder = os.path.join(flags["savedir_base"], flags["exp_id"])
host, _, port = where.partition(":")
if os.environ["SLURM_NODEID"] == "0":
    with socket.create_server(("", int(port))) as server:
        server.settimeout(60)
        other = server.accept()[0].recv(99).decode()
    with open(os.path.join(folder, "met"), "w") as file:
        json.dump([where, other], file)
    with open(os.path.join(folder, "status.json"), "w") as file:
        json.dump({{"state": "succeeded", "step": 1, "total": 1}}, file)
else:
    import time
    for _ in range(300):
        try:
            socket.create_connection((host, int(port))).sendall(where.encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""

# The real torchrun, and in place of trainval.py a program that asks every rank whose job it is of.
REAL = """#!/bin/sh
for word; do
    shift
    case $word in
        trainval.py) set -- "$@" {ranks} ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec {python} -m torch.distributed.run "$@"
"""
RANKS = """
import json, os, sys
import torch.distributed as dist
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
dist.init_process_group("gloo")
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, flags["savedir_base"])
if dist.get_rank() == 0:
    folder = os.path.join(flags["savedir_base"], flags["exp_id"])
    with open(os.path.join(folder, "world"), "w") as file:
        json.dump(everybody, file)
    with open(os.path.join(folder, "status.json"), "w") as file:
        json.dump({"state": "succeeded", "step": 1, "total": 1}, file)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealSlurm]:
    need_slurm()
    with real_slurm() as running:
        yield running


def of_two_nodes(place: Place, tmp_path: Path, torchrun: str) -> tuple[str, ...]:
    """The flags of a submission to two nodes whose torchrun is this script."""
    program = tmp_path / "bin" / "torchrun"
    program.write_text(torchrun)
    program.chmod(0o755)
    values = {"resources": {"cpu": 1, "mem": 1}, "nodes": 2, "partition": "low"}
    jobs = tmp_path / "jobs.py"
    jobs.write_text(f"JOB_CONFIGS = {{'default': {values!r}}}")
    return ("--job_configs", str(jobs), "--python_binary", str(program))


def listener(port: int) -> socket.socket:
    return socket.create_server(("", port))


def test_every_attempt_meets_at_a_port_and_under_an_id_of_its_own() -> None:
    tokens = [token_of("ab" * 16, f"{number:06x}", 1) for number in range(30)]
    filled = [rendezvous.fill_in(WORDS, {"token": token}) for token in tokens]
    assert {words[4] for words in filled} == {f"{token}_0" for token in tokens}
    ports = {next(rendezvous.candidates(token)) for token in tokens}
    assert len(ports) >= 28, "30 of 2,000: two may coincide"
    assert all(29400 <= port < 31400 for port in ports)


def test_a_job_that_is_started_again_meets_under_another_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert rendezvous.fill_in(WORDS, {"token": TOKEN})[4] == f"{TOKEN}_2"


def test_the_first_node_takes_another_port_for_one_that_is_taken_and_names_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = next(rendezvous.candidates(TOKEN))
    with closing(listener(first)):
        port = int(rendezvous.fill_in(WORDS, {"token": TOKEN})[2].partition(":")[2])
    assert port != first
    assert f"port {first} of" in caplog.text
    assert f"is taken: the nodes of this job meet at port {port}" in caplog.text


def test_where_every_node_has_its_own_wrapper_a_taken_port_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = next(rendezvous.candidates(TOKEN))
    monkeypatch.setenv("LATHE_HEAD_NODE", "pod-0")
    with closing(listener(first)):
        monkeypatch.setenv("LATHE_NODE_RANK", "1")
        assert rendezvous.fill_in(WORDS, {"token": TOKEN})[2] == f"pod-0:{first}"
        monkeypatch.setenv("LATHE_NODE_RANK", "0")
        with refused("rendezvous_port_taken", port=first):
            rendezvous.fill_in(WORDS, {"token": TOKEN})


def test_a_taken_port_on_a_real_slurm_costs_no_time_and_the_job_succeeds(
    place: Any, tmp_path: Path, cluster: RealSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = place(1)
    monkeypatch.setattr(record, "new_nonce", lambda: NONCE)
    words = of_two_nodes(made, tmp_path, MEETING.format(python=sys.executable))
    plan = made.lathe(
        "plan", "-e", "sweep", "-sb", str(made.base), "--exp_configs", str(made.groups), "--json"
    )
    token = token_of(plan.json[0]["exp_id"], NONCE, 1)
    first, second, *_ = rendezvous.candidates(token)
    with closing(listener(first)):
        assert made.submit(*words, backend="slurm").code == 0
        (row,) = made.until_all("succeeded", "failed")
    assert row["state"] == "succeeded", row["reason"]
    folder = Path(row["folder"])
    met = json.loads((folder / "met").read_text())
    assert [where.partition(":")[2] for where in met] == [str(second)] * 2
    (text,) = folder.glob("attempts/1/slurm-*.txt")
    assert f"port {first} of" in text.read_text()
    print(f"SHOW a taken port: {first} was taken, both nodes met at {second}; succeeded")


@pytest.mark.long
def test_two_people_who_send_one_group_at_one_moment_are_two_worlds_ten_times(
    place: Any, tmp_path: Path, cluster: RealSlurm
) -> None:
    made = place(1)
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = REAL.format(python=sys.executable, ranks=tmp_path / "ranks.py")
    words = of_two_nodes(made, tmp_path, torchrun)
    num_good = 0
    for number in range(10):
        people = [
            Place(tmp_path / f"{name}{number}", made.groups, made.python, made.what)
            for name in ("ann", "bob")
        ]
        cluster.command("scontrol", "update", "PartitionName=low", "State=DOWN")
        for person in people:
            assert person.submit(*words, backend="slurm").code == 0
        cluster.command("scontrol", "update", "PartitionName=low", "State=UP")
        for person in people:
            (row,) = wait_until(
                person.status,
                lambda rows: rows[0]["state"] in ("succeeded", "failed", "lost"),
                within_s=300,
            )
            assert row["state"] == "succeeded", row["reason"]
            world = json.loads((Path(row["folder"]) / "world").read_text())
            assert world == [str(person.base)] * 2
            num_good += 1
    print(f"SHOW two bases, one group, two nodes, ten times: {num_good} of 20 worlds unmixed")
