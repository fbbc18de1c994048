"""Each task's loss as others write it: stock models of transformers, on padded rows or on rows one
after the other; their own collation, nothing of ours but weights, names and rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opponents import attention
from opponents.knobs import Knobs
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

# B rows, T tokens of the longest, M tokens of all of them, N labelled tokens, D width

Rows = Sequence[Mapping[str, Any]]
Texts = Sequence[Any]  # of token ids
IGNORED = -100
TEMPERATURE = 0.05


def ids_of(text: Any) -> Tensor:
    return torch.as_tensor(np.asarray(text)).long()


def flat(texts: Texts) -> tuple[Tensor, Tensor]:
    """(M,) ids, and their places in their texts."""
    places = [torch.arange(len(text)) for text in texts]
    return torch.cat([ids_of(text) for text in texts]), torch.cat(places)


class Loss(ABC):
    """The summed loss of some rows."""

    def __init__(self, task: Any, model: Any, knobs: Knobs) -> None:
        self.task, self.model, self.knobs = task, model, knobs
        self.is_equal = knobs.packing == "equal"
        self.is_padded = knobs.packing in ("padded", "single")
        self.is_plain = knobs.attention == "eager"
        kind = knobs.attention if self.is_padded or knobs.packing == "flattened" else attention.NAME
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_attn_implementation"):
                config._attn_implementation = kind

    @abstractmethod
    def length(self, row: Mapping[str, Any]) -> int:
        """The tokens of a row; rows of like length share a micro-batch."""

    @abstractmethod
    def __call__(self, rows: Rows) -> Tensor: ...

    def padded(self, texts: Texts, pad: int = 0) -> tuple[Tensor, Tensor | None]:
        """(B, T) ids, and their mask, None if nothing is padded."""
        width = -(-max(map(len, texts)) // self.knobs.multiple) * self.knobs.multiple
        ids = torch.full((len(texts), width), pad)
        mask = torch.zeros(len(texts), width, dtype=torch.long)
        for number, text in enumerate(texts):
            ids[number, : len(text)] = ids_of(text)
            mask[number, : len(text)] = 1
        return ids, None if bool(mask.all()) else mask

    def labels(self, texts: Texts) -> Tensor:
        ids, mask = self.padded(texts)
        return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)

    def chunks(self, texts: Texts) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """The texts in the order of their lengths, knobs.chunk at a time, with their numbers."""
        order = np.argsort([len(text) for text in texts], kind="stable")
        size = 1 if self.knobs.packing == "single" else self.knobs.chunk
        for at in range(0, len(order), size):
            numbers = order[at : at + size]
            yield numbers, [texts[number] for number in numbers]


def in_order(parts: Sequence[Tensor], numbers: Sequence[np.ndarray]) -> Tensor:
    """The rows of all parts by their numbers."""
    return torch.cat(list(parts))[torch.from_numpy(np.argsort(np.concatenate(list(numbers))))]


class OfLanguageModel(Loss):
    def length(self, row: Mapping[str, Any]) -> int:
        return len(row["ids"])

    def __call__(self, rows: Rows) -> Tensor:
        base, texts = self.model.base, [row["ids"] for row in rows]
        if self.is_padded:
            ids, mask = self.padded(texts)
            labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
            given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        else:
            ids, places = flat(texts)
            labels = ids.masked_fill(places == 0, IGNORED)[None]
            attention.begin([len(text) for text in texts], equal=self.is_equal)
            given = {"input_ids": ids[None], "position_ids": places[None], "use_cache": False}
        if self.knobs.head == "stock":
            return base(**given, labels=labels, num_items_in_batch=torch.tensor(1)).loss
        hidden = base.model(**given).last_hidden_state[:, :-1]
        kept = (labels[:, 1:] != IGNORED).flatten().nonzero()[:, 0]
        logits = base.lm_head(hidden.flatten(0, 1)[kept])
        return F.cross_entropy(logits.float(), labels[:, 1:].flatten()[kept], reduction="sum")


class OfSummariser(Loss):
    def length(self, row: Mapping[str, Any]) -> int:
        return len(row["source"])

    def __call__(self, rows: Rows) -> Tensor:
        base = self.model.base
        sources, targets = ([row[name] for row in rows] for name in ("source", "targets"))
        if not self.is_padded:
            ids, _ = flat(sources)
            states = self.encoded(base.encoder, ids, [len(text) for text in sources])
            return self.decoded(base, states, [len(text) for text in sources], targets)
        ids, mask = self.padded(sources)
        labels = self.labels(targets)
        if self.knobs.head == "stock":
            loss = base(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            return loss * (labels != IGNORED).sum()
        states = base.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.padded_decoder(base, states, mask, labels)

    def encoded(self, encoder: Any, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        how = {"equal": self.is_equal, "plain": self.is_plain}
        return attention.t5_stack(encoder, ids, lengths, **how)

    def decoded(self, base: Any, states: Tensor, lengths: Sequence[int], targets: Texts) -> Tensor:
        """The loss of targets over a stream of states."""
        starts = torch.full((1,), base.config.decoder_start_token_id)
        written = torch.cat([x for text in targets for x in (starts, ids_of(text)[:-1])])
        how = {"equal": False, "plain": self.is_plain, "read": (states, lengths)}
        own = [len(text) for text in targets]
        hidden = attention.t5_stack(base.decoder, written, own, **how)
        return self.scored(base, hidden, torch.cat([ids_of(text) for text in targets]))

    def padded_decoder(
        self, base: Any, states: Tensor, mask: Tensor | None, labels: Tensor
    ) -> Tensor:
        hidden = base.decoder(
            input_ids=base.prepare_decoder_input_ids_from_labels(labels),
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            use_cache=False,
        ).last_hidden_state
        kept = (labels.flatten() != IGNORED).nonzero()[:, 0]
        return self.scored(base, hidden.flatten(0, 1)[kept], labels.flatten()[kept])

    def scored(self, base: Any, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        if base.config.scale_decoder_outputs:
            hidden_ND = hidden_ND * base.config.d_model**-0.5
        return F.cross_entropy(base.lm_head(hidden_ND).float(), targets_N, reduction="sum")


class OfReader(OfSummariser):
    """Fusion-in-Decoder: passages in the encoder one by one, side by side in the decoder."""

    def length(self, row: Mapping[str, Any]) -> int:
        return int(np.sum(row["passages_lengths"]))

    def __call__(self, rows: Rows) -> Tensor:
        base, targets = self.model.t5, [row["targets"] for row in rows]
        of_rows = [list(self._prompts(row)) for row in rows]
        texts = [text for prompts in of_rows for text in prompts]
        count = len(of_rows[0])
        if not self.is_padded:
            states, lengths = self._of_streams(texts), [len(text) for text in texts]
            of_question = [sum(lengths[at : at + count]) for at in range(0, len(texts), count)]
            return self.decoded(base, states, of_question, targets)
        ids, mask = self.padded(texts)
        parts, numbers = [], []
        for own, some in self.chunks(texts):
            part, part_mask = self.padded(some)
            state = base.encoder(input_ids=part, attention_mask=part_mask).last_hidden_state
            parts.append(F.pad(state, (0, 0, 0, ids.shape[1] - state.shape[1])))
            numbers.append(own)
        states = in_order(parts, numbers).unflatten(0, (-1, count)).flatten(1, 2)
        mask = None if mask is None else mask.unflatten(0, (-1, count)).flatten(1, 2)
        labels = self.labels(targets)
        if self.knobs.head == "stock":
            read: Any = BaseModelOutput(last_hidden_state=states)  # pyright: ignore
            given = {"encoder_outputs": read, "attention_mask": mask, "labels": labels}
            return base(**given, use_cache=False).loss * (labels != IGNORED).sum()
        return self.padded_decoder(base, states, mask, labels)

    def _of_streams(self, texts: Texts) -> Tensor:
        """(M, D) encoder states of all passages, in their order."""
        encoder, found = self.model.t5.encoder, {}
        for numbers, some in self.chunks(texts):
            ids, _ = flat(some)
            lengths = [len(text) for text in some]
            states = self.encoded(encoder, ids, lengths).split(lengths)
            found |= dict(zip(numbers.tolist(), states, strict=True))
        return torch.cat([found[number] for number in range(len(texts))])

    def _prompts(self, row: Mapping[str, Any]) -> Iterator[np.ndarray]:
        ends = np.cumsum(row["passages_lengths"])[:-1]
        for passage in np.split(row["passages"], ends):
            whole = np.concatenate([row["question"], passage])
            yield whole[: self.task.cfg.data.passage_tokens]


class OfVerifier(Loss):
    """The stock encoder's last states of all statements, under the task's own loss."""

    def length(self, row: Mapping[str, Any]) -> int:
        return len(row["statements"])

    def __call__(self, rows: Rows) -> Tensor:
        texts = [t for row in rows for t in np.split(row["statements"], np.cumsum(row["lengths"]))]
        texts = [text for text in texts if len(text)]
        counts = [len(row["lengths"]) for row in rows]
        column = [place for count in counts for place in range(count)]
        has_gold = np.repeat([int(row["has_gold"][0]) for row in rows], counts)
        batch = {
            "group": torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
            "column": torch.tensor(column),
            "is_gold": torch.from_numpy(has_gold * (np.array(column) == 0)).bool(),
            "is_multiple_choice": torch.tensor(
                [bool(row["is_multiple_choice"][0]) for row in rows]
            ),
        }
        (loss,) = self.task.losses(_Reading(lambda: self._read(texts)), [batch])
        return loss

    def _read(self, texts: Texts) -> dict[str, Tensor]:
        encoder, parts, numbers = self.model.encoder, [], []
        for own, some in self.chunks(texts):
            lengths = torch.tensor([len(text) for text in some])
            if self.is_padded:
                ids, mask = self.padded(some)
                states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
                parts.append(states[torch.arange(len(some)), lengths - 1])
            else:
                how = {"equal": self.is_equal, "plain": self.is_plain}
                ids, _ = flat(some)
                states = attention.t5_stack(encoder.encoder, ids, lengths.tolist(), **how)
                parts.append(states[lengths.cumsum(0) - 1])
            numbers.append(own)
        hidden = in_order(parts, numbers)
        return {"hidden": hidden, "logits": self.model.head(hidden).squeeze(-1)}


class OfRetriever(Loss):
    """In-batch negatives over the positive and the negative of every query."""

    def __init__(self, task: Any, model: Any, knobs: Knobs) -> None:
        super().__init__(task, model, knobs)
        self._loss = None if knobs.loss == "own" else _of_sentences(model.query_model, knobs)

    def length(self, row: Mapping[str, Any]) -> int:
        return int(np.max(row["lengths"]))

    def __call__(self, rows: Rows) -> Tensor:
        queries = [row["query"] for row in rows]
        passages = [p for row in rows for p in np.split(row["passages"], row["lengths"][:1])]
        if self._loss is not None:
            columns = (queries, passages[0::2], passages[1::2])
            return self._loss([self._features(texts) for texts in columns], None) * len(rows)
        own = self._vectors(queries)
        scores = own @ self._vectors(passages).T / TEMPERATURE
        return F.cross_entropy(scores, torch.arange(len(rows)) * 2, reduction="sum")

    def _features(self, texts: Texts) -> dict[str, Tensor]:
        ids, mask = self.padded(texts, self.task.pad)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}

    def _vectors(self, texts: Texts) -> Tensor:
        bert, parts, numbers = self.model.query_model, [], []
        for own, some in self.chunks(texts):
            lengths = [len(text) for text in some]
            if self.is_padded:
                ids, mask = self.padded(some, self.task.pad)
                states = bert(input_ids=ids, attention_mask=mask).last_hidden_state
                if mask is not None:
                    states = states * mask[..., None]
                parts.append(states.sum(1) / torch.tensor(lengths)[:, None])
            else:
                ids, places = flat(some)
                attention.begin(lengths, equal=self.is_equal)
                given = {"input_ids": ids[None], "position_ids": places[None]}
                states = bert(**given).last_hidden_state[0]
                parts.append(torch.stack([x.mean(0) for x in states.split(lengths)]))
            numbers.append(own)
        return F.normalize(in_order(parts, numbers), dim=-1)


class OfCrossAttention(Loss):
    """transformers has no such model: the task's own, with rows and contexts padded, or its modules
    called one by one on streams; the context is encoded in every step.
    """

    def length(self, row: Mapping[str, Any]) -> int:
        return len(row["decoder"]) + len(row["context"])

    def __call__(self, rows: Rows) -> Tensor:
        decoders, contexts = ([row[name] for row in rows] for name in ("decoder", "context"))
        first = int(rows[0]["answer_start"][0]) if self.task.cfg.data.loss_on == "answer" else 0
        if not self.is_padded:
            return self._of_streams(decoders, contexts, first)
        ids, mask = self.padded(decoders)
        labels = ids.clone() if mask is None else ids.masked_fill(mask == 0, IGNORED)
        labels[:, :first] = IGNORED
        read, read_mask = self.padded(contexts)
        given = {"context_input_ids": read, "context_attention_mask": read_mask}
        mask = torch.ones_like(ids) if mask is None else mask
        return self.model(ids, mask, labels=labels, **given).loss

    def _of_streams(self, decoders: Texts, contexts: Texts, first: int) -> Tensor:
        base, lengths = self.model.base, [len(text) for text in decoders]
        ids, places = flat(contexts)
        read = [len(text) for text in contexts]
        attention.begin(read, equal=self.is_equal)
        with torch.no_grad():
            given = {"input_ids": ids[None], "position_ids": places[None], "use_cache": False}
            states = base.transformer(**given).last_hidden_state[0]
        ids, places = flat(decoders)
        attention.begin(lengths, equal=self.is_equal)
        hidden = base.transformer.wte(ids[None]) + base.transformer.wpe(places[None])
        across = [(1, mine, others) for mine, others in zip(lengths, read, strict=True)]
        for index, block in enumerate(base.transformer.h):
            is_added = index in self.model.indices
            if is_added and not self.model.layers.after:
                hidden = self._added(index, hidden, states, across)
            hidden = block(hidden)
            if is_added and self.model.layers.after:
                hidden = self._added(index, hidden, states, across)
        kept = (places[1:] >= max(1, first)).nonzero()[:, 0]
        logits = base.lm_head(base.transformer.ln_f(hidden[0, kept]))
        return F.cross_entropy(logits.float(), ids[1:][kept], reduction="sum")

    def _added(
        self, index: int, hidden_1MD: Tensor, states: Tensor, spans: list[tuple[int, int, int]]
    ) -> Tensor:
        layer, x = self.model.added_layer(index), hidden_1MD[0]
        heads, normed = layer.crossattention, layer.ln_1(x)
        of_queries = heads.q_k_attn if heads.shared_projections else heads.q_attn
        of_keys = heads.q_k_attn if heads.shared_projections else heads.k_attn
        given = ((of_queries, normed), (of_keys, states), (heads.v_attn, states))
        qkv = [part(value).unflatten(-1, (heads.heads, -1)) for part, value in given]
        scale = qkv[0].shape[-1] ** -0.5
        mixed = attention.by_row(*qkv, spans, plain=self.is_plain, scale=scale)
        middle = x + heads.c_proj(mixed)
        out = middle + layer.mlp(layer.ln_2(middle))
        return (x + out if layer.skip else out)[None]


class _Reading(nn.Module):
    """A model that reads one thing, whatever it is called with."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self._read = read

    def forward(self, **_: Tensor) -> Any:
        return self._read()


