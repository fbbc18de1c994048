"""A base of another kind than a task trains is refused as what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.facts import LLAMA, TINY_BASE, TINY_BERT, TINY_T5, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.models import base_model
from trainer.protocol.task import Places

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BASES: dict[str, Any] = {
    "gpt_bigcode": TINY_BASE,
    "llama": LLAMA,
    "t5": TINY_T5,
    "bert": TINY_BERT,
    "bart": {"config": {"model_type": "bart", "vocab_size": 384, "d_model": 32}, "seed": 1},
    "modernbert": {"config": {"model_type": "modernbert", **_SMALL}, "seed": 1},
    "vit": {"config": {"model_type": "vit", **_SMALL}, "seed": 1},
}
DECODER, BOTH, MASKED = "a decoder", "an encoder-decoder", "an encoder of masked language modelling"
OTHER = "no language model that transformers knows"
KINDS = {
    **dict.fromkeys(("gpt_bigcode", "llama"), DECODER),
    **dict.fromkeys(("t5", "bart"), BOTH),
    **dict.fromkeys(("bert", "modernbert"), MASKED),
    "vit": OTHER,
}
ADVICE = {
    DECODER: ", or train this one with the task causal_lm",
    BOTH: ", or train a T5 with the task fid or summariser",
    MASKED: ", or train this one with the task retriever",
    OTHER: "",
}
WANTED = {
    "causal_lm": "a decoder, which writes a text from left to right",
    "cross_attention": "a decoder, which writes a text from left to right",
    "fid": "an encoder-decoder",
    "summariser": "an encoder-decoder",
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=4, valid=2)


def load(task: str, base: Any, facts: Path, **changes: Any) -> Any:
    values = {**experiment(task, facts, **changes), "base": base}
    return tasks.load(tasks.parse(values), Places(facts, facts / "cache", facts))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("task", WANTED)
def test_a_base_of_another_kind_is_refused_by_the_name_of_its_kind(
    task: str, base: str, facts: Path
) -> None:
    kind, wanted = KINDS[base], WANTED[task]
    if wanted.startswith(kind):
        load(task, BASES[base], facts)
        return
    told = {"family": base, "kind": kind, "wanted": wanted, "advice": ADVICE[kind]}
    with refused("base_of_another_kind", **told):
        load(task, BASES[base], facts)


def test_a_bert_without_an_end_token_is_refused_as_a_bert(facts: Path) -> None:
    with refused("base_of_another_kind", family="bert", kind=MASKED):
        load("causal_lm", TINY_BERT, facts, tokenizer="no/such/tokenizer")


def test_a_bert_that_was_made_a_decoder_is_one(facts: Path) -> None:
    decoder = {"config": {**TINY_BERT["config"], "is_decoder": True}, "seed": 1}
    task = load("causal_lm", decoder, facts)
    assert base_model.skeleton(task.cfg.base, task.places).config.is_decoder


@pytest.mark.parametrize("task", ["vera", "retriever"])
def test_a_base_that_reads_no_text_is_refused(task: str, facts: Path) -> None:
    with refused("base_without_vocabulary", family="vit"):
        load(task, BASES["vit"], facts)
