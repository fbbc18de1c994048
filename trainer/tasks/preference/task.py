"""Learns from answers of which people preferred some: DPO, IPO, SimPO, ORPO, KTO, and reward
models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config.mistakes import FP16_OF_T5
from trainer.config.userfile import placed
from trainer.data import lookup
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.readers.own_rows import own_rows
from trainer.data.readings.row_store import key_of
from trainer.errors import ConfigError, DataError, LatheError
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import base_source, encoder_decoder
from trainer.models.families import T5, family_of
from trainer.protocol.abilities import EncodedRows, Uncut
from trainer.protocol.task import Batch, Encoded, Places, Row
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.tasks.continuation import ContinuationTask
from trainer.tasks.preference import losses, metrics, rows
from trainer.tasks.preference.config import Config
from trainer.tasks.preference.forms import Form, OneText, TwoTexts
from trainer.tasks.preference.losses import ScoredAnswers
from trainer.tasks.preference.model import EncoderDecoderPolicy, Policy, RewardModel
from trainer.tasks.preference.start_store import StartStore
from trainer.tasks.token_task import refuse_beyond_positions

# What a batch says besides what the model reads.
_BESIDE = ("start", "margin", "is_desired", "answer_tokens")
_OTHER = "other_"  # KTO: before the names of the batch of answers behind prompts of other rows
# By loss: the names of the two answers of an encoded row.
_PAIR, _SINGLE = ("chosen", "rejected"), ("answer", "other")


class Task(ContinuationTask[Config]):
    """A row is a pair of answers, or one answer with a label; the loss is a mean over rows."""

    unit: ClassVar[str] = "pairs"
    rows_are_of_files: ClassVar[bool] = True

    def __init__(self, cfg: Config, places: Places) -> None:
        self.how = cfg.preference
        self.form: Form = OneText(self)
        config = base_source.config_of(cfg.base, places)
        if self.how.loss == "reward":
            self.kind = "encoder"  # pyright: ignore[reportAttributeAccessIssue] (of the experiment)
        elif config.is_encoder_decoder:
            self.kind = "seq2seq_lm"  # pyright: ignore[reportAttributeAccessIssue] (of the experiment)
            self.form = TwoTexts(self)
        if config.is_encoder_decoder:
            _refuse_encoder_decoder(cfg, config)
        if not self.how.has_pairs:
            self.unit = "answers"  # pyright: ignore[reportAttributeAccessIssue] (of the experiment)
        super().__init__(cfg, places)
        self.chat = None
        if cfg.data.source == "chat":
            template, folder = cfg.data.chat_template, places.data_path
            self.chat = ChatTemplate.of(self.tokenizer, template, folder)
        self._start: dict[bytes, np.ndarray] | None = None  # by the key of a row

    # Model
    # ----------------------------------------------------------------------------------------------

    def operate(self, base: Any) -> nn.Module:
        refuse_beyond_positions(base, self.cfg.data.max_tokens)
        if self.how.loss == "reward":
            return RewardModel(base, self.reader(base), seed=self.cfg.train.seed)
        if self.kind == "seq2seq_lm":
            encoder_decoder.refuse_unfit(base, end=self.end, texts="answers")
            if not self.is_packed:
                self.recompute(base)
            return EncoderDecoderPolicy(base, recompute_every=self.cfg.train.recompute_every)
        return Policy(base, self.reader(getattr(base, base.base_model_prefix)))

    def generation(self) -> dict[str, Any]:
        if self.how.loss == "reward":
            return {}
        return {"eos_token_id": self.exported_ends, "pad_token_id": self.pad}

    @property
    def continues_prompts(self) -> bool:
        """Whether it is a language model; an encoder-decoder answers prompts by trained.py."""
        return self.kind == "causal_lm"

    # Data
    # ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        data = self.cfg.data
        layout = data.layout()
        if layout is None:
            raw = ((f"row {n}", row) for n, row in enumerate(lookup.preferences(split)))
        else:
            how: dict[str, Any] = {"layout": layout, "cache_dir": self.places.cache_dir}
            raw = own_rows(data, split, self.places.data_path, first=".jsonl", **how)
        write = rows.text if self.chat is None else rows.conversation
        if not self.how.has_pairs:
            return rows.singles(raw, write)
        return rows.pairs(self._only_pairs(raw), write, needs_margin=self.how.margin)

    def _only_pairs(self, placed_rows: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
        for place, raw in placed_rows:
            if rows.is_single(raw):
                raise DataError(
                    f"{place}: a completion without 'chosen' and 'rejected', and "
                    f"preference.loss={self.how.loss!r} learns from pairs of answers. Use "
                    'preference.loss="kto", which learns from completions with a label.',
                    place=place,
                    field="completion",
                )
            yield place, raw

    @property
    def names(self) -> tuple[str, str]:
        """Of the two answers of an encoded row."""
        return _PAIR if self.how.has_pairs else _SINGLE

    def encode(self, row: Row) -> Encoded:
        return self.encode_rows([row])[0]

    def encode_rows(self, rows: Sequence[Row]) -> list[Encoded]:
        """Both answers of each row with their prompts, and which of their tokens are scored."""
        answers = self.form.whole([answer for row in rows for answer in _answers_of(row)])
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return [self._encoded(row, pair) for row, pair in zip(rows, pairs, strict=True)]

    def _encoded(self, row: Row, answers: Sequence[Mapping[str, list[int]]]) -> Encoded:
        form = self.form
        cut = dict(zip(self.names, map(form.cut, answers), strict=True))
        content, cuts = form.fields(cut), form.cuts(answers)
        content["margin"] = (
            np.asarray([row["beside"]["margin"]], np.float32).view(np.int32).tolist()
        )
        content["is_desired"] = [int(row["label"])]
        lost, learnt = zip(*map(form.losses_of, answers), strict=True)
        return Encoded(
            content,
            is_truncated=any(any(one.lost) for one in cuts.values()),
            lost_labels=(sum(lost), sum(learnt)),
            cuts=cuts,
        )

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """The two answers, each with its prompt; of an encoder-decoder also the prompt."""
        answers = self.form.whole(_answers_of(row))
        return self.form.uncut(dict(zip(self.names, answers, strict=True)))

    def encoding_id(self) -> str:
        chat = {} if self.chat is None else self.chat.identity()
        kind = self.how.loss if self.how.loss in ("kto", "reward") else "pairs"
        settings = {"max_tokens": self.cfg.data.max_tokens, "kind": kind, **self.form.identity}
        return self.encoded_under(**settings, **chat)

    def limits(self) -> dict[str, int]:
        return {"data.max_tokens": self.cfg.data.max_tokens}

    def specimen(self) -> Row:
        text = self.filler()
        write = rows.text if self.chat is None else rows.conversation
        prompt = text if self.kind == "seq2seq_lm" else "word "
        answers = [write(prompt, text, {}, "specimen") for _ in self.names]
        return {"answers": answers, "label": True, "beside": {"margin": 0.0}}

    def length(self, encoded: Mapping[str, Any]) -> int:
        names = [*self.names, *(["prompt"] if self.kind == "seq2seq_lm" else [])]
        return sum(len(encoded[name]) for name in names)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """What the model reads of the answers: of pairs the chosen ones before the rejected ones;
        of KTO the answers, and under names that begin with `other_` those behind other prompts.
        Besides:

        - answer_tokens (S,): how many tokens each answer has, 1 at least.
        - margin (B,) fp32, is_desired (B,) bool.
        - start (S,) fp32: the answers' log-probabilities under the model that the run begins with;
          of KTO those of the others behind them. Missing before read_start().
        """
        if self.how.has_pairs:
            batch = self.form.batch(rows, self.names)
        else:
            answers, others = (self.form.batch(rows, [name]) for name in self.names)
            batch = answers | {f"{_OTHER}{name}": tensor for name, tensor in others.items()}
        learnt = self.names if self.how.has_pairs else self.names[:1]
        tokens = [max(1, self.form.num_learnt(row, name)) for name in learnt for row in rows]
        batch["answer_tokens"] = torch.tensor(tokens)
        margins = np.concatenate([np.asarray(row["margin"], np.int32) for row in rows])
        batch["margin"] = torch.from_numpy(margins.view(np.float32).copy())
        batch["is_desired"] = torch.tensor([bool(row["is_desired"][0]) for row in rows])
        if self._start is not None:
            batch["start"] = self._of_start(rows)
        return batch

    # What the start says
    # ----------------------------------------------------------------------------------------------

    def read_start(
        self, start: Callable[[], nn.Module], stores: Mapping[str, EncodedRows], *, batch: int
    ) -> None:
        """Fill the store of each split, and read it: from now on collate() knows every row."""
        if not self.how.is_referred:
            return
        store, model = self._start_store(), cache(start)  # which is read where a row is missing

        @torch.no_grad()
        def compute(rows: Sequence[Mapping[str, Any]]) -> Tensor:
            return self._log_probabilities(model(), rows)

        known = dict(self._start or {})
        self._start = None  # until all is there, a batch has no start
        for split, of_split in stores.items():
            store.fill(split, of_split, compute, batch=batch)
            known.update(store.read(split, of_split))
        self._start = known

    def _log_probabilities(self, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B, 2) of both answers of each row."""
        batch = to_device(self.collate(rows))
        logps = model(**_read_by_model(batch))["logps"]
        if self.how.has_pairs:
            return torch.stack(logps.chunk(2), dim=1)
        return torch.stack([logps, model(**_read_by_model(_others(batch)))["logps"]], dim=1)

    def _start_store(self) -> StartStore:
        cfg, reference = self.cfg, self.how.reference
        identity = {
            "base": base_source.fingerprint(cfg.base, self.places),
            "precision": cfg.train.precision,
            "base_bits": cfg.train.base_bits,
        }
        if self.init_from is not None:
            identity["init_from"] = base_source.fingerprint(self.init_from, self.places)
        root = self.places.cache_dir / "start" if reference is None else Path(placed(reference))
        return StartStore(root, reference is not None, identity, self._keyed)

    @property
    def _keyed(self) -> list[str]:
        return self.form.names_of_fields(self.names)

    def _of_start(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """(2 B,) of all first answers, then of all second ones."""
        assert self._start is not None
        values: list[np.ndarray] = []
        for row in rows:
            value = self._start.get(key_of(row, self._keyed))
            if value is None:
                raise DataError(
                    f"a row of {self.length(row)} tokens was not read by the model that the run "
                    "began with: the rows have changed since. Start again, with another "
                    "preference.reference if it is given."
                )
            values.append(value)
        return torch.from_numpy(np.stack(values, axis=1).ravel())

    # Loss and scores
    # ----------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["is_desired"]), device=batch["is_desired"].device)

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """Sums over pairs or answers. Two losses look at the whole global batch first: ORPO, whose
        cross-entropy is a mean over its tokens, and KTO, which measures how far the model is from
        its start.
        """
        if self.how.loss == "orpo":
            yield from self._orpo(model, window)
        elif self.how.loss == "kto":
            kl = self._divergence(model, window)
            for batch in window:
                answers = self._answers(model, batch)
                yield losses.kto(answers, batch["is_desired"], kl, self.how).sum()
        else:
            for batch in window:
                yield self._of_pairs(model, batch)[0].sum()

    def _orpo(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        counts = [torch.stack([self.units(b), self.units(b) * 0 + len(b["whole"])]) for b in window]
        num_pairs, num_tokens = distributed.total(torch.stack(counts).sum(0))
        for batch in window:
            out = model(**_read_by_model(batch))
            odds = losses.of_pairs(self._with_start(out["logps"], batch), self.how)
            yield out["nll"] * (num_pairs / num_tokens) + odds.sum()

    @torch.no_grad()
    def _divergence(self, model: nn.Module, window: Sequence[Batch]) -> Tensor:
        """() fp32: the mean log-ratio of answers behind prompts of other rows, over all rows of the
        step; 0 at least. A collective.
        """
        sums = []
        for batch in window:
            ratios = self._other_answers(model, batch).ratios.double()
            sums.append(torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))]))
        total, count = distributed.total(torch.stack(sums).sum(0))
        return (total / count).clamp(min=0).float()

    def _answers(self, model: nn.Module, batch: Batch) -> ScoredAnswers:
        return self._with_start(model(**_read_by_model(batch))["logps"], batch)

    def _other_answers(self, model: nn.Module, batch: Batch) -> ScoredAnswers:
        logps = model(**_read_by_model(_others(batch)))["logps"]
        start = batch["start"][len(logps) :] if "start" in batch else self._as_start(logps)
        return ScoredAnswers(logps, batch["answer_tokens"], start)

    def _with_start(self, logps: Tensor, batch: Batch) -> ScoredAnswers:
        start = batch["start"][: len(logps)] if "start" in batch else self._as_start(logps)
        return ScoredAnswers(logps, batch["answer_tokens"], start)

    def _as_start(self, logps: Tensor) -> Tensor:
        """Before read_start(), as when memory is planned, a model is taken for the start itself.
        LatheError where it is an export.
        """
        if self.how.is_referred and self._export is not None:
            raise LatheError(
                f"{self._export} is compared with the model that its run began with, which has not "
                "read these rows: call read_start() first."
            )
        return logps.detach()

    def _of_pairs(
        self, model: nn.Module, batch: Batch
    ) -> tuple[Tensor, Tensor, ScoredAnswers | None]:
        """(P,) losses, (2 P,) rewards, and the answers if a language model gives them."""
        if self.how.loss == "reward":
            scores = model(**_read_by_model(batch))["scores"]
            return losses.reward(scores, batch["margin"], self.how), scores, None
        answers = self._answers(model, batch)
        return losses.of_pairs(answers, self.how), losses.rewards(answers, self.how), answers

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """The loss, and what metrics.py says of rewards and lengths."""
        if self.how.loss == "kto":
            answers, others = self._answers(model, batch), self._other_answers(model, batch)
            table = metrics.table_of_singles(answers, others, batch["is_desired"])
            return {"answers": GatheredValues(table, lambda t: metrics.of_singles(t, self.how))}
        if self.how.loss == "orpo":
            out = model(**_read_by_model(batch))
            answers = self._with_start(out["logps"], batch)
            odds, rewards = losses.of_pairs(answers, self.how), losses.rewards(answers, self.how)
            num_pairs = self.units(batch)
            num_tokens = num_pairs * 0 + len(batch["whole"])
            sums = [out["nll"].double(), num_tokens, odds.double().sum(), num_pairs]
            table = torch.stack([one.double() for one in sums])[None]
            loss = GatheredValues(table, metrics.orpo_loss)
            return {"loss": loss, **metrics.of_pairs(rewards, batch["answer_tokens"], None)}
        loss_P, rewards, answers = self._of_pairs(model, batch)
        ratios = answers.ratios if answers is not None and self.how.is_referred else None
        more = metrics.of_pairs(rewards, batch["answer_tokens"], ratios)
        return {"loss": Ratio(loss_P.sum(), self.units(batch)), **more}


