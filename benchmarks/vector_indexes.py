"""What the indexes of `lathe search --faiss` find by default, and what building and loading cost.

    python benchmarks/vector_indexes.py --out FOLDER [--passages 100000] [--width 384]
    [--queries 500] [--depth 100] [--clusters 1000] [--vectors FILE.npz] [HNSW32 "IVF1024,Flat" ...]

Vectors of length 1: a centre, of so many clusters, and noise of the same length around it;
--clusters 0 draws noise alone, which has no near neighbours, the hardest case for an index.
--vectors: a file of arrays `q` and `p` in their place. The folder holds the vectors and the
indexes; a second start finds them, so its seconds are those of a second call. Prints a line for
each index, and the whole curve of recall.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import numpy as np
import torch

from trainer.protocol.task import Row
from trainer.retrieval import embeddings
from trainer.retrieval.exact_search import search
from trainer.retrieval.vector_index import IndexOptions, folder_of, open_index

SEED, AT_ONCE = 5, 100_000


def of_length_1(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def drawn(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(questions, passages)."""
    if options.vectors:
        with np.load(options.vectors) as arrays:
            return arrays["q"], arrays["p"]
    random, width = np.random.default_rng(SEED), options.width
    centres = of_length_1(random.standard_normal((max(1, options.clusters), width), np.float32))

    def draw(count: int) -> np.ndarray:
        vectors = np.empty((count, width), np.float32)
        for start in range(0, count, AT_ONCE):
            part = vectors[start : start + AT_ONCE]
            part[:] = of_length_1(random.standard_normal(part.shape, np.float32))
            if options.clusters:
                chosen = centres[random.integers(len(centres), size=len(part))]
                part[:] = of_length_1(part + chosen)
        return vectors

    return draw(options.queries), draw(options.passages)


def passages_folder(folder: Path, vectors: np.ndarray) -> embeddings.Embeddings:
    def encode(rows: object) -> torch.Tensor:
        assert isinstance(rows, list)
        return torch.from_numpy(vectors[[int(row["id"]) for row in rows]])

    def rows() -> list[Row]:
        return [{"id": str(n), "text": ""} for n in range(len(vectors))]

    size = embeddings.MAX_SHARD_ROWS
    plan = embeddings.EmbeddingsPlan(
        "drawn", f"{vectors.shape}", "passage", "float32", len(vectors), size
    )
    return embeddings.write(folder, rows, encode, plan=plan)


def main() -> None:
    parser = argparse.ArgumentParser(description="Recall and seconds of indexes by default.")
    parser.add_argument("specs", nargs="*", default=["HNSW32", "IVF1024,Flat"])
    parser.add_argument("--out", type=Path, required=True, help="the folder of vectors and indexes")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--vectors", type=Path, help="an .npz of q and p in place of draws")
    options = parser.parse_args()
    queries, passages = drawn(options)
    corpus = passages_folder(options.out, passages)
    start = time.process_time()
    search(queries, corpus.vectors, depth=options.depth)
    print(f"{passages.shape}: exactly {time.process_time() - start:.2f} CPU s")
    for spec in options.specs:
        folder, start = folder_of(options.out, spec), time.process_time()
        index = open_index(IndexOptions(folder, spec, options.depth), [corpus], queries)
        opened = time.process_time()
        index.search(queries, options.depth)
        seconds = f"opened {opened - start:.2f}, searched {time.process_time() - opened:.2f} CPU s"
        print("\n".join(index.lines(folder)), seconds, sep="\n")
        curve = (f"{one.value}: {one.recall:.3f}" for one in index.record.recall.settings)
        print(f"  recall by {index.record.knob}: " + ", ".join(curve), flush=True)


if __name__ == "__main__":
    main()
