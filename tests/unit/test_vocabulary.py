"""Tokenizers are found where they are, identified by content, and never pad with the end of
a text.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from tests.wording import refused
from trainer.config.schema import EmbeddedTokenizer
from trainer.data import vocabulary

_ROOT = Path(__file__).resolve().parents[2]
_DATA = _ROOT / os.environ.get("LATHE_DATA", "../shared/data")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def embedded(cache: Path) -> PreTrainedTokenizerFast:
    return vocabulary.embedded_tokenizer(EmbeddedTokenizer(vocab_size=320), cache)


def _real(name: str, cache: Path) -> PreTrainedTokenizerFast:
    if not (_DATA / "tokenizers" / name).is_dir():
        pytest.skip(f"no tokenizer {name} at {_DATA / 'tokenizers'}; set LATHE_DATA")
    return vocabulary.load_tokenizer(f"tokenizers/{name}", data_path=_DATA, cache_dir=cache)


def _embedded_id(cache: Path) -> str:
    return vocabulary.tokenizer_id(
        vocabulary.embedded_tokenizer(EmbeddedTokenizer(vocab_size=300), cache)
    )


TEXTS = ["plain", "  two  spaces, it 's \n\ttab", "Grüße 中文 \U0001f600", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_tokenizer_gives_back_any_text(
    embedded: PreTrainedTokenizerFast, text: str
) -> None:
    assert embedded.decode(embedded(text)["input_ids"]) == text


@pytest.fixture(scope="module")
def byt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as google/byt5-* are: the tokenizer's config, and no vocabulary."""
    folder = tmp_path_factory.mktemp("byt5")
    ByT5Tokenizer().save_pretrained(folder)
    assert not (folder / "tokenizer.json").exists()
    return folder


@pytest.mark.parametrize("text", [*TEXTS, "", "a</s>b", "the <extra_id_0> of <extra_id_124>"])
def test_byt5_has_the_ids_of_its_own_tokenizer_and_can_be_exported(
    text: str, byt5: Path, cache: Path, tmp_path: Path
) -> None:
    slow = ByT5Tokenizer.from_pretrained(byt5)
    ours = vocabulary.load_tokenizer(str(byt5), data_path=None, cache_dir=cache)
    ours.save_pretrained(tmp_path)
    for fast in (ours, AutoTokenizer.from_pretrained(tmp_path)):
        for own in (True, False):
            want = slow(text, add_special_tokens=own)["input_ids"]
            assert fast(text, add_special_tokens=own)["input_ids"] == want
        assert fast.decode(want) == slow.decode(want)
        assert (fast.pad_token_id, fast.eos_token_id, len(fast)) == (0, 1, 384)
    assert vocabulary.eos_id(ours) == 1
    assert vocabulary.pad_id(ours) == 0
    vocabulary.check_fits(ours, 384)


def test_the_embedded_tokenizer_ends_with_id_0_and_pads_with_id_1(
    embedded: PreTrainedTokenizerFast,
) -> None:
    assert len(embedded) == 320
    assert embedded.bos_token_id == embedded.eos_token_id == vocabulary.eos_id(embedded) == 0
    assert embedded.pad_token_id == vocabulary.pad_id(embedded) == 1
    assert embedded.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]


