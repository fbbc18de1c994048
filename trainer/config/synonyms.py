"""What other libraries call our keys: `learning_rate` is `optim.lr` here. Imports no torch.

The names come from transformers (TrainingArguments and its example scripts), PEFT, TRL, DeepSpeed,
Lightning, Tevatron and facebookresearch/FiD. Whoever brings one of them into a dictionary is told
our key, or the flag of trainval.py, or what to do where there is neither.
"""

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


def _key(*keys: str, advice: str = "") -> Synonym:
    return Synonym(keys=keys, advice=advice)


def _flag(*flags: str, advice: str = "") -> Synonym:
    return Synonym(flags=flags, advice=advice)


def _none(advice: str) -> Synonym:
    return Synonym(advice=advice)


_STEPS = _none(
    "A run is counted in optimizer steps: train.steps = epochs * rows / train.global_batch."
)
_RATE = _key("optim.lr")
_MICRO = _key(
    "train.micro_batch",
    advice="train.global_batch is the rows of one optimizer step over all devices.",
)
_ACCUMULATION = _key(
    "train.global_batch",
    advice="Accumulation follows from it: global_batch / (micro_batch * devices).",
)
_BATCH = _key("train.global_batch", "train.micro_batch")
_PRECISION = _key("train.precision", advice='It is "fp32", "bf16" or "fp16".')
_BITS = _key("train.base_bits", advice="4 is NF4, 8 is int8; it needs `lora`.")
_RECOMPUTE = _key("train.gradient_checkpointing", advice="It is true, false, k or auto.")
_SHAPE = _key("schedule.shape")
_CLIP = _key("optim.clip")
_BETAS = _key("optim.betas", advice="It is a list of both.")
_EVALUATION = _key("train.eval_every", advice="It is a number of steps.")
_SAVING = _key("train.save_every", advice="It is a number of steps.")
_LOGGING = _key("train.log_every", advice="It is a number of steps.")
_BASE = _key("base")
_TOKENIZER = _key("tokenizer")
_FILE = _key("data.files", advice="Files lie below the flag --data_path of trainval.py.")
_LENGTH = _key(
    "data.max_tokens",
    "data.passage_tokens",
    "data.query_tokens",
    "data.source_tokens",
    "data.target_tokens",
    "data.decoder_tokens",
    "data.context_tokens",
)
_TARGET_LENGTH = _key("data.target_tokens", "data.answer_tokens")
_WRITTEN_LENGTH = _key("generation.max_tokens", "data.answer_tokens")
_QUERY_LENGTH = _key("data.query_tokens")
_PASSAGE_LENGTH = _key("data.passage_tokens")
_PASSAGES = _key("data.passages", "data.contexts")
_PADDING_FREE = _none(
    "Rows are packed without padding wherever the base can read them so; no key is needed."
)
_KERNELS = _none("The fastest attention that the base supports is chosen; no key is needed.")
_LORA = _key("lora", advice='For example {"r": 16, "alpha": 64, "targets": ["q", "v"]}.')
_TARGETS = _key("lora.targets")
_ANSWERS = _key("train.answers", advice="It is how many validation rows are answered, or all.")
_EARLY_STOP = _none(
    "A run ends after train.steps; best/ holds the weights of the best evaluation (train.best)."
)
_ZERO = _key("deepspeed", advice='It is "zero0" to "zero3", or the path of a DeepSpeed file.')
_SHARDING = _key("deepspeed", advice='Sharding is ZeRO\'s: "zero3" divides all states.')
_DEVICES = _none("The launcher decides: torchrun --nproc-per-node N, or `resources` of a job.")
_RESUME = _none("The same command again goes on from the last checkpoint; -r 1 starts over.")
_RUNS = _flag("--savedir_base", advice="Each run has a folder of its own in it.")
_TRACKERS = _flag("--trackers", "--wandb_project_name")
_WORKERS = _flag("--num_proc", advice="Rows are encoded once, before training, and then read.")
_INSTEAD_OF_DO = _none(
    "trainval.py trains and evaluates; `python -m trainer evaluate` and `predict` do the rest."
)

