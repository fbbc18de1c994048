"""Predicted speed against what others measured on GPUs and published; nothing was fitted to it.

    python benchmarks/plan_published.py [--only NAME ...]

Source: MosaicML, llm-foundry, scripts/train/benchmarking/README.md, "H100 80GB BF16": MPT models
under FSDP FULL_SHARD, which is ZeRO-3, with flash attention, with and without recomputation. MPT is
taken as a GPT-2 of its width, which adds biases. Our rates are those of NVIDIA's data sheets. About
a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from trainer.commands.plan import subject_for
from trainer.plan.memory.measure import measuring
from trainer.plan.time.run_time import run_time
from trainer.plan.time.target import target_of
from trainer.training.options import Options

# Width, blocks and heads. Source: the yamls of the same repository.
_SHAPES = {
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}


@dataclass(frozen=True)
class Published:
    """One row of the table."""

    model: str
    tokens: int  # of a row
    gpus: int
    micro_batch: int
    accumulation: int
    is_recomputed: bool
    tokens_per_s: float  # of one GPU

    @property
    def name(self) -> str:
        again = " recomputed" if self.is_recomputed else ""
        return f"{self.model} {self.tokens} x{self.gpus} b{self.micro_batch}{again}"

    def values(self) -> dict[str, Any]:
        """The same as an experiment of ours."""
        width, blocks, heads = _SHAPES[self.model]
        config = {"model_type": "gpt2", "n_embd": width, "n_layer": blocks, "n_head": heads}
        config |= {"n_positions": self.tokens, "vocab_size": 50368}
        config |= {"bos_token_id": 0, "eos_token_id": 0}
        rows = self.micro_batch * self.accumulation * self.gpus
        train = {"steps": 100, "global_batch": rows, "micro_batch": self.micro_batch}
        train |= {"precision": "bf16", "gradient_checkpointing": self.is_recomputed}
        return {
            "task": "causal_lm",
            "base": {"config": config},
            "tokenizer": {"vocab_size": 2048, "corpus": "lookup"},
            "train": train,
            "optim": {"lr": 1e-4},
            "data": {"source": "jsonl", "max_tokens": self.tokens},
            "deepspeed": "zero3",
        }


TABLE = (
    Published("760m", 2048, 16, 24, 1, False, 68551),
    Published("760m", 1024, 8, 48, 2, False, 78581),
    Published("1b", 512, 8, 56, 4, False, 52275),
    Published("1b", 2048, 8, 14, 1, False, 45455),
    Published("1b", 2048, 64, 20, 1, False, 44402),
    Published("1b", 8192, 8, 3, 4, False, 29157),
    Published("3b", 1024, 8, 20, 6, False, 27046),
    Published("3b", 2048, 64, 6, 3, False, 22525),
    Published("3b", 4096, 8, 5, 6, False, 20964),
    Published("7b", 1024, 8, 64, 2, True, 10203),
    Published("7b", 2048, 8, 6, 1, False, 10643),
    Published("7b", 8192, 8, 8, 2, True, 6935),
    Published("13b", 2048, 8, 2, 1, False, 4792),
    Published("13b", 2048, 64, 2, 1, False, 4800),
    Published("13b", 4096, 8, 10, 3, True, 4717),
    Published("30b", 2048, 32, 14, 3, True, 2308),
    Published("70b", 2048, 64, 8, 4, True, 1039),
)


def predicted(row: Published, folder: Path) -> float:
    """Tokens a second of one GPU."""
    nodes = max(1, row.gpus // 8)
    target = target_of("h100", world=row.gpus, nodes=nodes)
    assert target.rates is not None
    options = Options(folder / "out", cache_dir=folder)
    time = run_time(subject_for(row.values(), options, row.gpus), target.rates, target.cluster)
    rows = row.micro_batch * row.accumulation
    return rows * row.tokens / time.step.total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="beginnings of names")
    given = parser.parse_args()
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder, measuring():
        for row in TABLE:
            if given.only and not any(row.name.startswith(name) for name in given.only):
                continue
            found = predicted(row, Path(folder))
            errors.append(found / row.tokens_per_s - 1)
            print(
                f"{row.name:28s}{row.tokens_per_s:9.0f} {found:9.0f} tokens/s {errors[-1]:+7.1%}",
                flush=True,
            )
    sizes = sorted(map(abs, errors))
    print(f"{len(sizes)} rows: median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}")


if __name__ == "__main__":
    main()
