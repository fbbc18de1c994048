"""LoRA as a user of transformers and peft would write it: a stock model, peft.get_peft_model, padded
batches and torch.optim.AdamW. Nothing of ours but the token ids of a row.

Each class is one task: it is built from a folder of weights and says the loss of some encoded rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    T5EncoderModel,
)

from tests.numerics.cross_attention_twin import twin_logits, twin_loss, twin_states
from trainer.tasks.cross_attention.config import Layers

Row = Mapping[str, Sequence[int]]
PAD = 1


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(N, L) ids and mask, padded to the longest row."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor([int(token) for token in row])
        mask[number, : len(row)] = 1
    return ids, mask


def pieces(row: Row, field: str, lengths: str) -> list[Sequence[int]]:
    """The parts of a flat field."""
    found, start = [], 0
    for length in row[lengths]:
        found.append(row[field][start : start + int(length)])
        start += int(length)
    return found


class Plain(nn.Module):
    """A stock model, with peft's adapters or without, and the new weights that a task puts on top."""

    stock: ClassVar[Any] = AutoModelForCausalLM
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any, added: Mapping[str, Tensor]) -> None:
        """added: by name, what a task's new layers start from."""
        super().__init__()
        self.model = model
        self.added = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(tensor.clone()) for name, tensor in added.items()}
        )

    @classmethod
    def read(cls, folder: str) -> Any:
        """The stock model in a folder."""
        return cls.stock.from_pretrained(folder, dtype=torch.float32, **cls.options)

    @property
    def bare(self) -> Any:
        """The stock model itself, whatever stands around it."""
        is_wrapped = isinstance(self.model, peft.PeftModel)
        return self.model.base_model.model if is_wrapped else self.model

    def new(self, name: str) -> Tensor:
        return self.added[name.replace(".", "/")]

    def loss(self, rows: Sequence[Row]) -> Tensor:
        raise NotImplementedError

    def trained(self) -> dict[str, nn.Parameter]:
        """By the names that peft gives them in its files, and those of the new layers."""
        found = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        return found | {name.replace("/", "."): p for name, p in self.added.items()}


