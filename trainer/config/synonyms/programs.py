"""What the five programs that Lathe stands on call our keys, where no library calls them so.

Tevatron (v1 and main), facebookresearch/FiD, minFiD, Vera with accelerate, xc-cache (dssk). Their
tables are in docs/coming-from/.
"""

from __future__ import annotations

from trainer.config.synonyms import synonym as to
from trainer.config.synonyms.synonym import Synonym, as_flag, as_key, nothing

_NO_SPLADE = nothing("Learned sparse retrieval (SPLADE) is not in Lathe.")
_RANKS_SHARE = nothing("Ranks of torchrun share the rows; nothing has to be counted by hand.")
_CORPUS_IS_A_FILE = as_key(
    "data.corpus", advice="A corpus is a file: download that of the Hub, and name the file."
)
_TEXTS_ALONE = nothing("Texts alone are read, no pictures, sound or video.")
_NEVER_ON = nothing("The published groups never switched it on, and nothing here stands for it.")

SYNONYMS: dict[str, Synonym] = {
    # Tevatron
    "q_max_len": to.QUERY_LENGTH,
    "query_max_len": to.QUERY_LENGTH,
    "p_max_len": to.PASSAGE_LENGTH,
    "passage_max_len": to.PASSAGE_LENGTH,
    "train_n_passages": as_key("data.passages"),
    "train_group_size": as_key("data.passages"),
    "positive_passage_no_shuffle": to.POSITIVE,
    "negative_passage_no_shuffle": to.NEGATIVES,
    "passage_field_separator": as_key("data.separator"),
    "append_eos_token": as_key("data.append_eos"),
    "add_special_tokens": nothing("Special tokens are always added; no key is needed."),
    "padding_side": to.PADDING_FREE,
    "untie_encoder": as_key("encoder.tied", advice="It is the other way round: false is two."),
    "add_pooler": as_key("encoder.projection"),
    "projection_in_dim": as_key("encoder.projection.in_width"),
    "projection_out_dim": as_key("encoder.projection.width"),
    "dtype": to.PRECISION,
    "grad_cache": as_key("loss.query_chunk", "loss.passage_chunk"),
    "gc_q_chunk_size": as_key("loss.query_chunk"),
    "gc_p_chunk_size": as_key("loss.passage_chunk"),
    "distil_temperature": as_key("loss.distillation.teacher_temperature"),
    "lora_name_or_path": nothing(
        'Adapters are no base. Train them with "export": "merged", or fold them in: lathe merge.'
    ),
    "train_dir": to.FILE,
    "dataset_path": to.FILE,
    "train_yaml": to.SEVERAL_SETS,
    "dataset_proc_num": to.WORKERS,
    "data_cache_dir": to.CACHE,
    "dataset_cache_dir": to.CACHE,
    "corpus_name": _CORPUS_IS_A_FILE,
    "corpus_path": as_key("data.corpus"),
    "corpus_config": _CORPUS_IS_A_FILE,
    "corpus_split": _CORPUS_IS_A_FILE,
    "assets_path": _TEXTS_ALONE,
    "encode_text": _TEXTS_ALONE,
    "encode_image": _TEXTS_ALONE,
    "encode_audio": _TEXTS_ALONE,
    "encode_video": _TEXTS_ALONE,
    "do_encode": nothing("`python -m trainer encode` writes vectors."),
    "encode_in_path": nothing("It is the flag --in of `python -m trainer encode`."),
    "encoded_save_path": nothing("It is the flag --out of `python -m trainer encode`."),
    "encode_output_path": nothing("It is the flag --out of `python -m trainer encode`."),
    "encode_is_qry": nothing("It is the flag --side of `python -m trainer encode`."),
    "encode_is_query": nothing("It is the flag --side of `python -m trainer encode`."),
    "encode_num_shard": _RANKS_SHARE,
    "encode_shard_index": _RANKS_SHARE,
    "dataset_number_of_shards": _RANKS_SHARE,
    "dataset_shard_index": _RANKS_SHARE,
    "is_bidirectional": _NO_SPLADE,
    "pooling_strategy": _NO_SPLADE,
    "q_flops_loss_factor": _NO_SPLADE,
    "p_flops_loss_factor": _NO_SPLADE,
    "flops_warmup": _NO_SPLADE,
    # facebookresearch/FiD
    "n_context": to.PASSAGES,
    "text_maxlength": to.PASSAGE_LENGTH,
    "passage_maxlength": to.PASSAGE_LENGTH,
    "question_maxlength": to.QUERY_LENGTH,
    "answer_maxlength": to.TARGET_LENGTH,
    "per_gpu_batch_size": to.MICRO,
    "accumulation_steps": to.ACCUMULATION,
    "total_steps": as_key("train.steps"),
    "scheduler_steps": nothing("The schedule ends with the run, after train.steps."),
    "fixed_lr": as_key("schedule.shape", advice='It is "constant", with schedule.warmup_steps.'),
    "eval_freq": to.EVALUATION,
    "save_freq": to.SAVING,
    "eval_print_freq": to.LOGGING,
    "use_checkpoint": to.RECOMPUTE,
    "model_size": to.BASE,
    "model_path": to.BASE,
    "train_data": to.FILE,
    "eval_data": to.FILE,
    "maxload": as_key("data.files", advice='"train.json[:100]" is the first hundred rows.'),
    "no_title": nothing("A row without titles has none; no key is needed."),
    "checkpoint_dir": to.RUNS,
    "main_port": to.DEVICES,
    "indexing_dimension": as_key("encoder.projection.width"),
    "no_projection": as_key("encoder.projection", advice="Left out, there is none."),
    "no_question_mask": nothing("The mean is over real tokens alone."),
    "no_passage_mask": nothing("The mean is over real tokens alone."),
    "extract_cls": as_key("encoder.pooling", advice='It is "cls" or "mean".'),
    "write_results": nothing("It is the flag --pred of `python -m trainer evaluate`."),
    "write_crossattention_scores": nothing(
        "It is the flag --write_scores of `python -m trainer evaluate`."
    ),
    # minFiD
    "num_contexts": to.PASSAGES,
    "batch_size_val": to.EVAL_BATCH,
    "num_warmup_steps": as_key("schedule.warmup_steps"),
    "num_training_steps": as_key("train.steps"),
    "num_report_steps": to.LOGGING,
    "num_workers": to.WORKERS,
    "start_step_val": nothing("Evaluations come every train.eval_every steps from the beginning."),
    "grad_accumulation": to.ACCUMULATION,
    "t5_name": to.BASE,
    "no_shuffle": as_key("train.order", "data.sample_targets"),
    "data_test": to.FILE,
    "gpus": to.DEVICES,
    "tqdm": nothing("The console shows a line for each log step instead of a bar."),
    # Vera, and accelerate's own flags
    "model_type": as_key("base", advice="Its config.json says of which type it is."),
    "load_from_ckpt": as_key(
        "base", advice="`python -m trainer import vera FILE --out DIR` makes a base of a .pth."
    ),
    "max_input_len": to.LENGTH,
    "eval_tasks": as_key("data.test_tasks"),
    "loss_fn": as_key("loss.terms"),
    "contrastive_loss_type": as_key("loss.contrastive"),
    "contrastive_loss_temp": as_key("loss.temperature"),
    "contrastive_loss_coef": as_key("loss.coefficient"),
    "save_interval": to.SAVING,
    "eval_loop_cap": as_key("data.valid_limit"),
    "nosave": nothing("A run always saves."),
    "nolog": to.TRACKERS,
    "num_processes": to.DEVICES,
    "use_fsdp": to.SHARDING,
    "fsdp_offload_params": as_key("deepspeed", advice='"zero3_offload" offloads.'),
    "fsdp_sharding_strategy": as_key(
        "deepspeed",
        advice='FULL_SHARD is "zero3", SHARD_GRAD_OP "zero2", NO_SHARD "zero0", HYBRID_SHARD '
        '"zero3_hpz".',
    ),
    "fsdp_backward_prefetch_policy": as_key(
        "deepspeed", advice="overlap_comm and stage3_prefetch_bucket_size of its file."
    ),
    "fsdp_auto_wrap_policy": nothing("ZeRO-3 gathers by module; no unit has to be named."),
    "fsdp_state_dict_type": nothing(
        "best/ and final/ are whole models, and checkpoints load on any number of ranks."
    ),
    # xc-cache (dssk)
    "include_questions_on_contexts": as_key("data.question_on_context"),
    "chunked_contexts": as_key("data.chunked"),
    "num_cross_attn_layers": as_key("layers.count"),
    "cross_attn_layers_stride": as_key("layers.stride"),
    "cross_attn_shared_weights": as_key("layers.shared_weights"),
    "cross_attn_shared_projections": as_key("layers.shared_projections"),
    "cross_attn_dropout_prob": as_key("layers.key_dropout", "layers.attention_dropout"),
    "cross_attn_final_layer": as_key("layers.after"),
    "cross_attn_hidden_size": as_key("layers.width"),
    "cross_attn_num_attention_heads": as_key("layers.heads"),
    "cross_attn_num_key_value_heads": as_key("layers.kv_heads"),
    "cross_attn_attention_bias": as_key("layers.attention_bias"),
    "cross_attn_skip_connections": as_key("layers.skip"),
    "randomly_initialize_decoder": as_key("base", advice='{"config": {...}} draws it.'),
    "context_size": as_key("data.decoder_tokens", "data.context_tokens"),
    "test_batch_size": to.EVAL_BATCH,
    "skip_steps": to.ACCUMULATION,
    "do_repetition_augmentations": _NEVER_ON,
    "wandb_log_gradients": to.GRADIENTS,
    "exp_group": as_flag("--exp_group"),
    "data_path": as_flag("--data_path"),
    "job_scheduler": as_flag("--job_scheduler"),
    "dist_url": to.DEVICES,
    "eval_samples": as_key("data.files", advice='"valid.jsonl[:1000]" is the first thousand rows.'),
}
