"""The T5s that transformers 3.0.2, on which facebookresearch/FiD runs, can express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.errors import ConfigError


def refuse_newer(config: Any, path: Path) -> None:
    """ConfigError for a T5 that transformers 3.0.2 cannot express; it names every reason at
    once.
    """
    problems: list[str] = []
    if config.feed_forward_proj != "relu":
        problems.append(f"feed_forward_proj={config.feed_forward_proj!r}, want 'relu'")
    if not config.scale_decoder_outputs:
        problems.append("tie_word_embeddings=false, want true")
    if config.num_decoder_layers != config.num_layers:
        problems.append(
            f"num_decoder_layers={config.num_decoder_layers}, want num_layers={config.num_layers}"
        )
    if config.relative_attention_max_distance != 128:
        problems.append(
            f"relative_attention_max_distance={config.relative_attention_max_distance}, want 128"
        )
    if problems:
        raise ConfigError(
            f"{path}: facebookresearch/FiD runs on transformers 3.0.2, which has no such T5: "
            f"got {'; '.join(problems)}. Use --layout t5."
        )


def config_302(config: Any) -> dict[str, Any]:
    """config.json of a T5 with the keys that transformers 3.0.2 wrote."""
    names = (
        "vocab_size",
        "d_model",
        "d_kv",
        "d_ff",
        "num_layers",
        "num_heads",
        "relative_attention_num_buckets",
    )
    names += (
        "dropout_rate",
        "layer_norm_epsilon",
        "initializer_factor",
        "pad_token_id",
        "eos_token_id",
        "model_type",
    )
    fixed = {"is_encoder_decoder": True, "n_positions": getattr(config, "n_positions", 512)}
    start = getattr(config, "decoder_start_token_id", None)
    fixed["decoder_start_token_id"] = config.pad_token_id if start is None else start
    return {name: getattr(config, name) for name in names} | fixed
