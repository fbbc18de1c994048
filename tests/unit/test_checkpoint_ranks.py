"""Saving is collective: two ranks write one checkpoint, and what fails on one of them fails alike
on both.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from trainer.errors import LatheError
from trainer.runtime import distributed
from trainer.training import checkpoint


def _save_on(root: Path, step: int, fails_on: int | None, error: str) -> str:
    """What `save` gave or raised on this rank, as text; rank `fails_on` fails with `error` in its
    own part.
    """
    rank = distributed.rank()

    def refuse(descriptor: int) -> None:
        raise (
            OSError(errno.ENOSPC, "No space left on device")
            if error == "disk"
            else RuntimeError("CUDA error")
        )

    fsync = os.fsync
    if rank == fails_on:
        os.fsync = refuse
    try:
        own = {f"w{k}": torch.full((2,), float(k)) for k in range(5) if k % 2 == rank}
        folder = checkpoint.save(
            root,
            step,
            weights=own,
            optimizer={f"{name}|exp_avg": value for name, value in own.items()},
            rng={"torch": torch.tensor([rank])},
            state={"rank": rank},
            keep_last=2,
        )
        return f"saved {folder.name}"
    except LatheError as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        os.fsync = fsync


def _on_two_ranks(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"good": _save_on(root, 1, None, "")}
    for name, rank, error in (("disk0", 0, "disk"), ("disk1", 1, "disk"), ("code1", 1, "code")):
        found[name] = _save_on(root, 2, rank, error)
        found[f"{name}_left"] = sorted(path.name for path in root.iterdir())
        distributed.barrier()
    found["resume"] = checkpoint.resume_point(root)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("two")
    return root, run_on_ranks(2, _on_two_ranks, root)


Two = tuple[Path, list[dict[str, Any]]]


def test_two_ranks_save_one_checkpoint_that_any_world_size_reads(two: Two) -> None:
    root, results = two
    assert [result["good"] for result in results] == ["saved step-1", "saved step-1"]
    read = dict(checkpoint.read_tensors(root / "step-1", "weights"))
    assert {name: value.tolist() for name, value in read.items()} == {
        f"w{k}": [k, k] for k in range(5)
    }
    assert checkpoint.problems(root / "step-1") == []


def test_each_rank_finds_its_own_random_state_and_the_json_state_is_rank_0s(two: Two) -> None:
    folder = two[0] / "step-1"
    assert checkpoint.saved_world(folder) == 2
    assert [int(checkpoint.read_rng(folder, rank)["torch"]) for rank in (0, 1)] == [0, 1]
    assert checkpoint.read_state(folder) == {"rank": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(two: Two, rank: int) -> None:
    first, second = (result[f"disk{rank}"] for result in two[1])
    assert first == second
    assert first.startswith(f"StorageError: step-2 was not saved. Rank {rank}: ")
    assert "No space left on device. Free some space" in first


def test_any_other_failure_on_one_rank_reaches_all_too(two: Two) -> None:
    texts = [result["code1"] for result in two[1]]
    assert texts == ["CheckpointError: step-2 was not saved. Rank 1: RuntimeError: CUDA error"] * 2


def test_a_failed_save_leaves_only_the_earlier_checkpoint(two: Two) -> None:
    root, results = two
    for name in ("disk0", "disk1", "code1"):
        assert results[0][f"{name}_left"] == ["step-1"]
    assert [result["resume"] for result in results] == [root / "step-1"] * 2


def test_a_manifest_lists_the_files_of_every_rank_with_size_and_checksum(two: Two) -> None:
    folder = two[0] / "step-1"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert len(files) == 7
    for entry in files:
        assert (folder / entry["name"]).stat().st_size == entry["size"]
        assert len(entry["sha256"]) == 64
