"""Samples as token ids, for clients that train with them: tokens, how likely each was, and what was
likelier.

Each question is answered in forward passes of its own, so that its answer does not depend, not even
by rounding, on what others ask at the same time: the same question gives the same bytes again.
"""

# L tokens of a prompt, V vocabulary, K tokens at a place

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.commands.texts.wishes import WrongWish
from trainer.models.generation.sampling import chances_of, draw
from trainer.models.generation.texts import GrowingText, chance_of, grown
from trainer.tasks.generated import text_of

_AT_ONCE = 128  # places whose (V,) log-probabilities are held as fp32
_ALTERNATIVES = -1  # the number of the text of which the alternatives of a prompt are drawn


@dataclass
class SampledTokens(GrowingText):
    """Tokens that are drawn until one of `stop_tokens`, which is the last of them, or until their
    text holds one of `stops`.
    """

    stop_tokens: frozenset[int] = frozenset()
    top_k: int | None = None  # tokens are drawn from so many of the likeliest; None: from all
    logprobs: list[float] = field(default_factory=list[float])  # of each token that was drawn
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])

    def next_token(self, logits_V: Tensor, likeliest: int) -> int:
        """The token to take next, by the model's (V,) logits and the likeliest token by them."""
        if self.temperature is None or self.top_k == 1:
            return likeliest
        if self.top_k is not None and self.top_k < len(logits_V):
            logits_V = logits_V.float().cpu()
            least = logits_V.topk(self.top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
        return draw(logits_V, temperature=self.temperature, top_p=self.top_p, chance=self.chance)

    def keep_logprobs(self, logits_V: Tensor, token: int) -> None:
        """Note how likely a token was by the model itself: at temperature 1, of all tokens."""
        logprobs_V = logits_V.float().log_softmax(-1)
        self.logprobs.append(float(logprobs_V[token]))
        if self.num_likeliest:
            self.likeliest.append(_pairs(logprobs_V, self.num_likeliest))

    def take(self, token: int) -> None:
        """Add a token."""
        self.made.append(token)
        if token in self.stop_tokens or (self.stops and self._has_stop(token)):
            self.finish = "stop"
        elif len(self.made) == self.most:
            self.finish = "length"

    def _has_stop(self, token: int) -> bool:
        text = self._spelling.add(token)
        return any(stop in text for stop in self.stops)


@torch.inference_mode()
def sample(task: Any, base: Any, one: Mapping[str, Any]) -> dict[str, Any]:
    """What a question for samples gives: {"sequences": [{"tokens", "logprobs", "finish", "topk"}]},
    and what it asks of the prompt: "prompt_logprobs", "topk_prompt", "targets", "alternatives".

    one: {"prompt": ids, "num_samples", "max_tokens", "temperature", "top_k", "top_p", "seed",
    "stop_tokens": ids or None for the model's own ends, "stops": texts, "topk"} and of the prompt
    {"has_logprobs", "first": the first place that is scored, "topk_prompt", "targets": [[place,
    token]], "alternatives": K}. WrongWish; DivergedError where the model gives no numbers.
    """
    prompt: list[int] = one["prompt"]
    size = base.get_input_embeddings().weight.shape[0]
    tokens = [*prompt, *(token for _, token in one["targets"]), *(one["stop_tokens"] or ())]
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        text = f"got the token {wrong}, want 0 to {size - 1}: the vocabulary of this model"
        raise WrongWish(text, "prompt")
    positions = getattr(base.config, "max_position_embeddings", None) or 1 << 30
    if not 1 <= len(prompt) < positions:
        text = f"the prompt has {len(prompt)} tokens, want 1 to {positions - 1}"
        raise WrongWish(text, "prompt")
    most = positions - len(prompt)
    ends = task.ends if one["stop_tokens"] is None else one["stop_tokens"]
    texts = [
        SampledTokens(
            prompt=prompt,
            most=min(most, one["max_tokens"] or most),
            ends=(),
            spell=lambda ids: text_of(task.tokenizer, ids, ends=()).text,
            temperature=one["temperature"] or None,
            top_p=one["top_p"],
            top_k=one["top_k"] if one["top_k"] > 0 else None,
            chance=chance_of(one["seed"], prompt, number),
            stops=one["stops"],
            stop_tokens=frozenset(ends),
            num_likeliest=one["topk"],
        )
        for number in range(one["num_samples"])
    ]
    for _ in grown(base, texts, pad=task.pad):
        pass
    sequences = [
        {
            "tokens": text.made,
            "logprobs": text.logprobs,
            "finish": text.finish,
            "topk": text.likeliest,
        }
        for text in texts
    ]
    return {"sequences": sequences, **_of_prompt(base, prompt, one)}


def _of_prompt(base: Any, prompt: Sequence[int], one: Mapping[str, Any]) -> dict[str, Any]:
    """What a question asks of its prompt, each place given the tokens before it."""
    width, targets = one["alternatives"], one["targets"]
    if not (one["has_logprobs"] or one["topk_prompt"] or targets or width):
        return {}
    by_place: dict[int, list[int]] = {}
    for number, (place, _) in enumerate(targets):
        by_place.setdefault(place, []).append(number)
    chance = chance_of(one["seed"], prompt, _ALTERNATIVES)
    own: list[float | None] = [None]
    topk: list[list[tuple[int, float]] | None] = [None]
    scores = [0.0] * len(targets)
    drawn: list[list[tuple[int, float]]] = []
    logits_LV = base(input_ids=torch.tensor([list(prompt)]).to(base.device)).logits[0]
    for start in range(0, len(prompt) - 1, _AT_ONCE):
        rows_LV = logits_LV[start : min(start + _AT_ONCE, len(prompt) - 1)].float().cpu()
        for place, row_V in enumerate(rows_LV, start + 1):
            logprobs_V = row_V.log_softmax(-1)
            is_scored = place >= one["first"]
            own.append(float(logprobs_V[prompt[place]]) if is_scored else None)
            has_topk = is_scored and one["topk_prompt"]
            topk.append(_pairs(logprobs_V, one["topk_prompt"]) if has_topk else None)
            for number in by_place.get(place, ()):
                scores[number] = float(logprobs_V[targets[number][1]])
            if width:
                drawn.append(_alternatives(row_V, logprobs_V, one, chance))
    return {
        "prompt_logprobs": own,
        "topk_prompt": topk,
        "targets": scores,
        "alternatives": drawn,
    }


def _alternatives(
    logits_V: Tensor, logprobs_V: Tensor, one: Mapping[str, Any], chance: torch.Generator
) -> list[tuple[int, float]]:
    """K tokens that are drawn at one place, each independently, with their log-probabilities."""
    width, temperature = one["alternatives"], one["temperature"]
    if not temperature:
        tokens = [int(logits_V.argmax())] * width
    else:
        chances_V = chances_of(logits_V, temperature)
        draws = torch.multinomial(chances_V, width, replacement=True, generator=chance)
        tokens = draws.tolist()
    return [(token, float(logprobs_V[token])) for token in tokens]


def _pairs(logprobs_V: Tensor, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens with their log-probabilities, the likeliest first."""
    top = logprobs_V.topk(min(count, len(logprobs_V)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
