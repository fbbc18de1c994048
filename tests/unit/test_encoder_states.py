"""States of contexts: each distinct one once, small, checked when read, never stale, and safe from
kills.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer.files.atomic import sha256_of
from trainer.switches import CPU_KERNELS
from trainer.tasks.cross_attention.encoder_states import layout, reading, writing
from trainer.tasks.cross_attention.encoder_states.layout import Dtype, StatesPlan
from trainer.tasks.cross_attention.encoder_states.reading import StateCache, open_states, pad_states
from trainer.tasks.cross_attention.encoder_states.writing import Contexts

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 32
TEXTS = [[(n * 7 + token) % 50 for token in range(3 + n * 5 % 17)] for n in range(40)]
MET = TEXTS + TEXTS[:10]  # as questions that share a passage
IDENTITY = {
    "base": "b",
    "tokenizer": "t",
    "template": "chat",
    "context_tokens": 64,
    "dtype": "fp32",
}
TABLE = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0))


def encode(batch: Sequence[np.ndarray]) -> list[Tensor]:
    """Running sums, so that a state depends on the tokens before it."""
    return [TABLE[torch.as_tensor(np.array(ids), dtype=torch.int64)].cumsum(0) for ids in batch]


def contexts(texts: Sequence[Sequence[int]] = MET) -> Contexts:
    met = (((place,), np.array(ids, dtype=np.int32)) for place, ids in enumerate(texts))
    return writing.distinct(met, lambda place: np.array(texts[place[0]], dtype=np.int32))


def plan(
    found: Contexts, dtype: Dtype = "fp32", shard_tokens: int | None = 60, **changes: Any
) -> StatesPlan:
    identity = {**IDENTITY, "dtype": dtype, **changes}
    return layout.plan_for(
        identity, found.keys, found.lengths, dtype=dtype, width=WIDTH, shard_tokens=shard_tokens
    )


def written(
    root: Path, dtype: Dtype = "fp32", *, found: Contexts | None = None, **options: Any
) -> Path:
    found = found or contexts()
    wanted = plan(found, dtype)
    folder = root / layout.folder_name(wanted.identity)
    given = {"batch_tokens": 40, **options}
    writing.write(
        folder, found, given.pop("encode", encode), plan=writing.begun(folder, wanted), **given
    )
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is stored


def test_a_context_that_is_met_again_is_stored_once(tmp_path: Path) -> None:
    found = contexts()
    assert (found.met, len(found)) == (50, 40)
    assert len(StateCache(written(tmp_path))) == 40


def test_fp32_states_are_those_of_the_encoder(tmp_path: Path) -> None:
    cache = StateCache(written(tmp_path))
    for ids in MET:
        torch.testing.assert_close(cache.states(ids), encode([np.array(ids)])[0], rtol=0, atol=0)


def test_bf16_states_are_the_rounded_ones(tmp_path: Path) -> None:
    cache = StateCache(written(tmp_path, "bf16"))
    assert torch.equal(cache.states(TEXTS[7]), encode([np.array(TEXTS[7])])[0].bfloat16())


def test_int8_states_are_off_by_half_a_step_of_their_token_and_a_rounding(tmp_path: Path) -> None:
    got = StateCache(written(tmp_path, "int8")).states(TEXTS[7])
    wanted = encode([np.array(TEXTS[7])])[0]
    most = wanted.abs().amax(dim=1, keepdim=True)
    assert got.dtype == torch.bfloat16
    assert bool(((got.float() - wanted).abs() <= most / 254 + wanted.abs() / 2**7).all())
    assert float((got.float() - wanted).abs().max()) > 0


def test_a_token_of_zeros_survives_int8() -> None:
    numbers, scale = layout.quantise(torch.zeros(2, 4))
    assert torch.equal(layout.dequantise(numbers, scale), torch.zeros(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4), ("int8", 1)])
def test_a_number_takes_two_bytes_and_less_than_a_hundredth_besides(
    tmp_path: Path, dtype: Dtype, size: int
) -> None:
    texts = [[(n + token) % 50 for token in range(150 + n)] for n in range(60)]
    found = contexts(texts)
    wanted = layout.plan_for(
        IDENTITY, found.keys, found.lengths, dtype=dtype, width=256, shard_tokens=None
    )

    def wide(batch: Sequence[np.ndarray]) -> list[Tensor]:
        return [states.repeat(1, 256 // WIDTH) for states in encode(batch)]

    writing.write(tmp_path, found, wide, plan=writing.begun(tmp_path, wanted), batch_tokens=4096)
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    elements = wanted.tokens * 256
    allowed = size * 1.01 + (4 / 256 if dtype == "int8" else 0)  # one scale a token
    assert size < on_disk / elements <= allowed
    assert (
        on_disk <= wanted.bytes_needed(contexts=len(found), tokens=wanted.tokens, shards=2) + 2048
    )


def test_shards_are_cut_between_contexts_and_hold_all_of_them() -> None:
    lengths = np.array([5, 50, 3, 3, 3, 200, 1])
    bounds = layout.shard_bounds(lengths, 20)
    assert [entry for shard in bounds for entry in shard] == list(range(7))
    assert [list(shard) for shard in bounds] == [[0, 1], [2, 3], [4, 5], [6]]


def test_states_stay_on_the_disk_until_they_are_read(tmp_path: Path) -> None:
    cache = StateCache(written(tmp_path))
    one, same = cache.states(TEXTS[3]), cache.states(TEXTS[3])
    assert one.data_ptr() == same.data_ptr()  # a view of the mapped file, no copy


def test_a_batch_of_states_has_zeros_behind_the_shorter_rows() -> None:
    one, two, three = torch.ones(2, 3), 2 * torch.ones(1, 3), 3 * torch.ones(4, 3)
    states, mask = pad_states([[one, two], [three]])
    assert states[..., 0].tolist() == [[1, 1, 2, 0], [3, 3, 3, 3]]
    assert mask.tolist() == [[True, True, True, False], [True] * 4]


def test_the_files_of_the_folder_are_those_of_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that an older version began or wrote is gone on with and read."""
    monkeypatch.setenv(CPU_KERNELS, "0")  # those of now are noted in the plan
    found = contexts()
    folder = written(tmp_path)
    first, *_, last = sorted(path.name for path in folder.glob("states-*.json"))
    record = json.loads((folder / first).read_text())
    assert list(record.items()) == [
        ("name", "states-00000.safetensors"),
        ("size", (folder / "states-00000.safetensors").stat().st_size),
        ("sha256", sha256_of(folder / "states-00000.safetensors")),
    ]
    assert list(json.loads((folder / "plan.json").read_text()).items()) == [
        ("format", 1),
        ("identity", IDENTITY),
        ("contexts", hashlib.sha256(found.keys.tobytes()).hexdigest()),
        ("dtype", "fp32"),
        ("width", WIDTH),
        ("count", 40),
        ("tokens", int(found.lengths.sum())),
        ("shard_tokens", 60),
    ]
    meta = json.loads((folder / "meta.json").read_text())
    assert list(meta) == ["format", "shards"]
    assert meta["format"] == 1
    assert meta["shards"][0] == record
    assert meta["shards"][-1]["name"] == last.replace(".json", ".safetensors")


