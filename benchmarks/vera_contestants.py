"""The same training and evaluation of a statement verifier, by our task and engine, and with the
original's padding.

Both take the same groups in the same order and start from the same random weights; a step is handed
out by its number. The loss is `losses.original` on both sides, without the Python loops of the
published program: only padding differs, and who tokenises when. Ours collates on the clock; the
reference's tensors are made beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from one_rank import OneRank, store_of
from torch import Tensor
from workload import Workload

from trainer import tasks
from trainer.data.order import Sharding
from trainer.models.packed.layout import grids_of
from trainer.protocol.task import DRAW, Batch, Row
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.tasks.vera import groups, losses

# B groups, C slots of each, S statements (of which R are real), L tokens, D width

LR = 1e-5  # the published learning rate, constant, without clipping
MAX_TOKENS, TRAINED_SLOTS, EVALUATED_SLOTS = 128, 4, 11  # what the original pads to
ABSENT = -1e9  # its logit of an empty slot
SIZES: dict[
    str, dict[str, Any]
] = {  # small and base as in google/t5-v1_1-small and -base; tiny to try this out
    "tiny": {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "num_layers": 2},
    "small": {"d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 6, "num_layers": 8},
    "base": {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_layers": 12},
}


@dataclass(frozen=True, kw_only=True)
class Work(Workload):
    """Groups of statements."""

    tokenizer: str
    tasks: tuple[str, ...]

    @property
    def experiment(self) -> dict[str, Any]:
        config = {
            "model_type": "t5",
            "vocab_size": 32128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": self.dropout,
            **SIZES[self.size],
        }
        return self.values(
            "vera",
            config,
            self.tokenizer,
            train={"order": "as_given"},
            optim={"lr": LR, "weight_decay": 0.0, "clip": 0.0},
            data={
                "source": "groups",
                "train_tasks": list(self.tasks),
                "valid_tasks": list(self.tasks),
                "max_tokens": MAX_TOKENS,
                "statements": TRAINED_SLOTS,
                "sample_distractors": False,
                "order": "legacy",
            },
            loss={"mode": "original"},
        )

    @cached_property
    def cfg(self) -> Any:
        return tasks.parse(self.experiment)

    @cached_property
    def task(self) -> Any:
        return tasks.load(self.cfg, self.places)

    @cached_property
    def groups(self) -> list[Row]:
        """The groups of all batches, the tasks' mixed as published."""
        wanted = self.batch * self.num_batches
        found = list(islice(self.task.rows("train"), wanted))
        if len(found) < wanted:
            raise SystemExit(
                f"{', '.join(self.tasks)}: {len(found)} groups, want {wanted}. Lower --rounds or "
                "--batch."
            )
        if max(map(_num_statements, found)) > EVALUATED_SLOTS:
            raise SystemExit(
                f"a group has more than the {EVALUATED_SLOTS} statements that the original "
                "evaluates"
            )
        return found

    def num_statements(self, number: int, slots: int) -> int:
        """Real statements of batch `number`, at most `slots` of a group."""
        return sum(min(slots, _num_statements(self.groups[row])) for row in self.span(number))


def _num_statements(row: Row) -> int:
    return len(row["golds"]) + len(row["distractors"])


