"""How fast conversations become tokens with their masks, against a rendering and one batched call
of the tokenizer, which gives ids alone.

    python benchmarks/chat_encoding.py --tokenizer ../shared/data/tokenizers/starcoder

Conversations of the standard library's own words, 30 a turn. Both sides take turns; seconds are of
processors, the least of the rounds. Exits 1 when the ids of the two sides differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

from transformers import AutoTokenizer

from trainer.config.schema import EmbeddedTokenizer
from trainer.data import stdlib_docs, vocabulary
from trainer.data.chat.chat_template import ChatTemplate

WORDS_OF_A_TURN, TURNS_AT_ONCE = 30, 2048
ROLES = ("user", "assistant")


def conversations(turns: int) -> list[dict[str, Any]]:
    """Rows of so many turns each, about TURNS_AT_ONCE turns together."""
    words = " ".join(row["text"] for row in stdlib_docs.texts("train")).split()
    draw = random.Random(turns)

    def text() -> str:
        start = draw.randrange(len(words) - WORDS_OF_A_TURN)
        return " ".join(words[start : start + WORDS_OF_A_TURN])

    return [
        {"messages": [{"role": ROLES[number % 2], "content": text()} for number in range(turns)]}
        for _ in range(max(1, TURNS_AT_ONCE // turns))
    ]


def stock(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ids by a rendering of each row and one call of the tokenizer."""
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def least_seconds(
    chat: ChatTemplate, rows: Sequence[dict[str, Any]], rounds: int
) -> tuple[float, float]:
    """The least seconds of ours and of the stock side, which take turns."""
    end = chat.tokenizer.eos_token_id
    times = [
        (seconds(partial(chat.tokens, rows, end)), seconds(partial(stock, chat.tokenizer, rows)))
        for _ in range(rounds)
    ]
    return min(one for one, _ in times), min(one for _, one in times)


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of the processor that one call takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Print rows a second of both sides, and how many times as long ours takes."""
    flags = argparse.ArgumentParser(
        description="How fast conversations become tokens with their masks."
    )
    flags.add_argument("--tokenizer", default=None, help="A folder; default: the embedded one.")
    flags.add_argument("--template", default="chatml", help="A built-in one, or a file.")
    flags.add_argument("--turns", type=int, nargs="+", default=[2, 8, 32, 128, 512])
    flags.add_argument("--rounds", type=int, default=7)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Any = (
            AutoTokenizer.from_pretrained(given.tokenizer)
            if given.tokenizer
            else vocabulary.embedded_tokenizer(EmbeddedTokenizer(vocab_size=4096), Path(folder))
        )
    chat = ChatTemplate.of(tokenizer, given.template, None)
    print(f"{'turns':>5} {'rows':>5} {'ours rows/s':>12} {'stock rows/s':>12} {'ratio':>6}")
    for turns in given.turns:
        rows = conversations(turns)
        ours = [one["ids"] for one in chat.tokens(rows, tokenizer.eos_token_id)]
        for mine, theirs in zip(ours, stock(tokenizer, rows), strict=True):
            if mine[: len(theirs)] != theirs:
                sys.exit("the ids differ")
        ours_s, stock_s = least_seconds(chat, rows, given.rounds)
        print(
            f"{turns:5} {len(rows):5} {len(rows) / ours_s:12.0f} {len(rows) / stock_s:12.0f} "
            f"{ours_s / stock_s:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
