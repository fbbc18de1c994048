"""A plausibility verifier: it scores statements, and is trained on groups of one true statement and
several false ones.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.formats import picked
from trainer.errors import ConfigError
from trainer.files import packages
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import base_model, base_source
from trainer.models.families import DECODERS
from trainer.models.gradcache import pooled_losses
from trainer.models.head import HEAD_FILE
from trainer.protocol.abilities import Uncut
from trainer.protocol.task import DRAW, Batch, Cut, Encoded, Places, Row
from trainer.runtime import distributed
from trainer.tasks.token_task import TokenTask
from trainer.tasks.vera import groups, losses
from trainer.tasks.vera.config import Config, Part
from trainer.tasks.vera.exported import plausibility
from trainer.tasks.vera.metrics import LOGIT, Kind, statement_metrics
from trainer.tasks.vera.model import (
    Verifier,
    layout_of,
    read_by,
    read_temperature,
    write_description,
)

log = logging.getLogger(__name__)


class Task(TokenTask[Config]):
    """A row is a group of statements; the loss is a mean over groups."""

    unit: ClassVar[str] = "groups"
    kind: ClassVar[base_model.Kind] = "encoder"
    rows_are_of_files: ClassVar[bool] = True
    base_name: ClassVar[str] = "encoder"

    def __init__(self, cfg: Config, places: Places) -> None:
        packages.require("sklearn", "vera")  # now, not at the first evaluation
        super().__init__(cfg, places)
        self.temperature = 1.0  # load_export sets it to that of a calibrated model
        self._logged: set[str] = set()  # splits whose numbers of groups were logged
        self.tasks = list(
            dict.fromkeys([*cfg.data.train_tasks, *cfg.data.valid_tasks, *cfg.data.test_tasks])
        )

    def read_for(self, whole: Task) -> None:
        """Encode rows as a source of `whole` (data.mix): its tasks have the same numbers there."""
        self.tasks = whole.tasks

    @cached_property
    def is_packed(self) -> bool:
        return True

    # Model
    # ----------------------------------------------------------------------------------------------

    def load_export(self, folder: Path) -> nn.Module:
        self.temperature = read_temperature(folder)
        if not (folder / HEAD_FILE).is_file():
            raise ConfigError(
                f"{folder} holds no {HEAD_FILE}, so it is no trained verifier. Give a best/ or "
                "final/ folder, or one that `python -m trainer import vera` wrote."
            )
        return super().load_export(folder)

    def operate(self, base: Any) -> Verifier:
        if self.cfg.dropout is not None:
            base_model.set_dropout(base, self.cfg.dropout)
        train, limit = self.cfg.train, self.cfg.data.max_tokens
        verifier = Verifier(base, seed=train.seed, recompute_every=train.recompute_every)
        if verifier.backbone is not None and limit > verifier.backbone.max_positions:
            raise ConfigError(
                f"data.max_tokens={limit} is longer than the base's "
                f"{verifier.backbone.max_positions} positions. Use at most that many."
            )
        return verifier

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        super().export(weights, folder)
        write_description(folder, 1.0, max_tokens=self.cfg.data.max_tokens)
        shutil.copyfile(plausibility.__file__, folder / Path(plausibility.__file__).name)

    def exported_config(self) -> Any:
        """The base's config; for a decoder, whose base may be a language model, with the class of
        its body.
        """
        config = base_source.config_of(self.cfg.base, self.places)
        return super().exported_config() if config.model_type in DECODERS else config

    # Data
    # ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        cache_dir = self.places.cache_dir
        of_split = groups.rows(self.cfg.data, split, self.places.data_path, cache_dir=cache_dir)
        if split not in self._logged and picked.current() is None:
            self._logged.add(split)
            log.info(
                "%s: %s",
                split,
                ", ".join(
                    f"{task} {count} groups" for task, count in groups.mixture(of_split).items()
                ),
            )
        return of_split

    def encode(self, row: Row) -> Encoded:
        """Ids of a group's statements with their end tokens, the gold first, and the kind of the
        group.
        """
        ids = self._ids([*row["golds"], *row["distractors"]])
        cut = [self._cut(tokens) for tokens in ids]
        return Encoded(
            {
                "statements": [token for tokens in cut for token in tokens],
                "lengths": [len(tokens) for tokens in cut],
                "has_gold": [len(row["golds"])],
                "is_multiple_choice": [int(not groups.is_boolean(row["task"], self.cfg.data))],
                "task": [self.tasks.index(row["task"])],
                "number": [row["number"]],
            },
            is_truncated=max(map(len, ids)) >= self.cfg.data.max_tokens,
            cuts={
                "statements": Cut(
                    "data.max_tokens", self.cfg.data.max_tokens, [len(tokens) + 1 for tokens in ids]
                )
            },
        )

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """statements, each with its end token."""
        texts = [[*ids, self.end] for ids in self._ids([*row["golds"], *row["distractors"]])]
        return {"statements": Uncut(texts, self.cfg.data.max_tokens, "data.max_tokens")}

    def limits(self) -> dict[str, int]:
        return {"data.max_tokens": self.cfg.data.max_tokens}

    def specimen(self) -> Row:
        """A group of as many statements as a training group has."""
        text = self.filler()
        return {
            "golds": [text],
            "distractors": [text] * (self.cfg.data.statements - 1),
            "task": self.cfg.data.train_tasks[0],
            "number": 0,
        }

    def statement_ids(self, text: str) -> list[int]:
        """One statement as the model reads it."""
        return self._cut(self._ids([text])[0])

    def statement_length(self, text: str) -> int:
        """The tokens of one statement and its end token, before data.max_tokens cuts it."""
        return len(self._ids([text])[0]) + 1

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Cuts ids to data.max_tokens. The end token, whose state is scored, is never cut off."""
        return [*tokens[: self.cfg.data.max_tokens - 1], self.end]

    def encoding_id(self) -> str:
        data = self.cfg.data
        return self.encoded_under(
            max_tokens=data.max_tokens,
            statements=data.statements,  # the stored lengths depend on it
            tasks=self.tasks,
            boolean=sorted(data.boolean),
        )

    def length(self, encoded: Mapping[str, Any]) -> int:
        return sum(int(length) for length in encoded["lengths"][: self.cfg.data.statements])

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """The statements as the model reads them (model.read_by), with group, column and is_gold
        (S,), and is_multiple_choice, task and number (G,).

        In training, where rows carry a draw, a group has at most data.statements statements;
        otherwise it has all of them.
        """
        statements: list[Sequence[int]] = []
        group, column, is_gold = [], [], []
        for number, row in enumerate(rows):
            for place, index in enumerate(self._choose_statements(row)):
                start = int(np.sum(row["lengths"][:index]))
                statements.append(row["statements"][start : start + int(row["lengths"][index])])
                group.append(number)
                column.append(place)
                is_gold.append(index == 0 and bool(row["has_gold"][0]))
        return {
            **self.read(statements, once=DRAW not in rows[0]),
            "group": torch.tensor(group),
            "column": torch.tensor(column),
            "is_gold": torch.tensor(is_gold),
            "is_multiple_choice": torch.tensor(
                [bool(row["is_multiple_choice"][0]) for row in rows]
            ),
            "task": torch.tensor([int(row["task"][0]) for row in rows]),
            "number": torch.tensor([int(row["number"][0]) for row in rows]),
        }

    def read(self, statements: Sequence[Sequence[int]], *, once: bool = False) -> Batch:
        """A batch of token rows, see model.read_by."""
        return read_by(statements, once=once)

    def _choose_statements(self, row: Mapping[str, Any]) -> list[int]:
        """The indices of a group's chosen statements: in training the gold and some distractors,
        else all statements.
        """
        everyone = list(range(len(row["lengths"])))
        most, gold = self.cfg.data.statements, int(row["has_gold"][0])
        if DRAW not in row or len(everyone) <= most:
            return everyone
        if not self.cfg.data.sample_distractors:
            return everyone[:most]
        draws = np.random.PCG64(int(row[DRAW][0])).random_raw(len(everyone) - gold)
        picked = np.sort(np.argsort(draws, kind="stable")[: most - gold]) + gold
        return [*everyone[:gold], *picked.tolist()]

    # Loss and scores
    # ----------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["is_multiple_choice"]), device=batch["group"].device)

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """Each term is a mean over the groups or statements of all ranks and micro-batches."""
        if self.cfg.loss.mode == "original":
            yield from self._as_published(model, window)
            return
        if self.cfg.loss.contrastive == 0 or self.cfg.loss.coefficient == 0:
            yield from self._scored_apart(model, window)
            return
        yield from pooled_losses(lambda batch: _represent(model, batch), window, self._of_pool)

    def _of_pool(self, pool: Mapping[str, Tensor]) -> Tensor:
        statements = _statements(pool)
        shares = self._shares(statements)
        return self._total(
            shares, {name: share.count for name, share in shares.items()}, statements.num_groups
        )

    def _scored_apart(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """Losses without the contrastive term. They need no statements of other micro-batches, so
        ranks exchange only their counts.
        """
        kinds = torch.cat([batch["is_multiple_choice"] for batch in window])
        own = [
            losses.cross_entropy_count(kinds, norm=self.cfg.loss.ce_norm),
            torch.full_like(kinds, 1).long().sum(),
        ]
        num_cross_entropies, num_groups = distributed.total(torch.stack(own))
        for batch in window:
            shares = self._shares(_statements(_represent(model, batch)))
            counts = {
                name: num_cross_entropies if name == "cross_entropy" else num_groups
                for name in shares
            }
            yield self._total(shares, counts, num_groups)

    def _as_published(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """Losses of the published program, which averages micro-batches and ranks however many
        groups each of them has.

        An infinite term of its loss has a finite gradient. The training loop stops at an infinite
        loss, so such terms count as 0.
        """
        loss, num_groups = self.cfg.loss, sum(len(batch["is_multiple_choice"]) for batch in window)
        total = int(distributed.total(torch.tensor(num_groups)))
        for batch in window:
            statements = _statements(_represent(model, batch))
            terms = losses.original(
                statements,
                loss_fn=loss.terms,
                contrastive_type=loss.contrastive,
                temperature=loss.temperature,
                coefficient=loss.coefficient,
                is_infinite=False,
                gathered=losses.gather(statements) if distributed.world() > 1 else None,
            )
            yield terms.loss * (total / (distributed.world() * len(window)))

    def _shares(self, statements: losses.Statements) -> dict[str, losses.Share]:
        loss = self.cfg.loss
        by = losses.keys_by_label if loss.classes == "label" else losses.keys_by_column
        return losses.corrected_sums(
            statements,
            loss_fn=loss.terms,
            ce_norm=loss.ce_norm,
            contrastive_type=loss.contrastive if loss.coefficient else 0,
            temperature=loss.temperature,
            keys=by(statements),
        )

    def _total(
        self,
        shares: Mapping[str, losses.Share],
        counts: Mapping[str, Tensor],
        num_groups: int | Tensor,
    ) -> Tensor:
        """The sum of the means of all terms, times num_groups, by which the engine divides it."""
        means = [
            share.sum
            / counts[name].clamp(min=1)
            * (self.cfg.loss.coefficient if name == "contrastive" else 1.0)
            for name, share in shares.items()
        ]
        return torch.stack(means).sum() * num_groups

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """loss: cross-entropy plus binary cross-entropy, per group; and every metric of
        metrics.statement_metrics, of the logits before calibration.

        A calibrated model also has ece_calibrated/..., the error after calibration.
        """
        statements = _statements(_represent(model, batch))
        terms_G = losses.cross_entropy(statements) + losses.bce(statements)
        logits_S = statements.logits_S.double()
        task_S = batch["task"][batch["group"]]
        group_S = batch["number"][batch["group"]]
        table = torch.stack([task_S, group_S, batch["column"], logits_S, batch["is_gold"]], dim=-1)
        return {
            "loss": Ratio(terms_G.sum(), self.units(batch)),
            "statements": GatheredValues(table, self._metrics),
        }

    def _metrics(self, table: Tensor) -> dict[str, float]:
        data = self.cfg.data
        kinds: dict[str, Kind] = {
            t: "boolean" if groups.is_boolean(t, data) else "multiple_choice" for t in self.tasks
        }
        parts: dict[str, Part] = {
            task: "unseen1"
            if task in data.unseen1
            else "unseen2"
            if task in data.unseen2
            else "seen"
            for task in self.tasks
        }
        metrics = statement_metrics(table, self.tasks, kinds, parts)
        if self.temperature != 1.0:
            table = table.clone()
            table[:, LOGIT] /= self.temperature
            calibrated = statement_metrics(table, self.tasks, kinds, parts)
            metrics |= {
                name.replace("ece/", "ece_calibrated/"): calibrated[name]
                for name in metrics
                if name[:4] == "ece/"
            }
        return metrics


def _represent(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Pooled states and logits of a batch, with the tensors that tell how its statements form
    groups.
    """
    return {
        **model(**layout_of(batch)),
        "column": batch["column"],
        "is_gold": batch["is_gold"],
        "is_multiple_choice": batch["is_multiple_choice"],
    }


def _statements(pool: Mapping[str, Tensor]) -> losses.Statements:
    """The statements of one or several batches, in order; every column 0 begins a group."""
    return losses.Statements(
        logits_S=pool["logits"],
        hidden_SD=pool["hidden"],
        group_S=(pool["column"] == 0).cumsum(0) - 1,
        column_S=pool["column"],
        is_gold_S=pool["is_gold"],
        is_multiple_choice_G=pool["is_multiple_choice"],
    )
