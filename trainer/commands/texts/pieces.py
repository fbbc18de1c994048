"""The pieces of the texts that answer requests, as they grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.commands.texts.echo import token_entries
from trainer.commands.texts.wishes import PromptOfText
from trainer.models.generation.texts import GrowingText, grown

_TOGETHER = 32  # texts of one forward


@dataclass(frozen=True)
class AnswerText:
    """One text of an answer."""

    of: int  # the number of its question
    number: int  # its own among the texts of the question
    prompt: PromptOfText
    text: GrowingText


def choices_of(number: int, prompts: Sequence[PromptOfText]) -> list[AnswerText]:
    """The texts of one question, in order: all of its first prompt, then those of the next."""
    pairs = [(prompt, text) for prompt in prompts for text in prompt.texts]
    return [AnswerText(number, at, prompt, text) for at, (prompt, text) in enumerate(pairs)]


def pieces(task: Any, base: Any, choices: Sequence[AnswerText]) -> Iterator[dict[str, Any]]:
    """The pieces of growing texts, each with the number of its question.

    Of a question with several answers each piece also says of which answer it is (`choice`), and
    the last piece of an answer whether the question is over (`is_last`). With log-probabilities
    that piece holds one object for each token. Of a request with tools it holds the `calls`, and
    the `content` beside them.
    """
    growing = Counter(choice.of for choice in choices)
    several = {number for number, count in growing.items() if count > 1}
    for choice, piece in _grown(task, base, choices):
        line = {"of": choice.of, **piece}
        if choice.of in several:
            line["choice"] = choice.number
        if "finish" in piece:
            growing[choice.of] -= 1
            if choice.of in several:
                line["is_last"] = not growing[choice.of]
            line |= _end_of(task, base, choice)
        yield line


def _grown(
    task: Any, base: Any, choices: Sequence[AnswerText]
) -> Iterator[tuple[AnswerText, dict[str, Any]]]:
    """Each piece with its text: first what repeats the prompt, then what is generated."""
    for choice in choices:
        if choice.prompt.text is not None:
            yield choice, {"text": choice.prompt.text}
    for choice in choices:
        if choice.text.most == 0:
            yield choice, {"finish": "length", "prompt_tokens": len(choice.prompt.ids), "tokens": 0}
    open_choices = [choice for choice in choices if choice.text.most > 0]
    for start in range(0, len(open_choices), _TOGETHER):
        some = open_choices[start : start + _TOGETHER]
        for number, piece in grown(base, [choice.text for choice in some], pad=task.pad):
            yield some[number], piece


def _end_of(task: Any, base: Any, choice: AnswerText) -> dict[str, Any]:
    """What the last piece of a text says besides its end."""
    text, tools = choice.text, choice.prompt.tools
    more: dict[str, Any] = {}
    if text.num_likeliest is not None:
        repeated: list[dict[str, Any]] = []
        of_prompt = choice.prompt.text
        if of_prompt is not None:
            repeated = token_entries(task, base, choice.prompt.ids, of_prompt, text.num_likeliest)
        more["logprobs"] = [*repeated, *_logprobs(text)]
    if tools is None:
        return more
    # what opens a call that was forced is a part of the answer, not of the prompt
    opening = len(tools.opening)
    more |= {"prompt_tokens": len(text.prompt) - opening, "tokens": len(text.made) + opening}
    with_marks = task.tokenizer.decode(
        text.made, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    said = tools.said(with_marks) if text.finish else None
    more |= {"content": text.text, "calls": []}
    if said is None:
        return more
    calls = [{"name": call.name, "arguments": call.arguments} for call in said.calls]
    finish = "tool_calls" if text.finish == "stop" else text.finish
    return {**more, "content": said.text, "calls": calls, "finish": finish}


def _logprobs(text: GrowingText) -> list[dict[str, Any]]:
    """One object for each token of a text that has ended; their texts together are the text."""
    entries: list[dict[str, Any]] = []
    for choice, own in zip(text.chosen, text.texts_of_choices(), strict=True):
        likeliest = [
            {"token": own if token == choice.token else spelt, "logprob": value}
            for (token, value), spelt in zip(choice.likeliest, choice.spelt, strict=True)
        ]
        entries.append({"token": own, "logprob": choice.logprob, "likeliest": likeliest})
    return entries
