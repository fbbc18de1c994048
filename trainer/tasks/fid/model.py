"""Fusion-in-Decoder on a stock T5: passages are encoded one by one, without padding, and decoded
over all together.

Source: Izacard & Grave 2021 (arXiv 2007.01282). The T5's modules and parameter names are those of
transformers, and only the order in which they are called is ours; fido.py removes some of them
where an experiment says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.models import base_model
from trainer.models.distillation import DistillationTerms, Lesson
from trainer.models.head import OutputLayer
from trainer.models.inputs.neftune import noisy
from trainer.models.losses import PLAIN, Terms
from trainer.models.packed import absorbed, t5_decoder, t5_encoder
from trainer.models.packed.attention import flex
from trainer.models.packed.stream_attention import RowStarts
from trainer.models.weights import generation_file
from trainer.tasks.fid import fido

if TYPE_CHECKING:
    from trainer.protocol.task import Batch
    from trainer.tasks.fid.config import Reader

# B questions, P passages of all questions, M tokens of all passages, S tokens of the longest
# question (all its passages), T target tokens, G generated tokens, D width, I width of all heads


@dataclass(frozen=True)
class Generation:
    """How answers are written."""

    max_length: int  # tokens, the start token included
    ends: list[int] | None = None  # tokens that end an answer; None: the end of the T5's config
    num_beams: int = 1  # 1: greedy
    num_answers: int = 1  # how many of the best answers are returned; at most num_beams
    is_synced: bool = False  # all ranks run the same number of forwards, as ZeRO-3 needs


class FiD(nn.Module):
    """A T5 whose forward reads a packed batch (fused_layout.pack)."""

    def __init__(
        self,
        t5: Any,
        reader: Reader,
        *,
        recompute_every: int | None = None,
        terms: Terms = PLAIN,
        distillation: DistillationTerms | None = None,
    ) -> None:
        """t5: a T5ForConditionalGeneration; fido.switch removes cross-attention weights from it as
        reader.cross_attention_every and reader.cross_attention_multi_query say.

        recompute_every: k computes every k-th encoder block again in the backward pass. terms: of
        the loss in training mode. distillation: how a teacher is learnt from.
        """
        super().__init__()
        fido.switch(t5, reader)
        self.t5, self.reader, self.recompute_every = t5, reader, recompute_every
        self.terms, self.distillation = terms, distillation
        if reader.dropout is not None:
            base_model.set_dropout(t5, reader.dropout)
        if reader.compat_cross_bias:
            _add_cross_bias(t5)

    def forward(
        self, generation: Generation | None = None, *, score_passages: bool = False, **batch: Tensor
    ) -> dict[str, Tensor]:
        """The loss, the answers or the passage scores of a packed batch with labels (B, T).

        By default OutputLayer.sums over labelled tokens. With `generation` {"tokens":
        (B * num_answers, G) with the start token, "scores": (B * num_answers,) of beams}. With
        score_passages {"passage_scores": (P,) fp32}.
        """
        if generation is None and not score_passages:
            hidden_ND = self.scored_states(**batch)
            targets_N = batch["labels"].flatten().index_select(0, batch["scored"])
            terms = self.terms if self.training else None
            lesson = Lesson.of(self.distillation, batch)
            return OutputLayer(self.t5).sums(hidden_ND, targets_N, terms, lesson)
        fused_BSD = self.fuse(self.encode(batch), batch)
        if score_passages:
            return {"passage_scores": self._passage_scores(fused_BSD, batch)}
        assert generation is not None
        return self._generate(fused_BSD, batch["fused_mask"], generation)

    def scored_states(self, **batch: Tensor) -> Tensor:
        """(N, D) states of the decoder at labelled positions, under teacher forcing."""
        states_MD = self.encode(batch)
        if not self.reader.compat_cross_bias:
            return self._decode_stream(states_MD, batch)
        fused_BSD = self.fuse(states_MD, batch)
        hidden_BTD = self.decode(fused_BSD, batch["fused_mask"], batch["labels"])
        return hidden_BTD.flatten(0, 1).index_select(0, batch["scored"])

    def _decode_stream(self, states_MD: Tensor, batch: Batch) -> Tensor:
        """The decoder attends to the tokens of its question, not to pads."""
        labels_BT, scored_N = batch["labels"], batch["scored"]
        written_BT = self.t5.prepare_decoder_input_ids_from_labels(labels_BT)
        longest = max(labels_BT.shape[1], batch["fused_mask"].shape[1])
        return t5_decoder.decode(
            self.t5.decoder,
            written_BT.flatten().index_select(0, scored_N),
            states_MD,
            RowStarts(batch["target_starts"], batch["question_starts"], longest),
            few=self._few(states_MD, batch),
        )

    def _few(self, states_MD: Tensor, batch: Batch) -> absorbed.FewQueries | None:
        """The decoder's input for absorbed attention, which projects no keys of the encoder states.

        None when answers are too long for it to be faster.
        """
        scored_N, (rows, longest) = batch["scored"], batch["labels"].shape
        written, layers = len(scored_N), fido.cross_layers(self.t5)
        is_few = all(absorbed.is_few(written, rows, layer.EncDecAttention) for layer in layers)
        if not (is_few and written):
            return None
        if rows == 1:
            return absorbed.FewQueries(states_MD[None], None, scored_N, written)
        fused_BSD = self.fuse(states_MD, batch)
        return absorbed.FewQueries(fused_BSD, batch["fused_mask"], scored_N, longest)

    def encode(self, batch: Batch) -> Tensor:
        """(M, D) encoder states of the real tokens, after the final norm and dropout."""
        is_flex = self.reader.attention == "flex"
        attend_by = flex(batch["passage"], batch["position"]) if is_flex else None
        how: Any = {"attend_by": attend_by, "recompute_every": self.recompute_every}
        with noisy(self.t5.encoder.embed_tokens, batch):
            return t5_encoder.encode(self.t5.encoder, batch, **how)

    def fuse(self, states_MD: Tensor, batch: Batch) -> Tensor:
        """(M, D) states of all tokens -> (B, S, D), one row for each question, so that the decoder
        attends to all passages of a question at once.
        """
        mask_BS = batch["fused_mask"]
        flat = states_MD.new_zeros(mask_BS.numel(), states_MD.shape[-1]).index_copy(
            0, batch["fused"], states_MD
        )
        return flat.view(*mask_BS.shape, -1)

    def decode(self, fused_BSD: Tensor, mask_BS: Tensor, labels_BT: Tensor) -> Tensor:
        """(B, T, D) decoder states under teacher forcing."""
        return self.t5.decoder(
            input_ids=self.t5.prepare_decoder_input_ids_from_labels(labels_BT),
            encoder_hidden_states=fused_BSD,
            encoder_attention_mask=mask_BS,
            # transformers 5.23 would fill a cache of all cross keys and values, in training too
            use_cache=False,
        ).last_hidden_state

    def head(self, hidden_ND: Tensor) -> Tensor:
        """(N, D) decoder states -> (N, vocabulary) logits."""
        return OutputLayer(self.t5)(hidden_ND)

    def _generate(self, fused_BSD: Tensor, mask_BS: Tensor, how: Generation) -> dict[str, Tensor]:
        from transformers.modeling_outputs import BaseModelOutput

        generated = self.t5.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=fused_BSD),
            attention_mask=mask_BS,
            max_length=how.max_length,
            num_beams=how.num_beams,
            num_return_sequences=how.num_answers,
            do_sample=False,
            eos_token_id=how.ends or self.t5.generation_config.eos_token_id,
            past_key_values=generation_file.cache_of(self.t5.config),
            synced_gpus=how.is_synced,
            return_dict_in_generate=True,
            output_scores=how.num_beams > 1,
        )
        output = {"tokens": generated.sequences}
        return output | ({"scores": generated.sequences_scores} if how.num_beams > 1 else {})

    def _passage_scores(self, fused_BSD: Tensor, batch: Batch) -> Tensor:
        """(P,) fp32: the cross-attention scores of the first decoder step, before the softmax, as
        their mean over a passage's tokens, the heads and the layers that have cross-attention.

        Source: Izacard & Grave 2021b (arXiv 2012.04584). A retriever learns from these scores; they
        do not change answers.
        """
        config = self.t5.config
        start_B1 = torch.full_like(
            batch["fused_mask"][:, :1], config.decoder_start_token_id, dtype=torch.int64
        )
        with _cross_projections(self.t5) as projected:
            self.t5.decoder(
                input_ids=start_B1,
                encoder_hidden_states=fused_BSD,
                encoder_attention_mask=batch["fused_mask"],
                use_cache=False,
            )
        pairs = projected()
        layer_scores = []
        for q_B1I, k_BSI in pairs:
            # (B, 1, width of a key): its product with a key is the sum over heads of all q.k. Where
            # every head has keys of its own, a key is as wide as all queries together; keys that
            # heads share meet the sum of their queries.
            query_B1I = q_B1I.float().unflatten(-1, (-1, k_BSI.shape[-1])).sum(-2)
            layer_scores.append((k_BSI.float() @ query_B1I.transpose(1, 2)).squeeze(-1))
        scores_BS = sum(layer_scores)
        scores_M = torch.as_tensor(scores_BS).flatten()[batch["fused"]]
        if self.reader.compat_cross_bias:
            # at the first step the position bias is the same for every token, in all layers
            first = self.t5.decoder.block[0].layer[1].EncDecAttention
            bias_of_heads = first.compute_bias(1, 1, first.q.weight.device).float().sum()
            scores_M = scores_M + bias_of_heads * config.num_decoder_layers
        total_P = scores_M.new_zeros(len(batch["question"])).index_add(
            0, batch["passage"], scores_M
        )
        tokens_P = torch.bincount(batch["passage"], minlength=len(total_P))
        return total_P / (tokens_P * len(pairs) * config.num_heads)


def _add_cross_bias(t5: Any) -> None:
    """Give cross-attention the table of position biases that it had in transformers 3.0.2, filled
    with zeros.

    At decoder step t every key gets the bias of distance 0, except the first t keys of the first
    passage. transformers removed the table in 4.0 (PR 8518). In 5.23 cross-attention counts the
    present tokens twice, because self-attention has already put them into the cache: hence the
    subtraction.
    """
    first = t5.decoder.block[0].layer[1].EncDecAttention
    table = torch.zeros(
        first.relative_attention_num_buckets, first.n_heads, dtype=t5.dtype, device=t5.device
    )
    first.relative_attention_bias = nn.Embedding.from_pretrained(table, freeze=False)
    first.has_relative_attention_bias = True
    of_class = first.compute_bias

    def compute_bias(
        query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0
    ) -> Tensor:
        return of_class(query_length, key_length, device, max(past_seen_tokens - query_length, 0))

    first.compute_bias = compute_bias


@contextmanager
def _cross_projections(t5: Any) -> Iterator[Callable[[], list[tuple[Tensor, Tensor]]]]:
    """While it is open, the projected queries and keys of every cross-attention are recorded.

    It yields a function that returns the pairs (queries, keys), one for each layer.
    """
    layers = fido.cross_layers(t5)
    values: dict[tuple[int, str], Tensor] = {}

    def keep(name: tuple[int, str], module: nn.Module, inputs: Any, output: Tensor) -> None:
        values[name] = output

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            for part in ("q", "k"):
                module = getattr(layer.EncDecAttention, part)
                handle = module.register_forward_hook(functools.partial(keep, (number, part)))
                hooks.callback(handle.remove)
        yield lambda: [(values[number, "q"], values[number, "k"]) for number in range(len(layers))]
