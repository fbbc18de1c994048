"""A folder of vectors holds every text once, survives kills, and is only ever continued by what it
was begun with.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_on_ranks
from tests.wording import Fault, fault, refused
from trainer.protocol.abilities import Embeds, Side
from trainer.protocol.task import Row
from trainer.retrieval import embeddings
from trainer.retrieval.embeddings import EmbeddingsPlan
from trainer.switches import CPU_KERNELS

ROWS: list[Row] = [
    {"id": f"p{n}", "title": "t" * (n % 3), "text": "word " * (1 + n * 7 % 11)} for n in range(23)
]


class Bags:
    """The smallest task that embeds: the sum of its tokens' vectors, scaled on the
    passages' side.
    """

    def __init__(self) -> None:
        self.widths: list[int] = []  # of each batch: what a padded one would cost

    def ids(self, texts: Sequence[Row], *, side: Side) -> list[list[int]]:
        assert all(("title" in text) == (side == "passage") for text in texts)
        return [
            [ord(letter) % 50 for letter in text.get("title", "") + text["text"]] for text in texts
        ]

    def embed(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        self.widths += [max(map(len, rows))] * len(rows)
        assert not torch.is_grad_enabled()
        return torch.stack([model(torch.tensor(row)).sum(0) for row in rows]) * (
            2 if side == "passage" else 1
        )

    def shorten(self, model: nn.Module, dims: int) -> None:
        raise NotImplementedError

    def keep_layers(self, model: nn.Module, count: int) -> None:
        raise NotImplementedError


def bag_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Embedding(50, 4).eval()


def encoder(task: Embeds | None = None, **changes: object) -> embeddings.Encoder:
    options: dict[str, object] = {"side": "passage", "batch": 4, **changes}
    return embeddings.encoder_of(task or Bags(), bag_model(), **options)  # pyright: ignore[reportArgumentType]


def plan(**changes: object) -> EmbeddingsPlan:
    texts, count = embeddings.digest_of(ROWS)
    made = EmbeddingsPlan(
        model="m", texts=texts, side="passage", dtype="float32", count=count, shard_rows=5
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def whole(found: embeddings.Embeddings) -> np.ndarray:
    return np.concatenate(found.vectors)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def alone(row: Row) -> np.ndarray:
    return encoder(batch=1)([row])[0].numpy()


def test_rows_of_like_length_share_a_batch_and_every_vector_is_that_of_its_own_row() -> None:
    task = Bags()
    vectors = encoder(task)(ROWS).numpy()
    assert task.widths == sorted(task.widths, reverse=True)
    np.testing.assert_allclose(vectors, np.stack([alone(row) for row in ROWS]), rtol=1e-6)


def test_under_bf16_the_vectors_are_still_fp32() -> None:
    class Linear(Bags):
        def embed(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
            return torch.stack([torch.ones(2, 4) @ model(torch.tensor(row))[:4] for row in rows])[
                :, 0
            ]

    full, half = (
        encoder(Linear(), precision=precision)(ROWS[:3]) for precision in ("fp32", "bf16")
    )
    assert full.dtype == half.dtype == torch.float32
    assert 0 < float((full - half).abs().max()) < 0.1  # it did run in bf16


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_folder_holds_ids_and_vectors_in_the_order_of_the_rows(
    tmp_path: Path, dtype: str
) -> None:
    found = embeddings.write(tmp_path / "v", lambda: iter(ROWS), encoder(), plan=plan(dtype=dtype))
    assert found.ids == [row["id"] for row in ROWS]
    assert [shard.shape for shard in found.vectors] == [(5, 4)] * 4 + [(3, 4)]
    assert all(isinstance(shard, np.memmap) and shard.dtype == dtype for shard in found.vectors)
    expected = np.stack([alone(row) for row in ROWS]).astype(dtype)
    np.testing.assert_allclose(whole(found), expected, rtol=1e-6 if dtype == "float32" else 1e-3)
    embeddings.verify(found)


def test_what_a_kill_left_is_kept_and_the_rest_is_made(tmp_path: Path) -> None:
    embeddings.write(tmp_path / "v", lambda: iter(ROWS), encoder(), plan=plan())
    wanted = content(tmp_path / "v")
    for lost in ("meta.json", "ids.txt", "vectors-00001.json", "vectors-00003.npy"):
        (tmp_path / "v" / lost).unlink()
    (tmp_path / "v" / ".vectors-00003.npy.17.tmp").write_bytes(b"half")
    with refused("vectors_unfinished"):
        embeddings.read(tmp_path / "v")
    made: list[str] = []
    encode = encoder()

    def counting(rows: Sequence[Row]) -> Tensor:
        made.extend(row["id"] for row in rows)
        return encode(rows)

    embeddings.write(
        tmp_path / "v", lambda: iter(ROWS), counting, plan=plan(shard_rows=9)
    )  # another world's choice
    assert made == [row["id"] for row in [*ROWS[5:10], *ROWS[15:20]]]
    assert content(tmp_path / "v") == wanted


def test_a_finished_folder_is_not_encoded_again(tmp_path: Path) -> None:
    embeddings.write(tmp_path / "v", lambda: iter(ROWS), encoder(), plan=plan())

    def never(rows: Sequence[Row]) -> Tensor:
        raise AssertionError("nothing was left to do")

    assert embeddings.write(
        tmp_path / "v", lambda: iter(ROWS), never, plan=plan()
    ).plan.count == len(ROWS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "n"}, fault("vectors_of_others", key="model", was="m", now="n")),
        ({"texts": "x"}, fault("vectors_of_others", key="texts", now="x")),
        (
            {"precision": "bf16"},
            fault("vectors_of_others", key="precision", was="fp32", now="bf16"),
        ),
        ({"side": "query"}, fault("vectors_of_others", key="side", was="passage", now="query")),
        (
            {"dtype": "float16"},
            fault("vectors_of_others", key="dtype", was="float32", now="float16"),
        ),
    ],
)
def test_a_folder_of_something_else_is_not_continued(
    tmp_path: Path, changes: dict[str, str], said: Fault
) -> None:
    embeddings.write(tmp_path / "v", lambda: iter(ROWS), encoder(), plan=plan())
    with refused(said):
        embeddings.write(tmp_path / "v", lambda: iter(ROWS), encoder(), plan=plan(**changes))


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with refused("vectors_folder_taken"):
        embeddings.write(tmp_path, lambda: iter(ROWS), encoder(), plan=plan())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_vectors_that_are_no_numbers_are_refused_and_so_are_those_that_fp16_cannot_hold(
    tmp_path: Path,
) -> None:
    def filled(value: float) -> embeddings.Encoder:
        return lambda rows: torch.full((len(rows), 2), value)

    with refused("not_finite"):
        embeddings.write(tmp_path / "a", lambda: iter(ROWS), filled(float("nan")), plan=plan())
    with refused(
        "vectors_dtype",
        dtype="float16",
        value="7e+04",
        dtype_again="float16",
        most=65504,
        fix="float32",
    ):
        embeddings.write(
            tmp_path / "b", lambda: iter(ROWS), filled(7e4), plan=plan(dtype="float16")
        )


def test_an_altered_shard_is_found(tmp_path: Path) -> None:
    found = embeddings.write(tmp_path / "v", lambda: iter(ROWS), encoder(), plan=plan())
    path = tmp_path / "v" / "vectors-00002.npy"
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    with refused("vectors_altered", at="vectors-00002.npy"):
        embeddings.verify(found)
    path.write_bytes(altered[:-8])
    with refused("vectors_torn", at="vectors-00002.npy"):
        _ = embeddings.read(tmp_path / "v").vectors


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("vectors_absent", at="meta.json"):
        embeddings.read(tmp_path / "v")


def test_the_fingerprint_follows_every_file_and_what_it_stands_on(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("1")
    first = embeddings.fingerprint(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    assert embeddings.fingerprint(tmp_path / "copy") == first
    assert embeddings.fingerprint(tmp_path / "model", "another base") != first
    (tmp_path / "model" / "weights").write_text("2")
    assert embeddings.fingerprint(tmp_path / "model") != first


def written_on_ranks(folder: str) -> list[str]:
    encode, own = encoder(), []

    def counting(rows: Sequence[Row]) -> Tensor:
        own.extend(row["id"] for row in rows)
        return encode(rows)

    embeddings.write(Path(folder), lambda: iter(ROWS), counting, plan=plan())
    return own


def test_two_ranks_share_the_work_and_write_the_folder_of_one(tmp_path: Path) -> None:
    embeddings.write(tmp_path / "one", lambda: iter(ROWS), encoder(), plan=plan())
    first, second = run_on_ranks(2, written_on_ranks, str(tmp_path / "two"))
    assert sorted([*first, *second]) == sorted(row["id"] for row in ROWS)
    assert len(second) == 10
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_the_files_of_the_folder_are_those_of_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that an older version began or wrote is gone on with and read."""
    monkeypatch.setenv(CPU_KERNELS, "0")  # those of now are noted in the plan
    columns = torch.arange(20.0).reshape(4, 5).T  # the numbers of a row are not neighbours here
    encode = {5: lambda _: columns, 3: lambda _: columns[:3]}
    folder = tmp_path / "v"
    embeddings.write(folder, lambda: iter(ROWS), lambda rows: encode[len(rows)](rows), plan=plan())
    of_shards = [columns.numpy()] * 4 + [columns[:3].numpy()]
    stated = {"model": "m", "texts": embeddings.digest_of(ROWS)[0], "side": "passage"}
    stated |= {"dtype": "float32", "count": 23, "shard_rows": 5}
    wanted: dict[str, bytes] = {"ids.txt": "".join(f"p{n}\n" for n in range(23)).encode()}
    records = []
    for number, vectors in enumerate(of_shards):
        file = io.BytesIO()
        np.save(file, np.ascontiguousarray(vectors))
        name, shard = f"vectors-{number:05d}", file.getvalue()
        digest = hashlib.sha256(shard).hexdigest()
        records.append({"name": f"{name}.npy", "size": len(shard), "sha256": digest})
        wanted[f"{name}.npy"] = shard
        wanted[f"{name}.json"] = text({**records[-1], "rows": len(vectors), "dim": 4})
    wanted["plan.json"] = text(stated)
    of_ids = {"ids_sha256": hashlib.sha256(wanted["ids.txt"]).hexdigest()}  # later than the first
    wanted["meta.json"] = text({"format": 1, **stated, "dim": 4, **of_ids, "shards": records})
    assert content(folder) == wanted


def text(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
