"""The recordings of this clone: their room, their README, and the way they are packed."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.parity.packing import PACKED, packed_numbers, unpacked_folder, unpacked_numbers
from tests.parity.recordings import LEFT_OUT, Entry, known, once
from tests.parity.smallest import some_rows

MOST_BYTES = 3_000_000
SYSTEMS = ("cross_attention", "fid", "retriever", "vera")


def test_the_recordings_take_at_most_3_mb() -> None:
    assert sum(path.stat().st_size for path in PACKED.rglob("*") if path.is_file()) <= MOST_BYTES


def test_every_system_has_recordings_and_a_section_of_the_readme() -> None:
    folders = {path.name for path in PACKED.iterdir() if path.is_dir()}
    text = (PACKED / "README.md").read_text()
    assert folders >= set(SYSTEMS)
    for name in folders:
        assert f"\n## {name} (" in text


@pytest.mark.parametrize("size", range(9))
def test_bytes_come_out_of_packing_as_they_went_in(size: int) -> None:
    content = os.urandom(size)
    assert unpacked_numbers(packed_numbers(content)) == content


def test_unpacked_recordings_have_the_names_of_their_files() -> None:
    folder = unpacked_folder()
    assert (folder / "fid/init/model.safetensors").is_file()
    assert (folder / "cross_attention/K_generate/xattn.safetensors").is_file()
    assert not list(folder.rglob("*.xz"))


def test_a_lost_file_is_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unpack = unpacked_folder.__wrapped__
    file = unpack() / "fid/eval_cases.json"
    content = file.read_bytes()
    file.unlink()
    assert (unpack() / "fid/eval_cases.json").read_bytes() == content
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_who_comes_second_leaves_the_files_that_the_first_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes of pytest on a new machine unpack at once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        made = [pool.submit(lambda: unpacked_folder.__wrapped__().stat().st_ino) for _ in range(3)]
    assert len({one.result() for one in made}) == 1


def test_a_cut_tensor_holds_its_largest_number_and_is_compared_where_it_is_known() -> None:
    whole = torch.arange(40.0).reshape(10, 4)
    whole[6, 2] = -100.0
    cut = some_rows(whole, 2)
    got, want = known(whole, cut)
    assert (cut == LEFT_OUT).sum() == 7 * 4
    assert torch.equal(got, want)
    assert want.abs().max() == 100.0


def test_a_case_that_is_here_and_outside_runs_once_and_another_of_its_name_is_told_apart() -> None:
    here, outside = unpacked_folder() / "fid", Path("/outside")
    entries = [
        Entry("here", "a", here, "1"),
        Entry("again", "a", outside, "1"),
        Entry("other", "a", outside, "2"),
        Entry("new", "b", outside, "3"),
    ]
    found = [(entry.case, entry.name) for entry in once(entries)]
    assert found == [("here", "a"), ("other", "a-outside"), ("new", "b")]
