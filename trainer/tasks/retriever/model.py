"""One or two encoders, and how a text's states become its vector: pooled, and then projected and
normalised if the experiment says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models import recomputation
from trainer.models.inner_layers import InnerLayers, keep_blocks
from trainer.models.masks import of_right_padded
from trainer.models.packed.layout import pack
from trainer.protocol.abilities import Side
from trainer.protocol.task import Text
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.models.decoder.streams import Read
    from trainer.tasks.retriever.config import Encoder, Projection

# N texts, L tokens of the longest, M tokens of all of them, D width of a state, E width of a vector

_VECTORS: dict[Side, str] = {"query": "queries", "passage": "passages"}
_LAYERS = "loss.matryoshka.layers"


class Pooler(nn.Module):
    """A linear layer for each side, or one for both, computed in fp32. Its weights have the names
    that Tevatron gives them in pooler.pt.
    """

    def __init__(
        self, in_width: int, width: int, *, tied: bool, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.linear_q = nn.Linear(in_width, width, dtype=dtype)
        self.linear_p = None if tied else nn.Linear(in_width, width, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(in_width)  # torch initialises a linear layer with the same bound
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.device.type != "meta":
                    parameter.copy_(
                        torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                    )

    def forward(self, states_ND: Tensor, side: Side) -> Tensor:
        layer = self.linear_q if side == "query" or self.linear_p is None else self.linear_p
        return F.linear(states_ND, layer.weight.to(states_ND.dtype), layer.bias.to(states_ND.dtype))


class LogScale(nn.Module):
    """The logarithm of what scores are multiplied by, the inverse of the temperature, as a weight.

    Source: Radford et al. 2021 (CLIP), which keeps it below log 100.
    """

    MOST = math.log(100)

    def __init__(self, temperature: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)], dtype=dtype))

    def forward(self, count: int) -> Tensor:
        """(count,) the same number, in fp32 or fp64. Beyond the limit its gradient still passes."""
        own = _wide(self.log_scale)
        return (own + (own.clamp(max=self.MOST) - own).detach()).expand(count)


class Retriever(nn.Module):
    """Token ids of queries, of passages, or of both, to vectors whose dot product is relevance."""

    def __init__(
        self,
        query_model: Any,
        passage_model: Any | None,
        *,
        how: Encoder,
        pooler: Pooler | None = None,
        log_scale: LogScale | None = None,
        read: Mapping[str, Read | None] | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        """passage_model: None when one encoder serves both sides. read: the function with which
        each side's encoder reads streams (streams.reader_of); None: rows are padded. layers: in
        training there are vectors of so many blocks, too.
        """
        super().__init__()
        for model in (query_model, passage_model):
            if model is not None:
                model.config.use_cache = False  # a decoder's body would fill one in training
        self.query_model, self.passage_model, self.pooler = query_model, passage_model, pooler
        self.log_scale = log_scale
        self.how, self._read, self.layers = how, read or {}, tuple(layers)
        self.knows_blocks_by_number = bool(layers)  # time/blocks.py must not shorten it
        bodies = {"query": query_model, "passage": passage_model or query_model}
        heard = {
            id(body): InnerLayers(body, layers, key=_LAYERS)
            for body in {*bodies.values()}
            if layers
        }
        self._heard = {side: heard.get(id(body)) for side, body in bodies.items()}

    def forward(
        self,
        chunks: tuple[int | None, int | None] | None = None,
        calls: Sequence[int] = (0, 0),
        **batch: Tensor,
    ) -> dict[str, Tensor]:
        """{"queries": (Q, E), "passages": (P, E)} in fp32, for each side that the batch holds; and
        with the queries "log_scale" (Q,) if the temperature is learnt (LogScale). In training
        "queries_4" and "passages_4", where 4 is one of `layers`.

        batch: texts as packed() lays them out, or (N, L) right-padded query_ids, query_mask,
        passage_ids and passage_mask, or pieces of either with `texts` (Batches.lay_out). chunks:
        how many queries and how many passages are encoded at a time (None: all); streams and pieces
        have their sizes already. The activations of a chunk are not kept: the backward pass encodes
        it again with the same random numbers. Only the last chunk keeps them, because the backward
        pass reaches it first. calls: the least number of encoder runs, for queries and for
        passages. Under ZeRO-3 each run gathers the weights, so all ranks must run the encoders
        equally often, forwards and backwards: a rank with fewer chunks runs its smallest one again,
        to no effect.
        """
        pieces: dict[Side, list[dict[str, Tensor]]] = {
            side: pieces_of(batch, side, size)
            for side, size in zip(_VECTORS, chunks or (None, None), strict=True)
            if any(name.startswith(side) for name in batch)
        }
        last = [*pieces][-1]
        by_side: dict[str, Tensor] = {}
        for side, of_side in pieces.items():
            spare = max(0, calls[[*_VECTORS].index(side)] - len(of_side))
            runs = [*of_side[-1:] * spare, *of_side]
            again = 0 if chunks is None else len(runs) - (side == last)
            vectors = [
                recomputation.of_many_blocks(self._of_layers, side, piece) for piece in runs[:again]
            ]
            vectors += [self._of_layers(side, piece) for piece in runs[again:]]
            for unused in vectors[:spare]:
                vectors[-1] = vectors[-1] + 0.0 * unused.sum()
            whole = torch.cat(vectors[spare:])
            if "texts" in of_side[0]:
                whole = whole[torch.cat([piece["texts"] for piece in of_side]).argsort()]
            names = [_VECTORS[side], *(f"{_VECTORS[side]}_{layer}" for layer in self.layers)]
            by_side |= zip(names, whole.unbind(1), strict=False)
        if self.log_scale is not None and "queries" in by_side:
            by_side["log_scale"] = self.log_scale(len(by_side["queries"]))
        return by_side

    def _of_layers(self, side: Side, piece: Mapping[str, Tensor]) -> Tensor:
        """(N, K, E) of the texts of one piece: of the whole encoder, then of each of `layers` in
        training.
        """
        vectors = [
            states_ND if self.pooler is None else self.pooler(states_ND, side)
            for states_ND in self._pool(side, piece)
        ]
        vectors_NKE = torch.stack(vectors, 1)
        return F.normalize(vectors_NKE, dim=-1) if self.how.normalize else vectors_NKE

    def _pool(self, side: Side, piece: Mapping[str, Tensor]) -> list[Tensor]:
        """(N, D) of the whole encoder and of each of `layers`."""
        heard = self._heard[side]
        if heard is None or not self.training:
            return [self._pooled(self._states(side, piece), piece)]
        with heard.listening() as inner:
            states = self._states(side, piece)
        of_layers = [inner[layer].view(states.shape) for layer in self.layers]
        return [self._pooled(one, piece) for one in (states, *of_layers)]

    def _states(self, side: Side, piece: Mapping[str, Tensor]) -> Tensor:
        """The states of the tokens of a piece, as a stream or as padded rows."""
        if "tokens" in piece:
            read = self._read[side]
            assert read is not None
            return read(piece)
        is_tied = self.passage_model is None
        model: Any = self.query_model if side == "query" or is_tied else self.passage_model
        visible = of_right_padded(piece["mask"], model.config)
        return model(input_ids=piece["ids"], attention_mask=visible).last_hidden_state

    def _pooled(self, states: Tensor, piece: Mapping[str, Tensor]) -> Tensor:
        if "tokens" in piece:
            return pooled_stream(states, piece, self.how.pooling)
        return pooled(states, piece["mask"], self.how.pooling)

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        pooler: Any = self.pooler
        config: Any = self.query_model.config
        return config.hidden_size if pooler is None else pooler.linear_q.out_features

    def keep_layers(self, count: int) -> bool:
        """Remove all but the first `count` blocks of each encoder; whether there were more."""
        bodies = [body for body in (self.query_model, self.passage_model) if body is not None]
        had_more = [keep_blocks(body, count, key="--layers") for body in bodies]
        return any(had_more)


def packed(texts: Sequence[Sequence[int]], side: Side, *, size: int | None) -> dict[str, Tensor]:
    """Texts of one side as streams (layout.pack) of `size` texts each; None: one stream of all.

    The names of a stream's tensors begin with the side and the number of the stream.
    """
    size = size or len(texts)
    streams = [pack(texts[at : at + size], bucketed=True) for at in range(0, len(texts), size)]
    return {
        f"{side}_{number}_{name}": tensor
        for number, stream in enumerate(streams)
        for name, tensor in stream.items()
    }


def most_calls(batch: Mapping[str, Tensor]) -> list[int]:
    """The numbers of encoder runs, for queries and for passages, on the rank that needs most for
    its batch. A collective.
    """
    own = [len(pieces_of(batch, side, None)) for side in _VECTORS]
    return [max(of_side) for of_side in zip(*distributed.gather(own), strict=True)]


def pieces_of(
    batch: Mapping[str, Tensor], side: Side, size: int | None = None
) -> list[dict[str, Tensor]]:
    """The texts of a side, in groups that are encoded together."""
    if f"{side}_ids" in batch:
        ids, mask = batch[f"{side}_ids"], batch[f"{side}_mask"]
        cut = zip(ids.split(size or len(ids)), mask.split(size or len(ids)), strict=True)
        return [{"ids": own, "mask": is_token} for own, is_token in cut]
    pieces: dict[str, dict[str, Tensor]] = {}
    for name, tensor in batch.items():
        of_side, _, rest = name.partition("_")
        number, _, own = rest.partition("_")
        if of_side == side:
            pieces.setdefault(number, {})[own] = tensor
    return [pieces[number] for number in sorted(pieces, key=int)]


def rows_of_streams(batch: Mapping[str, Tensor], side: Side) -> list[Tensor]:
    """The ids of each text of a side that packed() laid out, or that stands in pieces."""
    texts: list[tuple[int, Tensor]] = []
    for piece in pieces_of(batch, side, None):
        if "tokens" in piece:
            rows = piece["tokens"].split(piece["starts"].diff().tolist())
        else:
            rows = [ids[mask.bool()] for ids, mask in zip(piece["ids"], piece["mask"], strict=True)]
        places = piece["texts"].tolist() if "texts" in piece else range(len(texts), 1 << 60)
        texts += zip(places, rows, strict=False)
    return [ids for _, ids in sorted(texts, key=lambda text: text[0])]


def texts_by_name(batch: Mapping[str, Tensor]) -> dict[str, Text]:
    """The queries of a batch, and its passages one by one."""
    if "query_ids" in batch:
        queries = Text(batch["query_ids"], batch["query_mask"])
        passages = zip(batch["passage_ids"], batch["passage_mask"], strict=True)
        texts = [Text(ids, mask) for ids, mask in passages]
    else:
        queries = Text(torch.cat(rows_of_streams(batch, "query")))
        texts = [Text(ids) for ids in rows_of_streams(batch, "passage")]
    by_name = {f"passage {number}": text for number, text in enumerate(texts, start=1)}
    return {"query": queries, **by_name}


def pooled(states_NLD: Tensor, mask_NL: Tensor, pooling: str) -> Tensor:
    """(N, D) in fp32, or fp64 for fp64 states: the first state of each text, the mean of its
    states, or its last state before the padding.
    """
    if pooling == "mean":
        weights_NL1 = mask_NL.unsqueeze(-1).to(_wide(states_NLD).dtype)
        return (_wide(states_NLD) * weights_NL1).sum(1) / weights_NL1.sum(1)
    if pooling == "cls":
        return _wide(states_NLD[:, 0])
    last_N = mask_NL.sum(-1) - 1
    return _wide(states_NLD[torch.arange(len(last_N), device=last_N.device), last_N])


def pooled_stream(states_MD: Tensor, piece: Mapping[str, Tensor], pooling: str) -> Tensor:
    """(N, D) pooled states as `pooled` gives them, from the states of a packed batch."""
    starts = piece["starts"]
    if pooling == "mean":
        states_MD = _wide(states_MD)
        sums_ND = states_MD.new_zeros(len(starts) - 1, states_MD.shape[1])
        return sums_ND.index_add(0, piece["passage"], states_MD) / starts.diff()[:, None]
    return _wide(states_MD.index_select(0, starts[:-1] if pooling == "cls" else starts[1:] - 1))


def first_numbers(vectors_NE: Tensor, dims: int, *, normalize: bool) -> Tensor:
    """(N, dims) what stands first in each vector, of length 1 again if whole vectors have it.

    Source: Kusupati et al. 2022 (Matryoshka Representation Learning).
    """
    first = vectors_NE[:, :dims]
    return F.normalize(first, dim=-1) if normalize else first


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def pooler_of(
    projection: Projection | None, how: Encoder, *, width: int, seed: int, dtype: torch.dtype
) -> Pooler | None:
    """A new pooler for states of `width`; ConfigError when the experiment says another width."""
    if projection is None:
        return None
    if projection.in_width not in (None, width):
        raise ConfigError(
            f"encoder.projection.in_width={projection.in_width}, but the base's states have "
            f"{width}. Use {width}, or leave it out."
        )
    return Pooler(
        width,
        projection.width,
        tied=how.tied if projection.tied is None else projection.tied,
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
