"""Generates texts with a language model, several in one forward pass, and yields each as it
grows.
"""

# R texts that are not finished, L tokens of a step, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.data.padding import pad_right
from trainer.errors import ConfigError

TORN = "\ufffd"  # stands for a character of which only some tokens are generated yet
Piece = dict[str, Any]


@dataclass
class GrowingText:
    """One text that is being generated."""

    prompt: list[int]  # token ids
    most: int  # the most tokens to generate
    temperature: float
    stops: list[str]  # the text ends before the first of these
    chance: torch.Generator  # for the draws
    made: list[int] = field(default_factory=list[int])  # token ids that were generated
    text: str = ""  # of these tokens
    told: int = 0  # how many characters of it were returned already
    finish: str = ""  # why it ended: "stop" or "length"; "" while it grows

    def take(self, token: int, tokenizer: Any, end: int) -> Piece | None:
        """Add a token; returns the new characters that no later token can change, if any."""
        if token == end:
            self.finish = "stop"
            return self._rest()
        self.made.append(token)
        self.text = tokenizer.decode(self.made)
        places = [self.text.find(stop) for stop in self.stops if stop in self.text]
        if places:
            self.text, self.finish = self.text[: min(places)], "stop"
            return self._rest()
        if len(self.made) == self.most:
            self.finish = "length"
            return self._rest()
        return self._until(len(self.text) - unsure(self.text, self.stops))

    def _rest(self) -> Piece | None:
        return self._until(len(self.text))

    def _until(self, sure: int) -> Piece | None:
        piece = self.text[self.told : sure]
        self.told = max(self.told, sure)
        return {"text": piece} if piece else None

    def last(self) -> Piece:
        """The reason why it ended, and its numbers of tokens."""
        counts = {"prompt_tokens": len(self.prompt), "tokens": len(self.made)}
        return {"finish": self.finish, **counts}


def begun(task: Any, base: Any, prompt: str, asked: dict[str, Any]) -> GrowingText:
    """A text that continues `prompt`. ConfigError for a prompt without tokens, or with too many."""
    limit: int = getattr(base.config, "max_position_embeddings", None) or 1 << 20
    ids: list[int] = task.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids or len(ids) >= limit:
        raise ConfigError(f"the prompt has {len(ids)} tokens, want 1 to {limit - 1}")
    return GrowingText(
        prompt=ids,
        most=min(asked["max_tokens"], limit - len(ids)),
        temperature=1.0 if asked["temperature"] is None else asked["temperature"],
        stops=asked["stop"],
        chance=torch.Generator().manual_seed(asked["seed"]),
    )


def grown(task: Any, base: Any, texts: Sequence[GrowingText]) -> Iterator[tuple[int, Piece]]:
    """Generate all texts, one token of each at a time, and yield (number of the text, new piece).
    The last piece of a text tells its end.

    Each text draws from its own generator, so that, up to rounding, it is the same as when it is
    generated alone.
    """
    alive = list(range(len(texts)))
    reversed_RL, mask_RL = pad_right([text.prompt[::-1] for text in texts], task.pad)
    step_RL, mask_RL = reversed_RL.flip(1), mask_RL.flip(1)
    cache = None
    # only the last token's logits: those of a whole prompt can take gigabytes
    last = {"logits_to_keep": 1} if base._supports_logits_to_keep() else {}
    while alive:
        positions_RL = (mask_RL.cumsum(-1) - 1).clamp(min=0)[:, -step_RL.shape[1] :]
        out = base(
            input_ids=step_RL.to(base.device),
            attention_mask=mask_RL.to(base.device),
            position_ids=positions_RL.to(base.device),
            past_key_values=cache,
            use_cache=True,
            **last,
        )
        cache = out.past_key_values
        for number, logits_V in zip(alive, out.logits[:, -1], strict=True):
            text = texts[number]
            piece = text.take(_pick_token(logits_V, text), task.tokenizer, task.end)
            if piece is not None:
                yield number, piece
            if text.finish:
                yield number, text.last()
        rows = [row for row, number in enumerate(alive) if not texts[number].finish]
        if not rows:
            return
        if len(rows) < len(alive):
            cache.batch_select_indices(torch.tensor(rows, device=base.device))
            mask_RL = mask_RL[rows]
            alive = [alive[row] for row in rows]
        step_RL = torch.tensor([[texts[number].made[-1]] for number in alive])
        mask_RL = torch.cat([mask_RL, mask_RL.new_ones(len(alive), 1)], 1)


def unsure(text: str, stops: list[str]) -> int:
    """How many characters at the end a later token may change or turn into a stop text."""
    whole = text.rstrip(TORN)
    starts = [
        length for stop in stops for length in range(1, len(stop)) if whole.endswith(stop[:length])
    ]
    return len(text) - len(whole) + max(starts, default=0)


def _pick_token(logits_V: Tensor, text: GrowingText) -> int:
    """A token from (V,) logits: the most likely one at temperature 0, else a random one."""
    if not text.temperature:
        return int(logits_V.argmax())
    chances_V = (logits_V.float().cpu() / text.temperature).softmax(-1)
    return int(torch.multinomial(chances_V, 1, generator=text.chance))