class Ours:
    """What a run does at ZeRO 0 on one rank, without its prefetching thread: collation is on the
    clock.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        store = store_of(work.task, lambda: work.groups, work.folder / "cache")
        sharding = Sharding(work.batch, work.batch, 1, 0)
        self._rank = OneRank(work.task, store, sharding=sharding, folder=work.folder / "run")

    def step(self, number: int) -> Tensor:
        """Train on batch `number`; its loss."""
        return self._rank.step(number, [self.batch(number, is_trained=True)], lr=LR)

    @torch.no_grad()
    def evaluate(self, number: int) -> Tensor:
        """(R,) logits of all statements of batch `number`; the pool of `task.scores` has them in
        its fourth column.
        """
        self._rank.engine.eval()
        batch = to_device(self.batch(number, is_trained=False))
        return self._work.task.scores(self._rank.engine.model, batch)["statements"].values[:, 3]

    def batch(self, number: int, *, is_trained: bool) -> Batch:
        """Batch `number` as the task collates it: in training at most TRAINED_SLOTS statements of a
        group.
        """
        rows: list[dict[str, Any]] = [
            self._rank.session.train[row] for row in self._work.span(number)
        ]
        if is_trained:
            rows = [
                {**row, DRAW: np.zeros(1, dtype=np.int64)} for row in rows
            ]  # what is drawn is not looked at
        return self._work.task.collate(rows)

    def share_of_real_tokens(self, *, is_trained: bool) -> float:
        """Of the cells of attention in all batches; everything else reads real tokens only."""
        batches = [
            self.batch(number, is_trained=is_trained) for number in range(self._work.num_batches)
        ]
        cells = sum(grid.numel() for batch in batches for grid in grids_of(batch))
        return sum(len(batch["tokens"]) for batch in batches) / cells

    def close(self) -> None:
        self._rank.close()


@dataclass(frozen=True)
class Padded:
    """B groups of C slots, each MAX_TOKENS long; an empty slot holds the end of a text and
    padding.
    """

    ids_SL: Tensor
    mask_SL: Tensor
    is_gold_S: Tensor
    is_multiple_choice_B: Tensor

    @property
    def is_present_S(self) -> Tensor:
        return self.mask_SL.sum(-1) > 1

    def on_device(self) -> Padded:
        return Padded(
            **{name: tensor.to(distributed.device()) for name, tensor in vars(self).items()}
        )


class Reference:
    """A stock T5EncoderModel, fed as the original feeds it: every slot, padded to MAX_TOKENS."""

    def __init__(self, work: Work) -> None:
        self._work = work
        model: Any = work.task.model().to(distributed.device())
        self._encoder, self._head = model.encoder, model.head
        assert type(self._encoder).__name__ == "T5EncoderModel", "stock, of transformers"
        assert self._encoder.config._attn_implementation == "sdpa", "the default of transformers"
        self._optimizer = torch.optim.Adam(
            [*self._encoder.parameters(), *self._head.parameters()], lr=LR
        )
        self._trained = [self._padded(number, TRAINED_SLOTS) for number in range(work.num_batches)]
        self._evaluated = [
            self._padded(number, EVALUATED_SLOTS) for number in range(work.num_batches)
        ]

    def _padded(self, number: int, slots: int) -> Padded:
        rows = [self._work.groups[row] for row in self._work.span(number)]
        texts = [[*row["golds"], *row["distractors"]][:slots] for row in rows]
        read = self._work.task.tokenizer(
            [text for group in texts for text in group + [""] * (slots - len(group))],
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        is_gold_BC = torch.zeros(len(rows), slots, dtype=torch.bool)
        is_gold_BC[:, 0] = torch.tensor([bool(row["golds"]) for row in rows])
        is_boolean = [groups.is_boolean(row["task"], self._work.cfg.data) for row in rows]
        return Padded(
            read["input_ids"],
            read["attention_mask"],
            is_gold_BC.flatten(),
            ~torch.tensor(is_boolean),
        )

    def share_of_real_tokens(self, *, is_trained: bool) -> float:
        """Of the tokens that the encoder reads in all batches; the ends that fill empty slots are
        not real.
        """
        batches = self._trained if is_trained else self._evaluated
        real = sum(int(batch.mask_SL[batch.is_present_S].sum()) for batch in batches)
        return real / sum(batch.mask_SL.numel() for batch in batches)

    def step(self, number: int) -> Tensor:
        """Train on batch `number`; its loss."""
        self._encoder.train()
        batch = self._trained[number % self._work.num_batches].on_device()
        loss = self._loss(batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _loss(self, batch: Padded) -> Tensor:
        logits_S, hidden_SD = self._forward(batch)
        (real_R,) = batch.is_present_S.nonzero(as_tuple=True)
        slots, terms = len(logits_S) // len(batch.is_multiple_choice_B), self._work.cfg.loss
        return losses.original(
            losses.Statements(
                logits_S=logits_S[real_R],
                hidden_SD=hidden_SD[real_R],
                group_S=real_R // slots,
                column_S=real_R % slots,
                is_gold_S=batch.is_gold_S[real_R],
                is_multiple_choice_G=batch.is_multiple_choice_B,
            ),
            loss_fn=terms.terms,
            contrastive_type=terms.contrastive,
            temperature=terms.temperature,
            coefficient=terms.coefficient,
        ).loss

    @torch.no_grad()
    def evaluate(self, number: int) -> Tensor:
        """(R,) logits of all statements of batch `number`."""
        self._encoder.eval()
        batch = self._evaluated[number % self._work.num_batches].on_device()
        return self._forward(batch)[0][batch.is_present_S]

    def _forward(self, batch: Padded) -> tuple[Tensor, Tensor]:
        """(S,) logits of all slots and the (S, D) states of their ends."""
        states_SLD = self._encoder(
            input_ids=batch.ids_SL, attention_mask=batch.mask_SL
        ).last_hidden_state
        last_S = batch.mask_SL.sum(-1) - 1
        hidden_SD = states_SLD[torch.arange(len(last_S), device=last_S.device), last_S]
        logits_S = self._head(hidden_SD).squeeze(-1)
        return logits_S.masked_fill(~batch.is_present_S, ABSENT), hidden_SD
