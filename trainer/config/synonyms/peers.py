"""What axolotl, sentence-transformers and OpenAI's fine-tuning call our keys, where no library
calls them so.
"""

from __future__ import annotations

from trainer.config.synonyms import synonym as to
from trainer.config.synonyms.synonym import Synonym, as_flag, as_key, nothing

_ADAPTERS_ARE_NO_BASE = nothing(
    "Adapters are no base. The same command goes on from the last checkpoint; `lathe merge` folds "
    "adapters into a base for the next run."
)
_MADE_ON_THE_HUB = as_flag("--push_to_hub", advice="What it makes on the Hub is private.")
_SHARED_ROWS = as_key(
    "deepspeed",
    advice="Ranks share rows where its file says sequence_parallel_size (docs/long-rows.md).",
)

SYNONYMS: dict[str, Synonym] = {
    # axolotl
    "base_model": to.BASE,
    "adapter": to.LORA,
    "lora_model_dir": _ADAPTERS_ARE_NO_BASE,
    "datasets": to.SEVERAL_SETS,
    "path": as_key("data.files", "data.dataset"),
    "type": as_key("data.source"),
    "dataset_prepared_path": to.CACHE,
    "val_set_size": as_key("data.valid_share", advice="It is a share, such as 0.05."),
    "sequence_len": to.LENGTH,
    "sample_packing": to.PADDING_FREE,
    "eval_sample_packing": to.PADDING_FREE,
    "context_parallel_size": _SHARED_ROWS,
    "sequence_parallel_degree": _SHARED_ROWS,
    "sequence_parallel_size": _SHARED_ROWS,
    "wandb_watch": to.GRADIENTS,
    "wandb_name": to.RUN_NAME,
    "wandb_log_model": to.ARTIFACTS,
    "micro_batch_size": to.MICRO,
    "evals_per_epoch": to.EVALUATION,
    "saves_per_epoch": to.SAVING,
    "loss_watchdog_threshold": as_key(
        "train.spike_z", advice="It is in robust deviations above the median of the last losses."
    ),
    "loss_watchdog_patience": as_key("train.bad_steps_allowed"),
    "special_tokens": to.PADDING_FREE,
    "save_first_step": nothing("--dry_run of trainval.py checks folder, disk and two rows."),
    # sentence-transformers
    "batch_sampler": as_key(
        "data.batches",
        "loss.mask_duplicates",
        advice='NO_DUPLICATES is {"distinct": true}; mask_duplicates takes a text out of the '
        "negatives of a query that it answers.",
    ),
    "multi_dataset_batch_sampler": to.SEVERAL_SETS,
    "prompts": as_key("data.query_prefix", "data.passage_prefix"),
    "router_mapping": as_key("encoder.tied", advice="false is an encoder for each side."),
    "learning_rate_mapping": nothing("One learning rate, optim.lr, is for all weights."),
    "similarity_fn_name": as_key("encoder.normalize", advice="Then a dot product is a cosine."),
    "model_card_data": nothing("README.md of an export is written from what the run recorded."),
    "model_kwargs": to.PRECISION,
    "hub_model_id": _MADE_ON_THE_HUB,
    "hub_private_repo": _MADE_ON_THE_HUB,
    "hub_strategy": _MADE_ON_THE_HUB,
    # OpenAI
    "n_epochs": to.EPOCHS,
    "learning_rate_multiplier": to.RATE,
    "hyperparameters": as_key("train", "optim"),
    "training_file": to.FILE,
}