def _refuse_encoder_decoder(cfg: Config, config: Any) -> None:
    """ConfigError for what no encoder-decoder of this configuration learns."""
    family, loss = family_of(config), cfg.preference.loss
    if cfg.train.precision == "fp16":
        raise ConfigError(f"{FP16_OF_T5}.")
    if loss == "reward" and config.model_type not in T5:
        raise ConfigError(
            f"preference.loss='reward' with a {config.model_type}, of which nothing here takes the "
            f"encoder alone. Use a base of {', '.join(T5)}, or a decoder."
        )
    if family.reads_pictures:
        raise ConfigError(
            f"base: a {config.model_type} reads pictures, too; want a model of texts alone. Choose "
            "a T5, a T5Gemma or a decoder."
        )
    if loss != "reward" and cfg.data.source == "chat":
        raise ConfigError(
            f'data.source="chat" with a {config.model_type}, whose encoder reads the prompt and '
            "whose decoder writes the answer, each a text: no chat template writes them. Use "
            'data.source="files" with texts, or a decoder.'
        )


def _answers_of(row: Row) -> list[Row]:
    """The two answers of a row that are encoded: a pair, or an answer and its other (rows.py)."""
    beside: Row = row["beside"]
    return [*row["answers"], beside["other"]] if "other" in beside else row["answers"]


def _read_by_model(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k not in _BESIDE and not k.startswith(_OTHER)}


def _others(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(_OTHER): v for k, v in batch.items() if k.startswith(_OTHER)}
