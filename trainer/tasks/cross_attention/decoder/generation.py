"""Answers: a context is encoded and projected once per request, then a new token costs a one-token
forward.

Greedy decoding has a loop of its own, which several ranks run for an agreed number of tokens; beams
and draws are those of transformers' `generate`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainer.errors import ConfigError
from trainer.models.weights import generation_file
from trainer.tasks.cross_attention.decoder.context import Past

if TYPE_CHECKING:
    from trainer.protocol.abilities import Search

# B batch, E tokens that end an answer, N answers of a row, R rows of a beam search or of draws,
# T prompt tokens, G generated tokens, V vocabulary


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
    past: Past | None = None,
    max_new_tokens: int,
    pad_token_id: int,
    eos_token_id: int | Sequence[int] | None = None,
    always_steps: bool = False,
    return_logits: bool = False,
) -> Generated:
    """The most likely continuation of (B, T) left-padded prompts, token by token, at most
    max_new_tokens of them.

    model: a CrossAttentionModel in evaluation mode, or the engine around it; only its forward is
    called. past: a context that is projected already, with an empty cache. eos_token_id: a row
    stops there, or at any of several; None: no row stops early. always_steps: make exactly
    max_new_tokens forwards even when every row has stopped, as ZeRO-3 wants of all ranks. Raises
    ConfigError for right-padded prompts, a model in training mode, or more tokens than the base has
    positions.
    """
    check_prompts(model, attention_mask, max_new_tokens)
    arguments: dict[str, Any] = {
        "context_input_ids": context_input_ids,
        "context_attention_mask": context_attention_mask,
        "encoder_hidden_states": encoder_hidden_states,
        "encoder_attention_mask": encoder_attention_mask,
        "past": past,
        "use_cache": True,
    }
    ends = _ids(eos_token_id)
    ends_E = torch.tensor(ends, dtype=torch.long, device=input_ids.device)
    stopped_B = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    writing = _writing(model, input_ids, attention_mask, arguments)
    logits_BV = next(writing)
    for length in range(1, max_new_tokens + 1):
        next_B = logits_BV.argmax(dim=-1).masked_fill(stopped_B, pad_token_id)
        tokens.append(next_B)
        if return_logits:
            logits.append(logits_BV)
        if ends:
            stopped_B = stopped_B | torch.isin(next_B, ends_E)
            if not always_steps and bool(stopped_B.all()):
                break
        if length < max_new_tokens:
            logits_BV = writing.send(next_B)
    return Generated(
        torch.stack(tokens, dim=1), torch.stack(logits, dim=1) if return_logits else None
    )


def _writing(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, arguments: dict[str, Any]
) -> Generator[Tensor, Tensor, None]:
    """(B, V) logits of what follows; each time it is sent the (B,) tokens that were chosen."""
    one_B1 = torch.ones_like(attention_mask[:, :1])
    while True:
        output = model(
            input_ids=input_ids, attention_mask=attention_mask, last_logits_only=True, **arguments
        )
        next_B = yield output.logits[:, -1]
        input_ids, attention_mask = next_B[:, None], torch.cat([attention_mask, one_B1], dim=1)
        arguments = {"past": output.past}


def stream_tokens(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    past: Past,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int],
) -> Iterator[int]:
    """The tokens of `greedy` for one prompt, (1, T), each as soon as it is known, without the
    end.
    """
    check_prompts(model, attention_mask, max_new_tokens)
    writing = _writing(model, input_ids, attention_mask, {"past": past})
    with torch.no_grad():
        token_1 = next(writing).argmax(dim=-1)
    for length in range(1, max_new_tokens + 1):
        if int(token_1) in _ids(eos_token_id):
            return
        yield int(token_1)
        if length < max_new_tokens:
            with torch.no_grad():
                token_1 = writing.send(token_1).argmax(dim=-1)


def search_beams(
    model: nn.Module,
    prompts: Mapping[str, Any],
    search: Search,
    *,
    max_new_tokens: int,
    pad_token_id: int,
    eos_token_id: int | Sequence[int] | None = None,
    is_synced: bool = False,
) -> Tensor:
    """(B*N, G) continuations by beams or draws, N = search.num_answers of each row, the best first,
    pads at the end.

    prompts: `input_ids` and `attention_mask`, (B, T) and padded on the left, with the context as
    `greedy` takes it. Draws come from torch's random state. is_synced: ranks make equally many
    forwards, as ZeRO-3 wants.
    """
    check_prompts(model, prompts["attention_mask"], max_new_tokens)
    context = {
        name: tensor
        for name, tensor in prompts.items()
        if name not in ("input_ids", "attention_mask")
    }
    sampling = (
        {"temperature": search.temperature, "top_p": search.top_p, "top_k": 0}
        if search.temperature
        else {}
    )
    # transformers' own types do not take it for a model that generates
    spoken: Any = _Spoken(model, context)
    generation_file.keep_ids_alone(spoken)
    tokens = spoken.generate(
        prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=max_new_tokens,
        num_beams=search.num_beams,
        num_return_sequences=search.num_answers,
        do_sample=search.temperature is not None,
        pad_token_id=pad_token_id,
        eos_token_id=_ids(eos_token_id) or None,
        synced_gpus=is_synced,
        **sampling,
    )
    assert isinstance(tokens, Tensor), "nothing but tokens was asked for"
    return tokens[:, prompts["input_ids"].shape[1] :]


class _Spoken(PreTrainedModel, GenerationMixin):
    """What transformers' `generate` calls for one request. Its forwards read a context that
    `generate` does not know.
    """

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # it computes nothing itself

    def __init__(self, model: nn.Module, context: Mapping[str, Any]) -> None:
        super().__init__(_inner(model).base.config)
        self._called = [model]  # in a list: a module would be registered as a part of this one
        self._context = context
        self._past: Past | None = None

    @property
    def device(self) -> torch.device:
        return next(_inner(self._called[0]).parameters()).device

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride] (it is called by names)
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Cache,
        **_: Any,
    ) -> dict[str, Any]:
        # a mask of ones gets lost
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        fresh = input_ids if self._past is None else input_ids[:, -1:]
        return {"input_ids": fresh, "attention_mask": mask, "past_key_values": past_key_values}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Cache, **_: Any
    ) -> CausalLMOutputWithPast:
        """(R, T) ids -> (R, 1, V) logits; afterwards past_key_values is ours, whose rows a beam
        search reorders.

        Beams of a row stay next to one another, so that the context's keys and values are never
        reordered.
        """
        past = self._past or self._context.get("past")
        more: dict[str, Any] = {**self._context, "use_cache": True}
        if past is not None:
            more = {"past": Past(past_key_values, past.context)}
        output = self._called[0](
            input_ids=input_ids, attention_mask=attention_mask, last_logits_only=True, **more
        )
        self._past = output.past
        return CausalLMOutputWithPast(logits=output.logits, past_key_values=output.past.cache)


def most_prompt_tokens(model: nn.Module, max_new_tokens: int) -> int:
    """How long a prompt may be for max_new_tokens to fit behind it. ConfigError when none fits."""
    positions = _inner(model).backbone.max_positions
    if positions <= max_new_tokens:
        raise ConfigError(
            f"{max_new_tokens} generated tokens: the base has {positions} positions, which leaves "
            f"none for a prompt. Use at most {positions - 1} (data.answer_tokens)."
        )
    return positions - max_new_tokens


def _ids(one_or_several: int | Sequence[int] | None) -> list[int]:
    if one_or_several is None:
        return []
    return [one_or_several] if isinstance(one_or_several, int) else list(one_or_several)


def _inner(model: nn.Module) -> Any:
    return getattr(model, "module", model)  # an engine keeps the model as .module


def check_prompts(model: nn.Module, attention_mask: Tensor, max_new_tokens: int) -> None:
    """ConfigError for prompts that cannot be continued.

    Right-padded prompts, a model in training mode, or more tokens than the base has positions.
    """
    inner = _inner(model)
    if inner.training:
        raise ConfigError("got a model in training mode, want evaluation mode. Call eval() first.")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: want at least 1.")
    if not bool(attention_mask[:, -1].all()):
        raise ConfigError("got prompts padded on the right, want them padded on the left.")
    inner.check_lengths(attention_mask.shape[1] + max_new_tokens, 0)
