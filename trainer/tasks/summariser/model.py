"""A stock T5 whose forward gives the summed loss of summaries, or writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer.models.head import OutputLayer
from trainer.models.losses import IGNORED

if TYPE_CHECKING:
    from trainer.tasks.summariser.config import Generation

# B rows, S source tokens, T target tokens, G generated tokens, D width


class Summariser(nn.Module):
    """Any seq2seq model of the T5 families; in a loss, its head sees labelled positions only."""

    def __init__(self, base: Any, *, label_smoothing: float) -> None:
        super().__init__()
        self.base, self.label_smoothing = base, label_smoothing

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
        hidden_BTD = self._decoded(input_ids, attention_mask, labels)
        # without the pads: a vocabulary of logits for each of them would cost most
        scored_BT = labels != IGNORED
        smoothing = self.label_smoothing if self.training else 0.0
        layer = OutputLayer(self.base)
        return {"loss": layer.loss(hidden_BTD[scored_BT], labels[scored_BT], smoothing=smoothing)}

    def _decoded(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """(B, T, D) states of the decoder under teacher forcing."""
        written = self.base.prepare_decoder_input_ids_from_labels(labels)
        if hasattr(self.base, "model"):  # a T5Gemma, which has its body in one module
            return self.base.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=written,
                use_cache=False,
            ).last_hidden_state
        encoded = self.base.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return self.base.decoder(
            input_ids=written,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            use_cache=False,
        ).last_hidden_state


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
