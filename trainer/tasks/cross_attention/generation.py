"""Greedy decoding: a context is encoded and projected once per request, then a new token costs a one-token forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

# B batch, T prompt tokens, G generated tokens, V vocabulary


@dataclass(frozen=True)
class Generated:
    """The answers of a batch."""

    tokens_BG: Tensor  # with the end token where one was produced, pads behind it
    logits_BGV: Tensor | None  # what each token was chosen from; None unless asked for


@torch.no_grad()
def greedy(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    context_input_ids: Tensor | None = None,
    context_attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | Sequence[Tensor] | None = None,
    encoder_attention_mask: Tensor | None = None,
    max_new_tokens: int,
    pad_token_id: int,
    eos_token_id: int | None = None,
    always_steps: bool = False,
    return_logits: bool = False,
) -> Generated:
    """The most likely continuation of (B, T) left-padded prompts, token by token, at most max_new_tokens of them.

    model: a CrossAttentionModel in evaluation mode, or the engine around it; only its forward is called.
    eos_token_id: a row stops there; None: no row stops early. always_steps: make exactly max_new_tokens forwards even
    when every row has stopped, as ZeRO-3 wants of all ranks.
    Raises ConfigError for right-padded prompts, a model in training mode, or more tokens than the base has positions.
    """
    _check(model, attention_mask, max_new_tokens)
    arguments: dict[str, Any] = {
        "context_input_ids": context_input_ids,
        "context_attention_mask": context_attention_mask,
        "encoder_hidden_states": encoder_hidden_states,
        "encoder_attention_mask": encoder_attention_mask,
        "use_cache": True,
    }
    stopped_B = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    one_B1 = torch.ones_like(attention_mask[:, :1])
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    for _ in range(max_new_tokens):
        output = model(input_ids=input_ids, attention_mask=attention_mask, last_logits_only=True, **arguments)
        logits_BV = output.logits[:, -1]
        next_B = logits_BV.argmax(dim=-1).masked_fill(stopped_B, pad_token_id)
        tokens.append(next_B)
        if return_logits:
            logits.append(logits_BV)
        if eos_token_id is not None:
            stopped_B = stopped_B | (next_B == eos_token_id)
            if not always_steps and bool(stopped_B.all()):
                break
        input_ids, attention_mask = next_B[:, None], torch.cat([attention_mask, one_B1], dim=1)
        arguments = {"past": output.past}
    return Generated(torch.stack(tokens, dim=1), torch.stack(logits, dim=1) if return_logits else None)


def most_prompt_tokens(model: nn.Module, max_new_tokens: int) -> int:
    """How long a prompt may be so that max_new_tokens fit behind it. ConfigError when no prompt fits."""
    positions = _inner(model).backbone.max_positions
    if positions <= max_new_tokens:
        raise ConfigError(
            f"{max_new_tokens} generated tokens: the base has {positions} positions, which leaves none for a prompt. "
            f"Use at most {positions - 1} (data.answer_tokens)."
        )
    return positions - max_new_tokens


def _inner(model: nn.Module) -> Any:
    return getattr(model, "module", model)  # an engine keeps the model as .module


def _check(model: nn.Module, attention_mask: Tensor, max_new_tokens: int) -> None:
    inner = _inner(model)
    if inner.training:
        raise ConfigError("greedy: got a model in training mode, want evaluation mode. Call eval() first.")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: want at least 1.")
    if not bool(attention_mask[:, -1].all()):
        raise ConfigError("greedy: got prompts padded on the right, want them padded on the left.")
    inner.check_lengths(attention_mask.shape[1] + max_new_tokens, 0)