SYNONYMS: dict[str, Synonym] = {
    # transformers: TrainingArguments
    "learning_rate": _RATE,
    "num_train_epochs": _STEPS,
    "max_steps": _key("train.steps"),
    "per_device_train_batch_size": _MICRO,
    "per_gpu_train_batch_size": _MICRO,
    "per_device_eval_batch_size": _key("train.eval_batch"),
    "per_gpu_eval_batch_size": _key("train.eval_batch"),
    "auto_find_batch_size": _key("train.micro_batch", advice='"auto" finds the largest that fits.'),
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "max_grad_norm": _CLIP,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": _key("optim.eps"),
    "adafactor": _key("optim.name", advice='It is "adamw" or "adafactor".'),
    "optim_args": _key("optim", advice="Each argument is a key of this block."),
    "lr_scheduler_type": _SHAPE,
    "lr_scheduler_kwargs": _key("schedule", advice="Each argument is a key of this block."),
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "tf32": _none(
        'A GPU with TF32 uses it at precision "fp32"; LATHE_TF32=0 in the environment forbids it.'
    ),
    "bf16_full_eval": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "torch_compile": _key("train.compile"),
    "logging_steps": _LOGGING,
    "logging_strategy": _LOGGING,
    "eval_steps": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "evaluation_strategy": _EVALUATION,
    "eval_delay": _none("Evaluations come every train.eval_every steps from the beginning."),
    "save_steps": _SAVING,
    "save_strategy": _SAVING,
    "save_total_limit": _key("train.keep_last", advice="The best checkpoint is kept besides."),
    "load_best_model_at_end": _none(
        "best/ always holds the best weights and final/ the last; train.best names the metric."
    ),
    "metric_for_best_model": _key("train.best"),
    "greater_is_better": _key("train.best_is", advice='It is "min" or "max".'),
    "label_smoothing_factor": _key("label_smoothing"),
    "group_by_length": _key("train.bucket_steps"),
    "data_seed": _key("train.seed"),
    "full_determinism": _none("The same dictionary on as many devices draws the same numbers."),
    "dataloader_num_workers": _WORKERS,
    "dataloader_drop_last": _none(
        "No row is dropped: epochs follow one another without a shorter batch between them."
    ),
    "remove_unused_columns": _key("data.columns", advice="Other columns are not read."),
    "predict_with_generate": _ANSWERS,
    "generation_max_length": _WRITTEN_LENGTH,
    "generation_num_beams": _key("generation.num_beams"),
    "report_to": _TRACKERS,
    "run_name": _flag("--wandb_run_name"),
    "output_dir": _RUNS,
    "overwrite_output_dir": _flag("--reset", advice="-r 1 moves the old folder aside."),
    "logging_dir": _RUNS,
    "resume_from_checkpoint": _RESUME,
    "ignore_data_skip": _RESUME,
    "do_train": _INSTEAD_OF_DO,
    "do_eval": _INSTEAD_OF_DO,
    "do_predict": _INSTEAD_OF_DO,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "neftune_noise_alpha": _none("No noise is added to embeddings."),
    "use_liger_kernel": _none("The loss is fused with the output layer already; no key is needed."),
    # transformers: arguments of its example scripts
    "model_name_or_path": _BASE,
    "pretrained_model_name_or_path": _BASE,
    "model_name": _BASE,
    "config_name": _key("base", advice='{"config": {...}} draws random weights.'),
    "tokenizer_name": _TOKENIZER,
    "tokenizer_name_or_path": _TOKENIZER,
    "torch_dtype": _PRECISION,
    "attn_implementation": _KERNELS,
    "use_flash_attention_2": _KERNELS,
    "trust_remote_code": _none("Code of a model's repository never runs here."),
    "dataset_name": _key("data.dataset"),
    "dataset_config_name": _key("data.subset"),
    "dataset_split": _key("data.splits"),
    "train_file": _FILE,
    "validation_file": _FILE,
    "test_file": _FILE,
    "validation_split_percentage": _key("data.valid_share", advice="It is a share, such as 0.05."),
    "preprocessing_num_workers": _WORKERS,
    "block_size": _LENGTH,
    "max_source_length": _key("data.source_tokens"),
    "max_target_length": _TARGET_LENGTH,
    "val_max_target_length": _WRITTEN_LENGTH,
    "max_new_tokens": _WRITTEN_LENGTH,
    "no_repeat_ngram_size": _key("generation.no_repeat_ngram"),
    "source_prefix": _key("data.prefix"),
    "text_column": _key("data.document", "data.columns"),
    "text_column_name": _key("data.columns"),
    "summary_column": _key("data.summaries"),
    # PEFT and bitsandbytes
    "use_lora": _LORA,
    "use_peft": _LORA,
    "peft_config": _LORA,
    "lora_r": _key("lora.r"),
    "lora_rank": _key("lora.r"),
    "lora_alpha": _key("lora.alpha"),
    "lora_dropout": _key("lora.dropout"),
    "lora_target_modules": _TARGETS,
    "target_modules": _TARGETS,
    "use_rslora": _key("lora.rslora"),
    "use_dora": _key("lora.dora"),
    "modules_to_save": _key("lora", advice="A task's new layers always train beside adapters."),
    "load_in_4bit": _BITS,
    "load_in_8bit": _BITS,
    "quantization_config": _BITS,
    "bnb_4bit_quant_type": _BITS,
    # TRL
    "max_seq_length": _LENGTH,
    "max_length": _LENGTH,
    "packing": _PADDING_FREE,
    "padding_free": _PADDING_FREE,
    "completion_only_loss": _key("data.loss_on", advice='"answer" is on completions alone.'),
    "assistant_only_loss": _key("data.source", advice='"chat" has its loss on the assistant.'),
    "dataset_text_field": _key("data.columns", advice='For example {"text": "body"}.'),
    "dataset_num_proc": _WORKERS,
    "chat_template_path": _key("data.chat_template"),
    # DeepSpeed
    "train_batch_size": _key("train.global_batch"),
    "train_micro_batch_size_per_gpu": _MICRO,
    "gradient_clipping": _CLIP,
    "zero_stage": _ZERO,
    "zero_optimization": _ZERO,
    "ds_config": _ZERO,
    "activation_checkpointing": _RECOMPUTE,
    # Lightning and general use
    "batch_size": _BATCH,
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "max_epochs": _STEPS,
    "num_steps": _key("train.steps"),
    "max_iters": _key("train.steps"),
    "optimizer": _key("optim", advice="Its `name` is adamw or adafactor."),
    "scheduler": _SHAPE,
    "lr_scheduler": _SHAPE,
    "warmup": _key("schedule.warmup_steps", "schedule.warmup_ratio"),
    "grad_clip": _CLIP,
    "gradient_clip_val": _CLIP,
    "accumulate_grad_batches": _ACCUMULATION,
    "val_check_interval": _EVALUATION,
    "eval_interval": _EVALUATION,
    "log_interval": _LOGGING,
    "log_every_n_steps": _LOGGING,
    "mixed_precision": _PRECISION,
    "random_seed": _key("train.seed"),
    "shuffle": _key("train.order"),
    "early_stopping": _EARLY_STOP,
    "early_stopping_patience": _EARLY_STOP,
    "devices": _DEVICES,
    "num_gpus": _DEVICES,
    "num_nodes": _DEVICES,
    "local_rank": _DEVICES,
    "wandb_project": _flag("--wandb_project_name"),
    "wandb_entity": _flag("--wandb_entity_name"),
    "data_dir": _flag("--data_path"),
    # Tevatron
    "q_max_len": _QUERY_LENGTH,
    "query_max_len": _QUERY_LENGTH,
    "p_max_len": _PASSAGE_LENGTH,
    "passage_max_len": _PASSAGE_LENGTH,
    "train_n_passages": _key("data.passages"),
    "train_group_size": _key("data.passages"),
    "positive_passage_no_shuffle": _key("data.select_positive", advice='"first" never changes.'),
    "negative_passage_no_shuffle": _key("data.select_negatives", advice='"first" never changes.'),
    "passage_field_separator": _key("data.separator"),
    "append_eos_token": _key("data.append_eos"),
    "untie_encoder": _key("encoder.tied"),
    "add_pooler": _key("encoder.projection"),
    "projection_in_dim": _key("encoder.projection.in_width"),
    "projection_out_dim": _key("encoder.projection.width"),
    "grad_cache": _key("loss.query_chunk", "loss.passage_chunk"),
    "gc_q_chunk_size": _key("loss.query_chunk"),
    "gc_p_chunk_size": _key("loss.passage_chunk"),
    # facebookresearch/FiD
    "n_context": _PASSAGES,
    "text_maxlength": _PASSAGE_LENGTH,
    "answer_maxlength": _TARGET_LENGTH,
    "per_gpu_batch_size": _MICRO,
    "accumulation_steps": _ACCUMULATION,
    "total_steps": _key("train.steps"),
    "eval_freq": _EVALUATION,
    "save_freq": _SAVING,
    "use_checkpoint": _RECOMPUTE,
    "model_size": _BASE,
    "model_path": _BASE,
    "train_data": _FILE,
    "eval_data": _FILE,
    "checkpoint_dir": _RUNS,
}
