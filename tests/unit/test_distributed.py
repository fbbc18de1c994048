"""Exchanges between ranks: exact, the same on one rank as on two, and never pickled."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_alone, run_on_ranks
from tests.wording import refused
from trainer.errors import EXIT_PREEMPTED, LatheError
from trainer.runtime import distributed

UNEVEN = ["", {"a": [1, None, 0.1], "ä": "x" * 1000}]  # by rank: texts of very different length


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in distributed.LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # remembers what was there, or that nothing was
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _exchange() -> dict[str, Any]:
    rank = distributed.rank()
    own = torch.tensor([rank + 1], dtype=torch.float32)
    total = distributed.total(own)
    distributed.barrier()
    return {
        "rank": [rank, distributed.world(), distributed.is_main()],
        "float": total,
        "own": own,
        "int": distributed.total(torch.tensor(2**53 + 1 if rank else 0)),
        "bool": distributed.total(torch.tensor([True, rank == 1])),
        "half": distributed.total(torch.tensor(0.1, dtype=torch.bfloat16)),
        "gather": distributed.gather(UNEVEN[rank]),
        "broadcast": distributed.broadcast(
            {"from": rank} if rank == 0 else "ignored and longer than rank 0's"
        ),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_on_ranks(2, _exchange)


def test_each_rank_knows_its_place(two: list[dict[str, Any]]) -> None:
    assert [result["rank"] for result in two] == [[0, 2, True], [1, 2, False]]


def test_total_sums_floats_in_fp64_and_leaves_its_argument_alone(two: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(two):
        assert result["float"].dtype == torch.float64
        assert result["float"].tolist() == [3.0]
        assert result["own"].tolist() == [rank + 1]


def test_total_keeps_integers_exact_beyond_what_a_double_holds(two: list[dict[str, Any]]) -> None:
    assert all(
        result["int"].dtype == torch.int64 and int(result["int"]) == 2**53 + 1 for result in two
    )


def test_total_counts_booleans(two: list[dict[str, Any]]) -> None:
    assert all(result["bool"].tolist() == [2, 1] for result in two)


def test_total_of_bf16_is_not_rounded_to_bf16(two: list[dict[str, Any]]) -> None:
    assert all(
        float(result["half"]) == 2 * float(torch.tensor(0.1, dtype=torch.bfloat16))
        for result in two
    )


def test_gather_returns_values_of_uneven_length_by_rank_on_all_ranks(
    two: list[dict[str, Any]],
) -> None:
    assert all(result["gather"] == UNEVEN for result in two)


def test_broadcast_gives_everyone_what_rank_0_holds(two: list[dict[str, Any]]) -> None:
    assert all(result["broadcast"] == {"from": 0} for result in two)


def test_without_a_group_every_exchange_is_the_identity() -> None:
    distributed.barrier()
    assert (distributed.rank(), distributed.world(), distributed.is_main()) == (0, 1, True)
    assert distributed.total(torch.tensor([1.5])).dtype == torch.float64
    assert distributed.gather({"a": 1}) == [{"a": 1}]
    assert distributed.broadcast([1, 2]) == [1, 2]


def test_one_rank_sees_the_same_types_as_many() -> None:
    assert distributed.gather((1, 2)) == [[1, 2]]
    assert distributed.broadcast((1, 2)) == [1, 2]


def test_total_without_a_group_is_a_copy() -> None:
    counts = torch.tensor([1])
    distributed.total(counts).add_(1)
    assert counts.tolist() == [1]


def test_an_object_that_json_cannot_hold_is_refused_on_one_rank_too() -> None:
    with pytest.raises(TypeError):
        distributed.gather(object())


def test_plain_python_gets_a_group_of_one_and_a_local_rank() -> None:
    def child() -> None:
        distributed.init(timeout_s=5)
        assert dist.is_initialized()
        assert dist.get_world_size() == 1
        assert os.environ["LOCAL_RANK"] == "0"
        distributed.init(timeout_s=5)  # a second call is harmless
        os._exit(0)

    assert _children([child]) == [0]


def test_half_a_launcher_is_an_error_that_names_the_missing_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("environment_missing", names="LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        distributed.init()


def test_the_launchers_variables_are_followed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def rank(number: int) -> None:
        os.environ.update(
            RANK=str(number),
            LOCAL_RANK=str(number),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        distributed.init(timeout_s=30)
        seen = distributed.gather(distributed.local_rank())
        (tmp_path / str(number)).write_text(json.dumps(seen))
        distributed.shutdown(0)

    assert _children([lambda: rank(0), lambda: rank(1)]) == [0, 0]
    assert [json.loads((tmp_path / str(number)).read_text()) for number in (0, 1)] == [
        [0, 1],
        [0, 1],
    ]


@pytest.mark.parametrize("exit_code", [0, 2, EXIT_PREEMPTED])
def test_shutdown_ends_the_process_with_its_code_and_flushes_what_was_written(
    tmp_path: Path, exit_code: int
) -> None:
    def child() -> None:
        file = (tmp_path / "out").open("w")
        os.dup2(file.fileno(), 1)
        distributed.init(timeout_s=5)
        import sys

        sys.stdout = os.fdopen(1, "w")
        sys.stdout.write("last words")
        distributed.shutdown(exit_code)

    assert _children([child]) == [exit_code]
    assert (tmp_path / "out").read_text() == "last words"


def test_a_failed_rank_leaves_without_waiting_for_the_others(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        if number == 1:
            time.sleep(30)
        distributed.shutdown(2)

    children = [_fork(lambda: rank(0)), _fork(lambda: rank(1))]
    start = time.monotonic()
    _, status = os.waitpid(children[0], 0)
    waited = time.monotonic() - start
    os.kill(children[1], 9)
    os.waitpid(children[1], 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert waited < 20


def _fork(function: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(99)
    return child


def _children(functions: list[Callable[[], None]]) -> list[int]:
    """Exit codes of the functions, each run in a forked process."""
    return [
        os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for child in [_fork(each) for each in functions]
    ]


def _late(wait_s: float) -> list[float]:
    """When this rank was let go, after rank 1 came so much later than a collective waits."""
    distributed.init(timeout_s=5)
    if distributed.rank() == 1:
        time.sleep(wait_s)
    distributed.wait_for_all()
    distributed.wait_for_all()
    return [time.monotonic()]


def test_ranks_wait_for_one_that_loads_for_long_and_name_one_that_never_comes() -> None:
    here, there = run_on_ranks(2, _late, 0.3)
    assert here[0] > there[0] - 0.3 > 0.0
    assert "waited 0 s for rank 1" in run_on_ranks(2, _abandoned)[0]


def _abandoned() -> str:
    if distributed.rank() == 1:
        return ""
    with pytest.raises(LatheError) as caught:
        distributed.wait_for_all(patience_s=0.05)
    return str(caught.value)


def test_a_group_that_is_gone_once_it_was_aborted_is_left_all_the_same() -> None:
    assert run_alone(left) == [True, False]


def left() -> list[bool]:
    distributed.init()
    had = distributed.has_group()
    distributed.abort = dist.destroy_process_group  # as NCCL's does
    distributed.leave_group()
    return [had, distributed.has_group()]


@pytest.mark.parametrize(
    ("address", "is_away"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.2", True),
        ("fe80::1%eth0", True),
        ("10.0.0.2", True),
    ],
)
def test_an_address_of_this_machine_is_not_away(address: str, is_away: bool) -> None:
    assert distributed._is_away(address) == is_away
