"""How the next token of a text is chosen: what is added to its logits, and the draw."""

# V vocabulary

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.errors import DivergedError
from trainer.models.generation.grammar import Grammar

# Lower ones choose as this one does; their quotients would leave the numbers of 32 bits.
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Adjustment:
    """What changes the logits of one text before a token is chosen. Source: OpenAI's API."""

    bias: Mapping[int, float] = field(default_factory=dict[int, float])  # by token
    frequency_penalty: float = 0.0  # taken off for each time that a token was generated already
    presence_penalty: float = 0.0  # taken off once if a token was generated already
    grammar: Grammar | None = None  # what the text must follow

    def copy(self) -> Adjustment:
        """The same one for another text, at whose beginning its grammar is."""
        return replace(self, grammar=self.grammar and self.grammar.copy())

    def of(self, logits_V: Tensor, made: Sequence[int]) -> Tensor:
        """(V,) fp32 logits on the CPU, changed. made: the tokens that were generated so far."""
        changed_V = logits_V.float().cpu().clone()
        for token, value in self.bias.items():
            changed_V[token] += value
        if made and (self.frequency_penalty or self.presence_penalty):
            counts = Counter(made)
            tokens = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()), dtype=torch.float32)
            changed_V[tokens] -= self.frequency_penalty * times + self.presence_penalty
        if self.grammar is not None:
            changed_V[~self.grammar.allowed()] = -torch.inf
        return changed_V


def chances_of(logits_V: Tensor, temperature: float) -> Tensor:
    """(V,) fp32 on the CPU: how likely each token is to be drawn. DivergedError for logits by which
    none can be.
    """
    chances_V = (logits_V.float().cpu() / max(temperature, LEAST_TEMPERATURE)).softmax(-1)
    if chances_V.isnan().any():
        raise DivergedError(
            "no token can be drawn: the model computes NaN or infinite numbers for this prompt. "
            "Its weights have grown beyond all bounds. Use those of an earlier step."
        )
    return chances_V


def draw(logits_V: Tensor, *, temperature: float, top_p: float, chance: torch.Generator) -> int:
    """A token that is drawn by (V,) logits, from the likeliest ones that top_p leaves.
    DivergedError as `chances_of`.
    """
    chances_V = chances_of(logits_V, temperature)
    if top_p < 1:
        ordered_V, tokens_V = chances_V.sort(descending=True, stable=True)
        # a token stays if those before it do not have the share yet; the likeliest always does
        is_behind_V = ordered_V.cumsum(-1) - ordered_V >= top_p
        is_behind_V[0] = False
        ordered_V[is_behind_V] = 0
        return int(tokens_V[torch.multinomial(ordered_V, 1, generator=chance)])
    return int(torch.multinomial(chances_V, 1, generator=chance))
