"""What every trainer of benchmarks/step_resume.py trains, and its record of what it did.

A GPT-2 of two layers with random weights and dropout 0.1, LoRA of rank 4, 64 rows of 16 tokens
(the first one is the row's number), batches of 4, AdamW at 0.003, 40 steps, a save every 10 steps.
A line of the record is written when a step is over; at step --kill the process then dies by
kill -9, as soon as the next step begins.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS, LENGTH, BATCH, STEPS, SAVE_EVERY, LR, SEED = 64, 16, 4, 40, 10, 0.003, 7
VOCABULARY = 512


@dataclass
class Record:
    """What a trainer did, line by line."""

    path: Path
    kill: int  # the step behind which the process dies; 0: it does not
    step: int = 0
    pending: dict[str, Any] = field(default_factory=dict[str, Any])

    def begin(self, step: int, rows: list[int], loss: float) -> None:
        """Note what a step is about to do. step: from 1 on, as the trainer counts."""
        self.finish()
        self.pending = {"step": step, "rows": rows, "loss": loss}

    def finish(self) -> None:
        """Write what the last step was; die if it is the step to die behind."""
        if not self.pending:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(self.pending) + "\n")
        step, self.pending = self.pending["step"], {}
        if step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments() -> tuple[Path, bool, Record]:
    """The folder of a trainer, whether it is to go on with what is there, and its record."""
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path)
    flags.add_argument("--kill", type=int, default=0)
    flags.add_argument("--resume", action="store_true")
    given = flags.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    return given.folder, given.resume, Record(given.folder / "record.jsonl", given.kill)


def rows() -> list[list[int]]:
    """The tokens of each row."""
    draw = random.Random(SEED)
    return [
        [number, *(draw.randrange(ROWS, VOCABULARY) for _ in range(LENGTH - 1))]
        for number in range(ROWS)
    ]


def row_numbers(input_ids: Any) -> list[int]:
    """Which rows a batch is. input_ids: (B, L)."""
    return [int(one) for one in input_ids[:, 0]]


def model() -> Any:
    """The model with its adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    adapters = LoraConfig(r=4, lora_alpha=32, target_modules=["c_attn", "c_fc"], lora_dropout=0.1)
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def dataset() -> Any:
    """The rows as a torch data set."""
    from torch.utils.data import Dataset

    class Rows(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, number: int) -> dict[str, Any]:
            import torch

            ids = torch.tensor(content[number])
            return {"input_ids": ids, "labels": ids}

    content = rows()
    return Rows()
