"""The exact strings that the decoder and the context encoder of the cross-attention task read.

The published system uses "chat" for GPTBigCode, Tulu and Llama bases, and "mistral" for Mistral;
"plain" is its early form. The tags are ordinary text, not special tokens. Source:
ServiceNow/xc-cache (HEAD 0e90cb8, "plain" 7a75209). "bare" is ours: the texts alone, for bases that
were trained on no chat format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Template = Literal["chat", "plain", "mistral", "bare"]

_CONTEXT_MARK = "<|C|>"  # ends the user's turn that holds a context
_LLAMA_SYSTEM = (
    "Please answer the following question given the following passages. Please be brief. "
    "If you cannot answer the question, please reply with 'UNANSWERABLE'.\n"
)


def prompt(question: str, template: Template) -> str:
    """The decoder's text up to where the answer begins; see `answer`."""
    if template == "plain":
        return f"question: {question} \n answer: "
    return question if template == "bare" else _turn(question, template)


def answer(text: str, template: Template) -> str:
    """An answer as it follows its prompt. A space stands before it only in "bare", where its first
    word would otherwise become another token.
    """
    return f" {text}" if template == "bare" else text


def answered(text: str, template: Template) -> str:
    """The answer in a text that was generated behind a prompt; the inverse of `answer`."""
    return text.removeprefix(" ") if template == "bare" else text


def context_text(
    question: str, contexts: Sequence[str], template: Template, *, question_on_context: bool
) -> str:
    """The context encoder's text: all contexts joined by one space, under one header.

    question_on_context: the header also holds the question. The published early system had no such
    option; "plain" then writes "question: ... context: ...".
    """
    joined = " ".join(contexts)
    if template == "bare":
        return f"{question} {joined}" if question_on_context else joined
    if template == "plain":
        return (
            f"question: {question} context: {joined}"
            if question_on_context
            else f"context: {joined}"
        )
    return _turn((question if question_on_context else "") + _CONTEXT_MARK, template) + joined


def chunk_texts(
    question: str, contexts: Sequence[str], template: Template, *, question_on_context: bool
) -> list[str]:
    """One text for each context, under a header of its own. Each is encoded by itself, with
    positions from 0.
    """
    return [
        context_text(question, [one], template, question_on_context=question_on_context)
        for one in contexts
    ]


def context_texts(
    question: str,
    contexts: Sequence[str],
    template: Template,
    *,
    question_on_context: bool,
    chunked: bool,
) -> list[str]:
    """The texts that the context encoder reads: one of all contexts or, if chunked, one for
    each.
    """
    if chunked:
        return chunk_texts(question, contexts, template, question_on_context=question_on_context)
    return [context_text(question, contexts, template, question_on_context=question_on_context)]


def in_context_prompt(
    question: str, contexts: Sequence[str], style: Literal["tulu", "llama_chat"]
) -> str:
    """The published prompting baseline: contexts and question in one prompt, no added layers."""
    joined = " ".join(contexts)
    if style == "tulu":
        return f"<|system|>\n{joined}\n<|user|>\n{question}\n<|assistant|>\n"
    return (
        f"[INST] <<SYS>>\n{_LLAMA_SYSTEM}\n<</SYS>>\n\n{joined}\nQuestion: "
        f"{question}\n[/INST]\nAnswer: "
    )


def _turn(user: str, template: Template) -> str:
    """A turn of the user, and the opening of the assistant's turn."""
    return (
        f"[INST] {user} [/INST] " if template == "mistral" else f"<|user|>\n{user}\n<|assistant|>\n"
    )