def test_training_the_embedded_tokenizer_again_gives_the_same_ids(
    embedded: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    again = vocabulary.embedded_tokenizer(EmbeddedTokenizer(vocab_size=320), tmp_path)
    assert vocabulary.tokenizer_id(again) == vocabulary.tokenizer_id(embedded)


def test_a_kept_embedded_tokenizer_is_not_trained_again(
    embedded: PreTrainedTokenizerFast, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(vocabulary, "_train", fail)
    spec = EmbeddedTokenizer(vocab_size=320)
    again = vocabulary.load_tokenizer(spec, data_path=None, cache_dir=cache)
    assert vocabulary.tokenizer_id(again) == vocabulary.tokenizer_id(embedded)


def test_processes_that_start_at_once_share_one_embedded_tokenizer(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        ids = set(pool.map(_embedded_id, [tmp_path] * 2))
    assert len(ids) == 1
    assert [
        path.name for path in (tmp_path / "tokenizers").iterdir() if path.suffix == ".tmp"
    ] == []


def test_a_cache_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    with refused("cache_unwritable", reason="Not a directory"):
        vocabulary.embedded_tokenizer(EmbeddedTokenizer(vocab_size=300), tmp_path / "cache")


def test_a_tokenizer_folder_is_found_below_the_data_path(
    embedded: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    embedded.save_pretrained(tmp_path / "mine")
    found = vocabulary.load_tokenizer("mine", data_path=tmp_path, cache_dir=tmp_path)
    assert vocabulary.tokenizer_id(found) == vocabulary.tokenizer_id(embedded)


def test_a_tokenizer_folder_here_wins_over_one_below_the_data_path(
    embedded: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.save_pretrained(tmp_path / "here" / "mine")
    (tmp_path / "data" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    found = vocabulary.load_tokenizer("mine", data_path=tmp_path / "data", cache_dir=tmp_path)
    assert vocabulary.tokenizer_id(found) == vocabulary.tokenizer_id(embedded)


def test_a_missing_tokenizer_folder_names_every_place_that_was_tried(tmp_path: Path) -> None:
    with refused(
        "tokenizer_unloadable",
        tokenizer="./gone/tokenizer",
        places=re.compile("folder .*gone/tokenizer, folder .*"),
        reason=re.compile(".*Give a folder"),
    ):
        vocabulary.load_tokenizer("./gone/tokenizer", data_path=tmp_path, cache_dir=tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refused("tokenizer_unloadable", tokenizer="empty"):
        vocabulary.load_tokenizer("empty", data_path=tmp_path, cache_dir=tmp_path)


def test_the_id_of_a_tokenizer_does_not_change_by_using_it(
    embedded: PreTrainedTokenizerFast,
) -> None:
    before = vocabulary.tokenizer_id(embedded)
    embedded(["a", "b c d e f"], padding=True, truncation=True, max_length=3)
    assert vocabulary.tokenizer_id(embedded) == before


def test_tokenizers_of_different_size_have_different_ids(
    embedded: PreTrainedTokenizerFast, cache: Path
) -> None:
    assert vocabulary.tokenizer_id(
        vocabulary.embedded_tokenizer(EmbeddedTokenizer(vocab_size=300), cache)
    ) != vocabulary.tokenizer_id(embedded)


@pytest.mark.parametrize("name", ["starcoder", "t5", "bert-uncased"])
def test_the_pad_of_a_real_tokenizer_is_in_its_vocabulary_and_is_not_its_end(
    name: str, cache: Path
) -> None:
    tokenizer = _real(name, cache)
    assert vocabulary.pad_id(tokenizer) != tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens(vocabulary.pad_id(tokenizer)) is not None


def test_a_tokenizer_whose_only_special_token_is_its_end_pads_with_an_ordinary_id(
    embedded: PreTrainedTokenizerFast,
) -> None:
    backend = embedded.backend_tokenizer.from_str(
        embedded.backend_tokenizer.to_str().replace('"special":true', '"special":false')
    )
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    assert plain.pad_token_id == plain.eos_token_id == 0
    assert vocabulary.pad_id(plain) == 1


def test_a_tokenizer_without_an_end_is_refused_where_one_is_needed(cache: Path) -> None:
    with refused("tokenizer_without_end"):
        vocabulary.eos_id(_real("bert-uncased", cache))


def test_ids_beyond_the_embedding_are_refused(embedded: PreTrainedTokenizerFast) -> None:
    vocabulary.check_fits(embedded, 320)
    with refused("ids_above_embeddings", largest=319, embeddings=319, wanted=320):
        vocabulary.check_fits(embedded, 319)
