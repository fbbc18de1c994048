"""The same cross-attention training and the same answers: our run on prepared states, our run that
encodes online, and the Hugging Face Trainer as published.

All take the same rows in the same order, from the same random weights; a step is handed out by its
number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from workload import SEED, Workload

from trainer import tasks
from trainer.data.order import Sharding, Sizes, sizes_of, window_rows
from trainer.data.readers import questions
from trainer.data.token_store import TokenStore, store_of
from trainer.models.packed.layout import grids_of
from trainer.protocol.task import Batch, Places
from trainer.recipes.cross_attention import preparation
from trainer.runtime import distributed
from trainer.tasks.cross_attention.decoder.generation import greedy

# B rows, T decoder tokens, L context tokens, G generated tokens

LR, CLIP = 5e-4, 1.0
SIZES: dict[str, dict[str, Any]] = {  # 1b as bigcode/starcoderbase-1b
    "tiny": {"n_embd": 512, "n_layer": 12, "n_head": 4},
    "small": {"n_embd": 768, "n_layer": 24, "n_head": 6},  # as deep as 1b
    "1b": {"n_embd": 2048, "n_layer": 24, "n_head": 16},
}
LAYERS = {"tiny": (4, 3), "small": (6, 3), "1b": (6, 3)}  # how many are added, and their stride


@dataclass(frozen=True, kw_only=True)
class Work(Workload):
    """Questions of NaturalQuestions on their contexts."""

    tokenizer: Path
    micro_batch: int = 16  # of the reference, in the order of the rows
    micro_tokens: int = 4096  # ours
    bucket_steps: int = 1
    with_contexts: bool = False  # every context is predicted too, as published
    precision: str = "fp32"
    packed: bool = True  # ours; the reference pads

    def experiment(self, encode: str, *, packed: bool = False) -> dict[str, Any]:
        (count, stride), shape = LAYERS[self.size], SIZES[self.size]
        config = {
            "model_type": "gpt_bigcode",
            "vocab_size": 49152,
            "n_positions": 2048,
            "n_inner": 4 * shape["n_embd"],
            "multi_query": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            **shape,
        }
        return self.values(
            "cross_attention",
            config,
            self.tokenizer,
            train={"micro_tokens": self.micro_tokens, "precision": self.precision},
            optim={"lr": LR, "betas": [0.9, 0.95], "eps": 1e-6, "clip": CLIP},
            layers={
                "count": count,
                "stride": stride,
                "width": shape["n_embd"] // 2,
                "heads": shape["n_head"],
                "key_dropout": 4 * self.dropout,
                "attention_dropout": self.dropout,
                "initialisation": "published",
            },
            data={
                "source": "jsonl",
                "decoder_tokens": 1024,
                "context_tokens": 1024,
                "include_context_ids": self.with_contexts,
                "fim_rate": 0.0,
                "packed": packed,
                "encode": encode,
                "state_dtype": "fp32" if self.precision == "fp32" else "bf16",
            },
            deepspeed="zero0" if self.precision == "fp32" else "zero1",
        )

    @property
    def places(self) -> Places:
        return replace(super().places, data_path=self.folder / "prepared")

    @property
    def sharding(self) -> Sharding:
        """Of our runs."""
        tokens = {"micro_tokens": self.micro_tokens, "bucket_steps": self.bucket_steps}
        return Sharding(self.batch, self.batch, 1, 0, **tokens)

    def prepare(self) -> None:
        """The first rows of the train split of NaturalQuestions, and the states of their
        contexts.
        """
        rows = list(
            islice(questions.nq_rows(self.data_path, "train"), self.batch * self.num_batches)
        )
        raw = self.folder / "raw"
        raw.mkdir()
        for split, some in (("train", rows), ("valid", rows[:1])):
            (raw / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        cfg: Any = tasks.parse(self.experiment("cached"))
        places = replace(self.places, data_path=raw)
        request = preparation.Preparation(self.folder / "prepared", {})
        preparation.write_rows(cfg, places, request)
        preparation.write_states(cfg, places, request)

    def task(self, encode: str, *, packed: bool = False) -> Any:
        return tasks.load(tasks.parse(self.experiment(encode, packed=packed)), self.places)

    def store(self, task: Any) -> TokenStore:
        return store_of(task, "train", self.places.cache_dir)


class Ours:
    """What a run does on one rank, without its prefetching thread: collation is on the clock."""

    def __init__(self, work: Work, encode: str) -> None:
        from one_rank import OneRank

        self._work, self.task = work, work.task(encode, packed=work.packed)
        store, folder = work.store(self.task), work.folder / f"run-{id(self)}"
        self._rank = OneRank(self.task, store, sharding=work.sharding, folder=folder)
        self._sizes = sizes_of(store, self.task)

    def step(self, number: int) -> Tensor:
        """Train on step `number`; its loss, still on the device, as in a run."""
        rows = self._rows(number)
        return self._rank.step(number, self._batches(rows), rows, lr=LR)

    def _rows(self, number: int) -> list[np.ndarray]:
        """The rows of each micro-batch of step `number`."""
        seed = (
            SEED if self._work.bucket_steps > 1 else None
        )  # None: the rows of the reference's step
        step = number % self._work.num_batches
        return window_rows(step, lengths=self._sizes, sharding=self._work.sharding, seed=seed)

    def _batches(self, rows: list[np.ndarray]) -> list[Batch]:
        return [
            self.task.collate([self._rank.session.train[int(row)] for row in some]) for some in rows
        ]

    def padding(self) -> float:
        """The share of padding in what is computed: by the tensors that the model gets, not by the
        rows' lengths.
        """
        real = computed = 0
        for number in range(self._work.num_batches):
            for batch in self._batches(self._rows(number)):
                ids = [
                    x for name, x in batch.items() if name == "tokens" or name.endswith("input_ids")
                ]
                states = [x[..., 0] for name, x in batch.items() if name == "encoder_hidden_states"]
                masks = [x for name, x in batch.items() if name.endswith("attention_mask")]
                computed += sum(x.numel() for x in ids + states)
                real += (
                    sum(int(x.sum()) for x in masks)
                    if masks
                    else sum(x.numel() for x in ids + states)
                )
        return 1 - real / computed

    def padding_of_attention(self) -> float:
        """The share of cells without a token in the rectangles that the decoder's attention alone
        needs.
        """
        batches = [
            batch for n in range(self._work.num_batches) for batch in self._batches(self._rows(n))
        ]
        cells = [grid for batch in batches for grid in grids_of(batch)]
        return 1 - sum(int(grid.sum()) for grid in cells) / max(
            1, sum(grid.numel() for grid in cells)
        )

    def close(self) -> None:
        self._rank.close()


class _MeanLoss(nn.Module):
    """Our model as the Trainer wants one: the mean loss of a micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        output = self.model(labels=labels, **inputs)
        return {"loss": output.loss / (labels[:, 1:] != -100).sum()}


