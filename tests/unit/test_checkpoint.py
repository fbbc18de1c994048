"""Checkpoints are whole or invisible: real kills at every file boundary, real full disks, flipped
bytes, lost files.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wording import refused
from trainer.files import safetensors_file
from trainer.training import checkpoint

KILLED = 77  # exit code of a child that died where it was told to


def tensors(step: int) -> dict[str, Tensor]:
    return {
        "a.weight": torch.full((3, 5), float(step)),
        "b": torch.arange(4) + step,
        "c": torch.tensor(step),
    }


def save(root: Path, step: int, **options: Any) -> Path:
    chosen: dict[str, Any] = {"keep_last": 9, **options}
    given = {
        "weights": tensors(step),
        "optimizer": {"a|exp_avg": torch.ones(2) * step},
        "rng": {"torch": tensors(0)["b"]},
    }
    return checkpoint.save(root, step, state={"step": step}, **{**given, **chosen})


def assert_holds(folder: Path, step: int) -> None:
    assert checkpoint.problems(folder) == []
    assert checkpoint.read_state(folder) == {"step": step}
    read = dict(checkpoint.read_tensors(folder, "weights"))
    assert read.keys() == tensors(step).keys()
    assert all(torch.equal(read[name], value) for name, value in tensors(step).items())


def test_adapters_saved_while_peft_stood_around_a_base_have_their_names_of_today(
    tmp_path: Path,
) -> None:
    old, new = "query_model.base_model.model.layers.0.q.lora_A.default.weight", "query_model.layers"
    given = {"weights": {old: torch.ones(2)}, "optimizer": {f"{old}|exp_avg": torch.ones(2)}}
    folder = save(tmp_path, 1, **given)
    for prefix, rest in (("weights", ""), ("optimizer", "|exp_avg")):
        (name,) = dict(checkpoint.read_tensors(folder, prefix))
        assert name == f"{new}.0.q.lora_A.default.weight{rest}"


def test_a_checkpoint_of_the_layout_before_pieces_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "VERSION", 1)
        folder = save(tmp_path, 5)
    assert_holds(folder, 5)
    assert "manifest.json: version 3, want 2" in checkpoint.problems(_of_version_3(tmp_path))


def _of_version_3(root: Path) -> Path:
    folder = save(root, 6)
    (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"version": 2', '"version": 3')
    )
    return folder


PIECES = {"w@0/2x3": torch.arange(2.0), "w@2/2x3": torch.arange(2.0, 6.0)}


def test_pieces_are_one_tensor_of_which_any_part_can_be_read(tmp_path: Path) -> None:
    read = checkpoint.read_tensors(save(tmp_path, 1, optimizer=PIECES), "optimizer")
    assert list(read) == ["w"]
    assert torch.equal(read["w"], torch.arange(6.0).reshape(2, 3))
    assert read.part("w", 1, 3).tolist() == [1.0, 2.0, 3.0]
    assert read.part("w", 3, 2).tolist() == [3.0, 4.0]
    assert read.part("w", 5, 9).tolist() == [5.0]
    assert read.part("w", 6, 2).tolist() == []


@pytest.mark.parametrize(
    "pieces",
    [
        {"w@2/2x3": torch.zeros(4)},
        {"w@0/2x3": torch.zeros(4)},
        {"w@0/2x3": torch.zeros(4), "w@2/2x3": torch.zeros(4)},
        {"w@0/2x3": torch.zeros(1), "w@2/2x3": torch.zeros(4)},
        {"w": torch.zeros(2, 3), "w@0/2x3": torch.zeros(6)},
    ],
)
def test_pieces_that_leave_a_hole_or_overlap_are_refused(
    pieces: dict[str, Tensor], tmp_path: Path
) -> None:
    with refused("elements_missing", name="w"):
        checkpoint.read_tensors(save(tmp_path, 1, optimizer=pieces), "optimizer")


def in_child(function: Callable[[], Any]) -> int:
    """The exit code of `function` run in a forked process: 0, or 1 when it raised."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def die_at(boundary: int) -> None:
    """Kill this process just before the `boundary`-th change of the disk; a file being synced loses
    half.
    """
    passed = 0

    def count() -> bool:
        nonlocal passed
        passed += 1
        return passed == boundary

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        creates = event == "open" and isinstance(arguments[1], str) and "x" in arguments[1]
        if (changes or creates) and count():
            os._exit(KILLED)

    def fsync(descriptor: int) -> None:
        if count():
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
            os._exit(KILLED)

    sys.addaudithook(hook)
    os.fsync = fsync


# ---------------------------------------------------------------- one rank, in order


def test_a_saved_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    assert_holds(save(tmp_path, 5), 5)


def test_a_checkpoint_folder_holds_its_files_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]
    shard = "0-of-1.safetensors"
    expected = {
        f"weights-{shard}",
        f"optimizer-{shard}",
        f"rng-{shard}",
        "state.json",
        "manifest.json",
    }
    assert {path.name for path in folder.iterdir()} == expected


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert checkpoint.newest_good(tmp_path) == tmp_path / "step-100"