def _of_sentences(bert: Any, knobs: Knobs) -> Any:
    """A loss of sentence-transformers over its own pooling and normalisation of a stock BERT."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            given = {name: features[name] for name in ("input_ids", "attention_mask")}
            return {**features, "token_embeddings": self.bert(**given).last_hidden_state}

    pooling = Pooling(bert.config.hidden_size, pooling_mode="mean")
    sentences = SentenceTransformer(modules=[States(), pooling, Normalize()], device="cpu").train()
    scale = 1 / TEMPERATURE
    if knobs.loss == "mnrl":
        return MultipleNegativesRankingLoss(sentences, scale=scale)
    size = min(knobs.chunk, 32)
    return CachedMultipleNegativesRankingLoss(sentences, scale=scale, mini_batch_size=size)


LOSSES: dict[str, type[Loss]] = {
    "causal_lm": OfLanguageModel,
    "summariser": OfSummariser,
    "fid": OfReader,
    "vera": OfVerifier,
    "retriever": OfRetriever,
    "cross_attention": OfCrossAttention,
}


class Opponent:
    """A stock model and torch's AdamW; micro-batches add up to the mean over a step's units."""

    def __init__(self, name: str, task: Any, model: nn.Module, knobs: Knobs) -> None:
        self.model, self._knobs = model, knobs
        self._loss = LOSSES[name](task, model, knobs)
        self._is_single = knobs.packing == "single" and name not in ("vera", "retriever", "fid")
        if knobs.compiled:
            for child in self.model.children():
                child.compile(dynamic=True)
        optim, self._weights = task.cfg.optim, [p for p in model.parameters() if p.requires_grad]
        own: Any = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": 0.0}
        self._optimizer = torch.optim.AdamW(self._weights, **own, **{knobs.optimizer: True})

    def step(self, rows: Rows, units: int) -> float:
        """One optimizer step on these rows; its loss."""
        if self._knobs.grouped:
            rows = sorted(rows, key=self._loss.length, reverse=True)
        size, total = 1 if self._is_single else self._knobs.micro_batch, 0.0
        for start in range(0, len(rows), size):
            with torch.autocast("cpu", torch.bfloat16, enabled=self._knobs.autocast):
                loss = self._loss(rows[start : start + size]) / units
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total
