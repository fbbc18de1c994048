"""The slow, obvious twin of the cross-attention model on a Llama or Mistral base: plain tensor
operations in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.tasks.cross_attention.config import Layers

Weights = Mapping[str, Tensor]


def rotary_twin_logits(
    weights: Weights,
    config: Any,
    layers: Layers,
    *,
    ids: Tensor,
    mask: Tensor,
    places: Tensor,
    states: Sequence[Tensor],
    kept: Tensor,
    context_places: Tensor,
) -> Tensor:
    """(B, T) ids at `places` -> (B, T, V) logits. weights: by the names of
    CrossAttentionModel.named_parameters().

    states: for each added layer bottom-up its (B, L, D) states; kept (B, L) bool: the keys seen, at
    context_places.
    """
    num_blocks = config.num_hidden_layers
    indices = [num_blocks - 1 - k * layers.stride for k in range(layers.count)][::-1]
    hidden = weights["base.model.embed_tokens.weight"][ids]
    for i in range(num_blocks):
        for what in ["base", "added"] if layers.after else ["added", "base"]:
            if what == "base":
                hidden = _base_block(weights, config, i, hidden, mask, places)
            elif i in indices:
                slot = indices[0] if layers.shared_weights else i
                own = states[indices.index(i)]
                hidden = _added(
                    weights, config, layers, slot, hidden, own, kept, places, context_places
                )
    return _rms_norm(weights, config, "base.model.norm", hidden) @ weights["base.lm_head.weight"].T


def _base_block(
    weights: Weights, config: Any, i: int, hidden: Tensor, mask: Tensor, places: Tensor
) -> Tensor:
    name = f"base.model.layers.{i}"
    length = hidden.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril() & mask.bool()[:, None, :]
    if getattr(config, "sliding_window", None):
        visible = visible & torch.ones(length, length, dtype=torch.bool).triu(
            1 - config.sliding_window
        )
    normed = _rms_norm(weights, config, f"{name}.input_layernorm", hidden)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    theta = config.rope_parameters["rope_theta"]
    hidden = hidden + _attention(
        weights, f"{name}.self_attn", heads, theta, (normed, places), (normed, places), visible
    )
    return hidden + _mlp(
        weights,
        f"{name}.mlp",
        _rms_norm(weights, config, f"{name}.post_attention_layernorm", hidden),
    )


def _added(
    weights: Weights,
    config: Any,
    layers: Layers,
    slot: int,
    hidden: Tensor,
    states: Tensor,
    kept: Tensor,
    places: Tensor,
    context_places: Tensor,
) -> Tensor:
    name = f"cross_attn_layers.{slot}"
    own = layers.heads or config.num_attention_heads
    heads = (own, layers.kv_heads or own)
    if layers.base_attention:
        heads = (config.num_attention_heads, config.num_key_value_heads)
    normed = _layer_norm(weights, config, f"{name}.ln_1", hidden)
    visible = kept[:, None, :].expand(-1, hidden.shape[1], -1)
    theta = config.rope_parameters["rope_theta"]
    out = hidden + _attention(
        weights,
        f"{name}.crossattention",
        heads,
        theta,
        (normed, places),
        (states, context_places),
        visible,
    )
    out = out + _mlp(weights, f"{name}.mlp", _layer_norm(weights, config, f"{name}.ln_2", out))
    return hidden + out if layers.skip else out


def _attention(
    weights: Weights,
    name: str,
    heads: tuple[int, int],
    theta: float,
    asking: tuple[Tensor, Tensor],
    asked: tuple[Tensor, Tensor],
    visible: Tensor,
) -> Tensor:
    """One head after the other, each with the keys and values of its group."""
    num_heads, num_groups = heads
    queries = _linear(weights, f"{name}.q_proj", asking[0]).chunk(num_heads, dim=-1)
    keys = _linear(weights, f"{name}.k_proj", asked[0]).chunk(num_groups, dim=-1)
    values = _linear(weights, f"{name}.v_proj", asked[0]).chunk(num_groups, dim=-1)
    found = []
    for h in range(num_heads):
        group = h * num_groups // num_heads
        query, key = _turned(queries[h], asking[1], theta), _turned(keys[group], asked[1], theta)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        found.append(scores.softmax(-1) @ values[group])
    return _linear(weights, f"{name}.o_proj", torch.cat(found, dim=-1))


def _turned(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """(B, L, K) of one head: number j and number j + K/2 are a point, turned by place *
    theta^(-2j/K).
    """
    half = x.shape[-1] // 2
    columns: list[Any] = [None] * (2 * half)
    for j in range(half):
        angle = places.double() * theta ** (-2 * j / (2 * half))
        cos, sin = angle.cos().float(), angle.sin().float()
        columns[j] = x[..., j] * cos - x[..., j + half] * sin
        columns[j + half] = x[..., j] * sin + x[..., j + half] * cos
    return torch.stack(columns, dim=-1)


def _mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gate = _linear(weights, f"{name}.gate_proj", x)
    return _linear(
        weights,
        f"{name}.down_proj",
        gate / (1 + torch.exp(-gate)) * _linear(weights, f"{name}.up_proj", x),
    )


def _rms_norm(weights: Weights, config: Any, name: str, x: Tensor) -> Tensor:
    return (
        x
        / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        * weights[f"{name}.weight"]
    )


def _layer_norm(weights: Weights, config: Any, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
