"""Rows in the usual formats become the tokens and the loss that their documentation lets expect.

Beside the files of each format (tests/fixtures/formats/<format>) stands what a task must make of
its three rows, written by hand after the format's public documentation: the texts, «what is in the
loss», and what a run says about the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from trainer import tasks
from trainer.config.formats.table import FORMATS
from trainer.data import left_out
from trainer.data.padding import unflat
from trainer.models import base_source
from trainer.protocol.task import Places
from trainer.statistics import examples

FIXTURES = Path(__file__).parent.parent / "fixtures" / "formats"
NONE = {"train": None, "valid": None}
CHAT = {"source": "chat", "chat_template": "plain"}
# What the data of a task says besides the format.
OF_TASK: dict[str, dict[str, Any]] = {
    "causal_lm": {"source": "files", "max_tokens": 2048},
    "cross_attention": {
        "source": "files",
        "template": "plain",
        "loss_on": "answer",
        "shuffled_context": False,
    },
    "fid": {"source": "files", "contexts": 9, "passage_tokens": 200},
    "retriever": {"source": "files", "files": NONE, "passages": 1, "passage_tokens": 200},
    "preference": {"source": "files", "max_tokens": 400},
    "summariser": {
        "source": "files",
        "document": "document",
        "summaries": ["summary"],
        "source_tokens": 300,
        "target_tokens": 100,
    },
}
V2 = {"files": {"train": "v2.jsonl"}, "corpus": "corpus.jsonl"}
NQ = {"files": {"train": "queries.jsonl"}, "corpus": "corpus.tsv"}
# (format, task, more of its data, the file with what is expected, whether the rows alone tell)
CASES: list[tuple[str, str, dict[str, Any], str, bool]] = [
    ("openai", "causal_lm", {"chat_template": "plain"}, "causal_lm", False),
    ("openai", "causal_lm", CHAT, "causal_lm", True),
    ("sharegpt", "causal_lm", {"chat_template": "plain"}, "causal_lm", False),
    ("sharegpt", "causal_lm", CHAT, "causal_lm", True),
    ("alpaca", "causal_lm", {}, "causal_lm", False),
    ("alpaca", "causal_lm", {"loss_on": "answer"}, "causal_lm", True),
    ("alpaca", "causal_lm", CHAT, "causal_lm.chat", True),
    ("alpaca", "summariser", {}, "summariser", True),
    ("prompt_completion", "causal_lm", {}, "causal_lm", False),
    ("prompt_completion", "causal_lm", {"loss_on": "answer"}, "causal_lm", True),
    ("prompt_completion", "causal_lm", CHAT, "causal_lm.chat", True),
    ("prompt_completion", "summariser", {}, "summariser", True),
    ("conversational", "causal_lm", {"chat_template": "plain"}, "causal_lm", False),
    ("conversational", "causal_lm", CHAT, "causal_lm", True),
    ("completion", "causal_lm", {}, "causal_lm", True),
    ("triples", "retriever", {}, "retriever", True),
    ("msmarco", "retriever", {}, "retriever", True),
    ("dpr", "retriever", {}, "retriever", True),
    ("dpr", "fid", {}, "fid", True),
    ("dpr", "cross_attention", {}, "cross_attention", True),
    ("beir", "retriever", {}, "retriever", True),
    ("kilt", "retriever", {}, "retriever", True),
    ("kilt", "fid", {}, "fid", True),
    ("kilt", "cross_attention", {}, "cross_attention", True),
    ("squad", "retriever", {}, "retriever", True),
    ("squad", "fid", {}, "fid", True),
    ("squad", "cross_attention", {}, "cross_attention", True),
    ("tevatron", "retriever", {}, "retriever", True),
    ("tevatron", "retriever", V2, "retriever.v2", True),
    ("tevatron", "fid", {}, "fid", True),
    ("tevatron", "cross_attention", {}, "cross_attention", True),
    ("fid", "retriever", {}, "retriever", False),
    ("fid", "fid", {}, "fid", True),
    ("fid", "cross_attention", {}, "cross_attention", True),
    ("nq", "retriever", {}, "retriever", False),
    ("nq", "fid", NQ, "fid", False),
    ("nq", "cross_attention", {}, "cross_attention", False),
    ("nq", "causal_lm", {}, "causal_lm", False),
    ("pretokenised", "retriever", {}, "retriever", False),
    ("preference", "preference", CHAT, "preference", True),
    ("openai_preference", "preference", CHAT, "preference", True),
    ("unpaired_preference", "preference", {"loss": "kto"}, "preference", True),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=12, valid=2)


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer(facts: Path) -> Iterator[None]:
    """A tokenizer is read once for all tasks that are loaded here, and no text is shortened."""
    usual = base_source.tokenizer_of
    tokenizers: dict[str, Any] = {}

    def tokenizer_of(cfg: Any, places: Places, **how: Any) -> Any:
        name = getattr(cfg.data, "chat_template", None) or ""
        if name not in tokenizers:
            tokenizers[name] = usual(cfg, places, **how)
        return tokenizers[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_source, "tokenizer_of", tokenizer_of)
        patch.setattr(examples, "_MOST_TOKENS", 1 << 20)
        yield


def task_of(name: str, facts: Path, folder: Path, data: Mapping[str, Any]) -> Any:
    values = experiment(name, facts)
    block = {**OF_TASK[name], **data}
    if "loss" in block:  # of another block
        values["preference"] = {"loss": block.pop("loss")}
    cfg = tasks.parse({**values, "data": block})
    return tasks.load(cfg, Places(folder, folder / "cache", folder))


def parts_of(task: Any, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) of each text that the model gets of a row."""
    encoded = task.encode(row)
    if task.cfg.task == "retriever":
        is_of_ids = task.cfg.data.reads == "pretokenised"
        text_of = str if is_of_ids else task.decode
        yield "query", text_of(encoded["query"])
        start = 0
        for number, length in enumerate(encoded["lengths"]):
            kind = "positive" if number < encoded["num_positives"][0] else "negative"
            yield kind, text_of(encoded["passages"][start : start + length])
            start += length
        return
    if task.cfg.task == "fid":
        for prompt in task._prompts_of(encoded):
            yield "passage", task.decode(prompt)
        yield "target", f"«{task.decode(unflat(encoded, 'targets')[0])}»"
        return
    if task.cfg.task == "preference":
        for name in task.names:
            pairs = zip(encoded[name], encoded[f"{name}_scored"], strict=True)
            groups = [(key, [*of_key]) for key, of_key in groupby(pairs, lambda pair: pair[1])]
            parts = [(key, task.decode([token for token, _ in part])) for key, part in groups]
            yield name, "".join(f"«{text}»" if key else text for key, text in parts)
        return
    for name, segments in examples.texts(task, task.collate([encoded])).items():
        texts = (f"«{one['text']}»" if one["in_loss"] else one["text"] for one in segments)
        yield name, "".join(texts)


