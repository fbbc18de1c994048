"""What a group costs that trains on one base, against its experiments one after another.

    python benchmarks/together.py [--runs 8] [--steps 20] [--width 256] [--layers 6] [--tokens 2048]
        [--global-batch 4] [--out FILE]

The base and the rows are made up, on whatever device there is. Printed, and written as JSON to
--out: processor and wall seconds and the peak memory of the group (--together TOKENS), and of one
process per experiment, in turn. Both save, evaluate once and export; starting a process counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.driven import VOCABULARY, write_tokenizer  # noqa: E402

WORDS = (16, 64)  # of a row, from and to
Values = dict[str, Any]


def write_rows(folder: Path, rows: int) -> None:
    """train.jsonl and valid.jsonl of made-up words."""
    drawn = random.Random(0)
    for name, count in (("train", rows), ("valid", 8)):
        texts = (
            " ".join(f"w{drawn.randrange(1, VOCABULARY - 2)}" for _ in range(drawn.randint(*WORDS)))
            for _ in range(count)
        )
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))


def values_of(number: int, folder: Path, how: argparse.Namespace) -> Values:
    """The dictionary of an experiment."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": how.width,
        "intermediate_size": 4 * how.width,
        "num_hidden_layers": how.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    batch = how.global_batch
    train = {"steps": how.steps, "global_batch": batch, "micro_batch": batch, "seed": number}
    return {
        "task": "causal_lm",
        "base": {"config": config, "seed": 1},
        "tokenizer": str(folder / "tokenizer"),
        "data": {"source": "files", "max_tokens": 256},
        "lora": {"r": 4 + 4 * (number % 3), "alpha": 16, "dropout": 0.0},
        "train": {**train, "precision": "fp32"},
        "optim": {"lr": 1e-4 * (1 + number)},
        "deepspeed": "zero0",
    }


def measured(groups: Path, group: str, folder: Path, flags: list[str]) -> Values:
    """Train a group in a process of its own."""
    command = [sys.executable, str(ROOT / "trainval.py"), "-e", group, "--exp_configs", str(groups)]
    command += ["-sb", str(folder / "runs"), "--data_path", str(folder), *flags]
    command += ["--cache_dir", str(folder / "cache")]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}")
    cpu_s, wall_s = used.ru_utime + used.ru_stime, time.monotonic() - start
    return {"cpu_s": cpu_s, "wall_s": wall_s, "peak_mib": used.ru_maxrss / 2**10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("runs", 8), ("steps", 20), ("width", 256), ("layers", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument("--out", type=Path)
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        write_tokenizer(folder / "tokenizer")
        write_rows(folder, how.steps * how.global_batch)
        every = [values_of(number, folder, how) for number in range(how.runs)]
        groups = {f"of_{number}": [values] for number, values in enumerate(every)}
        text = json.dumps({"all": every, **groups})
        (folder / "groups.json").write_text(text)
        together = measured(
            folder / "groups.json", "all", folder, ["--together", str(how.tokens), "-r", "1"]
        )
        alone = [measured(folder / "groups.json", name, folder, ["-r", "1"]) for name in groups]
    report: Values = {"how": {**vars(how), "out": None}, "together": together}
    report["alone"] = {key: sum(one[key] for one in alone) for key in ("cpu_s", "wall_s")}
    report["alone"]["peak_mib"] = max(one["peak_mib"] for one in alone)
    print(json.dumps(report, indent=1))
    if how.out is not None:
        how.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
