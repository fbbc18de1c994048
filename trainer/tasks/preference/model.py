"""Models that are trained on preferences, and the batches that they read.

S sequences: of pairs the P chosen answers with their prompts, then the P rejected ones. L tokens of
the longest answer, N scored tokens, A tokens of answers, B prompts of an encoder, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.padding import pad_right
from trainer.models.decoder.streams import Read
from trainer.models.encoder_decoder import DecoderTexts
from trainer.models.head import Head, OutputLayer
from trainer.models.losses import IGNORED, scored_before
from trainer.models.masks import of_right_padded
from trainer.models.packed.layout import pack, pack_labelled, pack_targets
from trainer.protocol.task import Batch


class Policy(nn.Module):
    """A causal language model whose forward gives the log-probability of each answer.

    The head runs on scored positions only.
    """

    def __init__(self, base: Any, read: Read | None) -> None:
        """read: how the body reads streams (streams.reader_of); None: rows are padded."""
        super().__init__()
        self.base, self._read = base, read

    def forward(
        self,
        labels: Tensor,
        scored: Tensor,
        of_answers: Tensor,
        slots: Tensor,
        answers: Tensor,
        whole: Tensor | None = None,
        **batch: Tensor,
    ) -> dict[str, Tensor]:
        """logps: (S,) fp32, the sum over the tokens of each answer; with `whole` also nll: (), the
        summed cross-entropy of the chosen answers with their prompts. batch: of `sequences`.
        """
        body = getattr(self.base, self.base.base_model_prefix)
        hidden_ND = _states(body, self._read, batch).index_select(0, scored)
        targets_N = labels.flatten().index_select(0, scored + 1)
        losses_N = OutputLayer(self.base).losses(hidden_ND, targets_N)
        # into a grid and not by index_add, which on a GPU adds in any order
        grid = losses_N.new_zeros(answers.numel())
        grid = grid.index_copy(0, slots, losses_N.index_select(0, of_answers))
        out = {"logps": -grid.view_as(answers).sum(1)}
        if whole is not None:
            out["nll"] = losses_N.index_select(0, whole).sum()
        return out


class EncoderDecoderPolicy(nn.Module):
    """An encoder-decoder whose forward gives the log-probability of each answer. Its encoder reads
    a prompt once for all of its answers.
    """

    def __init__(self, base: Any, *, recompute_every: int | None = None) -> None:
        """recompute_every: k computes every k-th block of a stream again in the backward pass."""
        super().__init__()
        self.base, self._recompute_every = base, recompute_every

    def forward(
        self,
        labels: Tensor,
        scored: Tensor,
        target_starts: Tensor | None = None,
        whole: Tensor | None = None,
        **prompts: Tensor,
    ) -> dict[str, Tensor]:
        """As Policy's, of a batch of `prompts_and_answers`; nll is that of the chosen answers."""
        texts = DecoderTexts(labels, scored, target_starts)
        hidden_ND = texts.states(self.base, prompts, recompute_every=self._recompute_every)
        targets_N = labels.flatten().index_select(0, scored)
        losses_N = OutputLayer(self.base).losses(hidden_ND, targets_N)
        grid = losses_N.new_zeros(labels.numel()).index_copy(0, scored, losses_N)
        by_answer = grid.view_as(labels).sum(1)
        rows = prompts["starts"][1:] if "starts" in prompts else prompts["input_ids"]
        out = {"logps": -by_answer.view(len(rows), -1).t().flatten()}
        if whole is not None:
            out["nll"] = losses_N.index_select(0, whole).sum()
        return out


