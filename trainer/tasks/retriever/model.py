"""Two encoders, or one for both sides: the state that stands for a text, perhaps projected and
normalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError
from trainer.models.masks import of_right_padded

if TYPE_CHECKING:
    from trainer.tasks.abilities import Side
    from trainer.tasks.retriever.config import Encoder, Projection

# N texts, L tokens of the longest, D width of a state, E width of a vector

_Encode = Callable[[Tensor, Any], Tensor]  # (N, L) ids and mask -> (N, E)


class Pooler(nn.Module):
    """A linear layer for each side, or one for both, computed in fp32. Named as Tevatron names them
    in pooler.pt.
    """

    def __init__(
        self, in_width: int, width: int, *, tied: bool, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.linear_q = nn.Linear(in_width, width, dtype=dtype)
        self.linear_p = None if tied else nn.Linear(in_width, width, dtype=dtype)
        generator, bound = (
            torch.Generator().manual_seed(seed),
            1 / math.sqrt(in_width),
        )  # torch's own for such a layer
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.device.type != "meta":
                    parameter.copy_(
                        torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                    )

    def forward(self, states_ND: Tensor, side: Side) -> Tensor:
        layer = self.linear_q if side == "query" or self.linear_p is None else self.linear_p
        return F.linear(states_ND, layer.weight.to(states_ND.dtype), layer.bias.to(states_ND.dtype))


class Retriever(nn.Module):
    """Token ids of queries, of passages, or of both, to vectors whose dot product is relevance."""

    def __init__(
        self,
        query_model: Any,
        passage_model: Any | None,
        *,
        how: Encoder,
        pooler: Pooler | None = None,
    ) -> None:
        """passage_model: None where one encoder serves both sides."""
        super().__init__()
        for model in (query_model, passage_model):
            if model is not None:
                model.config.use_cache = False  # a decoder's body would fill one in training
        self.query_model, self.passage_model, self.pooler = query_model, passage_model, pooler
        self.how = how

    def forward(
        self,
        query_ids: Tensor | None = None,
        query_mask: Tensor | None = None,
        passage_ids: Tensor | None = None,
        passage_mask: Tensor | None = None,
        chunks: tuple[int | None, int | None] | None = None,
    ) -> dict[str, Tensor]:
        """(N, L) right-padded ids and masks -> {"queries": (Q, E), "passages": (P, E)} of what was
        given, in fp32.

        chunks: so many queries and so many passages (None: all) are encoded at a time; no
        activations are kept, the backward pass encodes every chunk again with the same random
        numbers. The last chunk alone keeps them, for the backward pass comes to it first.
        """
        found: dict[str, Tensor] = {}
        query_chunk, passage_chunk = chunks or (None, None)
        if query_ids is not None:
            encode = (
                self._queries
                if chunks is None
                else _in_chunks(self._queries, query_chunk, passage_ids is None)
            )
            found["queries"] = encode(query_ids, query_mask)
        if passage_ids is not None:
            encode = (
                self._passages
                if chunks is None
                else _in_chunks(self._passages, passage_chunk, True)
            )
            found["passages"] = encode(passage_ids, passage_mask)
        return found

    def _queries(self, ids_NL: Tensor, mask_NL: Any) -> Tensor:
        return self._vectors(self.query_model, ids_NL, mask_NL, "query")

    def _passages(self, ids_NL: Tensor, mask_NL: Any) -> Tensor:
        model = self.query_model if self.passage_model is None else self.passage_model
        return self._vectors(model, ids_NL, mask_NL, "passage")

    def _vectors(self, model: nn.Module, ids_NL: Tensor, mask_NL: Tensor, side: Side) -> Tensor:
        seen = of_right_padded(mask_NL, model.config)
        states_NLD = model(input_ids=ids_NL, attention_mask=seen).last_hidden_state
        vectors_NE = pooled(states_NLD, mask_NL, self.how.pooling)
        if self.pooler is not None:
            vectors_NE = self.pooler(vectors_NE, side)
        return F.normalize(vectors_NE, dim=-1) if self.how.normalize else vectors_NE


def _in_chunks(encode: _Encode, size: int | None, keeps_last: bool) -> _Encode:
    """`encode`, so many texts at a time, whose activations are made again; but those of the last
    may be kept.
    """

    def run(ids_NL: Tensor, mask_NL: Any) -> Tensor:
        count = size or len(ids_NL)
        pieces = list(zip(ids_NL.split(count), mask_NL.split(count), strict=True))
        again = pieces[:-1] if keeps_last else pieces
        vectors = [checkpoint(encode, ids, mask, use_reentrant=False) for ids, mask in again]
        return torch.cat([*vectors, *(encode(ids, mask) for ids, mask in pieces[len(again) :])])

    return run


def pooled(states_NLD: Tensor, mask_NL: Tensor, pooling: str) -> Tensor:
    """(N, D) in fp32 (fp64 stays): of each text the first state, the mean of all, or the last that
    is no padding.
    """
    if pooling == "mean":
        weights_NL1 = mask_NL.unsqueeze(-1).to(_wide(states_NLD).dtype)
        return (_wide(states_NLD) * weights_NL1).sum(1) / weights_NL1.sum(1)
    if pooling == "cls":
        return _wide(states_NLD[:, 0])
    last_N = mask_NL.sum(-1) - 1
    return _wide(states_NLD[torch.arange(len(last_N), device=last_N.device), last_N])


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def pooler_of(
    wanted: Projection | None, how: Encoder, *, width: int, seed: int, dtype: torch.dtype
) -> Pooler | None:
    """A new pooler for states of `width`; ConfigError when the experiment says another width."""
    if wanted is None:
        return None
    if wanted.in_width not in (None, width):
        raise ConfigError(
            f"encoder.projection.in_width={wanted.in_width}, but the base's states have {width}. "
            f"Use {width}, or leave it out."
        )
    return Pooler(
        width,
        wanted.width,
        tied=how.tied if wanted.tied is None else wanted.tied,
        seed=seed,
        dtype=dtype,
    )


def is_causal(config: Any) -> bool:
    """Whether a base of this configuration reads from left to right only."""
    import transformers

    reads_both_ways = transformers.MODEL_FOR_MASKED_LM_MAPPING
    return (
        type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in reads_both_ways
    )
