"""Folders of vectors as encode writes them, of vectors that a test has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trainer.protocol.abilities import Side
from trainer.retrieval import embeddings
from trainer.retrieval.stored_forms import Form


def write_vectors(
    folder: Path,
    exact: np.ndarray,
    *,
    model: str = "m",
    side: Side = "passage",
    form: Form = "float32",
    shard_rows: int = 64,
    first: int = 0,
) -> embeddings.Embeddings:
    """A folder of passages or questions p0, p1, ... with these (N, D) vectors.

    first: the number of the first id.
    """
    rows = [{"id": f"p{first + n}", "text": f"{one.tolist()}"} for n, one in enumerate(exact)]
    texts, count = embeddings.digest_of(rows)
    plan = embeddings.EmbeddingsPlan(model, texts, side, form, count, shard_rows)

    def encode(of_shard: object) -> torch.Tensor:
        assert isinstance(of_shard, list)
        places = [int(row["id"][1:]) - first for row in of_shard]
        return torch.from_numpy(exact[places])

    return embeddings.write(folder, lambda: iter(rows), encode, plan=plan)
