"""The log-probabilities of the tokens of a prompt, for answers that repeat it (`echo`)."""

# L tokens of a prompt, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.models.generation.texts import TORN, Spelling

_AT_ONCE = 256  # tokens whose (V,) log-probabilities are held as fp32


def spelt(task: Any, ids: Sequence[int]) -> str:
    """The text of a prompt's ids, with its special tokens."""
    how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(task.tokenizer.decode(list(ids), **how))


@torch.inference_mode()
def token_entries(
    task: Any, base: Any, ids: Sequence[int], text: str, likeliest: int
) -> list[dict[str, Any]]:
    """{"token", "logprob", "likeliest"} of each token of a prompt: its text, how likely it is
    behind those before it, and the likeliest ones in its place. The first one has no logprob.

    text: of the prompt, which the texts of its tokens are together. A beginning-of-text token that
    the client did not write has none.
    """
    logits_LV = base(input_ids=torch.tensor([list(ids)]).to(base.device)).logits[0]
    spelling = Spelling(lambda tokens: spelt(task, tokens))
    entries: list[dict[str, Any]] = []
    whole = spelt(task, ids)
    length = len(whole.removesuffix(text)) if whole.endswith(text) else 0
    for start in range(0, len(ids), _AT_ONCE):
        # the logits at a place are those of the next token
        before = max(start - 1, 0)
        logprobs_LV = logits_LV[before : start + _AT_ONCE - 1].float().log_softmax(-1).cpu()
        for place, token in enumerate(ids[start : start + _AT_ONCE], start):
            entry: dict[str, Any] = {"logprob": None, "likeliest": []}
            if place:
                logprobs_V = logprobs_LV[place - 1 - before]
                top = logprobs_V.topk(likeliest)
                entry["likeliest"] = [
                    {"token": spelling.added_by(other), "logprob": value}
                    for other, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
                entry["logprob"] = float(logprobs_V[token])
            grown = spelling.add(token)
            end = max(len(grown.rstrip(TORN)), length)
            entries.append({"token": grown[length:end], **entry})
            length = end
    if entries:  # what is torn at the very end stands with the last token
        entries[-1]["token"] += spelling.text[length:]
    return entries