class RewardModel(nn.Module):
    """The body of a language model with a new head on the state of an answer's last token. Of a T5
    it is the encoder.
    """

    def __init__(self, base: Any, read: Read | None, *, seed: int) -> None:
        super().__init__()
        self.base, self._read = base, read
        self.head = Head(base, seed=seed, has_bias=False)  # rewards are compared: it would cancel

    def forward(self, last: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """{"scores": (S,) fp32, of each answer}. batch: of `whole_sequences`."""
        states_SD = _states(self.base, self._read, batch).index_select(0, last)
        return {"scores": self.head(states_SD).squeeze(-1)}


def _states(body: Any, read: Read | None, batch: Mapping[str, Tensor]) -> Tensor:
    """Last hidden states: (M, D) of a stream, (S * T, D) of padded rows."""
    if "tokens" in batch:
        assert read is not None
        return read(dict(batch))
    mask_ST = batch["attention_mask"]
    return body(
        input_ids=batch["input_ids"],
        attention_mask=of_right_padded(mask_ST, body.config),
        position_ids=(mask_ST.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    )[0].flatten(0, 1)


def sequences(
    ids: Sequence[Sequence[int]],
    is_answer: Sequence[Sequence[int]],
    *,
    num_whole: int = 0,
    pad: int | None,
) -> Batch:
    """S sequences as Policy reads them: a stream, or with `pad` padded rows.

    - labels, scored (N,): as layout.pack_labelled has them; of padded rows (S, T) and of the
      flattened positions.
    - of_answers (A,): which of the scored tokens belong to answers.
    - answers (S, L) bool: a grid with a row for each answer, True where it has a token.
    - slots (A,): where those tokens stand in the flattened grid.
    - whole (W,): which of the scored tokens belong to the first num_whole sequences, all of whose
      tokens are scored; missing for 0.
    """
    flags = [
        np.ones(len(row), dtype=np.int64) if number < num_whole else np.asarray(row)
        for number, row in enumerate(is_answer)
    ]
    if pad is None:
        batch = pack_labelled(ids, flags)  # pyright: ignore[reportArgumentType]
        answer = np.concatenate([np.asarray(row, dtype=bool) for row in is_answer])
        number = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    else:
        tokens, mask = pad_right(ids, pad)
        is_label, _ = pad_right(flags, 0)  # pyright: ignore[reportArgumentType]
        labels = tokens.masked_fill(is_label == 0, IGNORED)
        labels[:, 0] = IGNORED
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        batch["scored"] = scored_before(labels)
        answer = pad_right(is_answer, 0)[0].numpy().astype(bool).ravel()
        number = np.repeat(np.arange(len(ids)), tokens.shape[1])
    places = batch["scored"].numpy() + 1
    of_answers = np.flatnonzero(answer[places])
    sequence = number[places[of_answers]]
    lengths = np.bincount(sequence, minlength=len(ids))
    width = max(1, int(lengths.max()))
    firsts = np.cumsum(lengths) - lengths
    extra = {
        "of_answers": of_answers,
        "slots": sequence * width + np.arange(len(sequence)) - firsts[sequence],
        "answers": np.arange(width) < lengths[:, None],
    }
    if num_whole:
        extra["whole"] = np.flatnonzero(number[places] < num_whole)
    return {**batch, **{name: torch.from_numpy(one) for name, one in extra.items()}}


def whole_sequences(ids: Sequence[Sequence[int]], *, pad: int | None) -> Batch:
    """S sequences as RewardModel reads them, with last (S,): the places of their last tokens."""
    lengths = torch.tensor([len(row) for row in ids])
    if pad is None:
        packed = pack(ids, bucketed=True)
        del packed["passage"]
        return {**packed, "last": lengths.cumsum(0) - 1}
    tokens, mask = pad_right(ids, pad)
    last = torch.arange(len(ids)) * tokens.shape[1] + lengths - 1
    return {"input_ids": tokens, "attention_mask": mask, "last": last}


def prompts_and_answers(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    *,
    counts_whole: bool = False,
    pad: int | None,
) -> Batch:
    """B prompts and the answers to each, equally many, as EncoderDecoderPolicy reads them.

    - the prompts as layout.pack packs them; with `pad` input_ids and attention_mask.
    - labels, scored, target_starts: all answers, those to one prompt side by side, as
      layout.pack_targets has them; with `pad` without target_starts.
    - whole (W,): which of the scored tokens belong to the first answer to each prompt; missing
      without counts_whole.
    """
    texts = [answer for of_prompt in answers for answer in of_prompt]
    batch = pack_targets(texts)
    if counts_whole:
        is_first = np.tile(np.arange(len(answers[0])) == 0, len(answers))
        whole = np.flatnonzero(np.repeat(is_first, [len(text) for text in texts]))
        batch["whole"] = torch.from_numpy(whole)
    if pad is None:
        packed = pack(prompts, bucketed=True)
        del packed["passage"]
        return {**packed, **batch}
    del batch["target_starts"]
    tokens, mask = pad_right(prompts, pad)
    return {"input_ids": tokens, "attention_mask": mask, **batch}
