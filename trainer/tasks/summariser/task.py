"""Summarisation with any seq2seq model of the T5 families. Without `lora` all weights train, except
those that read pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.control_tokens import ControlTokens
from trainer.data.padding import flat, pad_right, unflat
from trainer.errors import ConfigError
from trainer.files import packages
from trainer.metrics.mergeable import Ratio
from trainer.models import base_model, base_source, encoder_decoder
from trainer.models.families import family_of
from trainer.models.losses import IGNORED, Terms
from trainer.models.packed.layout import pack, pack_targets
from trainer.protocol.abilities import GREEDY, Answered, Search, Uncut, by_row, scored_answers
from trainer.protocol.task import DRAW, Batch, Cut, Encoded, Places, Row
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.tasks.distilled import DistilledTask
from trainer.tasks.generated import refuse_sampling, text_of
from trainer.tasks.summariser import data, rouge
from trainer.tasks.summariser.config import Config
from trainer.tasks.summariser.model import Summariser, arguments

ALIGNED = 8  # tensor cores and CUDA's attention kernels want widths that are multiples of 8


class Task(DistilledTask[Config]):
    """A document in the encoder, its summary in the decoder."""

    kind: ClassVar[base_model.Kind] = "seq2seq_lm"
    rows_are_of_files: ClassVar[bool] = True

    def __init__(self, cfg: Config, places: Places) -> None:
        packages.require("rouge_score", "rouge")  # now, not at the first evaluation
        super().__init__(cfg, places)

    # Model
    # ----------------------------------------------------------------------------------------------

    def operate(self, base: Any) -> Summariser:
        config = base.config
        family = family_of(config)
        encoder_decoder.refuse_unfit(base, end=self.end, texts="summaries")
        if family.reads_pictures and self.cfg.lora is not None:
            raise ConfigError(
                f"lora: got a {config.model_type}, of which a part reads pictures, want a base of "
                "texts alone: adapters in that part would never train. Leave lora out, or choose a "
                "T5 or T5Gemma."
            )
        if family.reads_pictures:  # documents are texts: that part would get no gradient
            encoder = base.get_encoder()
            for module in (encoder.vision_tower, encoder.multi_modal_projector):
                module.requires_grad_(False)
        if not self.is_packed:
            self.recompute(base)
        return Summariser(
            base,
            terms=Terms.of(self.cfg.train),
            recompute_every=self.cfg.train.recompute_every,
            distillation=self.distillation,
        )

    def fingerprint(self) -> str:
        if not self._has_frozen_weights:
            return super().fingerprint()
        return base_source.fingerprint(self.cfg.base, self.places)

    @property
    def _has_frozen_weights(self) -> bool:
        return family_of(base_source.config_of(self.cfg.base, self.places)).reads_pictures

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the whole model, with the base's own weights in the part that reads pictures."""
        if self._has_frozen_weights and self.cfg.lora is None:
            of_base = self.model().named_parameters()
            frozen = {name: weight.detach() for name, weight in of_base if not weight.requires_grad}
            weights = {**frozen, **weights}
        super().export(weights, folder)

    def generation(self) -> dict[str, Any]:
        how = self.cfg.generation
        options = arguments(how, num_beams=how.num_beams, num_answers=1, is_synced=False)
        del options["synced_gpus"], options["num_return_sequences"]
        return {**options, "eos_token_id": self.exported_ends, "pad_token_id": self.pad}

    # Data
    # ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        return data.rows(self.cfg.data, self.places, split)

    def encode(self, row: Row) -> Encoded:
        """Token ids of the document and of every reference, each cut to its limit with its end
        token kept.
        """
        fields = self.uncut_fields(row)
        source, targets = fields["source"], fields["targets"]
        cut = [self._cut(ids, self.cfg.data.target_tokens) for ids in targets.texts]
        longest = max(map(len, targets.texts), default=0)
        first = len(targets.texts[0]) if targets.texts else 0
        limits = self.cfg.data
        return Encoded(
            {
                "source": self._cut(source.texts[0], limits.source_tokens),
                **flat(cut, "targets"),
            },
            is_truncated=len(source.texts[0]) > limits.source_tokens
            or longest > limits.target_tokens,
            lost_labels=(max(0, first - limits.target_tokens), first),
            cuts={
                name: Cut(uncut.setting, uncut.limit or 0, [len(ids) for ids in uncut.texts])
                for name, uncut in (("documents", source), ("summaries", targets))
            },
        )

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """source: prefix, document and end token; targets: every reference with its end token."""
        limits = self.cfg.data
        document = limits.prefix + row["document"]
        source = self.tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        summaries = self._controls.written_out(row["summaries"])
        targets = [[*ids, self.end] for ids in summaries]
        return {
            "source": Uncut([[*source, self.end]], limits.source_tokens, "data.source_tokens"),
            "targets": Uncut(targets, limits.target_tokens, "data.target_tokens", labels_from=0),
        }

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        return ids if len(ids) <= limit else [*ids[: limit - 1], self.end]

    def encoding_id(self) -> str:
        limits = self.cfg.data
        return self.encoded_under(
            prefix=limits.prefix,
            source_tokens=limits.source_tokens,
            target_tokens=limits.target_tokens,
        )

    def limits(self) -> dict[str, int]:
        return {
            "data.source_tokens": self.cfg.data.source_tokens,
            "data.target_tokens": self.cfg.data.target_tokens,
        }

    def specimen(self) -> Row:
        return {"id": "0", "document": self.filler(), "summaries": [self.filler()]}

    def length(self, encoded: Mapping[str, Any]) -> int:
        """The tokens of the document and of the longest reference, for a reference is drawn
        later.
        """
        return len(encoded["source"]) + max(map(int, encoded["targets_lengths"]), default=0)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Documents as layout.pack packs them, and summaries as layout.pack_targets does.

        For a base that reads no streams, documents are input_ids and attention_mask (B, S), with S
        and T rounded up to multiples of 8.
        """
        sources, targets = [row["source"] for row in rows], [self.target_of(row) for row in rows]
        lengths = [len(source) for source in sources]
        if self.is_packed:
            packed = pack(sources, bucketed=True) | pack_targets(targets)
            return self.with_lesson(packed | self.noise(rows, lengths), rows)
        ids, mask = pad_right(sources, self.pad)
        ids, mask = _align(ids, self.pad), _align(mask, 0)
        ids_of_targets, is_target = pad_right(targets, self.pad)
        labels = _align(ids_of_targets.masked_fill(is_target == 0, IGNORED), IGNORED)
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            "scored": (labels.flatten() != IGNORED).nonzero()[:, 0],
            **self.noise(rows, lengths, width=ids.shape[1]),
        }
        return self.with_lesson(batch, rows)

    @property
    def draws_targets(self) -> bool:
        return self.cfg.data.sample_summaries

    def target_of(self, row: Mapping[str, Any]) -> Sequence[int]:
        """The first reference; in training a random one if data.sample_summaries; [] if there is
        none.
        """
        targets = unflat(row, "targets")
        is_drawn = self.draws_targets and DRAW in row
        return targets[int(row[DRAW][0]) % len(targets) if is_drawn else 0] if targets else []

    # Summaries
    # ----------------------------------------------------------------------------------------------

    def question_row(self, row: Row) -> Row:
        return {"id": row["id"], "question": row["document"], "answers": row["summaries"]}

    def answer_scores(self, prediction: str, references: Sequence[str]) -> dict[str, float]:
        return rouge.scores(prediction, references, self.cfg.rouge)

    def answer_tokens(self) -> int:
        return self.cfg.generation.max_tokens

    def answers(
        self,
        model: nn.Module,
        rows: Sequence[Mapping[str, Any]],
        raw: Sequence[Row],
        *,
        search: Search = GREEDY,
        max_tokens: int | None = None,
    ) -> Answered:
        """Summaries, and the mean of each kind of ROUGE over the rows that have references.

        The default `search` takes the number of beams from the experiment's generation.num_beams.
        """
        refuse_sampling(search, task="summariser", texts="summaries")
        how = self.cfg.generation
        if max_tokens is not None:
            least = min(how.min_tokens, max_tokens)
            how = how.model_copy(update={"max_tokens": max_tokens, "min_tokens": least})
        beams = max(search.num_beams, search.num_answers) if search != GREEDY else how.num_beams
        is_synced = distributed.must_keep_step(model)
        options = arguments(
            how, num_beams=beams, num_answers=search.num_answers, is_synced=is_synced
        )
        options["eos_token_id"] = self.ends
        tokens = model(**to_device(self.collate(rows)), generation=options)["tokens"][:, 1:]
        texts = [text_of(self.tokenizer, row, ends=self.ends) for row in tokens.tolist()]
        texts = [replace(one, text=one.text.strip()) for one in texts]
        return scored_answers(by_row(texts, search), raw, search, self._rouge)

    def _rouge(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]]
    ) -> dict[str, Ratio]:
        judged = [self.answer_scores(*pair) for pair in zip(predictions, references, strict=True)]
        return {kind: Ratio.of([of_row[kind] for of_row in judged]) for kind in rouge.KINDS}


def _align(ids: Tensor, pad: int) -> Tensor:
    """Rows padded on the right until their width is a multiple of 8."""
    return F.pad(ids, (0, -ids.shape[1] % ALIGNED), value=pad)