def shown(task: Any) -> str:
    """What a run says about the training file, and its rows as the model gets them."""
    with left_out.reading() as notes:
        rows = list(task.rows("train"))
    lines = ["; ".join(f"{called}, {count:,}" for called, count in notes.formats.items())]
    for number, row in enumerate(rows, start=1):
        lines.append(f"== row {number}")
        for name, text in parts_of(task, row):
            lines += [f"-- {name}", text]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "task", "data", "file", "is_told"),
    CASES,
    ids=[f"{name}-{task}-{'-'.join(data) or 'plain'}" for name, task, data, *_ in CASES],
)
def test_rows_of_a_format_become_what_its_documentation_lets_expect(
    name: str,
    task: str,
    data: dict[str, Any],
    file: str,
    is_told: bool,
    facts: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    expected = (folder / f"{file}.txt").read_text()
    assert shown(task_of(task, facts, folder, {"format": name, **data})) == expected
    if is_told:
        assert shown(task_of(task, facts, folder, data)) == expected


def test_each_cell_of_the_table_has_a_case() -> None:
    cells = {(name, task) for name, task, *_ in CASES}
    of_table = {
        (name, task)
        for name, one in FORMATS.items()
        for task in tasks.names()
        if set(tasks.config_of(task).model_fields["data"].annotation.purposes) & one.serves.keys()  # type: ignore[union-attr]
    }
    assert cells == of_table
