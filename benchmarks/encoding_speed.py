"""How fast rows become tokens, by one process and by several, and whether the bytes are the same.

    python benchmarks/encoding_speed.py --rows 120000 --num_proc 2,1

Generated questions with three passages of some 100 words each, through FiD's encoding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
from pathlib import Path

from trainer import tasks
from trainer.data import stdlib_docs
from trainer.data.token_store import store_of
from trainer.protocol.task import Places

WORDS_OF_A_PASSAGE, PASSAGES = 100, 3


def write_rows(path: Path, count: int) -> None:
    """Questions with passages of the standard library's own words, drawn anew for every row."""
    words = " ".join(row["text"] for row in stdlib_docs.texts("train")).split()
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            starts = [draw.randrange(len(words) - WORDS_OF_A_PASSAGE) for _ in range(PASSAGES)]
            texts = [" ".join(words[start : start + WORDS_OF_A_PASSAGE]) for start in starts]
            row = {"question": f"What of {number}?", "answers": [words[number % 1000]]}
            file.write(json.dumps(row | {"contexts": texts}) + "\n")


def task_of(folder: Path, tokenizer: str | None) -> tasks.Task:
    """A reader with that tokenizer, or the embedded one."""
    values = {
        "task": "fid",
        "base": {"config": {"model_type": "t5"}},
        "tokenizer": tokenizer or {"vocab_size": 4096},
        "data": {"source": "files", "contexts": PASSAGES},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
        "optim": {"lr": 1e-4},
    }
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))


def processor_s() -> float:
    """Seconds of processors that this process and its ended children took."""
    return sum(os.times()[:4])


def digest_of(folder: Path) -> str:
    """sha256 over the names and bytes of a store's files."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def main() -> None:
    """Print rows a second and the digest for each number of processes."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("--rows", type=int, default=120_000)
    flags.add_argument("--num_proc", default="2,1", help="Numbers of processes, in this order.")
    flags.add_argument("--tokenizer", default=None, help="A folder; default: the embedded one.")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "train.jsonl", given.rows)
        task = task_of(folder, given.tokenizer)
        for num_proc in map(int, given.num_proc.split(",")):
            began, worked = time.monotonic(), processor_s()
            store = store_of(task, "train", folder / f"cache{num_proc}", num_proc=num_proc)
            wall_s = time.monotonic() - began
            busy_s, load = processor_s() - worked, os.getloadavg()[0]
            print(
                f"{num_proc} processes: {len(store):,} rows in {wall_s:.1f} s, "
                f"{len(store) / wall_s:.0f} rows/s, {busy_s:.0f} s of processors "
                f"(load {load:.1f}), "
                f"sha256 {digest_of(store.folder)[:16]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
