"""Texts that a language model writes: token by token, drawn, or bound by a grammar."""
