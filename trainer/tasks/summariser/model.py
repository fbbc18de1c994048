"""A stock T5 whose forward gives the summed loss of summaries, or writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from trainer.models import generation_file
from trainer.models.head import OutputLayer
from trainer.models.losses import IGNORED
from trainer.models.packed import t5_encoder
from trainer.models.packed.layout import pack

if TYPE_CHECKING:
    from trainer.tasks.summariser.config import Generation

# B rows, S source tokens, T target tokens, G generated tokens, D width, M source
# tokens of all rows


class Summariser(nn.Module):
    """Any seq2seq model of the T5 families; in a loss, its head sees labelled positions only."""

    def __init__(self, base: Any, *, label_smoothing: float) -> None:
        super().__init__()
        self.base, self.label_smoothing = base, label_smoothing

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        *,
        scored: Tensor | None = None,
        generation: Any = None,
        **stream: Tensor,
    ) -> dict[str, Tensor]:
        """(B, S) ids and mask, (B, T) labels -> {"loss": () fp32, the sum over labelled tokens}.

        stream: source_stream() of the same ids, of a base with T5's encoder, which then runs on
        real tokens alone. scored: (N,) where labels are among all B * T; None works it out, which
        waits for the device. generation: arguments of `generate`; then {"tokens": (rows * answers,
        G) with the start token}. The loss is smoothed in training mode only.
        """
        if generation is not None:
            source: dict[str, Any] = {"input_ids": input_ids}
            if stream:
                source = {"encoder_outputs": self._encoded(input_ids, stream)}
            source["past_key_values"] = generation_file.cache_of(self.base.config)
            tokens = self.base.generate(attention_mask=attention_mask, **source, **generation)
            return {"tokens": tokens}
        hidden_BTD = self._decoded(input_ids, attention_mask, labels, stream)
        # without the pads: a vocabulary of logits for each of them would cost most
        if scored is None:
            scored = (labels.flatten() != IGNORED).nonzero()[:, 0]
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, scored)
        smoothing = self.label_smoothing if self.training else 0.0
        layer = OutputLayer(self.base)
        targets_N = labels.flatten().index_select(0, scored)
        return {"loss": layer.loss(hidden_ND, targets_N, smoothing=smoothing)}

    def _encoded(self, input_ids: Tensor, stream: Mapping[str, Tensor]) -> BaseModelOutput:
        """(B, S, D) states of the sources, 0 where there is no token."""
        encoder = self.base.encoder
        tokens_M = input_ids.flatten().index_select(0, stream["places"])
        every = 1 if encoder.gradient_checkpointing else None
        states_MD = t5_encoder.encode(
            encoder, {**stream, "tokens": tokens_M}, recompute_every=every
        )
        flat = states_MD.new_zeros(input_ids.numel(), states_MD.shape[-1])
        flat = flat.index_copy(0, stream["places"], states_MD)
        return BaseModelOutput(last_hidden_state=flat.view(*input_ids.shape, -1))  # pyright: ignore

    def _decoded(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        stream: Mapping[str, Tensor],
    ) -> Tensor:
        """(B, T, D) states of the decoder under teacher forcing."""
        written = self.base.prepare_decoder_input_ids_from_labels(labels)
        if hasattr(self.base, "model"):  # a T5Gemma, which has its body in one module
            return self.base.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=written,
                use_cache=False,
            ).last_hidden_state
        encoded = (
            self._encoded(input_ids, stream)
            if stream
            else self.base.encoder(input_ids=input_ids, attention_mask=attention_mask)
        )
        return self.base.decoder(
            input_ids=written,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            use_cache=False,
        ).last_hidden_state


def source_stream(sources: Sequence[Sequence[int]], width: int) -> dict[str, Tensor]:
    """Where the tokens of padded sources, (B, width), lie in a stream: packing.pack's layout, and
    places (M,) of its tokens among all B * width.
    """
    batch = pack(sources, bucketed=True)
    del batch["tokens"]
    return batch | {"places": batch["passage"] * width + batch["position"]}


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
        "min_new_tokens": how.min_tokens,
        "no_repeat_ngram_size": how.no_repeat_ngram,
        "do_sample": False,
        "synced_gpus": is_synced,
        **beams,
    }
