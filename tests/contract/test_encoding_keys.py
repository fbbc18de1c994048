"""Each key of an experiment either reaches the encoding of a row, and then its id, or neither.

A key that encoding reads and the id does not count would let stale rows pass; one that the id
counts and encoding does not read would refuse runs for nothing.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_origin

import pytest

import exp_configs
from tests import golden_files
from tests.facts import OF_TASK, TINY_BASE, experiment
from tests.long import long_but
from trainer import tasks
from trainer.config import reference
from trainer.config.mistakes import blocks_in
from trainer.data import vocabulary
from trainer.errors import ConfigError
from trainer.models import base_source
from trainer.protocol.task import Places, Task

TASKS = tasks.names()
GOLDEN = Path(__file__).parent.parent / "golden" / "encoding_ids.json"

# Keys that cannot change alone: what changes with them.
TOGETHER: dict[str, dict[str, Any]] = {
    "train.base_bits": {"lora": {}},
    "train.bad_steps_allowed": {"train": {"on_bad_step": "skip"}},
    "train.bad_steps_among": {"train": {"on_bad_step": "skip"}},
    "train.spike_window": {"train": {"spike_z": 10.0, "steps": 200}},
    "train.spike_z": {"train": {"steps": 200}},
    "optim.momentum": {"optim": {"name": "sgd"}},
    "optim.nesterov": {"optim": {"name": "sgd", "momentum": 0.9}},
    "schedule.warmup_ratio": {"schedule": {"warmup_steps": None}},
    "schedule.power": {"schedule": {"shape": "polynomial"}},
    "schedule.decay_ratio": {"schedule": {"shape": "wsd"}},
    "schedule.decay": {"schedule": {"shape": "wsd"}},
    "teacher": {"teacher": {"base": TINY_BASE}},
    "data.subset": {"data": {"dataset": "someones/rows", "files": {}}},
    "data.revision": {"data": {"dataset": "someones/rows", "files": {}}},
    "data.splits": {"data": {"dataset": "someones/rows", "files": {}}},
}
OF_ONE_TASK: dict[tuple[str, str], dict[str, Any]] = {
    ("causal_lm", "data.chat_template"): {"data": {"source": "chat"}},
    ("causal_lm", "data.put_aside_s"): {
        "data": {"source": "client"},
        "lora": {},
        "train": {"eval_every": None, "eval_batch": None},
    },
    ("causal_lm", "data.together"): {
        "data": {"source": "client"},
        "lora": {},
        "train": {"eval_every": None, "eval_batch": None},
    },
    ("preference", "data.chat_template"): {"data": {"source": "chat"}},
    ("preference", "data.stream"): {"preference": {"loss": "simpo"}},
    ("preference", "preference.gamma"): {"preference": {"loss": "simpo"}},
    ("preference", "preference.desirable"): {"preference": {"loss": "kto"}},
    ("preference", "preference.undesirable"): {"preference": {"loss": "kto"}},
    ("preference", "preference.margin"): {"preference": {"loss": "reward"}},
    ("preference", "preference.centre"): {"preference": {"loss": "reward"}},
    ("cross_attention", "data.facts"): {"data": {"source": "lookup"}},
    ("fid", "data.format"): {"data": {"source": "files"}},
    ("retriever", "data.format"): {"data": {"source": "files"}},
    ("summariser", "data.format"): {"data": {"document": "document", "summaries": ["summary"]}},
    ("fid", "data.rankings"): {"data": {"source": "ranked", "corpus": "corpus.tsv"}},
    ("retriever", "data.negatives"): {"data": {"source": "beir"}},
    ("retriever", "loss.distillation"): {"data": {"source": "fid"}},
    ("retriever", "loss.kind"): {"loss": {"margin": 0.2}},
    ("retriever", "loss.false_negatives"): {"loss": {"false_negatives": {"above": 0.5}}},
    ("retriever", "loss.matryoshka"): {"loss": {"matryoshka": {"dims": [8]}}},
    ("retriever", "loss.matryoshka.layer_weights"): {"loss": {"matryoshka": {"layers": [1]}}},
    ("retriever", "loss.chunk_tokens"): {"loss": {"query_chunk": None, "passage_chunk": None}},
    ("retriever", "data.valid_share"): {"data": {"files": {"valid": None}}},
    ("vera", "data.order"): {"train": {"order": "as_given"}},
}
# A block of one form is refused in the other.
_OF_NO_FORM: dict[str, Any] = {
    "encoder": {"pooling": "cls", "projection": None, "normalize": False, "temperature": 1.0},
    "loss": {"query_chunk": None, "passage_chunk": None},
}
OF_ONE_TASK["retriever", "form"] = _OF_NO_FORM
for _key in ("loss", "margin", "sigma", "weights", "mu", "top"):
    OF_ONE_TASK["retriever", f"cross.{_key}"] = {**_OF_NO_FORM, "form": "cross"}
_OF_LATE = ("width", "expand", "attend", "skip_punctuation", "skip", "mean", "temperature")
for _key in _OF_LATE:
    OF_ONE_TASK["retriever", f"late.{_key}"] = {**_OF_NO_FORM, "form": "late"}
_OF_SPARSE = ("pooling", "queries", "query_regulariser", "passage_regulariser", "query_weight")
for _key in (*_OF_SPARSE, "passage_weight", "warmup_steps", "temperature", "anti_zero"):
    OF_ONE_TASK["retriever", f"sparse.{_key}"] = {**_OF_NO_FORM, "form": "sparse"}
_OF_A_DATA_SET = ("dataset", "subset", "revision", "splits")
for _key in _OF_A_DATA_SET:
    OF_ONE_TASK["summariser", f"data.{_key}"] = {
        "data": {"source": "datasets", "dataset": "someones/rows"}
    }
for _key in (*_OF_A_DATA_SET, "files", "columns", "valid_share", "valid_sets", "stream"):
    OF_ONE_TASK["vera", f"data.{_key}"] = {
        "data": {
            "source": "files",
            "train_tasks": ["choices"],
            "valid_tasks": ["choices"],
            "boolean": [],
        }
    }
_MIX: dict[str, Any] = {"a.jsonl": 0.5, "b.jsonl": 0.5}
_MIX_OF_TASKS: dict[str, Any] = {"choices": 0.5, "judged": 0.5}
for _name in TASKS:
    _mix = _MIX_OF_TASKS if _name == "vera" else _MIX
    _files = {"files": {"train": None}} if _name == "retriever" else {}
    OF_ONE_TASK[_name, "data.mix"] = {"data": _files}
    for _key in ("ends", "changes"):
        OF_ONE_TASK[_name, f"data.mixing.{_key}"] = {"data": {**_files, "mix": _mix}}
    if _name == "retriever":
        OF_ONE_TASK[_name, "data.batches.source"] = {"data": {**_files, "mix": _mix}}
    OF_ONE_TASK[_name, "data.mixing.temperature"] = {"data": {**_files, "mix": dict.fromkeys(_mix)}}
# What a key's other value needs besides.
AFTER: dict[tuple[str, str], dict[str, Any]] = {
    ("causal_lm", "data.source"): {"data": {"chat_template": "chatml"}},
    ("causal_lm", "data.format"): {"data": {"chat_template": "chatml"}},
    ("preference", "data.source"): {"data": {"chat_template": "chatml"}},
}
# Values that no type tells.
VALUES: dict[str, list[Any]] = {
    "data.columns": [
        {"text": "body"},
        {"chosen": "better"},
        {"question": "query"},
        {"id": "number"},
        {"golds": "true"},
    ],
    "data.files": [{"train": "other.jsonl"}],
    "data.splits": [{"train": "other"}],
    "data.valid_sets": [{"hard": "hard.jsonl"}],
    "metrics": ["mine.py:style"],
    "judge.gate": [{"loss": {"gain": 0.0}}],
    "train.best_is": ["min"],
    "data.mix": [_MIX, _MIX_OF_TASKS],
    "data.rankings": [{"train": "other.trec"}],
    "data.corpus": ["corpus.tsv"],
    "data.chat_template": ["chatml", "plain"],
    "late.skip": [["a"]],
    "loss.matryoshka.dims": [[4]],
    "loss.matryoshka.layers": [[0]],
    "loss.matryoshka.layer_weights": [[2.0]],
    "loss.matryoshka.weights": [[2.0]],
    "data.boolean": [[], ["choices"]],
    "data.train_tasks": [["judged"]],
    "data.valid_tasks": [["judged"], ["judged", "more"]],
    "data.test_tasks": [["more"]],
    "data.unseen1": [["judged"]],
    "data.unseen2": [["judged"]],
    "data.summaries": [["context"]],
    "data.source": ["chat", "lookup", "fid", "datasets"],
    "optim.betas": [[0.8, 0.9]],
    "optim.groups": [[{"match": "*", "lr": 0.5}]],
    "train.freeze": [[{"match": "*", "until": 1}]],
    "lora.targets": [["q"]],
    "lora.parts": [["mlp"]],
    "lora.layers": [[0]],
    "lora.patterns": [[]],
    "lora.modules_to_save": [[]],
    "lora.tokens": [[]],
    "continues.experiment": [{"label": "other"}],
    "continues.manifest": ["0" * 64],
    "teacher.base.config": [{"vocab_size": 385}],
    "tokenizer": [{"vocab_size": 320}],
    "train.base_bits": [8],
    "train.spike_window": [20],
}
# Keys that have one value alone: no format of other people has statements.
FIXED = {("vera", "data.format")}
# A teacher's base is what a base is: a name, or a block of one kind.
FIXED |= {
    (name, f"teacher.base.{key}")
    for name in ("causal_lm", "fid", "summariser")
    for key in ("experiment", "model", "adapted.window", "sha256")
}
# The items of a list are blocks, which are tried in no place of their own.
FIXED |= {(name, f"data.mixing.changes.{key}") for name in TASKS for key in ("after", "weights")}
# Terms of a loss over a vocabulary, which these three do not have.
_TERMS = ("label_smoothing", "z_loss", "neftune_alpha")
FIXED |= {(name, f"train.{key}") for name in ("preference", "retriever", "vera") for key in _TERMS}
# Changes of weights name the sources.
for _mix in (_MIX, _MIX_OF_TASKS):
    VALUES.setdefault("data.mixing.changes", []).append([{"after": 2, "weights": _mix}])
ANYTHING = [True, False, 1, 2, 3, 7, 0.25, "other", {}, None]


def leaves(block: Any, above: str = "", of_block: str | None = None) -> Iterator[tuple[str, str]]:
    """(dotted key, its list) of every key of a dictionary. of_block: the list of a whole block."""
    for name, field in block.model_fields.items():
        path, inner = f"{above}{name}", blocks_in(field.annotation)
        inner = [] if get_origin(field.annotation) is list else inner
        kind = of_block or block.list_of(name)
        assert kind or inner, f"{block.__name__}.{name} stands in neither list (docs/add-a-key.md)"
        # blocks in a list or by a name change as a whole
        is_list = get_origin(field.annotation) in (tuple, dict)
        if kind == "encoded" or not inner or is_list:
            yield path, str(kind)
            continue
        for each in inner:
            yield from leaves(each, f"{path}.", kind)


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, blocks merged at every depth."""
    both = {key for key in changes if isinstance(changes[key], dict)}
    both = {key for key in both if isinstance(values.get(key), dict)}
    return {**values, **changes, **{key: merged(values[key], changes[key]) for key in both}}


