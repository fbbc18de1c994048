"""The question converter on a tiny T5 with random weights: batches, the cache, and work that was
interrupted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from tests.wording import refused
from trainer.recipes.vera import neural
from trainer.recipes.vera.convert import Conversion, convert
from trainer.recipes.vera.neural import QuestionConverter

WORDS = [
    "is",
    "ice",
    "cold",
    "warm",
    "can",
    "it",
    "melt",
    "what",
    "does",
    "the",
    "sun",
    "do",
    "shine",
    ".",
    "?",
]
TEXTS = [
    "is ice cold ? </s> yes",
    "what does the sun do ? </s> shine",
    "can it melt ? </s> yes",
    "is it ? </s> warm",
]


def tiny_t5(folder: Path, seed: int = 0) -> Path:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    config = T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        vocab_size=20,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    for parameter in model.parameters():  # random enough that answers differ
        torch.nn.init.normal_(parameter, std=0.7)
    model.generation_config.num_beams = 3  # what a model recommends is not what a conversion does
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny_t5(tmp_path / "model"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end by 16 tokens: where their length is not the subject."""
    monkeypatch.setattr(neural, "_MAX_LENGTH", 16)


def converter(model: str, folder: Path, batch: int = 64) -> QuestionConverter:
    return QuestionConverter(model, cache_dir=folder, batch=batch, device="cpu")


def cache_of(folder: Path) -> Path:
    (path,) = folder.glob("question_converter/*.jsonl")
    return path


@pytest.mark.long
def test_a_batch_says_what_each_text_alone_says(model: str, tmp_path: Path) -> None:
    together = converter(model, tmp_path / "a")(TEXTS)
    alone = converter(model, tmp_path / "b", batch=1)
    assert [alone([text])[0] for text in TEXTS] == together
    assert len(set(together)) > 1


@pytest.mark.long
def test_answers_are_greedy_and_end_by_256_tokens(model: str, tmp_path: Path) -> None:
    loaded = T5ForConditionalGeneration.from_pretrained(model).eval()
    used = converter(model, tmp_path)
    (answer,) = used(TEXTS[:1])
    ids = torch.tensor([used._tokenizer(TEXTS[0])["input_ids"]])
    tokens = [0]
    with torch.no_grad():
        while len(tokens) < 256 and (tokens[-1] != 1):
            logits = loaded(input_ids=ids, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    assert answer == used._tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.usefixtures("short")
def test_a_text_is_converted_once(model: str, tmp_path: Path) -> None:
    first = converter(model, tmp_path)
    answers = first([*TEXTS, TEXTS[0]])
    assert first.num_generated == len(TEXTS)
    again = converter(model, tmp_path)
    assert again(TEXTS[::-1]) == answers[:4][::-1]
    assert again.num_generated == 0


@pytest.mark.usefixtures("short")
def test_other_weights_have_a_cache_of_their_own(model: str, tmp_path: Path) -> None:
    converter(model, tmp_path / "cache")(TEXTS)
    other = converter(str(tiny_t5(tmp_path / "other", seed=1)), tmp_path / "cache")
    other(TEXTS)
    assert other.num_generated == len(TEXTS)


@pytest.mark.usefixtures("short")
def test_an_interrupted_conversion_goes_on_where_it_was(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = converter(model, tmp_path / "whole", batch=1)(TEXTS)
    broken = converter(model, tmp_path / "cache", batch=1)
    generate, calls = broken._generate, 0

    def killed(texts: list[str]) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return generate(texts)

    monkeypatch.setattr(broken, "_generate", killed)
    with pytest.raises(KeyboardInterrupt):
        broken(TEXTS)
    with cache_of(tmp_path / "cache").open("a") as cache:
        cache.write('["a line that was cut')
    resumed = converter(model, tmp_path / "cache", batch=1)
    assert resumed(TEXTS) == want
    assert resumed.num_generated == len(TEXTS) - 2
    lines = cache_of(tmp_path / "cache").read_text().splitlines()
    assert sorted(json.loads(line)[0] for line in lines) == sorted(TEXTS)


def test_two_conversions_do_not_write_one_cache(model: str, tmp_path: Path) -> None:
    converter(model, tmp_path)(TEXTS[:1])
    with (
        FileLock(f"{cache_of(tmp_path)}.lock"),
        refused("conversion_running"),
    ):
        converter(model, tmp_path)(TEXTS)


def test_a_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with refused("converter_unloadable"):
        converter(str(tmp_path / "nothing"), tmp_path)(TEXTS)


def test_a_set_is_converted_with_a_model(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dev.tsv").write_text("can it melt ? \\n (A) it can (B) the sun\tit can\n")
    asked = Conversion("unifiedqa", tmp_path / "dev.tsv", tmp_path / "out", task="other")
    with caplog.at_level(logging.INFO):
        (report,) = convert(asked, converter(model, tmp_path / "cache"))
    (group,) = json.loads((tmp_path / "out/other/dev.json").read_text())
    answers = converter(model, tmp_path / "cache")(
        ["can it melt ? </s> it can", "can it melt ? </s> the sun"]
    )
    full = [text if text.endswith((".", "!")) else f"{text.strip('?')}." for text in answers]
    assert group == {"golds": full[:1], "distractors": full[1:]}
    assert report.converter_share == 1.0
    assert "2 texts, 0 of them" in caplog.text
