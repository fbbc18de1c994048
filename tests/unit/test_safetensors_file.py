"""Files of a checkpoint: what is written is what safetensors reads, and what its checksum says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.wording import refused
from trainer.files import atomic, safetensors_file


@pytest.mark.parametrize("dtype", safetensors_file.DTYPES, ids=str)
def test_every_dtype_and_shape_survives_in_a_file_that_safetensors_reads(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    whole = torch.arange(24).reshape(2, 3, 4) % 2
    values = {
        "strided": whole.to(dtype).transpose(0, 2),
        "scalar": whole[1, 1, 1].to(dtype),
        "none": whole[:0].to(dtype),
    }
    safetensors_file.write_tensors(tmp_path, "x.safetensors", values)
    read = load_file(tmp_path / "x.safetensors")
    for name, value in values.items():
        assert read[name].dtype == dtype
        assert read[name].shape == value.shape
        assert torch.equal(read[name].float(), value.float())


def test_tensors_of_mixed_width_and_larger_than_a_block_stay_aligned(tmp_path: Path) -> None:
    values = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.randn(safetensors_file.BLOCK // 8 + 3, dtype=torch.float64),
        "ä|exp_avg": torch.ones(5, dtype=torch.bfloat16),
    }
    record = safetensors_file.write_tensors(tmp_path, "x.safetensors", values)
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], value) for name, value in values.items())
    assert (
        record.size
        == (tmp_path / "x.safetensors").stat().st_size
        == safetensors_file.bytes_needed(values)
    )
    assert safetensors_file.checksum_problem(tmp_path, record) is None


def test_a_shard_without_tensors_is_a_valid_file(tmp_path: Path) -> None:
    safetensors_file.write_tensors(tmp_path, "x.safetensors", {})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert list(file.keys()) == []


def test_a_second_writer_of_the_same_file_is_refused(tmp_path: Path) -> None:
    safetensors_file.write_json(tmp_path, "state.json", {})
    with refused("file_being_saved"):
        safetensors_file.write_json(tmp_path, "state.json", {})


def test_a_file_that_is_not_safetensors_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "weights-0-of-1.safetensors").write_bytes(b"\x80\x04pickle")
    with refused("checkpoint_unreadable", at="weights-0-of-1.safetensors"):
        dict(safetensors_file.tensors_of(tmp_path / "weights-0-of-1.safetensors"))


def test_a_flipped_byte_changes_the_checksum(tmp_path: Path) -> None:
    record = safetensors_file.write_tensors(tmp_path, "x.safetensors", {"w": torch.ones(4)})
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "x.safetensors").write_bytes(content)
    problem = safetensors_file.checksum_problem(tmp_path, record)
    assert problem is not None
    assert problem.startswith("x.safetensors: checksum")


def test_a_full_disk_says_which_file_and_what_to_do(tmp_path: Path) -> None:
    with (
        refused("disk_full"),
        atomic.refusals(tmp_path),
    ):
        Path("/dev/full").write_bytes(b"x")
