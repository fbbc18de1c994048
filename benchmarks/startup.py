"""What a start costs before its first batch: rows read and hashed, or remembered; a store opened.

    python benchmarks/startup.py [--megabytes 1000] [--rows 10000000]

FiD's questions with 100 passages each, so many MB of JSON lines, are read as the first start of a
run reads them and as a later one does; and a store of so many rows, of generated arrays, is opened
and gives its first window. CPU seconds of this process, and its largest memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

PASSAGE = "A passage of about one hundred words, as the encyclopedia has them. " * 9
TOKENS = 8  # of a generated row


def _measured(what: str, action: Callable[[], Any]) -> Any:
    start, cpu = time.monotonic(), time.process_time()
    value = action()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{what}: {time.process_time() - cpu:.2f} CPU s, {time.monotonic() - start:.2f} s, "
        f"at most {peak:.2f} GiB so far",
        flush=True,
    )
    return value


def rows_of_a_run(root: Path, megabytes: int) -> None:
    from trainer.data.content import content_of_rows
    from trainer.data.readers.jsonl import read_jsonl
    from trainer.files import opened

    path = root / "data" / "train.jsonl"
    path.parent.mkdir()
    contexts = [{"id": str(n), "title": f"Title {n}", "text": PASSAGE} for n in range(100)]
    with path.open("w") as file:
        number = 0
        while file.tell() < megabytes * 2**20:
            row = {"id": str(number), "question": f"Which one is {number}?", "answers": ["one"]}
            file.write(json.dumps({**row, "ctxs": contexts}) + "\n")
            number += 1
    opened.SETTLED_S = 0.0  # the file is of this very moment

    def content() -> tuple[str, int]:
        return content_of_rows(
            lambda: read_jsonl(path), "e", "train", settings="s", cache_dir=root / "cache"
        )

    first = _measured(f"{megabytes} MB of rows, first start", content)
    assert _measured("a later start", content) == first


def store_of_generated_rows(root: Path, rows: int) -> None:
    from trainer.data.order import Sharding, windows
    from trainer.data.token_store import TokenStore

    folder = root / "store"
    folder.mkdir()
    np.save(folder / "ids.ids.npy", np.zeros(rows * TOKENS, "<i4"))
    np.save(folder / "offsets.ids.npy", np.arange(rows + 1, dtype="<i8") * TOKENS)
    np.save(folder / "lengths.npy", np.full(rows, TOKENS, "<i8"))
    meta = {"rows": rows, "fields": ["ids"], "digest": "generated", "truncated_rows": 0}
    (folder / "meta.json").write_text(json.dumps(meta))
    store = _measured(f"{rows:,} rows opened", lambda: TokenStore(folder))
    _measured("its summary", store.summary)
    task: Any = SimpleNamespace(
        collate=lambda given: {"ids": torch.tensor(np.stack([row["ids"] for row in given]))},
        units=lambda batch: torch.ones((), dtype=torch.int64),
    )
    sharding = Sharding(world=1, rank=0, micro_batch=8, global_batch=64)

    def first_window() -> list[Any]:
        given = windows(store, task, sharding, seed=0, start_step=0, stop_step=10, is_shuffled=True)
        return list(islice(given, 1))

    _measured("its first shuffled window", first_window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        store_of_generated_rows(Path(place), given.rows)
        rows_of_a_run(Path(place), given.megabytes)


if __name__ == "__main__":
    main()
