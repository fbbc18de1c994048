"""Texts that must be JSON, token by token: which tokens may follow those that were generated.

The grammar of a schema, and the tokens that fit it, are llguidance's (an extra, `schema`).
"""

# V vocabulary

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.files.packages import extra

# What may stand between two parts of a JSON text: nothing or a blank. A model that likes blanks and
# new lines would never come to an end.
_BETWEEN = "[ ]?"


class Grammar:
    """Follows one text, from its first token on.

    matcher: llguidance's LLMatcher, at the beginning of the text. size: V, of the model's logits.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher, self._size = matcher, size

    def copy(self) -> Grammar:
        """The same grammar for another text, at its beginning as this one is."""
        return Grammar(self._matcher.deep_copy(), self._size)

    def allowed(self) -> Tensor:
        """(V,) whether a token may be the next one; a token that ends the text may be, where the
        text is whole.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits_V = np.unpackbits(mask, bitorder="little")[: self._size]
        return torch.from_numpy(bits_V.astype(bool))

    def take(self, token: int) -> str:
        """Go on by a token, which may be one that ends the text; returns why the text ends behind
        it, "" if it goes on.

        "stop": the text is whole, and nothing may follow. "length": the grammar has grown beyond a
        limit of llguidance, which allows then no token but one that ends the text, and the text is
        not whole.
        """
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            return "length"
        return "stop" if self._matcher.is_stopped() else ""


def grammar_of(
    schema: Mapping[str, Any], tokenizer: Any, *, ends: tuple[int, ...], size: int
) -> Grammar:
    """The grammar of JSON texts that a JSON schema describes, at the beginning of a text.

    tokenizer: a fast one of transformers. ends: the tokens that end a text. size: V, of the model's
    logits. ConfigError for a schema that is wrong or says what llguidance cannot hold, for another
    kind of tokenizer, and without llguidance.
    """
    library, tokens = _tokens_of(tokenizer, ends, size)
    grammar = ""
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(
            dict(schema), overrides={"whitespace_pattern": _BETWEEN}
        )
        problem = library.LLMatcher.validate_grammar(grammar, tokens)
    except ValueError as error:
        problem = str(error)
    matcher = None if problem else library.LLMatcher(tokens, grammar)
    if matcher is not None:
        matcher.compute_bitmask()  # what has no first token, such as a "$ref" to itself, fails here
        problem = "no text fits it" if matcher.is_error() else ""
    if problem:
        reason = problem.strip().splitlines()[0].rstrip(":")
        raise ConfigError(f"the schema cannot be held: {reason}. Simplify that part of it")
    return Grammar(matcher, size)


@functools.lru_cache(maxsize=2)
def _tokens_of(tokenizer: Any, ends: tuple[int, ...], size: int) -> tuple[Any, Any]:
    """(llguidance, its view of the tokenizer), which takes a second for a large vocabulary."""
    llguidance = extra("llguidance", "schema")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            "JSON by a schema needs a fast tokenizer, and this model has a "
            f"{type(tokenizer).__name__}"
        )
    try:
        tokens = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(ends))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"llguidance cannot read this model's tokenizer: {error}") from None
    return llguidance, tokens
