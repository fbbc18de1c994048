"""Shared by tasks that generate their answers: texts of generated tokens, and `predict`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.protocol.abilities import CutRow, GeneratedText, Prediction, Search

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row


def text_of(
    tokenizer: Any, tokens: Sequence[int], *, ends: Collection[int], cleans_up_spaces: bool = False
) -> GeneratedText:
    """The text of generated tokens up to the first of the ends, without special tokens.

    cleans_up_spaces: remove spaces before punctuation, as the tokenizer does by default.
    """
    stop = next((at for at, token in enumerate(tokens) if token in ends), None)
    ids = list(tokens[:stop])
    text = tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=cleans_up_spaces
    )
    return GeneratedText(str(text), len(ids), is_cut=stop is None)


def refuse_sampling(search: Search, *, task: str, texts: str) -> None:
    """ConfigError for a search that samples tokens. texts: what the task writes ("answers")."""
    if search.temperature is not None:
        raise ConfigError(f"task {task!r} draws no {texts}. Leave out --temperature.")


def predictions(n_best: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """{"prediction"} for each row, and "n_best" for a row of several texts, the best first."""
    return [
        {"prediction": texts[0]} if len(texts) == 1 else {"prediction": texts[0], "n_best": texts}
        for texts in n_best
    ]


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What the encoding of a task cuts off a row."""
    return CutRow(task.encode(row).cuts)


def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """The predictions of a task that has the ability Answers, for rows without references."""
    encoded = [task.encode(row) for row in rows]
    raw = [{"question": "", "answers": []}] * len(rows)
    answers = task.answers(model, encoded, raw, search=how.search, max_tokens=how.max_tokens)
    if answers.n_best is None:
        return predictions([[text] for text in answers.predictions])
    return predictions(answers.n_best)
