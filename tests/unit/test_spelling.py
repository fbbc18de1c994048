"""A text that is spelt token by token is the text of all its tokens."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from trainer.data import vocabulary
from trainer.models.generation.texts import TORN, GrowingText, Spelling, TokenChoice

_ROOT = Path(__file__).parents[2]
_DATA = _ROOT / os.environ.get("LATHE_DATA", "../shared/data")
TEXT = (
    "Where does Ada keep the red key? 🙂🙂 👩‍👩‍👧  In  the cellar (über dem é Tisch)…\n\n\t漢字テスト "
    "the unaffable walking; 12,345.67 don't. "
) * 4


def llama_like() -> tuple[Any, list[int]]:
    """SentencePiece with a token for each byte of what it does not know."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "b", "▁"]
    backend = Tokenizer(models.BPE({one: n for n, one in enumerate(pieces)}, []))
    replace = decoders.Replace("▁", " ")
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    ids = [257, 258, 257, 257, *"🙂".encode(), *"é漢".encode(), 258, 256 + 1] * 12
    return backend, ids


def spelling_of(name: str, cache: Path) -> tuple[Any, list[int]]:
    """(decode, ids of a long text)"""
    if name == "llama-like":
        backend, ids = llama_like()
        return backend.decode, ids
    if not (_DATA / "tokenizers" / name).is_dir():
        pytest.skip(f"no tokenizer {name} at {_DATA / 'tokenizers'}; set LATHE_DATA")
    made: Any = vocabulary.load_tokenizer(f"tokenizers/{name}", data_path=_DATA, cache_dir=cache)

    def decode(ids: Sequence[int]) -> str:
        return made.decode([*ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode, made(TEXT, add_special_tokens=False)["input_ids"]


NAMES = ("starcoder", "t5", "bert-uncased", "llama-like")


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_one_by_one_are_spelt_as_all_together(
    name: str, is_random: bool, tmp_path: Path
) -> None:
    decode, ids = spelling_of(name, tmp_path)
    if is_random:
        random.Random(3).shuffle(ids)
    lengths: list[int] = []

    def spell(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode(tokens)

    spelling = Spelling(spell)
    for number, token in enumerate(ids):
        added = spelling.added_by(token)
        before = spelling.text
        text = spelling.add(token)
        whole = decode(ids[: number + 1])
        assert text == whole or (text.endswith(TORN) and whole.endswith(TORN))
        if TORN not in before and TORN not in text:
            assert before + added == text
    if not is_random:
        assert max(lengths) < 60 < len(ids)


@pytest.mark.parametrize("stop", ["", "cellar", "🙂 ", "é"])
@pytest.mark.parametrize("name", NAMES)
def test_the_texts_of_tokens_are_the_text_up_to_a_stop(
    name: str, stop: str, tmp_path: Path
) -> None:
    decode, ids = spelling_of(name, tmp_path)
    stops = [stop] if stop else []
    text = GrowingText([1], len(ids), (), decode, stops=stops, is_told=True, num_likeliest=1)
    told = ""
    for token in ids:
        text.chosen.append(TokenChoice(token, 0.0, [], []))
        told += (text.take(token) or {"text": ""})["text"]
        if text.finish:
            break
    whole = decode(ids)
    assert text.text == told == (whole.partition(stop)[0] if stop else whole)
    assert text.finish == ("stop" if stop and stop in whole else "length")
    parts = text.texts_of_choices()
    assert "".join(parts) == text.text
    assert len(parts) == len(text.chosen)
    if text.finish == "stop":
        assert parts[-1]
    else:
        assert len(text.chosen) == len(text.made)
        assert sum(part.startswith(" ") for part in parts) > 3
