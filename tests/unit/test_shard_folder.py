"""A folder of shards: a command that was killed anywhere goes on, with its own plan alone, on any
number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.wording import refused, says
from trainer.data.shard_folder import META, PLAN, ShardFolder
from trainer.errors import ConfigError, LatheError, StorageError
from trainer.switches import CPU_KERNELS

COUNT = 5
GIVEN: dict[str, Any] = {"format": 1, "model": "m", "shard_size": 3}
DIGESTS = [hashlib.sha256(f"shard {number}".encode()).hexdigest() for number in range(2)]
TWO_SHARDS = {
    "plan.json": '{\n  "format": 1,\n  "model": "m",\n  "shard_size": 3\n}\n',
    **{f"parts-0000{n}.bin": f"shard {n}" for n in range(2)},
    **{
        f"parts-0000{n}.json": f'{{\n  "name": "parts-0000{n}.bin",\n  "size": 7,\n'
        f'  "sha256": "{DIGESTS[n]}",\n  "weight": {n}\n}}\n'
        for n in range(2)
    },
    "meta.json": '{\n  "format": 1,\n  "sum": 1,\n  "shards": [\n'
    + ",\n".join(
        f'    {{\n      "name": "parts-0000{n}.bin",\n      "size": 7,\n'
        f'      "sha256": "{DIGESTS[n]}"\n    }}'
        for n in range(2)
    )
    + "\n  ]\n}\n",
}


def folder_in(path: Path) -> ShardFolder:
    return ShardFolder(path, "parts", ".bin", "knit", refusal=StorageError)


def written(path: Path, count: int = COUNT, **changes: Any) -> list[int]:
    """What a command does; the shards that this rank wrote."""
    shards = folder_in(path)
    shards.begin({**GIVEN, **changes}, choice="shard_size")
    own = shards.own_missing(count)
    for number in own:
        shards.write_shard(number, [b"shard ", str(number).encode()], weight=number)
    shards.finish(count, lambda records: {"sum": sum(one["weight"] for one in records)})
    return own


def content(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def test_a_folder_has_a_plan_shards_with_their_records_and_what_lists_them(tmp_path: Path) -> None:
    assert written(tmp_path / "new" / "folder", 2) == [0, 1]
    assert content(tmp_path / "new" / "folder") == TWO_SHARDS


# Kills


def _damage(folder: Path) -> None:
    (folder / "meta.json").unlink()
    (folder / "parts-00000.json").unlink()
    (folder / "parts-00001.bin").write_text("shard")
    (folder / "parts-00002.json").write_text("[")
    (folder / "parts-00003.bin").unlink()


def test_a_restart_writes_the_shards_that_are_not_whole_and_no_others(tmp_path: Path) -> None:
    written(tmp_path)
    wanted = content(tmp_path)
    _damage(tmp_path)
    assert written(tmp_path) == [0, 1, 2, 3]
    assert content(tmp_path) == wanted
    assert written(tmp_path) == []


def _restarted(path: str) -> list[int]:
    return written(Path(path))


def test_ranks_share_what_is_missing(tmp_path: Path) -> None:
    written(tmp_path)
    wanted = content(tmp_path)
    _damage(tmp_path)
    assert run_on_ranks(2, _restarted, str(tmp_path)) == [[0, 2], [1, 3]]
    assert content(tmp_path) == wanted


def _killed_before(name: str, path: Path) -> None:
    """Write a folder, and die when the file of this name is whole under its hidden name."""
    replace: Callable[..., None] = os.replace

    def dying(source: Path, target: Path) -> None:
        if target.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = dying
    written(path)


@pytest.mark.parametrize("name", [PLAN, "parts-00001.bin", "parts-00001.json", META])
def test_a_command_killed_between_a_file_and_its_name_goes_on(tmp_path: Path, name: str) -> None:
    written(tmp_path / "whole")
    folder = tmp_path / "killed"
    process = get_context("fork").Process(target=_killed_before, args=(name, folder))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in folder.glob(f".{name}.*.tmp")] != []
    assert not folder_in(folder).is_finished
    written(folder)
    assert content(folder) == content(tmp_path / "whole")


@pytest.mark.parametrize("left", ["", '{\n  "form', '{"format": 1, "model": "another"}'])
def test_a_plan_that_was_never_whole_is_not_read_and_disappears(tmp_path: Path, left: str) -> None:
    for token in ("0123abcd", "4567cdef"):  # killed twice
        (tmp_path / f".plan.json.{token}.tmp").write_text(left)
    written(tmp_path, 2)
    assert content(tmp_path) == TWO_SHARDS


# What is refused


@pytest.mark.parametrize("name", ["thesis.tex", ".parts-00000.bin.tmp", "plan.json.tmp"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, name: str) -> None:
    for stranger in (name, ".plan.json.0123abcd.tmp"):
        (tmp_path / stranger).write_text("precious")
    with refused("shards_folder_taken", StorageError, content="parts"):
        written(tmp_path)
    assert content(tmp_path) == dict.fromkeys((name, ".plan.json.0123abcd.tmp"), "precious")


def test_the_choice_is_that_of_the_folder_and_everything_else_must_be_the_same(
    tmp_path: Path,
) -> None:
    written(tmp_path)
    shards = folder_in(tmp_path)
    begun = shards.begin({**GIVEN, "shard_size": 9}, choice="shard_size")
    assert begun == {"model": "m", "shard_size": 3}
    changed = "model was 'm', is 'n'; width was None, is 8"
    with refused("shards_of_others", ConfigError, differences=changed):
        shards.begin({**GIVEN, "model": "n", "width": 8}, choice="shard_size")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "model": "m"}'])
def test_a_plan_that_cannot_be_read_is_refused_with_what_to_delete(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / PLAN).write_text(text)
    with refused("plan_torn", folder=tmp_path, command="knit"):
        written(tmp_path)
    with refused("vectors_torn", at=tmp_path / PLAN):
        folder_in(tmp_path).read(PLAN, dict)


def test_a_key_that_the_reader_misses_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    with refused("vectors_torn", at=tmp_path / META, reason="'width'"):
        folder_in(tmp_path).read(META, lambda meta: meta["width"])


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("file_unwritable", StorageError):
        written(tmp_path / "file" / "folder")


def _refusals(path: str, count: int) -> str:
    """What a rank is told when rank 0 finds the folder, or too few shards in it."""
    try:
        shards = folder_in(Path(path))
        shards.begin(GIVEN, choice="shard_size")
        shards.finish(count)
    except LatheError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_every_rank_is_told_of_a_refusal(tmp_path: Path) -> None:
    written(tmp_path / "short")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").touch()
    for name, said in {
        "short": "LatheError: {}: shards [5, 6] are not whole. Run the same command again.",
        "strange": "StorageError: {} holds other files and no parts of ours. Name a new folder.",
    }.items():
        path = str(tmp_path / name)
        assert run_on_ranks(2, partial(_refusals, path), COUNT + 2) == [said.format(path)] * 2


def test_a_plan_notes_the_kernels_and_whoever_reads_it_does_not_meet_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = replace(folder_in(tmp_path), notes_kernels=True)
    monkeypatch.setenv(CPU_KERNELS, "1")
    wanted = {"model": "m", "shard_size": 3}
    assert shards.begin(GIVEN, choice="shard_size") == wanted
    assert json.loads((tmp_path / PLAN).read_text()) == {**GIVEN, CPU_KERNELS: "1"}
    assert shards.begin(GIVEN, choice="shard_size") == wanted
    assert shards.read(PLAN, dict) == wanted
    monkeypatch.setenv(CPU_KERNELS, "0")
    with refused("vectors_of_others", key=CPU_KERNELS, was="1", now="0") as caught:
        shards.begin(GIVEN, choice="shard_size")
    says("vectors_of_other_kernels", caught.value, switch=CPU_KERNELS)
    other = folder_in(tmp_path / "other")  # what does not depend on them
    assert other.begin(GIVEN, choice="") == wanted
    monkeypatch.setenv(CPU_KERNELS, "1")
    assert other.begin(GIVEN, choice="") == wanted
