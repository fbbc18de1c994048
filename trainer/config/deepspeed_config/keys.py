"""Every name a DeepSpeed file may use here, by block, and why the others are refused. Imports
nothing.

Read from the source of DeepSpeed 0.19.8: runtime/config.py and what it imports. DeepSpeed itself
checks names in some blocks only; tests/unit/test_deepspeed_keys.py compares those with its own
models, so that an upgrade is noticed.
"""

from __future__ import annotations

from typing import Any

VERSION = "0.19.8"


def _keys(text: str) -> dict[str, str]:
    return {key: kind for key, _, kind in (item.partition(":") for item in text.split())}


# Block -> its keys and their kinds: b boolean, i integer, n number, s string, l list of strings, o
# object, x whatever the owner checks; ? may be null. Stage-3 keys go by their documented names;
# DeepSpeed takes them without "stage3_" as well, we do not.
LEGAL: dict[str, dict[str, str]] = {
    "": _keys("""
        train_batch_size:i train_micro_batch_size_per_gpu:i gradient_accumulation_steps:i
        gradient_clipping:n
        managed_gradient_accumulation:b optimizer:o scheduler:o bf16:o fp16:o zero_optimization:o
        data_types:o aio:o
        zero_allow_untested_optimizer:b zero_force_ds_cpu_optimizer:b communication_data_type:s?
        prescale_gradients:b
        seq_parallel_communication_data_type:s? gradient_predivide_factor:n gradient_allreduce_op:s
        disable_allgather:b
        activation_checkpointing:o checkpoint:o comms_logger:o flops_profiler:o tensorboard:o
        csv_monitor:o wandb:o
        comet:o compile:o timers:o steps_per_print:i? wall_clock_breakdown:b memory_breakdown:b
        dump_state:b
        disable_python_gc:b vocabulary_size:i? dataloader_drop_last:b
        use_data_before_expert_parallelism:b
        sequence_parallel_size:i log_level:s?"""),
    "zero_optimization": _keys("""
        stage:i contiguous_gradients:b reduce_scatter:b reduce_bucket_size:i
        use_multi_rank_bucket_allreduce:b
        allgather_partitions:b allgather_bucket_size:i overlap_comm:b? compute_grad_norm:b
        load_from_fp32_weights:b
        elastic_checkpoint:b offload_param:o? offload_optimizer:o? sub_group_size:i
        stage3_prefetch_bucket_size:i
        stage3_param_persistence_threshold:i stage3_model_persistence_threshold:i
        stage3_max_live_parameters:i
        stage3_max_reuse_distance:i stage3_gather_16bit_weights_on_model_save:b
        stage3_module_granularity_threshold:i
        stage3_use_all_reduce_for_fetch_params:b stage3_allgather_sequential:b
        ignore_unused_parameters:b
        legacy_stage1:b round_robin_gradients:b parameter_alignment:b zero_hpz_partition_size:i
        zero_quantized_weights:b zero_quantized_nontrainable_weights:b zero_quantized_gradients:b
        memory_efficient_linear:b pipeline_loading_checkpoint:b override_module_apply:b
        log_trace_cache_warnings:b
        enable_sanity_checks:b save_muon_momentum_buffer_in_memory:b leaf_module:o"""),
    "zero_optimization.offload_param": _keys("""
        device:s nvme_path:s? buffer_count:i buffer_size:i max_in_cpu:i pin_memory:b"""),
    "zero_optimization.offload_optimizer": _keys("""
        device:s nvme_path:s? buffer_count:i pin_memory:b pipeline_read:b pipeline_write:b
        fast_init:b ratio:n
        super_offload:b cpuadam_cores_perc:n"""),
    "zero_optimization.leaf_module": _keys("classes:l names:l name_suffixes:l"),
    "bf16": _keys("""
        enabled:b immediate_grad_update:b check_grad_overflow:b bf16_master_weights_and_grads:b
        bf16_optimizer_states:b"""),
    "fp16": _keys("""
        enabled:b auto_cast:b loss_scale:n initial_scale_power:i loss_scale_window:i hysteresis:i
        consecutive_hysteresis:b min_loss_scale:i fp16_master_weights_and_grads:b"""),
    # Only what our own optimizer obeys: it is torch's AdamW, or DeepSpeedCPUAdam when its state is
    # offloaded.
    "optimizer": _keys("type:s params:o"),
    "optimizer.params": _keys("lr:n betas:x eps:n weight_decay:n adam_w_mode:b torch_adam:b"),
    "scheduler": _keys("type:s params:o"),
    "data_types": _keys(
        "grad_accum_dtype:s? param_dtype:s? buffer_dtype:s? keep_in_fp32_modules:l"
    ),
    "activation_checkpointing": _keys("""
        partition_activations:b number_checkpoints:i? contiguous_memory_optimization:b
        cpu_checkpointing:b profile:b
        synchronize_checkpoint_boundary:b"""),
    "checkpoint": _keys("""
        tag_validation:s load_universal:b use_node_local_storage:b parallel_write:o
        checkpoint_serialization:b"""),
    "checkpoint.parallel_write": _keys("pipeline_stage:b"),
    "aio": _keys(
        "block_size:i queue_depth:i intra_op_parallelism:i single_submit:b overlap_events:b "
        "use_gds:b"
    ),
    "comms_logger": _keys("enabled:b prof_all:b prof_ops:l verbose:b debug:b"),
    "flops_profiler": _keys("""
        enabled:b recompute_fwd_factor:n profile_step:i module_depth:i top_modules:i detailed:b
        output_file:s?"""),
    "tensorboard": _keys("enabled:b output_path:s job_name:s"),
    "csv_monitor": _keys("enabled:b output_path:s job_name:s"),
    "wandb": _keys("enabled:b group:s? team:s? project:s"),
    "comet": _keys("""
        enabled:b samples_log_interval:i project:s? workspace:s? api_key:s? experiment_name:s?
        experiment_key:s?
        online:b? mode:s?"""),
    "compile": _keys("""
        deepcompile:b autoep_non_moe:b free_activation:b free_activation_threshold:i
        offload_activation:b
        offload_activation_pin_memory:b offload_opt_states:b double_buffer:b symmetric_memory:b
        debug_log:b
        offload_parameters:b sync_before_reduce:b sync_after_reduce:b sync_before_allgather:b
        sync_after_allgather:b
        keep_int_input_tensors:b keep_all_input_tensors:b passes:l?"""),
    "timers": _keys("throughput:o"),
    "timers.throughput": _keys("enabled:b synchronized:b"),
}

