"""Folders of vectors that were damaged: refused by name or the same vectors, and what is lost is
made again by the same command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse as scipy_sparse

from tests.wording import refused
from trainer.commands.vectors.forms import one_form
from trainer.errors import UserError
from trainer.protocol.task import Row
from trainer.retrieval import embeddings
from trainer.retrieval.late import token_embeddings
from trainer.retrieval.sparse import word_weights
from trainer.switches import CPU_KERNELS, uses_cpu_kernels

ROWS: list[Row] = [{"id": f"p{n}", "text": f"text {n}"} for n in range(7)]
WIDTH = 8
FORMS = ("bi", "int8", "late", "sparse")


def _of_row(row: Row) -> np.ndarray:
    generator = np.random.default_rng(int(row["id"][1:]))
    return generator.random((2 + int(row["id"][1:]) % 3, WIDTH), dtype=np.float32)


def _whole(rows: Sequence[Row]) -> torch.Tensor:
    return torch.from_numpy(np.stack([_of_row(row)[0] for row in rows]))


def _tokens(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    found = [_of_row(row) for row in rows]
    return np.concatenate(found), np.array([len(one) for one in found])


def _words(rows: Sequence[Row]) -> Any:
    dense = np.stack([_of_row(row)[0] for row in rows])
    return scipy_sparse.csr_matrix(np.where(dense > 0.4, dense, 0))


def written(form: str, folder: Path, encoded: list[str] | None = None, **changes: Any) -> Any:
    """What the command of a form leaves, three texts in a shard; encoded: gets the ids of what is
    encoded.
    """
    texts, count = embeddings.digest_of(ROWS)
    common = ("m", texts, "passage", "float16", count, 3)
    plan, module, encode = {
        "bi": (embeddings.EmbeddingsPlan(*common), embeddings, _whole),
        "int8": (
            replace(embeddings.EmbeddingsPlan(*common), dtype="int8"),
            embeddings,
            _whole,
        ),
        "late": (
            token_embeddings.TokenPlan(*common, mean=False, pool_factor=1.0),
            token_embeddings,
            _tokens,
        ),
        "sparse": (word_weights.WordPlan(*common), word_weights, _words),
    }[form]

    def counting(rows: Sequence[Row]) -> Any:
        if encoded is not None:
            encoded.extend(row["id"] for row in rows)
        return encode(rows)

    how: Any = {"plan": replace(plan, **changes)}
    return module.write(folder, lambda: iter(ROWS), counting, **how)


def told(form: str, folder: Path) -> tuple[Any, ...]:
    """All that a search takes of a folder, of whatever form its files say it is."""
    form = "late" if form == "late" else "sparse" if form == "sparse" else "bi"
    if one_form([folder]) != form:
        raise UserError("another form, which no search compares with the questions'")
    read = {"late": token_embeddings.read, "sparse": word_weights.read}
    stored: Any = read.get(form, embeddings.read)(folder)
    if form == "sparse":
        parts = [one.toarray().tobytes() for one in stored.matrices()]
    else:
        parts = [np.asarray(one).tobytes() for one in stored.vectors]
    lengths = stored.offsets.tolist() if form == "late" else None
    plan = stored.plan
    if (plan.model, plan.side) != ("m", "passage"):
        raise UserError("another model or side, which no search compares with the questions'")
    return parts, stored.ids, lengths, getattr(plan, "mean", None)


def flipped(content: bytes, at: int, bit: int) -> bytes:
    altered = bytearray(content)
    altered[at] ^= 1 << bit
    return bytes(altered)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", FORMS)
def test_no_flipped_bit_beside_the_vectors_gives_other_vectors_ids_or_a_traceback(
    form: str, tmp_path: Path
) -> None:
    folder = tmp_path / "v"
    written(form, folder)
    wanted = told(form, folder)
    headers = {"vectors-00000.npy": 128, "vectors-00001.npz": 90}
    refusals = 0
    for name in ("meta.json", "ids.txt", "offsets.npy", *headers):
        path = folder / name
        if not path.exists():
            continue
        whole = path.read_bytes()
        for at in range(0, min(len(whole), headers.get(name, len(whole))), 3):
            path.write_bytes(flipped(whole, at, at % 7))
            try:
                assert told(form, folder) == wanted, (name, at)
            except UserError:
                refusals += 1
        path.write_bytes(whole)
    assert refusals > 100


def test_a_list_in_which_two_shards_have_one_name_is_refused(tmp_path: Path) -> None:
    written("bi", tmp_path / "v")
    meta = tmp_path / "v" / "meta.json"
    meta.write_text(meta.read_text().replace("vectors-00000.npy", "vectors-00001.npy"))
    with refused("vectors_torn", at="meta.json"):
        told("bi", tmp_path / "v")


@pytest.mark.parametrize("form", FORMS)
def test_what_is_lost_of_a_finished_folder_is_made_again_and_nothing_else(
    form: str, tmp_path: Path
) -> None:
    written(form, tmp_path / "v")
    wanted = content(tmp_path / "v")
    suffix = "npz" if form == "sparse" else "npy"
    shard = tmp_path / "v" / f"vectors-00001.{suffix}"
    for torn in (None, shard.read_bytes()[:-5]):
        if torn is None:
            shard.unlink()
        else:
            shard.write_bytes(torn)
        with refused("vectors_torn", at=f"vectors-00001.{suffix}"):
            told(form, tmp_path / "v")
        encoded: list[str] = []
        written(form, tmp_path / "v", encoded)
        assert encoded == ["p3", "p4", "p5"]
        assert content(tmp_path / "v") == wanted


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("bi", "ids.txt"),
        ("sparse", "ids.txt"),
        ("late", "ids.txt"),
        ("late", "offsets.npy"),
    ],
)
def test_a_file_beside_the_shards_is_refused_and_written_again_without_a_model(
    form: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "v"
    written(form, folder)
    wanted, path = content(folder), folder / name
    for altered in (None, flipped(wanted[name], len(wanted[name]) - 2, 0)):
        path.unlink() if altered is None else path.write_bytes(altered)
        fields = {"folder": folder, "fix": f"Delete {folder / 'meta.json'}"}
        is_ids = name == "ids.txt"
        with (
            refused("ids_of_others", **fields) if is_ids else refused("offsets_of_others", **fields)
        ):
            told(form, folder)
        (folder / "meta.json").unlink()
        encoded: list[str] = []
        written(form, folder, encoded)
        assert encoded == []
        assert content(folder) == wanted


def test_ids_of_an_earlier_version_are_read_by_their_number_alone(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    written("bi", folder)
    meta = (folder / "meta.json").read_text()
    lines = [line for line in meta.splitlines() if "ids_sha256" not in line]
    (folder / "meta.json").write_text("\n".join(lines))
    assert embeddings.read(folder).ids == [row["id"] for row in ROWS]
    (folder / "ids.txt").write_bytes(b"p\xff\n" * len(ROWS))
    with refused("vectors_torn", at="ids.txt"):
        _ = embeddings.read(folder).ids


@pytest.mark.parametrize("form", ["late", "sparse"])
def test_a_finished_folder_without_its_plan_is_still_of_its_form(form: str, tmp_path: Path) -> None:
    written(form, tmp_path / "v")
    (tmp_path / "v" / "plan.json").unlink()
    assert one_form([tmp_path / "v"]) == form


def _dying(encoded: list[str]) -> Callable[[Sequence[Row]], Any]:
    def encode(rows: Sequence[Row]) -> Any:
        if encoded:
            raise KeyboardInterrupt
        encoded.extend(row["id"] for row in rows)
        return _whole(rows)

    return encode


@pytest.mark.parametrize("began", ["0", "1"])
def test_where_the_environment_says_nothing_a_folder_keeps_its_kernels(
    began: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, count = embeddings.digest_of(ROWS)
    plan = embeddings.EmbeddingsPlan("m", texts, "passage", "float16", count, 3)
    monkeypatch.setenv(CPU_KERNELS, began)
    with pytest.raises(KeyboardInterrupt):
        embeddings.write(tmp_path / "v", lambda: iter(ROWS), _dying([]), plan=plan)
    monkeypatch.delenv(CPU_KERNELS)
    seen: list[bool] = []

    def encode(rows: Sequence[Row]) -> Any:
        seen.append(uses_cpu_kernels(os.environ))
        return _whole(rows)

    embeddings.write(tmp_path / "v", lambda: iter(ROWS), encode, plan=plan)
    assert set(seen) == {began == "1"}
    assert CPU_KERNELS not in os.environ


@pytest.mark.parametrize(("began", "other"), [("1", "0"), ("0", "1")])
def test_a_folder_goes_on_with_the_kernels_that_it_began_with(
    began: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("bi", tmp_path / "whole")
    texts, count = embeddings.digest_of(ROWS)
    plan = embeddings.EmbeddingsPlan("m", texts, "passage", "float16", count, 3)
    monkeypatch.setenv(CPU_KERNELS, began)
    with pytest.raises(KeyboardInterrupt):
        embeddings.write(tmp_path / "v", lambda: iter(ROWS), _dying([]), plan=plan)
    monkeypatch.setenv(CPU_KERNELS, other)
    with refused("vectors_of_others", key=CPU_KERNELS, was=began, now=other):
        written("bi", tmp_path / "v")
    monkeypatch.setenv(CPU_KERNELS, began)
    encoded: list[str] = []
    written("bi", tmp_path / "v", encoded)
    assert encoded == ["p3", "p4", "p5", "p6"]
    assert content(tmp_path / "v")["meta.json"] == content(tmp_path / "whole")["meta.json"]