def test_there_is_no_newest_checkpoint_in_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert checkpoint.newest_good(tmp_path / "none") is None
    assert checkpoint.resume_point(tmp_path / "none") is None


def test_other_folders_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for name in ("step-9-copy", "best", "step-x", ".step-8.tmp", ".step-7.gone"):
        shutil.copytree(tmp_path / "step-5", tmp_path / name)
    assert checkpoint.newest_good(tmp_path) == tmp_path / "step-5"


# ---------------------------------------------------------------- kills


def test_a_save_killed_at_any_file_boundary_leaves_the_old_or_the_new_checkpoint_whole(
    tmp_path: Path,
) -> None:
    boundary, code, seen = 0, KILLED, set()
    while code == KILLED:
        boundary += 1
        root = tmp_path / str(boundary)
        save(root, 1)
        code = in_child(lambda: (die_at(boundary), save(root, 2, keep_last=1)))  # noqa: B023 (run at once)
        newest = checkpoint.newest_good(root)
        assert newest is not None, f"killed at boundary {boundary}"
        step = checkpoint.read_state(newest)["step"]
        assert_holds(newest, step)
        seen.add(step)
        save(root, 3, keep_last=1)
        assert [path.name for path in root.iterdir()] == ["step-3"], (
            f"killed at boundary {boundary}"
        )
    assert code == 0
    assert seen == {1, 2}
    assert boundary > 20


@pytest.mark.long
def test_a_replacement_killed_at_any_file_boundary_never_loses_the_step(tmp_path: Path) -> None:
    boundary, code = 0, KILLED
    while code == KILLED:
        boundary += 1
        root = tmp_path / str(boundary)
        save(root, 1)
        code = in_child(lambda: (die_at(boundary), save(root, 1)))  # noqa: B023 (run at once)
        newest = checkpoint.newest_good(root)
        assert newest is not None, f"killed at boundary {boundary}"
        assert_holds(newest, 1)
        assert_holds(save(root, 2), 2)
        assert sorted(path.name for path in root.iterdir()) == ["step-1", "step-2"], (
            f"killed at boundary {boundary}"
        )
        assert_holds(root / "step-1", 1)
    assert code == 0


def test_pruning_killed_at_any_file_boundary_leaves_no_torn_checkpoint(tmp_path: Path) -> None:
    boundary, code = 0, KILLED
    while code == KILLED:
        boundary += 1
        root = tmp_path / str(boundary)
        for step in (1, 2, 3):
            save(root, step)
        code = in_child(lambda: (die_at(boundary), checkpoint.prune(root, keep_last=1)))  # noqa: B023
        assert all(checkpoint.problems(path) == [] for path in root.glob("step-*"))
        assert_holds(root / "step-3", 3)
    assert code == 0


def test_leftovers_of_a_dead_save_are_cleared_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".step-7.tmp").mkdir(parents=True)
    (tmp_path / ".step-7.tmp" / "weights-0-of-1.safetensors").write_bytes(b"half")
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step-8"]


# ---------------------------------------------------------------- damage


def damage(folder: Path, kind: str) -> None:
    victim = folder / "weights-0-of-1.safetensors"
    content = bytearray(victim.read_bytes())
    if kind == "checksum":
        content[-3] ^= 1
        victim.write_bytes(content)
    elif kind == "size":
        victim.write_bytes(content[:-1])
    elif kind == "missing":
        victim.unlink()
    elif kind == "extra":
        (folder / "weights-0-of-2.safetensors").write_bytes(content)


@pytest.mark.parametrize("kind", ["checksum", "size", "missing", "extra"])
def test_each_kind_of_damage_is_named_with_its_file(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path, 5)
    damage(folder, kind)
    (problem,) = checkpoint.problems(folder)
    name = "weights-0-of-2.safetensors" if kind == "extra" else "weights-0-of-1.safetensors"
    assert problem.startswith(f"{name}: {kind}")


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"files": [{"name": "a"}]}', '{"files": []}']
)
def test_a_manifest_that_is_missing_or_unreadable_is_a_problem(
    tmp_path: Path, content: str | None
) -> None:
    folder = save(tmp_path, 5)
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    (problem,) = checkpoint.problems(folder)
    assert problem.startswith(
        "manifest.json: missing" if content is None else "manifest.json: not readable"
    )


def test_every_single_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    content = (folder / "manifest.json").read_bytes()
    harmless = {ord(character) for character in " \n"}
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1
        (folder / "manifest.json").write_bytes(flipped)
        assert content[position] in harmless or checkpoint.problems(folder), f"byte {position}"


def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path: Path) -> None:
    save(tmp_path, 5).rename(tmp_path / "step-50")
    assert checkpoint.problems(tmp_path / "step-50") == [
        "manifest.json: of step 5, but the folder is step-50"
    ]


def test_a_damaged_checkpoint_is_warned_of_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-3", "checksum")
    damage(tmp_path / "step-2", "missing")
    assert checkpoint.newest_good(tmp_path) == tmp_path / "step-1"
    first, second = (
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )
    assert "step-3 is damaged" in first
    assert "weights-0-of-1.safetensors: checksum" in first
    assert "step-2 is damaged" in second


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    damage(save(tmp_path, 5), "size")
    assert_holds(save(tmp_path, 5), 5)