class CausalLM(Plain):
    def loss(self, rows: Sequence[Row]) -> Tensor:
        ids, mask = padded([row["ids"] for row in rows])
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        labels = ids.masked_fill(mask == 0, -100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Preference(Plain):
    """SimPO, which needs no model to compare with. Source: Meng et al. 2024, eq. 6."""

    BETA: ClassVar[float] = 2.0
    GAMMA: ClassVar[float] = 0.5

    def loss(self, rows: Sequence[Row]) -> Tensor:
        gaps = [self._mean(row, "chosen") - self._mean(row, "rejected") for row in rows]
        return -F.logsigmoid(self.BETA * torch.stack(gaps) - self.GAMMA).mean()

    def _mean(self, row: Row, answer: str) -> Tensor:
        """() the mean log-probability of the tokens of an answer behind its prompt."""
        ids = torch.tensor([[int(token) for token in row[answer]]])
        is_answer = torch.tensor([int(flag) for flag in row[f"{answer}_scored"]])[1:]
        logps = F.log_softmax(self.model(input_ids=ids).logits[0, :-1], dim=-1)
        of_targets = logps.gather(1, ids[0, 1:, None])[:, 0]
        return (of_targets * is_answer).sum() / is_answer.sum()


class Summariser(Plain):
    stock: ClassVar[Any] = AutoModelForSeq2SeqLM

    def loss(self, rows: Sequence[Row]) -> Tensor:
        ids, mask = padded([row["source"] for row in rows])
        targets, real = padded([pieces(row, "targets", "targets_lengths")[0] for row in rows])
        labels = targets.masked_fill(real == 0, -100)
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss


class FiD(Plain):
    """Every passage through the stock encoder, and all of a question through the decoder."""

    stock: ClassVar[Any] = AutoModelForSeq2SeqLM

    def loss(self, rows: Sequence[Row]) -> Tensor:
        t5, losses, count = self.bare, [], 0
        for row in rows:
            question = list(row["question"])
            passages = pieces(row, "passages", "passages_lengths") or [[]]
            states = []
            for passage in passages:
                ids = torch.tensor([[*map(int, question), *map(int, passage)][:64]])
                states.append(t5.encoder(input_ids=ids).last_hidden_state)
            target = torch.tensor([[int(t) for t in pieces(row, "targets", "targets_lengths")[0]]])
            made = t5(encoder_outputs=(torch.cat(states, dim=1),), labels=target)
            losses.append(made.loss * target.numel())
            count += target.numel()
        return torch.stack(losses).sum() / count


class Vera(Plain):
    stock: ClassVar[Any] = T5EncoderModel

    def loss(self, rows: Sequence[Row]) -> Tensor:
        """Cross-entropy of multiple choice, binary cross-entropy, and the contrast of all
        statements by cosines, true against false.
        """
        terms, hidden, is_true = [], [], []
        for row in rows:
            ids, mask = padded(pieces(row, "statements", "lengths"))
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            last = states[torch.arange(len(ids)), mask.sum(1) - 1]
            logits = last @ self.new("head.weight")[0] + self.new("head.bias")
            truth = torch.zeros(len(ids))
            truth[0] = float(row["has_gold"][0])
            bce = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
            term = bce[0] + (bce[1:].mean() if len(ids) > 1 else 0.0)
            if row["is_multiple_choice"][0]:
                term = term - logits.log_softmax(0)[0]
            terms.append(term)
            hidden.append(last)
            is_true += truth.bool().tolist()
        return torch.stack(terms).mean() + 0.1 * self._contrast(torch.cat(hidden), is_true)

    def _contrast(self, hidden: Tensor, is_true: list[bool]) -> Tensor:
        units = F.normalize(hidden, dim=-1)
        weights = (units @ units.T / 0.05).exp()
        terms = []
        for i, kind in enumerate(is_true):
            others = [j for j in range(len(is_true)) if j != i]
            same = [j for j in others if is_true[j] == kind]
            if same:
                terms.append(-(weights[i, same].sum() / weights[i, others].sum()).log())
        return torch.stack(terms).mean()


class Retriever(Plain):
    stock: ClassVar[Any] = AutoModel
    options: ClassVar[dict[str, Any]] = {"add_pooling_layer": False}  # of BERT, which is not read

    def loss(self, rows: Sequence[Row]) -> Tensor:
        """Every query against the first positive and the first negative of all."""
        queries = self.vectors([row["query"] for row in rows])
        chosen: list[Sequence[int]] = []
        for row in rows:
            texts = pieces(row, "passages", "lengths")
            chosen += [texts[0], texts[int(row["num_positives"][0])]]
        scores = queries @ self.vectors(chosen).T / 0.1
        return F.cross_entropy(scores, 2 * torch.arange(len(rows)))

    def vectors(self, texts: Sequence[Sequence[int]]) -> Tensor:
        ids, mask = padded(texts)
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        made = mean @ self.new("pooler.linear_q.weight").T + self.new("pooler.linear_q.bias")
        return F.normalize(made, dim=-1)


class CrossAttention(Plain):
    """The twin of the added layers on a GPTBigCode; adapters by what they make of its weights."""

    layers = Layers(count=2, stride=2, width=16, heads=2, initialisation="published")

    def loss(self, rows: Sequence[Row]) -> Tensor:
        ids, mask = padded([row["decoder"] for row in rows])
        contexts, kept = padded([row["context"] for row in rows])
        stock, config = self.weights(with_adapters=False), self.bare.config
        with torch.no_grad():
            states = twin_states(stock, config, contexts, kept)
        logits = twin_logits(
            self.weights(with_adapters=True),
            config,
            self.layers,
            ids=ids,
            mask=mask,
            states=[states] * 2,
            kept=[kept.bool()] * 2,
        )
        return twin_loss(logits, ids.masked_fill(mask == 0, -100))

    def weights(self, *, with_adapters: bool) -> dict[str, Tensor]:
        """Those of the base, under the names of our model, and of the added layers."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.bare.named_parameters():
            if "lora_" not in name:
                found[f"base.{name.replace('.base_layer', '')}"] = parameter
        for name, module in self.bare.named_modules():
            if with_adapters and hasattr(module, "lora_A"):
                found[f"base.{name}.weight"] = _effective(module)
        return found | {name.replace("/", "."): tensor for name, tensor in self.added.items()}


def _effective(layer: Any) -> Tensor:
    """The weight that a layer with adapters computes with. Source: Liu et al. 2024 (DoRA), eq. 5,
    sec. 4.3: no gradient through the norm.
    """
    weight = layer.base_layer.weight + layer.get_delta_weight("default")
    if not layer.use_dora["default"]:
        return weight
    magnitude = layer.lora_magnitude_vector["default"].weight
    return weight * (magnitude / weight.detach().norm(dim=1))[:, None]


LOOPS: dict[str, type[Plain]] = {
    "causal_lm": CausalLM,
    "cross_attention": CrossAttention,
    "fid": FiD,
    "preference": Preference,
    "retriever": Retriever,
    "summariser": Summariser,
    "vera": Vera,
}


def trained_losses(plain: Plain, steps: Sequence[Sequence[Row]], *, lr: float) -> list[float]:
    """The loss of every step of AdamW, whose rows are given; gradients are clipped at 1."""
    parameters = list(plain.trained().values())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
    )
    found: list[float] = []
    for rows in steps:
        loss = plain.loss(rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    return found