# Kills and ranks


def test_what_a_kill_left_is_kept_and_the_rest_is_made_alike(tmp_path: Path) -> None:
    folder = written(tmp_path)
    wanted = content(folder)
    for lost in ("meta.json", "states-00001.json", "states-00003.safetensors"):
        (folder / lost).unlink()
    (folder / ".states-00003.safetensors.17.tmp").write_bytes(b"half")
    made: list[int] = []

    def counting(batch: Sequence[np.ndarray]) -> list[Tensor]:
        made.append(len(batch))
        return encode(batch)

    bounds = layout.shard_bounds(contexts().lengths, 60)
    assert written(tmp_path, encode=counting) == folder
    assert sum(made) == len(bounds[1]) + len(bounds[3])
    assert content(folder) == wanted


_SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit import test_encoder_states as tests
def slow(batch):
    if Path(sys.argv[2]).is_file():
        time.sleep(600)  # to be killed here
    return tests.encode(batch)
tests.written(Path(sys.argv[1]), encode=slow)
"""


def test_a_process_that_is_killed_and_started_again_leaves_the_same_bytes(tmp_path: Path) -> None:
    wanted = content(written(tmp_path / "whole"))
    folder = tmp_path / "killed" / layout.folder_name({**IDENTITY, "dtype": "fp32"})
    second = folder / "states-00001.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW.format(root=str(ROOT)), str(tmp_path / "killed"), str(second)],
        env=environment,
    )
    began = time.monotonic()
    while not second.is_file() and process.poll() is None and time.monotonic() - began < 240:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("states-*.json")}
    assert 2 <= len(kept) < len([name for name in wanted if name.endswith(".safetensors")])
    with refused("states_unfinished"):
        open_states(tmp_path / "killed", {**IDENTITY, "dtype": "fp32"})
    written(tmp_path / "killed")
    assert content(folder) == wanted
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items()), (
        "a finished shard was made again"
    )


def _on_ranks(root: str) -> None:
    written(Path(root))


def test_two_ranks_write_the_bytes_of_one(tmp_path: Path) -> None:
    run_on_ranks(2, _on_ranks, str(tmp_path / "two"))
    folder = written(tmp_path / "one")
    assert content(tmp_path / "two" / folder.name) == content(folder)


# What is refused


def test_an_altered_shard_is_named_when_it_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path)
    path = folder / "states-00002.safetensors"
    altered = bytearray(path.read_bytes())
    shard = next(iter(layout.shard_bounds(contexts().lengths, 60)[2:]))
    altered[len(altered) // 2] ^= 1
    path.write_bytes(altered)
    cache = StateCache(folder)
    with refused("states_altered", at="states-00002.safetensors", context=re.compile(r"\d+")):
        [cache.states(TEXTS[entry]) for entry in shard]
    cache.states(TEXTS[0])  # the others serve


def test_a_shard_of_another_size_is_named_at_once(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with (folder / "states-00001.safetensors").open("ab") as file:
        file.write(b"x")
    with refused(
        "states_size",
        at="states-00001.safetensors",
        bytes=re.compile(r"\d+"),
        wanted=re.compile(r"\d+"),
    ):
        StateCache(folder)
    (folder / "states-00001.safetensors").unlink()
    written(tmp_path)
    assert torch.equal(StateCache(folder).states(TEXTS[9]), encode([np.array(TEXTS[9])])[0])


def test_a_context_that_was_not_prepared_is_refused_with_the_command(tmp_path: Path) -> None:
    cache = StateCache(written(tmp_path))
    assert [1, 2, 3] not in cache
    assert TEXTS[0] in cache
    with refused("states_not_prepared", tokens=3):
        cache.states([1, 2, 3])


@pytest.mark.parametrize(
    "change", [{"template": "plain"}, {"base": "c"}, {"context_tokens": 32}, {"tokenizer": "u"}]
)
def test_states_of_another_identity_are_never_used(tmp_path: Path, change: dict[str, Any]) -> None:
    written(tmp_path)
    ((name, wanted),) = change.items()
    with refused("states_of_others", key=name, has=IDENTITY[name], wanted=wanted):
        open_states(tmp_path, {**IDENTITY, **change})


def test_a_root_without_states_says_how_they_are_made(tmp_path: Path) -> None:
    with refused("states_absent"):
        open_states(tmp_path, IDENTITY)


def test_other_contexts_are_not_written_into_a_folder_that_was_begun(tmp_path: Path) -> None:
    written(tmp_path)
    with refused("vectors_of_others", key="contexts"):
        written(tmp_path, found=contexts(TEXTS[1:]))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    lacking = writing.missing(tmp_path, contexts(), plan(contexts()))
    assert lacking.contexts == 40
    assert len(lacking.shards) > 3
    writing.refuse_small_disk(tmp_path, lacking)
    with refused("states_do_not_fit", size="1048576.00 GiB"):
        writing.refuse_small_disk(tmp_path, replace(lacking, bytes=2**50))


def test_what_is_still_to_be_written_leaves_finished_shards_out(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "states-00002.json").unlink()
    lacking = writing.missing(folder, contexts(), plan(contexts()))
    assert lacking.shards == [2]
    assert lacking.contexts == len(layout.shard_bounds(contexts().lengths, 60)[2])


def test_a_state_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with refused("not_finite"):
        written(tmp_path, encode=lambda batch: [states / 0 for states in encode(batch)])


def test_batches_keep_to_their_budget_and_a_longer_context_goes_alone(tmp_path: Path) -> None:
    shapes: list[tuple[int, int]] = []

    def watching(batch: Sequence[np.ndarray]) -> list[Tensor]:
        shapes.append((len(batch), max(map(len, batch))))
        return encode(batch)

    written(tmp_path, encode=watching, batch_tokens=15)
    assert all(rows == 1 or rows * longest <= 15 for rows, longest in shapes)
    assert max(longest for _, longest in shapes) > 15


def test_a_cache_of_many_contexts_finds_each_of_them(tmp_path: Path) -> None:
    texts = [[n % 50, n // 50, n % 7] for n in range(2000)]
    texts = [[token % 50 for token in ids] + [0] * (n % 3) for n, ids in enumerate(texts)]
    found = contexts(texts)
    wanted = plan(found, shard_tokens=500)
    writing.write(tmp_path, found, encode, plan=writing.begun(tmp_path, wanted), batch_tokens=400)
    cache = reading.StateCache(tmp_path)
    assert any(layout.key_of(ids)[-1] == 0 for ids in texts), (
        "numpy drops zeros at the end of a key"
    )
    for ids in texts:
        assert torch.equal(cache.states(ids), encode([np.array(ids)])[0])
