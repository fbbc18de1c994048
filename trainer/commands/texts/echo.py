"""The log-probabilities of the tokens of a prompt, for answers that repeat it (`echo`)."""

# L tokens of a prompt, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.models.generation.texts import TORN, Spelling
from trainer.tasks.generated import text_of

_AT_ONCE = 256  # tokens whose (V,) log-probabilities are held as fp32


@torch.inference_mode()
def token_entries(task: Any, base: Any, ids: Sequence[int], likeliest: int) -> list[dict[str, Any]]:
    """{"token", "logprob", "likeliest"} of each token of a prompt: its text, how likely it is
    behind those before it, and the likeliest ones in its place. The first one has no logprob.
    """
    logits_LV = base(input_ids=torch.tensor([list(ids)]).to(base.device)).logits[0]
    spelling = Spelling(lambda tokens: text_of(task.tokenizer, tokens, ends=()).text)
    entries: list[dict[str, Any]] = []
    length = 0
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
            text = spelling.add(token)
            end = max(len(text.rstrip(TORN)), length)
            entries.append({"token": text[length:end], **entry})
            length = end
    if entries:  # what is torn at the very end stands with the last token
        entries[-1]["token"] += spelling.text[length:]
    return entries