@pytest.fixture(autouse=True)
def one_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer is read once for all tasks that are loaded here."""
    usual, tokenizers = base_source.tokenizer_of, {}

    def tokenizer_of(cfg: Any, places: Places, **how: Any) -> Any:
        key = json.dumps([cfg.model_dump(mode="json")["tokenizer"], how], sort_keys=True)
        if key not in tokenizers:
            tokenizers[key] = usual(cfg, places, **how)
        return copy.deepcopy(tokenizers[key])  # a chat template is written into it

    monkeypatch.setattr(base_source, "tokenizer_of", tokenizer_of)


@functools.cache
def keys_of(name: str) -> list[reference.Key]:
    """The keys of a task's experiments. Their schema takes 50 ms to make."""
    return list(reference.keys(tasks.config_of(name)))


def candidates(name: str, path: str) -> list[Any]:
    """Values to try for a key, those that its type lists first."""
    kinds = [key.kind for key in keys_of(name) if key.path == path]
    listed = [
        json.loads(part)
        for kind in kinds
        for part in kind.split(" | ")
        if part[0] == part[-1] == '"'
    ]
    return [*VALUES.get(path, ()), *listed, *ANYTHING]


def variants(name: str, folder: Path, path: str) -> Iterator[tuple[Task, Task]]:
    """Pairs of tasks that differ in one key alone, for every value of it that can be tried."""
    parts = path.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    before: dict[str, Any] = dict(experiment(name, folder))
    if path.startswith("continues."):
        before["continues"] = {"experiment": dict(before), "step": 2}
    for each in above:
        before = merged(before, TOGETHER.get(each, {}))
        before = merged(before, OF_ONE_TASK.get((name, each), {}))
    (folder / "corpus.tsv").write_text("id\ttext\ttitle\n1\tThe key is in the attic.\tkey\n")
    places = Places(folder, folder / "cache", folder / "runs")
    usual = loaded(before, places)
    for value in candidates(name, path):
        other = merged(before, nested(path, value))
        changed = loaded(other, places)
        if changed is None and (name, path) in AFTER:
            changed = loaded(merged(other, AFTER[name, path]), places)
        if usual is None:  # the key has to be there
            usual, changed = changed, None
        if usual is not None and changed is not None and usual.cfg != changed.cfg:
            yield usual, changed


