"""Runs where TRL is: five steps of its trainers of preferences, each over all rows.

    python preferences.py FOLDER < asked.json > told.json

FOLDER has model/ (a causal language model, its tokenizer beside it), scorer/ (the same with a head
for scores) and files of rows. Asked: {name: {"trainer", "config", "rows": a file}}. Told, by name:
the loss of each step. In FOLDER/name.safetensors: the gradients of the first step, under "gradient.",
and the weights after the last, under "weight.".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer  # pyright: ignore[reportMissingImports]  # pyright: ignore[reportMissingImports]
from trl.experimental.cpo import CPOConfig, CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # pyright: ignore[reportMissingImports]

TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
STEPS, LR = 5, 0.05


class Watch(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        if not self.gradients:
            self.gradients = {
                f"gradient.{name}": weight.grad.clone()
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }


def steps(
    folder: Path, name: str, *, trainer: str, config: dict[str, Any], rows: str
) -> list[float]:
    """The losses of five steps of plain gradient descent."""
    kind, configs = TRAINERS[trainer]
    is_reward = trainer == "reward"
    auto = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model = auto.from_pretrained(folder / ("scorer" if is_reward else "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    train = load_dataset("json", data_files=str(folder / rows), split="train")
    watch = Watch()
    how = configs(
        output_dir=str(folder / "out" / name),
        per_device_train_batch_size=len(train),
        num_train_epochs=STEPS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **config,
    )
    running = kind(
        model=model,
        args=how,
        train_dataset=train,
        processing_class=tokenizer,
        callbacks=[watch],
        optimizers=(torch.optim.SGD(model.parameters(), lr=LR), None),
    )
    losses: list[float] = []
    usual = running.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = usual(*args, **kwargs)
        losses.append(float(loss))
        return loss

    running.compute_loss = compute_loss
    running.train()
    weights = {f"weight.{key}": one.detach().clone() for key, one in model.named_parameters()}
    save_file({**watch.gradients, **weights}, folder / f"{name}.safetensors")
    return losses


def main() -> None:
    folder, asked = Path(sys.argv[1]), json.load(sys.stdin)
    told = {name: steps(folder, name, **one) for name, one in asked.items()}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
