"""The slow, obvious twin of the cross-attention model: plain tensor operations, no module, no fused
kernel.

It follows the published arithmetic to the letter: masked scores are replaced, not added to; the
softmax is in fp32 with the scores divided by (layer index + 1) before and multiplied back inside
when the model is in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.tasks.cross_attention.config import Layers

Weights = Mapping[str, Tensor]


def twin_logits(
    weights: Weights,
    config: Any,
    layers: Layers,
    *,
    ids: Tensor,
    mask: Tensor,
    states: Sequence[Tensor],
    kept: Sequence[Tensor],
    record: dict[str, Tensor] | None = None,
) -> Tensor:
    """(B, T) ids -> (B, T, V) logits. weights: by the names of
    CrossAttentionModel.named_parameters().

    states, kept: for each added layer bottom-up its (B, L, D) states and (B, L) bool mask of the
    keys it sees.
    """
    indices = [config.n_layer - 1 - k * layers.stride for k in range(layers.count)][::-1]
    hidden = _embed(weights, ids, mask)
    for i in range(config.n_layer):
        order = ["base", "added"] if layers.after else ["added", "base"]
        for what in order:
            if what == "base":
                hidden = _base_block(weights, config, i, hidden, mask)
                _note(record, f"block_out.{i}", hidden)
            elif i in indices:
                j = indices.index(i)
                slot = indices[0] if layers.shared_weights else i
                hidden = _added(
                    weights, config, layers, slot, i, hidden, states[j], kept[j], record
                )
    return _linear(
        weights, "base.transformer.wte", _norm(weights, config, "base.transformer.ln_f", hidden)
    )


def twin_states(weights: Weights, config: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, L) context ids -> (B, L, D) states of the base."""
    hidden = _embed(weights, ids, mask)
    for i in range(config.n_layer):
        hidden = _base_block(weights, config, i, hidden, mask)
    return _norm(weights, config, "base.transformer.ln_f", hidden)


def twin_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p over the labelled tokens, one token at a time."""
    terms = [
        -logits[b, t].float().log_softmax(-1)[labels[b, t + 1]]
        for b in range(labels.shape[0])
        for t in range(labels.shape[1] - 1)
        if labels[b, t + 1] != -100
    ]
    return torch.stack(terms).mean()


def _embed(weights: Weights, ids: Tensor, mask: Tensor) -> Tensor:
    places = torch.zeros_like(ids)
    for b in range(ids.shape[0]):
        seen = 0
        for t in range(ids.shape[1]):
            places[b, t] = seen if mask[b, t] else 1
            seen += int(mask[b, t])
    return (
        weights["base.transformer.wte.weight"][ids] + weights["base.transformer.wpe.weight"][places]
    )


def _base_block(weights: Weights, config: Any, i: int, hidden: Tensor, mask: Tensor) -> Tensor:
    name = f"base.transformer.h.{i}"
    size, heads = config.n_embd // config.n_head, config.n_head
    fused = _linear(weights, f"{name}.attn.c_attn", _norm(weights, config, f"{name}.ln_1", hidden))
    length = hidden.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril() & mask.bool()[:, None, :]
    heads_out = []
    for h in range(heads):
        if config.multi_query:  # all queries, then the one key and the one value
            query, (key, value) = (
                fused[..., h * size : (h + 1) * size],
                fused[..., heads * size :].split(size, dim=-1),
            )
        else:  # per head: its query, its key, its value
            query, key, value = fused[..., 3 * h * size : 3 * (h + 1) * size].split(size, dim=-1)
        heads_out.append(_attend(query, key, value, visible, divisor=i + 1))
    hidden = hidden + _linear(weights, f"{name}.attn.c_proj", torch.cat(heads_out, dim=-1))
    return hidden + _mlp(weights, config, name, hidden)


def _added(
    weights: Weights,
    config: Any,
    layers: Layers,
    slot: int,
    index: int,
    hidden: Tensor,
    states: Tensor,
    kept: Tensor,
    record: dict[str, Tensor] | None,
) -> Tensor:
    name = f"cross_attn_layers.{slot}"
    q_name, k_name = ("q_k_attn", "q_k_attn") if layers.shared_projections else ("q_attn", "k_attn")
    normed = _norm(weights, config, f"{name}.ln_1", hidden)
    query = _linear(weights, f"{name}.crossattention.{q_name}", normed)
    key = _linear(weights, f"{name}.crossattention.{k_name}", states)
    value = _linear(weights, f"{name}.crossattention.v_attn", states)
    heads = layers.heads or config.n_head
    split = [x.chunk(heads, dim=-1) for x in (query, key, value)]
    visible = kept.bool()[:, None, :].expand(-1, hidden.shape[1], -1)
    divisor = config.n_layer if layers.shared_weights else index + 1
    attended = torch.cat(
        [_attend(q, k, v, visible, divisor=divisor) for q, k, v in zip(*split, strict=True)], dim=-1
    )
    attended = _linear(weights, f"{name}.crossattention.c_proj", attended)
    _note(record, f"cross_attn_out.{index}", attended)
    out = hidden + attended
    out = out + _mlp(weights, config, name, out)
    _note(record, f"cross_block_out.{index}", out)
    return hidden + out if layers.skip else out


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, divisor: int) -> Tensor:
    """One head: (B, T, K), (B, L, K), (B, L, K) -> (B, T, K)."""
    scale = 1.0 if query.dtype == torch.float32 else 1.0 / divisor
    scores = (query @ key.transpose(1, 2)) * (scale / math.sqrt(query.shape[-1]))
    scores = scores.float() / scale
    scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
    return scores.softmax(dim=-1).to(value.dtype) @ value


def _mlp(weights: Weights, config: Any, name: str, hidden: Tensor) -> Tensor:
    inner = _linear(weights, f"{name}.mlp.c_fc", _norm(weights, config, f"{name}.ln_2", hidden))
    if config.activation_function == "gelu":
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    else:
        inner = (
            0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        )
    return _linear(weights, f"{name}.mlp.c_proj", inner)


def _norm(weights: Weights, config: Any, name: str, x: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + config.layer_norm_epsilon)
    return (normed * weights[f"{name}.weight"].float() + weights[f"{name}.bias"].float()).to(
        x.dtype
    )


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def _note(record: dict[str, Tensor] | None, name: str, tensor: Tensor) -> None:
    if record is not None:
        record[name] = tensor


def twin_gradients(
    model: nn.Module, labels: Tensor, logits_of: Callable[[dict[str, Tensor]], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of a twin, and its gradients by name: of logits from copies of the weights."""
    weights = {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    loss = twin_loss(logits_of(weights), labels) * int((labels[:, 1:] != -100).sum())
    loss.backward()
    return loss, {name: w.grad for name, w in weights.items() if w.grad is not None}
