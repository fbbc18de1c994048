"""lightning.Trainer with ModelCheckpoint, resumed by `trainer.fit(..., ckpt_path="last")`
(https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html).
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from workload import (
    BATCH,
    LR,
    SAVE_EVERY,
    SEED,
    STEPS,
    arguments,
    dataset,
    model,
    row_numbers,
)


class Module(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()
        self.network.train()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.network(**batch).loss
        record.begin(self.global_step + 1, row_numbers(batch["input_ids"]), loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)


folder, is_resumed, record = arguments()
lightning.seed_everything(SEED)
saves = ModelCheckpoint(
    dirpath=folder / "out", every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True
)
trainer = lightning.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    callbacks=[saves],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
)
loader = DataLoader(dataset(), shuffle=True, batch_size=BATCH)
trainer.fit(Module(), loader, ckpt_path="last" if is_resumed else None)
record.finish()