_GONE = f"DeepSpeed {VERSION} has removed it. Delete the key."
_PURE_DATA_PARALLEL = (
    "the batch arithmetic and the checkpoints here know no parallelism but that of data and "
    "sequence_parallel_size. Delete the key."
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "nebula",
            "compression_training",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
        ),
        _GONE,
    ),
    **dict.fromkeys(
        ("elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"), _GONE
    ),
    "amp": f"DeepSpeed {VERSION} has removed it. Set train.precision in the experiment.",
    "bfloat16": "the old name. Write 'bf16'.",
    "torch_autocast": "a third place for the precision. Set train.precision in the experiment.",
    "pipeline": _PURE_DATA_PARALLEL,
    "tensor_parallel": _PURE_DATA_PARALLEL,
    "expert_parallel": _PURE_DATA_PARALLEL,
    "hybrid_engine": "it generates text between updates, which no task here does. Delete the key.",
    "activation_checkpointing.cpu_checkpointing": "it is for DeepSpeed's own recomputation, which "
    "is not used. Delete the key, and say train.activation_offload.",
    "weight_quantization": "it is for inference. Delete the key.",
    "data_efficiency": "the order of the data is a function of the experiment's seed alone. "
    "Delete the key.",
    "autotuning": "the tuner starts the script with its own files. Run it outside, and hand over "
    "its result.",
    "datastates_ckpt": "checkpoints are written by trainer/training/checkpoint.py. Delete the key.",
    "checkpoint.writer": "checkpoints are written by trainer/training/checkpoint.py. Delete the "
    "key.",
    "zero_optimization.zenflow": "it brings its own optimizer, with stale updates; ours is "
    "AdamW. Delete the key.",
    "zero_optimization.mics_shard_size": _GONE,
    "zero_optimization.mics_hierarchical_params_gather": _GONE,
    "zero_optimization.zeropp_loco_param": _GONE,
    "zero_optimization.cpu_offload": 'the old name. Write "offload_optimizer": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_param": 'the old name. Write "offload_param": {"device": '
    '"cpu"}.',
    "zero_optimization.cpu_offload_use_pin_memory": "the old name. Write pin_memory in the "
    "offload block.",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the old name. Write 16bit "
    "instead of fp16.",
    "optimizer.params.max_grad_norm": "DeepSpeed ignores it there. Use gradient_clipping, or "
    "optim.clip.",
    "optimizer.legacy_fusion": "it belongs to LAMB; the optimizer here is AdamW. Delete the key.",
}

# Legal keys with one value that the engine or the loop cannot live with.
REFUSED_VALUES: dict[str, tuple[Any, str]] = {
    "managed_gradient_accumulation": (True, "the loop decides when a window ends"),
    "gradient_allreduce_op": ("sum", "the loop scales its losses for the mean over ranks"),
    "zero_optimization.compute_grad_norm": (
        False,
        "the norm is logged, clipped and watched for NaN",
    ),
    "zero_optimization.legacy_stage1": (True, f"DeepSpeed {VERSION} no longer has it"),
    "compile.deepcompile": (True, "DeepSpeed refuses it when the loop decides where a window ends"),
    "wandb.enabled": (
        True,
        "trainer/telemetry/run_record.py has opened the wandb run already; use "
        "--wandb_project_name",
    ),
}
