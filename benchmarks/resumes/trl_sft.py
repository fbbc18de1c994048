"""trl.SFTTrainer, resumed by `trainer.train(resume_from_checkpoint=True)`
(https://huggingface.co/docs/trl/sft_trainer; it is a transformers.Trainer).
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
from workload import (
    BATCH,
    LENGTH,
    LR,
    SAVE_EVERY,
    SEED,
    STEPS,
    arguments,
    model,
    row_numbers,
    rows,
)


class Recording(SFTTrainer):
    """An SFTTrainer that says which rows it was given, and their loss."""

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **how: Any) -> Any:
        numbers = row_numbers(inputs["input_ids"])
        loss = super().compute_loss(model, inputs, *more, **how)
        value = loss[0] if isinstance(loss, tuple) else loss
        record.begin(self.state.global_step + 1, numbers, value.item())
        return loss


def lay_tokenizer() -> Any:
    """A tokenizer whose words are numbers: the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(512)}
    whole = Tokenizer(models.WordLevel(words, unk_token="0"))
    whole_one = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="0", eos_token="0")
    whole_one.save_pretrained(folder / "tokenizer")
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


folder, is_resumed, record = arguments()
how = SFTConfig(
    output_dir=str(folder / "out"),
    per_device_train_batch_size=BATCH,
    max_steps=STEPS,
    save_steps=SAVE_EVERY,
    learning_rate=LR,
    seed=SEED,
    max_length=LENGTH,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Recording(
    model=model(),
    args=how,
    train_dataset=Dataset.from_dict({"input_ids": rows()}),
    processing_class=lay_tokenizer(),
)
trainer.train(resume_from_checkpoint=True if is_resumed else None)
record.finish()
