"""The text of tokens that are added one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TORN = "\ufffd"  # stands for a character of which only some tokens are there yet
_WINDOW = 12  # tokens: enough for a character of several tokens, and for an accent behind a letter


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
