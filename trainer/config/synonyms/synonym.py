"""One foreign name, and what stands for it here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Synonym:
    """What stands for a foreign name here."""

    keys: tuple[str, ...] = ()  # dotted; a task has some of them
    flags: tuple[str, ...] = ()  # of trainval.py
    advice: str = ""  # whole sentences

    def sentence(self, legal: Collection[str]) -> str | None:
        """What to write instead, for a task whose dotted keys are `legal`; None: nothing of this
        task stands for the name.
        """
        keys = [key for key in self.keys if key in legal]
        sentences: list[str] = []
        if keys:
            sentences.append(f"Here it is {' or '.join(keys)}.")
        if self.flags:
            kind = "a flag" if len(self.flags) == 1 else "flags"
            sentences.append(f"Here it is {kind} of trainval.py: {' or '.join(self.flags)}.")
        if self.advice and (sentences or not self.keys):
            sentences.append(self.advice)
        return " ".join(sentences) or None


def as_key(*keys: str, advice: str = "") -> Synonym:
    """A name that one of these dotted keys stands for."""
    return Synonym(keys=keys, advice=advice)


def as_flag(*flags: str, advice: str = "") -> Synonym:
    """A name that these flags of trainval.py stand for."""
    return Synonym(flags=flags, advice=advice)


def nothing(advice: str) -> Synonym:
    """A name that nothing stands for: `advice` says why, or what to do."""
    return Synonym(advice=advice)


# What several names mean
# --------------------------------------------------------------------------------------------------

EPOCHS = as_key("train.epochs")
MICRO = as_key(
    "train.micro_batch",
    advice="train.global_batch is the rows of one optimizer step over all devices.",
)
ACCUMULATION = as_key(
    "train.global_batch",
    advice="Accumulation follows from it: global_batch / (micro_batch * devices).",
)
BATCH = as_key("train.global_batch", "train.micro_batch")
EVAL_BATCH = as_key("train.eval_batch")
RATE = as_key("optim.lr")
CLIP = as_key("optim.clip")
BETAS = as_key("optim.betas", advice="It is a list of both.")
OPTIMIZER = as_key("optim", advice="Its `name` is adamw, adamw8bit, adafactor, sgd, lion or muon.")
SHAPE = as_key("schedule.shape")
WARMUP = as_key("schedule.warmup_steps", "schedule.warmup_ratio")
PRECISION = as_key("train.precision", advice='It is "fp32", "bf16" or "fp16".')
BITS = as_key("train.base_bits", advice="4 is NF4, 8 is int8; it needs `lora`.")
RECOMPUTE = as_key("train.gradient_checkpointing", advice="It is true, false, k or auto.")
EVALUATION = as_key("train.eval_every", advice='It is a number of steps, or "0.5 epoch".')
SAVING = as_key("train.save_every", advice='It is a number of steps, or "0.5 epoch".')
LOGGING = as_key("train.log_every", advice='It is a number of steps, or "0.5 epoch".')
BASE = as_key("base")
TOKENIZER = as_key("tokenizer")
LORA = as_key("lora", advice='For example {"r": 16, "alpha": 64, "targets": ["q", "v"]}.')
TARGETS = as_key("lora.targets")
SAVED = as_key("lora.modules_to_save", advice="A task's new layers train beside adapters anyhow.")
PATTERNS = as_key("lora.patterns", advice='For example [{"match": "*.mlp.*", "r": 4}].')
ZERO = as_key("deepspeed", advice='It is "zero0" to "zero3", or the path of a DeepSpeed file.')
SHARDING = as_key("deepspeed", advice='Sharding is ZeRO\'s: "zero3" divides all states.')
FILE = as_key("data.files", advice="Files lie below the flag --data_path of trainval.py.")
LENGTH = as_key(
    "data.max_tokens",
    "data.passage_tokens",
    "data.query_tokens",
    "data.source_tokens",
    "data.target_tokens",
    "data.decoder_tokens",
    "data.context_tokens",
)
TARGET_LENGTH = as_key("data.target_tokens", "data.answer_tokens")
WRITTEN_LENGTH = as_key("generation.max_tokens", "data.answer_tokens")
QUERY_LENGTH = as_key("data.query_tokens")
PASSAGE_LENGTH = as_key("data.passage_tokens")
PASSAGES = as_key("data.passages", "data.contexts")
POSITIVE = as_key("data.select_positive", advice='"first" never changes.')
NEGATIVES = as_key("data.select_negatives", advice='"first" never changes.')
ANSWERS = as_key("train.answers", advice="It is how many validation rows are answered, or all.")
PADDING_FREE = nothing(
    "Rows are packed without padding wherever the base can read them so; no key is needed."
)
KERNELS = nothing("The fastest attention that the base supports is chosen; no key is needed.")
EARLY_STOP = as_key("train.patience", advice="It counts evaluations.")
DEVICES = nothing("The launcher decides: torchrun --nproc-per-node N, or `resources` of a job.")
RESUME = nothing("The same command again goes on from the last checkpoint; -r 1 starts over.")
FOREIGN_CODE = nothing("Code of a model's repository never runs here.")
REVISION = nothing(
    "A Hub model is taken as it is now, and its commit is kept with the run. Download a revision "
    "into a folder to pin it."
)
SEVERAL_SETS = as_key("data.mix", advice='Names of files, folders and sets: {"a.jsonl": 0.7, ...}.')
RUNS = as_flag("--savedir_base", advice="Each run has a folder of its own in it.")
RUN_NAME = as_flag("--wandb_run_name", advice="The run folder is named by the id.")
TRACKERS = as_flag("--trackers", "--wandb_project_name")
WORKERS = as_flag("--num_proc", advice="Rows are encoded once, before training, and then read.")
GRADIENTS = as_flag("--wandb_log_gradients")
ARTIFACTS = as_flag("--wandb_artifacts", advice="wandb gets references, and no weights.")
HUB = as_flag("--push_to_hub", advice="final/ is uploaded when the run is finished.")
CACHE = as_flag("--cache_dir")
