"""How soon a run of millions of rows takes its first step, what it holds in memory, and whether it
has the same losses after kill -9.

    python benchmarks/stream.py --rows 10000000 --kind jsonl --steps 40 --folder /tmp/rows

Generated texts of 5 to 30 words, a decoder of one small block, and `data.stream`. The run is killed
at a few places and started again by the same command; `--whole` also trains the run without
`data.stream`, whose losses have to be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.facts import LLAMA, write_facts

WORDS = ["the", "key", "of", "Ada", "lies", "in", "a", "red", "tower", "near", "garden", "empty"]
_POLL_S = 0.05


def texts(count: int) -> Iterator[str]:
    draw = random.Random(0)
    some = [" ".join(draw.choices(WORDS, k=draw.randint(5, 30))) for _ in range(5000)]
    return (f"{number} {some[number * 7919 % 5000]}" for number in range(count))


def write_rows(folder: Path, count: int, kind: str) -> Path:
    """The training rows; a file that is there stays."""
    path = folder / f"rows-{count}.{kind}"
    if path.exists():
        return path
    if kind == "jsonl":
        with path.open("w") as file:
            file.writelines(f'{{"text": "{text}"}}\n' for text in texts(count))
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        held: list[str] = []
        for text in texts(count):
            held.append(text)
            if len(held) == 200_000:
                writer.write_table(pa.table({"text": held}))
                held.clear()
        if held:
            writer.write_table(pa.table({"text": held}))
    return path


def values_of(folder: Path, rows: Path, steps: int, *, is_streamed: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"source": "files", "max_tokens": 96, "files": {"train": rows.name}}
    train = {"steps": steps, "global_batch": 32, "micro_batch": 16, "precision": "fp32"}
    train |= {"log_every": 1, "eval_every": steps, "save_every": 5, "seed": 5}
    return {
        "task": "causal_lm",
        "base": LLAMA,
        "tokenizer": str(folder / "tokenizer"),
        "data": data | ({"stream": True} if is_streamed else {}),
        "train": train,
        "optim": {"lr": 0.01},
        "schedule": {"shape": "constant"},
        "deepspeed": "zero0",
    }


class Run:
    """A command that trains, and what is seen of it from outside."""

    def __init__(self, folder: Path, values: dict[str, Any], savedir: Path) -> None:
        groups = savedir.with_suffix(".json")
        groups.write_text(json.dumps({"one": [values]}))
        self._savedir = savedir
        root = Path(__file__).resolve().parent.parent
        self._argv = [sys.executable, str(root / "trainval.py"), "--exp_configs", str(groups)]
        self._argv += ["-e", "one", "-sb", str(savedir), "--data_path", str(folder)]
        self._argv += ["--cache_dir", str(savedir.with_suffix(".cache"))]

    def start(
        self, *, kill_at: int | None = None, kill_after_s: float | None = None
    ) -> dict[str, Any]:
        """Run to its end, or kill it when its step `kill_at` is logged, or after so many seconds.

        Seconds to the first step, all seconds, CPU seconds and the largest sum of memory (RSS, and
        without pages that are shared) of the process and its children, in MiB.
        """
        began, before, known = time.monotonic(), os.times(), self.steps()
        log = self._savedir.with_suffix(".log").open("ab")
        process = subprocess.Popen(self._argv, stdout=log, stderr=log)
        first_s, peak = None, [0, 0]
        while process.poll() is None:
            peak = [max(pair) for pair in zip(peak, memory_mib(process.pid), strict=True)]
            done, seconds = self.steps(), time.monotonic() - began
            if first_s is None and done > known:
                first_s = seconds
            is_due = (kill_at is not None and done >= kill_at) or (
                kill_after_s is not None and seconds > kill_after_s
            )
            if is_due:
                process.send_signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        after = os.times()
        cpu_s = sum(after[2:4]) - sum(before[2:4])
        found = {"first_step_s": first_s, "wall_s": time.monotonic() - began, "cpu_s": cpu_s}
        return found | {
            "peak_rss_mib": peak[0],
            "peak_pss_mib": peak[1],
            "code": process.returncode,
        }

    def lines(self) -> list[dict[str, Any]]:
        found = [*self._savedir.glob("*/metrics.jsonl")]
        if not found:
            return []
        lines = found[0].read_text().split("\n")[:-1]
        return [one for one in map(json.loads, lines) if "loss" in one]

    def steps(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines()}


def memory_mib(pid: int) -> tuple[int, int]:
    """(RSS, PSS) of a process and its children, together."""
    rss = pss = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in [str(pid), *children]:
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                rss += int(rest.split()[0]) if name == "Rss" else 0
                pss += int(rest.split()[0]) if name == "Pss" else 0
    except OSError:  # it has just ended
        pass
    return rss >> 10, pss >> 10


def measure(folder: Path, count: int, kind: str, steps: int, *, with_whole: bool) -> dict[str, Any]:
    """Train undisturbed, killed, and perhaps whole; what each took, and whether losses agree."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer").is_dir():
        write_facts(folder)
    rows = write_rows(folder, count, kind)
    streamed = values_of(folder, rows, steps, is_streamed=True)
    found: dict[str, Any] = {"rows": count, "kind": kind, "bytes": rows.stat().st_size}
    calm = Run(folder, streamed, folder / f"calm-{kind}-{count}")
    found["undisturbed"] = calm.start()
    found["again"] = Run(folder, streamed, folder / f"calm-{kind}-{count}").start()
    killed = Run(folder, streamed, folder / f"killed-{kind}-{count}")
    places: list[dict[str, Any]] = [{"kill_after_s": 4.0}, {"kill_at": 1}]
    places += [{"kill_at": step} for step in (steps // 3, steps // 2)]
    found["killed"] = [killed.start(**place) for place in places] + [killed.start()]
    found["same_after_kills"] = killed.losses() == calm.losses() and len(calm.losses()) == steps
    if with_whole:
        values = values_of(folder, rows, steps, is_streamed=False)
        whole = Run(folder, values, folder / f"whole-{kind}-{count}")
        found["whole"] = whole.start()
        found["same_as_whole"] = whole.losses() == calm.losses()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kind", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--whole", action="store_true", help="Also train without data.stream.")
    args = parser.parse_args()
    found = measure(args.folder, args.rows, args.kind, args.steps, with_whole=args.whole)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
