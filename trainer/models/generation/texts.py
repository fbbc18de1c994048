"""Generates texts with a language model, several in one forward pass, and yields each as it
grows: for predictions of files of rows, and for the service.
"""

# R texts that are not finished, L tokens of a step, V vocabulary

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.data.padding import pad_right
from trainer.errors import ConfigError
from trainer.models.generation.sampling import Adjustment, draw
from trainer.protocol.abilities import GeneratedText

TORN = "\ufffd"  # stands for a character of which only some tokens are there yet
_WINDOW = 12  # tokens: enough for a character of several tokens, and for an accent behind a letter
Piece = dict[str, Any]


class Spelling:
    """The text of growing tokens. Each token is spelt with the few before it, so that it costs the
    same however many there are.

    spell: the text of tokens. Tokenizers treat the first one otherwise (SentencePiece drops its
    blank), so that what a token adds is the difference of two texts with the same first token.
    """

    def __init__(self, spell: Callable[[Sequence[int]], str]) -> None:
        self._spell = spell
        self._tokens: list[int] = []  # from the first one that is still spelt
        self._settled = 0  # of these, whose text stands in `_before`
        self._before = ""
        self._head = ""  # what the settled ones are in a text that begins with the first of _tokens
        self._earlier: list[int] = []  # all others
        self.text = ""

    def add(self, token: int) -> str:
        """The text of all tokens, with a new one. Its end is torn until a character is whole."""
        self._tokens.append(token)
        self.text = self._text_of(self._tokens)
        if len(self._tokens) - self._settled >= _WINDOW and not self.text.endswith(TORN):
            self._settle()
        return self.text

    def added_by(self, token: int) -> str:
        """The characters that a token would add."""
        longer = self._text_of([*self._tokens, token])
        same = self.text.rstrip(TORN)
        return longer.removeprefix(self.text if longer.startswith(self.text) else same)

    def _text_of(self, tokens: list[int]) -> str:
        spelt = self._spell(tokens)
        if spelt.startswith(self._head):
            return self._before + spelt[len(self._head) :]
        if spelt.endswith(TORN):  # a byte may tear the characters before it too, until it is whole
            return self.text.rstrip(TORN) + TORN
        return self._spell([*self._earlier, *tokens])

    def _settle(self) -> None:
        """Spell no longer what stands before the tokens that came last."""
        for first in range(self._settled, len(self._tokens) - _WINDOW // 2):
            rest = self._tokens[first:]
            head = self._spell(rest)
            # else the next token might be the first of a text, or rest needs what was before it
            if head.strip() and self.text.endswith(head.strip()):
                self._earlier += self._tokens[:first]
                self._tokens, self._settled = rest, len(rest)
                self._head, self._before = head, self.text
                return


@dataclass(frozen=True)
class TokenChoice:
    """The log-probability of a token that was generated, and of the likeliest ones in its place."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]
    spelt: list[str]  # what each of the likeliest would add to the text


@dataclass
class GrowingText:
    """One text that is being generated."""

    prompt: list[int]  # token ids
    most: int  # the most tokens to generate
    ends: Collection[int]  # the tokens that end it
    spell: Callable[[Sequence[int]], str]  # the text of generated tokens
    temperature: float | None = None  # None: the most likely token is chosen
    top_p: float = 1.0  # tokens are drawn from the likeliest, whose probabilities sum up to this
    chance: torch.Generator = field(default_factory=torch.Generator)  # for the draws
    adjustment: Adjustment | None = None  # of the logits, before a token is chosen
    stops: Sequence[str] = ()  # the text ends before the first of these
    closing: str = ""  # is no part of the text where a token ends it behind this
    is_told: bool = False  # whether its pieces are read while it grows
    num_likeliest: int | None = None  # log-probabilities that are kept beside each; None: none
    made: list[int] = field(default_factory=list[int])  # token ids that were generated
    chosen: list[TokenChoice] = field(default_factory=list[TokenChoice])
    bounds: list[int] = field(default_factory=list[int])  # of each choice: where its text ends
    text: str = ""  # of these tokens
    told: int = 0  # how many characters of it were returned already
    finish: str = ""  # why it ended: "stop" or "length"; "" while it grows

    def __post_init__(self) -> None:
        self._spelling = Spelling(self.spell)

    def take(self, token: int) -> Piece | None:
        """Add a token; returns the new characters that no later token can change, if any."""
        grammar = self.adjustment.grammar if self.adjustment is not None else None
        end = grammar.take(token) if grammar is not None else ""
        if token in self.ends:
            return self._end(end or "stop", self.spell(self.made).removesuffix(self.closing))
        self.made.append(token)
        is_last = bool(end) or len(self.made) == self.most
        finish = end or "length"
        if not (self.is_told or self.stops or self.num_likeliest is not None):
            return self._end(finish, self.spell(self.made)) if is_last else None
        safe_start = len(self.text.rstrip(TORN)) - max(map(len, self.stops), default=0)
        self.text = self._spelling.add(token)
        self.bounds.append(max(len(self.text.rstrip(TORN)), *self.bounds[-1:], 0))
        places = [self.text.find(stop, max(0, safe_start)) for stop in self.stops]
        if max(places, default=-1) >= 0:
            first = min(place for place in places if place >= 0)
            starts = [0, *self.bounds[:-1]]
            del self.chosen[sum(start < first for start in starts) :]  # text begins behind it
            return self._end("stop", self.text[:first])
        if is_last:
            return self._end(finish, self.spell(self.made))
        rest = self.text[self.told :]
        return self._until(len(self.text) - unsure(rest, self.stops, closing=self.closing))

    def _end(self, finish: str, text: str) -> Piece | None:
        self.text, self.finish = text, finish
        return self._until(len(text))

    def _until(self, sure: int) -> Piece | None:
        piece = self.text[self.told : sure]
        self.told = max(self.told, sure)
        return {"text": piece} if piece and self.is_told else None

    def next_token(self, logits_V: Tensor, likeliest: int) -> int:
        """The token to take next, by the model's (V,) logits and the likeliest token by them."""
        if self.adjustment is not None:
            logits_V = self.adjustment.of(logits_V, self.made)
            likeliest = int(logits_V.argmax())
        if self.temperature is None:
            return likeliest
        return draw(logits_V, temperature=self.temperature, top_p=self.top_p, chance=self.chance)

    def keep_logprobs(self, logits_V: Tensor, token: int) -> None:
        """Remember how likely a token was that is taken next, and what was likelier."""
        if self.num_likeliest is None or token in self.ends:
            return
        logprobs_V = logits_V.float().log_softmax(-1)
        top = logprobs_V.topk(self.num_likeliest)
        likeliest = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        spelt = [self._spelling.added_by(one) for one, _ in likeliest]
        self.chosen.append(TokenChoice(token, float(logprobs_V[token]), likeliest, spelt))

    def texts_of_choices(self) -> list[str]:
        """The text of each of `chosen`, after the end: together they are the whole text. A
        character stands with the last of its tokens.
        """
        ends = [min(bound, len(self.text)) for bound in self.bounds[: len(self.chosen)]]
        ends[-1:] = [len(self.text)] if ends else []
        starts = [0, *ends][: len(ends)]
        return [self.text[start:end] for start, end in zip(starts, ends, strict=True)]

    def last(self) -> Piece:
        """The reason why it ended, and its numbers of tokens."""
        counts = {"prompt_tokens": len(self.prompt), "tokens": len(self.made)}
        return {"finish": self.finish, **counts}

    def whole(self) -> GeneratedText:
        """The text, after its end."""
        return GeneratedText(self.text, len(self.made), is_cut=self.finish == "length")


@dataclass(frozen=True)
class Fit:
    """A prompt as the model reads it, and the room behind it."""

    ids: list[int]
    most: int  # the most tokens that are generated
    cut_tokens: int  # how many tokens the prompt lost


def fitted(
    ids: Sequence[int], *, positions: int, most: int, least: int = 1, opening: Sequence[int] = ()
) -> Fit:
    """The one rule for prompts that are too long, of evaluation, predict and the service.

    A prompt with room for `least` tokens behind it is read whole; as many tokens are generated as
    have room, `most` at most. A longer prompt loses its beginning until `most` tokens have room,
    but not the tokens that open every text. The service refuses a prompt that lost tokens, and
    predict tells it. ConfigError if `most` tokens leave no room for any prompt.
    """
    room = positions - len(ids)
    if room >= least:
        return Fit(list(ids), min(most, room), 0)
    capacity = positions - most
    if capacity < 1:
        raise ConfigError(
            f"{most} tokens to generate: the model has {positions} positions, which leaves none "
            f"for a prompt of {len(ids)} tokens. Use --max_tokens {positions - 1} or fewer."
        )
    rest = capacity - len(opening)
    is_opened = rest > 0 and list(ids[: len(opening)]) == list(opening)
    shorter = [*opening, *ids[-rest:]] if is_opened else list(ids[-capacity:])
    return Fit(shorter, most, len(ids) - capacity)


def chance_of(seed: int, prompt: Sequence[int], number: int) -> torch.Generator:
    """For the draws of text `number` of those that continue a prompt: the same whatever is
    generated beside it, and on every device.
    """
    digest = hashlib.sha256(f"{seed}:{list(prompt)}:{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def grown(base: Any, texts: Sequence[GrowingText], *, pad: int) -> Iterator[tuple[int, Piece]]:
    """Generate all texts, one token of each at a time, and yield (number of the text, new piece).
    The last piece of a text tells its end.

    base: a causal language model of transformers, in evaluation mode. Each text draws from its own
    generator, so that, up to rounding, it is the same as when it is generated alone.
    """
    alive = list(range(len(texts)))
    reversed_RL, mask_RL = pad_right([text.prompt[::-1] for text in texts], pad)
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
        logits_RV = out.logits[:, -1]
        likeliest_R = logits_RV.argmax(-1).tolist()
        for number, logits_V, likeliest in zip(alive, logits_RV, likeliest_R, strict=True):
            text = texts[number]
            token = text.next_token(logits_V, likeliest)
            text.keep_logprobs(logits_V, token)
            piece = text.take(token)
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


def unsure(text: str, stops: Sequence[str], *, closing: str = "") -> int:
    """How many characters at the end a later token may change, turn into a stop text, or make a
    part of the closing.
    """
    whole = text.rstrip(TORN)
    sure = len(whole)
    for awaited, most in (*((stop, len(stop) - 1) for stop in stops), (closing, len(closing))):
        for start in range(max(0, len(whole) - most), sure):
            if awaited.startswith(whole[start:]):
                sure = start
                break
    return len(text) - sure