def test_a_file_where_a_checkpoint_folder_should_be_is_passed_over_and_replaced(
    tmp_path: Path,
) -> None:
    save(tmp_path, 4)
    (tmp_path / "step-5").write_text("not a folder")
    assert checkpoint.newest_good(tmp_path) == tmp_path / "step-4"
    assert_holds(save(tmp_path, 5), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def test_what_a_network_disk_keeps_for_open_files_is_no_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    (folder / ".nfs0001").touch()
    assert checkpoint.problems(folder) == []


# ---------------------------------------------------------------- retention


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.iterdir())


def test_the_end_of_a_run_removes_what_a_killed_process_was_removing(tmp_path: Path) -> None:
    save(tmp_path, 4)
    half = tmp_path / ".step-2.gone"
    half.mkdir()
    (half / "manifest.json").write_text("{}")
    checkpoint.tidy(tmp_path, 4, 1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_the_newest_ones_and_the_best_one_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, keep_last=2, keep={2})
    assert steps(tmp_path) == [2, 5, 6]


def test_pruning_names_what_it_removed(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    assert checkpoint.prune(tmp_path, keep_last=1, keep={2}) == [1, 3]


@pytest.mark.parametrize("kind", ["checksum", "size", "missing", "extra"])
def test_the_last_good_checkpoint_is_never_removed(tmp_path: Path, kind: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-2", kind)
    damage(tmp_path / "step-3", kind)
    checkpoint.prune(tmp_path, keep_last=1)
    assert_holds(tmp_path / "step-1", 1)


def test_nothing_is_removed_when_no_checkpoint_is_good(tmp_path: Path) -> None:
    for step in (1, 2):
        damage(save(tmp_path, step), "checksum")
    assert checkpoint.prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [1, 2]


def test_a_torn_checkpoint_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-2", "size")
    assert checkpoint.prune(tmp_path, keep_last=2) == [2]


def test_a_save_after_going_back_keeps_the_new_checkpoint(tmp_path: Path) -> None:
    for step in (1, 9):
        save(tmp_path, step)
    save(tmp_path, 3, keep_last=1)
    assert steps(tmp_path) == [3, 9]


def test_a_folder_that_cannot_be_pruned_costs_a_warning_and_not_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)

    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert_holds(save(tmp_path, 2, keep_last=1), 2)
    assert "old checkpoints stay" in caplog.text


# ---------------------------------------------------------------- a disk that refuses


def test_a_save_that_cannot_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with refused("checkpoint_does_not_fit", free="0.0 KiB"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert_holds(tmp_path / "step-1", 1)


@pytest.mark.parametrize("call", range(1, 8))
def test_a_disk_that_fills_up_during_a_save_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save(tmp_path, 1)
    calls, fsync = [], os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with refused("disk_full"):
        save(tmp_path, 2)
    newest = checkpoint.newest_good(tmp_path)
    assert newest is not None
    assert_holds(
        newest, 1 if call < 7 else 2
    )  # the seventh follows the rename: the new one is complete
    assert not list(tmp_path.glob(".step-*"))


def test_a_write_beyond_the_file_size_limit_of_the_process_is_a_storage_error(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with refused("file_unwritable", at="weights-0-of-1.safetensors", reason="File too large"):
            save(tmp_path, 2, weights={"w": torch.zeros(50_000)})

    assert in_child(limited) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_root_that_cannot_be_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(
        "checkpoint_not_saved", step=2, rank=0, place="file/checkpoints", reason="Not a directory"
    ):
        save(tmp_path / "file" / "checkpoints", 2)


def test_a_commit_misses_a_file_that_another_machine_wrote_elsewhere(tmp_path: Path) -> None:
    temporary = checkpoint.begin(tmp_path, 1)
    record = safetensors_file.WrittenFile("weights-1-of-2.safetensors", 10, "0" * 64)
    with refused("checkpoint_file_unseen", got=None, wanted=10):
        checkpoint.commit(temporary, tmp_path, 1, [record])


# ---------------------------------------------------------------- reading what cannot be read


def test_a_missing_shard_is_an_error_that_names_those_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    (folder / "weights-0-of-1.safetensors").rename(folder / "weights-0-of-2.safetensors")
    with refused("shards_missing", shards="weights-0-of-2.safetensors"):
        dict(checkpoint.read_tensors(folder, "weights"))


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    for rank in (0, 1):
        safetensors_file.write_tensors(
            tmp_path, f"weights-{rank}-of-2.safetensors", {"w": torch.ones(1)}
        )
    with refused("tensor_twice", name="w"):
        dict(checkpoint.read_tensors(tmp_path, "weights"))


def test_the_random_state_of_a_rank_that_did_not_exist_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    assert checkpoint.saved_world(folder) == 1
    with refused("rank_state_missing", rank=1):
        checkpoint.read_rng(folder, 1)


def test_a_state_that_is_not_json_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with refused("checkpoint_unreadable", at="state.json"):
        checkpoint.read_state(tmp_path)
