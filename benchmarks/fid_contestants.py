"""The same FiD training and the same answers by our task and engine, and by stock transformers used
as minFiD uses it.

Both take the same questions and passages in the same order, from the same random weights; a step is
handed out by its number. What only one of them needs is imported by it alone, for a process is
measured whole where memory is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from workload import Workload

from trainer import tasks
from trainer.data.readers import retrieved
from trainer.data.readers.passages import corpus_passages
from trainer.models import base_model, base_source
from trainer.models.losses import IGNORED
from trainer.protocol.task import Row
from trainer.runtime import distributed

# B questions, N passages of each, L tokens of each passage, T target tokens, G generated tokens, D
# width

LR, DECAY, CLIP = 1e-4, 1e-2, 1.0  # the published recipe, but for its schedule
SIZES: dict[
    str, dict[str, Any]
] = {  # small and base as in google-t5/t5-small and t5-base; tiny to try this out
    "tiny": {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_heads": 8, "num_layers": 4},
    "small": {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6},
    "base": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12},
}


@dataclass(frozen=True, kw_only=True)
class Work(Workload):
    """Questions of NaturalQuestions."""

    contexts: int = 10
    passage_tokens: int = 250

    def experiment(self, answer_tokens: int) -> dict[str, Any]:
        """answer_tokens: generated at most, the start token counted."""
        config = {
            "model_type": "t5",
            "vocab_size": 32128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "dropout_rate": self.dropout,
            **SIZES[self.size],
        }
        return self.values(
            "fid",
            config,
            "../tokenizers/t5",
            optim={"lr": LR, "weight_decay": DECAY, "decay": "all", "clip": CLIP},
            data={
                "source": "nq",
                "corpus": "corpus.tsv",
                "contexts": self.contexts,
                "passage_tokens": self.passage_tokens,
                "answer_tokens": answer_tokens,
                "sample_targets": False,
            },
        )

    @cached_property
    def questions(self) -> list[Row]:
        """The questions of all batches, their passages with title and text."""
        found = retrieved.rows(
            self.data_path, "train", source="nq", contexts=self.contexts, sort_by_score=False
        )
        questions = list(islice(found, self.batch * self.num_batches))
        passages = {row["id"]: row for row in corpus_passages(self.data_path, "corpus.tsv")}
        return [
            {**row, "ctxs": [passages[passage["id"]] for passage in row["ctxs"]]}
            for row in questions
        ]


@torch.no_grad()
def shrink_embeddings(t5: Any) -> None:
    """Make a random T5 heed what it reads: as it is drawn, its tied embedding outweighs every
    layer, and it repeats its start token for ever, so that any two answers would be equal.
    """
    t5.shared.weight.mul_(0.05)


class Ours:
    """What a run does at ZeRO 0 on one rank, without its prefetching thread: collation is on the
    clock.
    """

    def __init__(self, work: Work) -> None:
        from one_rank import OneRank, store_of

        from trainer.data.order import Sharding

        self._work = work
        self._task: Any = tasks.load(tasks.parse(work.experiment(2)), work.places)
        self._answering: dict[int, Any] = {}  # tasks, by how many tokens they answer with
        model = self._task.model()
        shrink_embeddings(model.t5)
        store = store_of(self._task, lambda: self._task.rows("train"), work.places.cache_dir)
        sharding = Sharding(work.batch, work.batch, 1, 0)
        self._rank = OneRank(
            self._task, store, sharding=sharding, folder=work.folder / "run", model=model
        )

    def step(self, number: int) -> Tensor:
        """Train on batch `number`; its loss, still on the device, as in a run."""
        batch = self._task.collate(
            [self._rank.session.train[row] for row in self._work.span(number)]
        )
        return self._rank.step(number, [batch], lr=LR)

    @torch.no_grad()
    def answers(self, number: int, answer_tokens: int) -> list[str]:
        """The answers to batch `number`, of at most answer_tokens tokens with the start token."""
        if answer_tokens not in self._answering:
            cfg = tasks.parse(self._work.experiment(answer_tokens))
            self._answering[answer_tokens] = tasks.load(cfg, self._work.places)
        self._rank.engine.eval()
        rows = self._work.span(number)
        encoded, raw = (
            [self._rank.session.train[row] for row in rows],
            [self._work.questions[row] for row in rows],
        )
        return (
            self._answering[answer_tokens]
            .answers(self._rank.engine.model, encoded, raw)
            .predictions
        )

    def close(self) -> None:
        self._rank.close()


class Reference:
    """Stock T5 used as minFiD uses it; tokenised and padded beforehand, which minFiD does during a
    step.
    """

    def __init__(self, work: Work) -> None:
        cfg = tasks.parse(work.experiment(2))
        self._work = work
        self._tokenizer = base_source.tokenizer_of(cfg, work.places)
        t5: Any = base_model.load(cfg.base, work.places, precision="fp32", kind="seq2seq_lm")
        shrink_embeddings(t5)
        assert t5.config._attn_implementation == "sdpa", (
            "the default of transformers, which minFiD would run"
        )
        self._t5 = t5.to(distributed.device())
        self._optimizer = torch.optim.AdamW(self._t5.parameters(), lr=LR, weight_decay=DECAY)
        self._batches = [self._padded(number) for number in range(work.num_batches)]

    def _padded(self, number: int) -> dict[str, Tensor]:
        """ids, mask (B, N, L), always as long as passages may be; labels (B, T)."""
        work, rows = self._work, [self._work.questions[row] for row in self._work.span(number)]
        prompts = [
            f"question: {row['question']} title: {passage['title']} context: {passage['text']}"
            for row in rows
            for passage in row["ctxs"]
        ]
        read = self._tokenizer(
            prompts,
            add_special_tokens=False,
            padding="max_length",
            truncation=True,
            max_length=work.passage_tokens,
            return_tensors="pt",
        )
        shape = (work.batch, work.contexts, work.passage_tokens)
        written = self._tokenizer(
            [row["answers"][0] for row in rows], padding=True, return_tensors="pt"
        )
        return {
            "ids": read["input_ids"].view(shape),
            "mask": read["attention_mask"].view(shape),
            "labels": written["input_ids"].masked_fill(written["attention_mask"] == 0, IGNORED),
        }

    def share_of_padding(self) -> float:
        """Of the tokens that the encoder reads."""
        masks = torch.stack([batch["mask"] for batch in self._batches])
        return 1.0 - masks.double().mean().item()

    def _encoded(self, number: int) -> dict[str, Any]:
        """The encoder's states of all tokens, padding included, as T5's forward and generate take
        them.
        """
        from transformers.modeling_outputs import BaseModelOutput

        batch = {
            name: tensor.to(distributed.device()) for name, tensor in self._batches[number].items()
        }
        ids_BNL, mask_BNL = batch["ids"], batch["mask"]
        states = self._t5.encoder(
            input_ids=ids_BNL.flatten(0, 1), attention_mask=mask_BNL.flatten(0, 1)
        )
        fused_BSD = states.last_hidden_state.view(len(ids_BNL), -1, self._t5.config.d_model)
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=fused_BSD),
            "attention_mask": mask_BNL.flatten(1),
            "labels": batch["labels"],
        }

    def step(self, number: int) -> float:
        """Train on batch `number`; its loss."""
        self._t5.train()
        loss = self._t5(**self._encoded(number % self._work.num_batches)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._t5.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def answers(self, number: int, answer_tokens: int) -> list[str]:
        """The answers to batch `number`, of at most answer_tokens tokens with the start token."""
        self._t5.eval()
        inputs = self._encoded(number % self._work.num_batches)
        del inputs["labels"]
        made_BG = self._t5.generate(
            **inputs, max_length=answer_tokens, num_beams=1, do_sample=False
        )
        return self._tokenizer.batch_decode(
            made_BG, skip_special_tokens=True, clean_up_tokenization_spaces=True
        )
