"""A stock T5 whose forward gives the summed loss of summaries, or writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.losses import IGNORED, token_cross_entropy

if TYPE_CHECKING:
    from trainer.tasks.summariser.config import Generation

# B rows, S source tokens, T target tokens, G generated tokens, D width, V vocabulary, N labelled
# positions


class Summariser(nn.Module):
    """Any seq2seq model of the T5 families; in a loss, its head sees labelled positions only."""

    def __init__(self, base: Any, *, label_smoothing: float) -> None:
        super().__init__()
        self.base, self.label_smoothing = base, label_smoothing
        self._scored_BT: Tensor | None = None
        base.get_output_embeddings().register_forward_pre_hook(self._without_pads)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, *, generation: Any = None
    ) -> dict[str, Tensor]:
        """(B, S) ids and mask, (B, T) labels -> {"loss": () fp32, the sum over labelled tokens}.

        generation: arguments of `generate`; then {"tokens": (rows * answers, G) with the start
        token}. The loss is smoothed in training mode only.
        """
        if generation is not None:
            return {
                "tokens": self.base.generate(
                    input_ids=input_ids, attention_mask=attention_mask, **generation
                )
            }
        self._scored_BT = labels != IGNORED
        try:
            logits_NV = self.base(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=self.base.prepare_decoder_input_ids_from_labels(labels),
                use_cache=False,
            ).logits
        finally:
            scored_BT, self._scored_BT = self._scored_BT, None
        smoothing = self.label_smoothing if self.training else 0.0
        return {"loss": smoothed_cross_entropy(logits_NV, labels[scored_BT], smoothing)}

    def _without_pads(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(B, T, D) -> (N, D) on its way into the head, without the pads.

        A vocabulary of logits for each pad would cost most.
        """
        return inputs if self._scored_BT is None else (inputs[0][self._scored_BT],)


def smoothed_cross_entropy(logits_NV: Tensor, targets_N: Tensor, smoothing: float) -> Tensor:
    """() fp32: the SUM over targets of (1 - smoothing) x cross-entropy + smoothing x its mean over
    the vocabulary.

    Source: Szegedy et al. 2016, sec. 7, with a uniform distribution over all V.
    """
    if smoothing == 0.0:
        return token_cross_entropy(logits_NV, targets_N)
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum", label_smoothing=smoothing)


def arguments(
    how: Generation, *, num_beams: int, num_answers: int, is_synced: bool
) -> dict[str, Any]:
    """What `generate` of transformers 5.23 is told. is_synced: ranks make equally many forwards, as
    ZeRO-3 wants.
    """
    beams = {"length_penalty": how.length_penalty, "early_stopping": False} if num_beams > 1 else {}
    return {
        "num_beams": num_beams,
        "num_return_sequences": num_answers,
        "max_new_tokens": how.max_tokens,
        "min_new_tokens": how.min_tokens or None,
        "no_repeat_ngram_size": how.no_repeat_ngram,
        "do_sample": False,
        "synced_gpus": is_synced,
        **beams,
    }