def loaded(values: dict[str, Any], places: Places) -> Any:
    """The task of a dictionary; None of one that is refused."""
    try:
        return tasks.load(tasks.parse(values), places)
    except ConfigError:
        return None


@pytest.mark.parametrize("name", long_but(("causal_lm", "retriever"), TASKS))
def test_a_key_that_encoding_does_not_read_changes_no_token_and_no_id(
    name: str, folder: Path
) -> None:
    places = Places(folder, folder / "cache", folder / "runs")
    rows = list(loaded(experiment(name, folder), places).rows("train"))[:12]
    untried: list[str] = []
    for path, kind in leaves(tasks.config_of(name)):
        if kind == "encoded" or (name, path) in FIXED:
            continue
        usual, changed = next(variants(name, folder, path), (None, None))
        if usual is None or changed is None:
            untried.append(path)
            continue
        assert usual.encoding_id() == changed.encoding_id(), path
        for row in with_ids(rows) if path.startswith("data.rankings") else rows:
            was, now = usual.encode(row), changed.encode(row)
            assert was == now, path
            assert usual.length(was) == changed.length(now), path
    assert untried == [], "give VALUES or TOGETHER what these keys need"


def with_ids(rows: list[Any]) -> list[Any]:
    """Rows of questions whose passages are named by their id in corpus.tsv."""
    return [{**row, "ctxs": [{"id": "1"} for _ in row["ctxs"]]} for row in rows]