class Reference:
    """The same model, stepped by the Hugging Face Trainer: micro-batches in the order of the rows,
    padded to their longest, contexts encoded inside every forward. Rows are tokenised beforehand.
    """

    def __init__(self, work: Work) -> None:
        from transformers import Trainer, TrainingArguments

        self._work = work
        self.task = work.task("online")
        store = work.store(self.task)
        self.sizes: Sizes = sizes_of(store, self.task)
        self._rows = [store[index] for index in range(work.batch * work.num_batches)]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[work.precision]
        self._model = _MeanLoss(self.task.model()).to(distributed.device(), dtype)
        arguments = TrainingArguments(
            output_dir=str(work.folder / "hugging_face"),
            learning_rate=LR,
            max_grad_norm=CLIP,
            adam_beta2=0.95,
            adam_epsilon=1e-6,
            gradient_accumulation_steps=work.batch // work.micro_batch,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        )
        self._trainer: Any = Trainer(model=self._model, args=arguments)
        self._trainer.current_gradient_accumulation_steps = (
            work.batch // work.micro_batch
        )  # which train() sets
        self._optimizer = self._trainer.create_optimizer()

    @property
    def micro_batches(self) -> int:
        return self._work.batch // self._work.micro_batch

    def _batches(self, number: int) -> Iterator[Batch]:
        for first in self._work.span(number)[:: self._work.micro_batch]:
            yield self.task.collate(self._rows[first : first + self._work.micro_batch])

    def step(self, number: int) -> float:
        """Train on step `number`; the mean of its micro-batches' losses."""
        loss = 0.0
        for batch in self._batches(number):
            loss += float(self._trainer.training_step(self._model, batch))
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def token_mean(self, number: int) -> float:
        """The loss of step `number` per token, which is what ours reports; nothing is trained."""
        self._model.train()
        batches = [
            {name: t.to(distributed.device()) for name, t in b.items()}
            for b in self._batches(number)
        ]
        units = [int(self.task.units(batch)) for batch in batches]
        losses = [
            float(self._model(**batch)["loss"]) * count
            for batch, count in zip(batches, units, strict=True)
        ]
        return sum(losses) / sum(units)

    def padding(self) -> float:
        """The share of padding in what is computed."""
        rows = np.arange(self._work.batch * self._work.num_batches).reshape(
            -1, self._work.micro_batch
        )
        parts = [self.sizes.axes_NA[some] for some in rows]
        real, padded = (
            sum(part.sum() for part in parts),
            sum(len(part) * part.max(axis=0).sum() for part in parts),
        )
        return 1 - real / padded


class Answers:
    """Some prompts on contexts of a given length, and the two ways of continuing them."""

    def __init__(self, work: Work, *, rows: int, context_tokens: int, new_tokens: int) -> None:
        task = work.task("online")
        store = work.store(task)
        self.rows, self.new_tokens, self._pad = rows, new_tokens, task.prompts.pad
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[work.precision]
        self._model = task.model().to(distributed.device(), dtype).eval()
        ids = np.concatenate([store[index]["context"] for index in range(len(store))])
        ids = np.resize(ids, rows * context_tokens).reshape(rows, context_tokens)
        prompts = [
            store[index]["decoder"][: int(store[index]["answer_start"][0])] for index in range(rows)
        ]
        width = min(map(len, prompts))
        self._prompts_BT = torch.tensor(np.stack([prompt[-width:] for prompt in prompts])).long()
        self._contexts_BL = torch.tensor(ids).long()

    def _inputs(self) -> tuple[Tensor, Tensor]:
        return self._prompts_BT.to(distributed.device()), self._contexts_BL.to(distributed.device())

    @torch.no_grad()
    def ours(self, number: int) -> Tensor:
        """(B, G): the context is encoded once, and every token is one short forward."""
        prompts_BT, contexts_BL = self._inputs()
        return greedy(
            self._model,
            prompts_BT,
            torch.ones_like(prompts_BT),
            context_input_ids=contexts_BL,
            context_attention_mask=torch.ones_like(contexts_BL),
            max_new_tokens=self.new_tokens,
            pad_token_id=self._pad,
        ).tokens_BG

    @torch.no_grad()
    def reference(self, number: int) -> Tensor:
        """(B, G): as published, the context and the whole text so far are read again for every
        token.
        """
        text_BT, contexts_BL = self._inputs()
        start = text_BT.shape[1]
        for _ in range(self.new_tokens):
            logits = self._model(
                text_BT,
                torch.ones_like(text_BT),
                context_input_ids=contexts_BL,
                context_attention_mask=torch.ones_like(contexts_BL),
            ).logits
            text_BT = torch.cat([text_BT, logits[:, -1:].argmax(dim=-1)], dim=1)
        return text_BT[:, start:]


class Contestants:
    """Everybody, built once."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @cached_property
    def cached(self) -> Ours:
        return Ours(self.work, "cached")

    @cached_property
    def online(self) -> Ours:
        return Ours(self.work, "online")

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.work)

    def close(self) -> None:
        self.cached.close()
        self.online.close()
