"""What we export makes the same vectors in sentence-transformers and in plain transformers; stock
weights make there what they make here.
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.facts import TINY_BERT, write_facts
from tests.tolerance import assert_close
from tests.unit.test_retriever_task import DECODER, exported, loaded
from trainer.errors import ConfigError
from trainer.files import packages
from trainer.models import base_source
from trainer.tasks.retriever.published import MINILM_BASE

if find_spec("sentence_transformers") is None:
    pytest.skip(
        "the optional package sentence-transformers is not installed", allow_module_level=True
    )
TEXTS = [
    "where is the key",
    "the old map of the harbour lies under the third stone " * 9,
    "a ship",
]
# Six products of a layer, each a sum over the width; two layers here, six in MiniLM.
DEPTH, MINILM_DEPTH = 6 * 2 * 64, 6 * 6 * 384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def ours(task: Any, model: Any, side: str) -> Tensor:
    with torch.no_grad():
        return task.embed(model, task.ids([{"text": text} for text in TEXTS], side=side), side=side)


KINDS: dict[str, dict[str, Any]] = {
    "projected and normalised": {"encoder": {"normalize": True}},
    "mean": {"encoder": {"projection": None, "pooling": "mean", "normalize": False}},
    "prefixes": {
        "encoder": {"projection": None, "pooling": "mean", "normalize": True},
        "data": {"query_prefix": "query: ", "passage_prefix": "passage: "},
    },
    "first token": {"encoder": {"projection": None, "pooling": "cls", "normalize": True}},
}


def sentence_transformer(folder: Path) -> Any:
    """Theirs, of a folder; imported here, for it takes seconds and few tests need it."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_makes_our_vectors_of_an_export(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    limits = {"query_tokens": 32, "passage_tokens": 32}  # it knows one limit for both sides
    changes = {**KINDS[kind], "data": {**limits, **KINDS[kind].get("data", {})}}
    task = loaded(folder, **changes)
    model = exported(task, tmp_path / "final")
    theirs = sentence_transformer(tmp_path / "final")
    assert theirs.max_seq_length == 32
    for side, encode in (("query", theirs.encode_query), ("passage", theirs.encode_document)):
        got = encode(TEXTS, convert_to_tensor=True)
        assert_close(ours(task, model, side), got, what="vectors", of=side, depth=DEPTH, margin=0.2)


def test_plain_transformers_loads_the_encoder_of_an_export(folder: Path, tmp_path: Path) -> None:
    import transformers

    task = loaded(folder, encoder={"projection": None, "pooling": "cls", "normalize": False})
    model = exported(task, tmp_path / "final")
    plain = transformers.AutoModel.from_pretrained(tmp_path / "final", add_pooling_layer=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    with torch.no_grad():
        states = plain.eval()(**tokenizer("where is the key", return_tensors="pt"))
    assert_close(
        ours(task, model, "query")[0],
        states.last_hidden_state[0, 0],
        what="vectors",
        depth=DEPTH,
        margin=0.2,
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"encoder": {"tied": False}}, id="two encoders"),
        pytest.param(DECODER, id="an end that the tokenizer does not add"),
    ],
)
def test_what_it_has_no_words_for_is_not_written(
    changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    exported(loaded(folder, **changes), tmp_path / "final")
    assert not (tmp_path / "final" / "modules.json").exists()


def test_a_base_that_was_trained_otherwise_is_pointed_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"projection": None, "pooling": "mean", "normalize": True}
    exported(loaded(folder, base=TINY_BERT, encoder=said), tmp_path / "final")
    base = {"base": str(tmp_path / "final"), "tokenizer": None}
    with caplog.at_level(logging.WARNING):
        loaded(folder, **base, encoder=said).model()
    assert "was trained with" not in caplog.text
    with caplog.at_level(logging.WARNING):
        loaded(folder, **base, encoder={**said, "pooling": "cls"}).model()
    assert "was trained with encoder.pooling='mean', this experiment says pooling='cls'" in (
        caplog.text
    )


def test_the_newer_form_of_a_pooling_is_understood(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"projection": None, "pooling": "mean", "normalize": False}
    exported(loaded(folder, encoder=said), tmp_path / "final")
    sentence_transformer(tmp_path / "final").save(str(tmp_path / "again"))
    content = json.loads((tmp_path / "again" / "1_Pooling" / "config.json").read_text())
    assert content["pooling_mode"] == "mean", "version 6 writes another form"
    base = {"base": str(tmp_path / "again"), "tokenizer": None}
    with caplog.at_level(logging.WARNING):
        loaded(folder, **base, encoder={**said, "normalize": True}).model()
    assert "encoder.normalize=False" in caplog.text


def test_stock_minilm_makes_the_vectors_of_sentence_transformers(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        stock = packages.folder_of(MINILM_BASE.partition("#")[0])
    except ConfigError as error:
        pytest.skip(f"{error}")
    task = loaded(
        folder,
        base=MINILM_BASE,
        tokenizer=None,
        encoder={"projection": None, "pooling": "mean", "normalize": True},
        data={"query_tokens": 256, "passage_tokens": 256},
    )
    assert base_source.resolve(task.cfg.base, task.places) == str(stock)
    theirs = sentence_transformer(stock)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        model = task.load_export(stock)
    assert "pooler" not in caplog.text, "what is left out on purpose is no news"
    got, want = ours(task, model, "passage"), theirs.encode(TEXTS)
    assert_close(got, torch.from_numpy(want), what="vectors", depth=MINILM_DEPTH, margin=0.2)
    assert (got - torch.from_numpy(want)).abs().max() <= 1e-5
