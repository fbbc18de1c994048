"""An encoder-decoder of transformers under teacher forcing: which bases can be trained so, and the
states of a decoder where its texts have labels, and the texts that it writes. A row of the source
may have several labelled texts: it is encoded once, and its keys and values are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from trainer.errors import ConfigError
from trainer.models.families import SUMMARISERS, family_of, start_of
from trainer.models.packed import t5_decoder, t5_encoder
from trainer.models.packed.layout import grids_of
from trainer.models.packed.stream_attention import RowStarts
from trainer.models.weights import generation_file

# B rows of the source, A texts of the decoder, T tokens of the longest one, N tokens of all texts,
# M source tokens of all rows, D width


def refuse_unfit(base: Any, *, end: int, texts: str) -> None:
    """ConfigError for a base that cannot learn to write texts that end.

    end: the tokenizer's end token. texts: what they are called ("summaries").
    """
    config = base.config
    family = family_of(config)
    if family.start_key is None:
        raise ConfigError(
            f"base: a {config.model_type}, want one of the T5 families ({', '.join(SUMMARISERS)})."
        )
    ends = config.eos_token_id
    if end not in (ends if isinstance(ends, list) else [ends]):
        raise ConfigError(
            f"base.config.eos_token_id={ends}, but the tokenizer ends texts with {end}: {texts} "
            "would never end. Make them equal, or use the base's own tokenizer."
        )
    if start_of(config) is None:
        raise ConfigError(
            f"base.config.{family.start_key}: missing. A {family.name} starts every text that it "
            "writes with this token. Published T5 models use their pad, id 0."
        )


@dataclass(frozen=True)
class DecoderTexts:
    """What a decoder is to write: A texts, the same number for each row of the source, those of a
    row side by side.
    """

    labels: Tensor  # (A, T), as layout.pack_targets has them
    scored: Tensor  # (N,)
    starts: Tensor | None  # (A + 1,); None: the source is padded

    def states(
        self, base: Any, source: Mapping[str, Tensor], *, recompute_every: int | None = None
    ) -> Tensor:
        """(N, D) states of the decoder at labelled positions.

        source: rows as layout.pack packs them, or (B, S) input_ids and attention_mask.
        recompute_every: k computes every k-th block of a stream again in the backward pass.
        """
        if self.starts is None or "tokens" not in source:
            return self._of_padded(base, source)
        each = (len(self.starts) - 1) // (len(source["starts"]) - 1)
        longest = max(each * self.labels.shape[1], longest_row(source))
        written = base.prepare_decoder_input_ids_from_labels(self.labels)
        return t5_decoder.decode(
            base.decoder,
            written.flatten().index_select(0, self.scored),
            t5_encoder.encode(base.encoder, source, recompute_every=recompute_every),
            RowStarts(self.starts[::each], source["starts"], longest),
            texts=self.starts,
            recompute_every=recompute_every,
        )

    def _of_padded(self, base: Any, source: Mapping[str, Tensor]) -> Tensor:
        mask_BS = source["attention_mask"]
        each = len(self.labels) // len(mask_BS)
        mask_AS = mask_BS.repeat_interleave(each, 0)
        states_BSD = base.get_encoder()(**source).last_hidden_state
        states_ASD = states_BSD.repeat_interleave(each, 0)
        written = base.prepare_decoder_input_ids_from_labels(self.labels)
        if hasattr(base, "model"):  # a T5Gemma, which has its body in one module
            decoded = base.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=states_ASD),
                attention_mask=mask_AS,
                decoder_input_ids=written,
                use_cache=False,
            )
        else:
            decoded = base.decoder(
                input_ids=written,
                encoder_hidden_states=states_ASD,
                encoder_attention_mask=mask_AS,
                use_cache=False,
            )
        # pads are dropped first, for the logits of all pads would be most of the cost
        return decoded.last_hidden_state.flatten(0, 1).index_select(0, self.scored)


def generate(
    base: Any, source: Mapping[str, Tensor], how: Mapping[str, Any], *, recompute_every: int | None
) -> Tensor:
    """(rows * answers, G) tokens that the decoder writes, with the start token.

    source: as in DecoderTexts.states, with layout.pack's `passage`. how: arguments of `generate`.
    """
    cache = generation_file.cache_of(base.config)
    if "tokens" not in source:
        return base.generate(**source, past_key_values=cache, **how)
    states_MD = t5_encoder.encode(base.encoder, source, recompute_every=recompute_every)
    width, rows = longest_row(source), len(source["starts"]) - 1
    places_M = source["passage"] * width + source["position"]
    flat = states_MD.new_zeros(rows * width, states_MD.shape[1]).index_copy(0, places_M, states_MD)
    mask = places_M.new_zeros(rows * width).index_fill(0, places_M, 1).view(rows, width)
    states = BaseModelOutput(last_hidden_state=flat.view(rows, width, -1))  # pyright: ignore
    return base.generate(encoder_outputs=states, attention_mask=mask, past_key_values=cache, **how)


def longest_row(source: Mapping[str, Tensor]) -> int:
    """The number of places for the longest row of a packed batch."""
    return max(grid.shape[1] for grid in grids_of(source))
