"""transformers.Trainer, resumed by `trainer.train(resume_from_checkpoint=True)`
(https://huggingface.co/docs/transformers/trainer, "Checkpoints").
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments
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


class Recording(Trainer):
    """A Trainer that says which rows it was given, and their loss."""

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **how: Any) -> Any:
        loss = super().compute_loss(model, inputs, *more, **how)
        value = loss[0] if isinstance(loss, tuple) else loss
        record.begin(self.state.global_step + 1, row_numbers(inputs["input_ids"]), value.item())
        return loss


folder, is_resumed, record = arguments()
how = TrainingArguments(
    output_dir=str(folder / "out"),
    per_device_train_batch_size=BATCH,
    max_steps=STEPS,
    save_steps=SAVE_EVERY,
    learning_rate=LR,
    seed=SEED,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Recording(model=model(), args=how, train_dataset=dataset())
trainer.train(resume_from_checkpoint=True if is_resumed else None)
record.finish()
