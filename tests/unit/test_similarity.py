"""ROUGE, METEOR and BERTScore of answers, and what is said when a library or its data is
not there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.wording import refused, says
from trainer.metrics.similarity import check, similarities

ROOT = Path(__file__).resolve().parents[2]


def test_rouge_is_the_best_over_the_references_for_each_kind_on_its_own() -> None:
    pytest.importorskip("rouge_score")
    (found,) = similarities(
        ["the cat sat"], [["the cat lay down", "sat cat the"]], measures=["rouge"]
    )
    assert found == pytest.approx(
        {"rouge1": 1.0, "rouge2": 2 * 1 / (2 + 3), "rougel": 2 * 2 / (3 + 4)}
    )


def test_references_that_rouge_cannot_read_are_told(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("rouge_score")
    similarities(["a cat"], [["Une fée étrange"]], measures=["rouge"])
    assert caplog.messages == []
    texts = ["Собака спит с 2020 года.", "犬は GPT を読む", "the dog"]
    similarities(texts, [[text] for text in texts], measures=["rouge"])
    (message,) = caplog.messages
    assert "2 of 3 references" in message


def test_meteor_of_equal_texts_is_that_of_one_chunk() -> None:
    pytest.importorskip("nltk")
    (found,) = similarities(["in the old cellar"], [["in the old cellar"]], measures=["meteor"])
    assert found["meteor"] == pytest.approx(
        1 - 0.5 * (1 / 4) ** 3
    )  # all words match, in 1 chunk of 4


@pytest.mark.long
def test_meteor_without_wordnet_says_how_to_get_it(tmp_path: Path) -> None:
    """In a process of its own: NLTK remembers what it has read."""
    pytest.importorskip("nltk")
    code = "import nltk\nnltk.data.path = []\nfrom trainer.metrics.similarity import similarities\n"
    code += "similarities(['a cellar'], [['the attic']], measures=['meteor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    says("wordnet_missing", done.stderr.strip().splitlines()[-1])


def tiny_bert(folder: Path) -> Path:
    """A random BERT with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "down", "dog"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=32, **named
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=9,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def test_bertscore_is_the_best_over_the_references(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    how: Any = {"measures": ["bertscore"], "bertscore_model": str(tiny_bert(tmp_path))}
    texts, references = (
        ["the cat sat", "dog", "down"],
        [["dog down", "the cat sat"], ["the cat"], ["the cat sat down"]],
    )
    found = [scores["bertscore"] for scores in similarities(texts, references, **how)]
    assert found[0] == pytest.approx(1.0, abs=1e-5)
    assert max(found[1:]) < 0.999
    alone = [
        similarities([t], [r], **how)[0]["bertscore"]
        for t, r in zip(texts, references, strict=True)
    ]
    assert found == pytest.approx(alone, abs=1e-6)
    assert found[2] == pytest.approx(
        greedy_matching(tmp_path, "down", "the cat sat down"), abs=1e-5
    )


def greedy_matching(folder: Path, text: str, reference: str) -> float:
    """F1 of the best cosine of every word on either side, from the last states, [CLS] and [SEP]
    left out. None is below 0: to bert-score a word that is left out is at cosine 0 to every other.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
    with torch.no_grad():
        one, other = (
            model(**tokenizer(t, return_tensors="pt"))[0][0, 1:-1] for t in (text, reference)
        )
    cosines = (
        torch.nn.functional.normalize(one, dim=-1) @ torch.nn.functional.normalize(other, dim=-1).T
    )
    cosines = cosines.clamp(min=0)
    precision, recall = float(cosines.max(1).values.mean()), float(cosines.max(0).values.mean())
    return 2 * precision * recall / ((precision + recall) or 1)


def test_a_bertscore_model_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    with refused("model_absent_on_hub", model=re.compile("'.*nothing'")):
        similarities(
            ["a"], [["b"]], measures=["bertscore"], bertscore_model=str(tmp_path / "nothing")
        )


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", absent)
    with refused("module_not_installed", name="torchmetrics", extra="bertscore"):
        check(["bertscore"])