@pytest.mark.parametrize("name", TASKS)
def test_a_key_that_encoding_reads_changes_the_id(name: str, folder: Path) -> None:
    for path, kind in leaves(tasks.config_of(name)):
        # a base is read where it brings the tokenizer, which the id names
        if kind == "encoded" and path not in ("task", "base"):
            pairs = variants(name, folder, path)
            assert any(a.encoding_id() != b.encoding_id() for a, b in pairs), path


def test_ids_of_before_are_those_of_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ids in data.json a run knows its rows again: none of them may change by itself."""
    monkeypatch.setattr(vocabulary, "tokenizer_id", lambda tokenizer: "tokenizer")
    places = Places(folder, folder / "cache", folder / "runs")
    ids: dict[str, str] = {}
    for group, experiments in sorted(exp_configs.EXP_GROUPS.items()):
        text = json.dumps([ids_of(values, folder, places) for values in experiments])
        ids[group] = hashlib.sha256(text.encode()).hexdigest()[:16]
    reason = os.environ.get(golden_files.WRITES)
    if reason:
        facts = {"made_with": golden_files.made_with(reason), **ids}
        GOLDEN.write_text(json.dumps(facts, indent=1) + "\n")
    recorded = json.loads(GOLDEN.read_text())
    del recorded["made_with"]
    assert recorded == ids


def ids_of(values: dict[str, Any], folder: Path, places: Places) -> list[str]:
    """The encoding ids of an experiment, the one of now first; with a base and a tokenizer that are
    here.
    """
    base = OF_TASK[values["task"]].get("base", TINY_BASE)
    cfg: Any = tasks.parse({**values, "base": base, "tokenizer": str(folder / "tokenizer")})
    task: Any = tasks.load(cfg, places)
    if values["task"] == "fid" and cfg.data.corpus:
        vars(task)["_corpus"] = SimpleNamespace(digest="corpus")
    return [task.encoding_id(), *task.earlier_encoding_ids()]
