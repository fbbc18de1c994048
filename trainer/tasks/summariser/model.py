"""A stock T5 whose forward returns the summed loss of summaries, or generates summaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer.models import encoder_decoder
from trainer.models.distillation import DistillationTerms, Lesson, without_teacher
from trainer.models.encoder_decoder import DecoderTexts
from trainer.models.head import OutputLayer
from trainer.models.inputs.neftune import noisy, without_noise
from trainer.models.losses import IGNORED, PLAIN, Terms

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
            own, every = without_teacher(source), self.recompute_every
            tokens = encoder_decoder.generate(self.base, own, generation, recompute_every=every)
            return {"tokens": tokens}
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
            return DecoderTexts(labels, scored, target_starts).states(
                self.base, without_noise(source), recompute_every=self.recompute_every
            )


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
