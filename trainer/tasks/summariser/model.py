"""A stock T5 whose forward returns the summed loss of summaries, or generates summaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from trainer.models.distillation import DistillationTerms, Lesson, without_teacher
from trainer.models.head import OutputLayer
from trainer.models.inputs.neftune import noisy, without_noise
from trainer.models.losses import IGNORED, PLAIN, Terms
from trainer.models.packed import t5_decoder, t5_encoder
from trainer.models.packed.layout import grids_of
from trainer.models.packed.stream_attention import RowStarts
from trainer.models.weights import generation_file

if TYPE_CHECKING:
    from trainer.tasks.summariser.config import Generation

# B rows, S source tokens, T target tokens, G generated tokens, D width, M source tokens of all
# rows, N target tokens of all rows


class Summariser(nn.Module):
    """Any seq2seq model of the T5 families. For a loss, its head reads labelled positions only."""

    def __init__(
        self,
        base: Any,
        *,
        terms: Terms = PLAIN,
        recompute_every: int | None = None,
        distillation: DistillationTerms | None = None,
    ) -> None:
        """terms: of the loss in training mode. recompute_every: k computes every k-th block of a
        stream again in the backward pass. distillation: how a teacher is learnt from.
        """
        super().__init__()
        self.base, self.terms = base, terms
        self.recompute_every, self.distillation = recompute_every, distillation

    def forward(
        self,
        labels: Tensor | None = None,
        scored: Tensor | None = None,
        target_starts: Tensor | None = None,
        *,
        generation: Any = None,
        **source: Tensor,
    ) -> dict[str, Tensor]:
        """OutputLayer.sums over labelled tokens.

        source: documents as layout.pack packs them, or (B, S) input_ids and attention_mask; perhaps
        distillation.teacher_fields. labels, scored, target_starts: summaries as layout.pack_targets
        packs them; scored=None computes it from the labels, which waits for the device. generation:
        arguments of `generate`; the result is then {"tokens": (rows * answers, G) with the start
        token}.
        """
        if generation is not None:
            return {"tokens": self._generate(without_teacher(source), generation)}
        assert labels is not None, "a loss needs summaries"
        if scored is None:
            scored = (labels.flatten() != IGNORED).nonzero()[:, 0]
        read = {"labels": labels, "scored": scored, "target_starts": target_starts}
        hidden_ND = self.scored_states(**read, **without_teacher(source))
        terms = self.terms if self.training else None
        targets_N = labels.flatten().index_select(0, scored)
        lesson = Lesson.of(self.distillation, source)
        return OutputLayer(self.base).sums(hidden_ND, targets_N, terms, lesson)

    def scored_states(
        self,
        labels: Tensor,
        scored: Tensor,
        target_starts: Tensor | None = None,
        **source: Tensor,
    ) -> Tensor:
        """(N, D) states of the decoder at labelled positions, under teacher forcing."""
        with noisy(self.base.get_encoder().get_input_embeddings(), source):
            return self._states(without_noise(source), labels, scored, target_starts)

    def _states(
        self, source: Mapping[str, Tensor], labels: Tensor, scored: Tensor, starts: Tensor | None
    ) -> Tensor:
        if starts is not None and "tokens" in source:
            return self._decode(source, labels, scored, starts)
        written = self.base.prepare_decoder_input_ids_from_labels(labels)
        if hasattr(self.base, "model"):  # a T5Gemma, which has its body in one module
            decoded = self.base.model(**source, decoder_input_ids=written, use_cache=False)
        else:
            decoded = self.base.decoder(
                input_ids=written,
                encoder_hidden_states=self.base.encoder(**source).last_hidden_state,
                encoder_attention_mask=source["attention_mask"],
                use_cache=False,
            )
        # pads are dropped first, for the logits of all pads would be most of the cost
        return decoded.last_hidden_state.flatten(0, 1).index_select(0, scored)

    def _encode(self, source: Mapping[str, Tensor]) -> Tensor:
        """(M, D) states of the tokens of all documents."""
        return t5_encoder.encode(self.base.encoder, source, recompute_every=self.recompute_every)

    def _decode(
        self, source: Mapping[str, Tensor], labels: Tensor, scored: Tensor, starts: Tensor
    ) -> Tensor:
        """(N, D) states of the decoder at labelled positions, under teacher forcing."""
        written = self.base.prepare_decoder_input_ids_from_labels(labels)
        return t5_decoder.decode(
            self.base.decoder,
            written.flatten().index_select(0, scored),
            self._encode(source),
            RowStarts(starts, source["starts"], max(labels.shape[1], _longest(source))),
            recompute_every=self.recompute_every,
        )

    def _generate(self, source: Mapping[str, Tensor], how: Any) -> Tensor:
        cache = generation_file.cache_of(self.base.config)
        if "tokens" not in source:
            return self.base.generate(**source, past_key_values=cache, **how)
        states_MD, width = self._encode(source), _longest(source)
        rows = len(source["starts"]) - 1
        places_M = source["passage"] * width + source["position"]
        flat = states_MD.new_zeros(rows * width, states_MD.shape[1]).index_copy(
            0, places_M, states_MD
        )
        mask = places_M.new_zeros(rows * width).index_fill(0, places_M, 1).view(rows, width)
        states = BaseModelOutput(last_hidden_state=flat.view(rows, width, -1))  # pyright: ignore
        return self.base.generate(
            encoder_outputs=states, attention_mask=mask, past_key_values=cache, **how
        )


def _longest(source: Mapping[str, Tensor]) -> int:
    """The number of places for the longest document."""
    return max(grid.shape[1] for grid in grids_of(source))


def arguments(
    how: Generation, *, num_beams: int, num_answers: int, is_synced: bool
) -> dict[str, Any]:
    """The arguments of `generate` in transformers 5.23. is_synced: all ranks run the same number of
    forwards, as ZeRO-3 needs.
    """
    beams = {"length_penalty": how.length_penalty, "early_stopping": False} if num_beams > 1 else {}
    return {
        "num_beams": num_beams,
        "num_return_sequences": num_answers,
        "max_new_tokens": how.max_tokens,
        "min_new_tokens": how.min_tokens,
        "no_repeat_ngram_size": how.no_repeat_ngram,
        "do_sample": False,
        "synced_gpus": is_synced,
        **beams,
    }
