"""Recorded runs of Tevatron v1 and GradCache: what their files hold, and our model with the
recorded weights.

Every file that the recordings' README names is read when it is there: losses and gradients on one
rank and two, with GradCache and dropout, traces of training, choices of passages, a run of the
published program, and other poolings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from tests.parity.recordings import Entry, digest, folders, once
from trainer.models.decoder.streams import reader_of
from trainer.protocol.task import Batch
from trainer.tasks.retriever.config import Encoder
from trainer.tasks.retriever.model import Pooler, Retriever

SYSTEM = "retriever"
DTYPES = {"f64": torch.float64, "f32": torch.float32}
_NAMES = {"lm_q.": "query_model.", "lm_p.": "passage_model."}  # theirs and ours
_UNUSED = (
    ".pooler.dense."  # BERT's own pooler, which never gets a gradient and which we do not build
)
WEIGHTS = ("bert_q.safetensors", "bert_p.safetensors", "pooler_untied_32_16.safetensors")
WIDTH = 16  # of the recorded projection


@dataclass(frozen=True)
class Recording:
    """A folder of recorded inputs, weights and results."""

    folder: Path

    def json(self, name: str) -> Any:
        """A JSON file; {} where it is absent."""
        file = self.folder / name
        return json.loads(file.read_text()) if file.is_file() else {}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """A file of tensors; {} where it is absent."""
        file = self.folder / name
        return _load(file) if file.is_file() else {}

    @property
    def digest(self) -> str:
        """Of the weights and the tokens."""
        names = ("bert_config.json", "tokens.safetensors", *WEIGHTS)
        return digest(*(self.folder / name for name in names))


@cache
def _load(file: Path) -> dict[str, Tensor]:
    return load_file(file)


@dataclass(frozen=True)
class Case:
    """One model, number of passages and precision, and what is recorded of its loss."""

    recording: Recording
    name: str  # "f64/tied/n2"
    recorded: Any

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name.split("/")[0]]

    @property
    def variant(self) -> str:
        return self.name.split("/")[1]

    @property
    def passages(self) -> int:
        return int(self.name.split("/")[2].removeprefix("n"))


@dataclass(frozen=True)
class Note:
    """A named entry of a JSON file, or a file of tensors."""

    recording: Recording
    name: str
    recorded: Any


@dataclass(frozen=True)
class Choice:
    """One choice of passages for some epochs."""

    recorded: Mapping[str, Any]


@dataclass(frozen=True)
class Pooling:
    """A loss of the later program with one pooling, and what is recorded of it."""

    recording: Recording
    name: str
    how: Encoder
    recorded: Mapping[str, Any]


# Discovery
# -------------------------------------------------------------------------------------------------


def recordings() -> list[Recording]:
    return [Recording(folder) for folder in folders(SYSTEM)]


def losses(world: int) -> list[Entry[Case]]:
    """expected_world<n>.json: {"<f64|f32>/<variant>/n<passages>": {"local" | "xdev": ...}}."""
    return _entries(
        Case(own, name, recorded)
        for own in recordings()
        for name, recorded in own.json(f"expected_world{world}.json").items()
        if name != "meta"
    )


def more(world: int, start: str) -> list[Entry[Note]]:
    """The entries of expected_more_world<n>.json whose names start so."""
    return _entries(
        Note(own, name, recorded)
        for own in recordings()
        for name, recorded in own.json(f"expected_more_world{world}.json").items()
        if name.startswith(start)
    )


def full_gradients() -> list[Entry[Note]]:
    """Names like f64_tied_n2 of grads_<name>.safetensors."""
    return _entries(
        Note(own, path.stem.removeprefix("grads_"), None)
        for own in recordings()
        for path in sorted(own.folder.glob("grads_*.safetensors"))
    )


def selections() -> list[Entry[Choice]]:
    return once(
        Entry(Choice(case), str(number), own.folder, digest(case))
        for own in recordings()
        for number, case in enumerate(own.json("negative_selection.json").get("cases", []))
    )


def driver_runs() -> list[Entry[Note]]:
    return _entries(
        Note(own, path.name, json.loads(path.read_text()))
        for own in recordings()
        for path in sorted(own.folder.glob("v1_driver_*.json"))
    )


def traces_of_zero() -> list[Entry[Note]]:
    name = "deepspeed_trace_6steps.json"
    return _entries(Note(own, name, own.json(name)) for own in recordings() if own.json(name))


def toys() -> list[Entry[Recording]]:
    """The recordings with rows as texts and the same ones pre-tokenised."""
    found: list[Entry[Recording]] = []
    for own in recordings():
        rows = [own.folder / name / "train.jsonl" for name in ("toy", "toy_pretok")]
        tokenizer = own.folder / "tinybert" / "tokenizer.json"
        if all(path.is_file() for path in rows):
            found.append(Entry(own, "toy", own.folder, digest(tokenizer, *rows)))
    return once(found)


def poolings() -> list[Entry[Pooling]]:
    """Every object of v2_expected.json that holds a loss: its settings stand in it, or in the keys
    that lead to it.
    """
    return _entries(
        pooling
        for own in recordings()
        for pooling in _poolings(own, own.json("v2_expected.json"), ())
    )


C = TypeVar("C", Case, Note, Pooling)


def _entries(cases: Iterable[C]) -> list[Entry[C]]:
    """Each is made of what is recorded of it, of weights and tokens, and of files named after it."""
    found: list[Entry[C]] = []
    for case in cases:
        folder = case.recording.folder
        own = [folder / f"{kind}_{case.name}.safetensors" for kind in ("grads", "reps")]
        own += [folder / "toy_pretok" / "train.jsonl", folder / "tinybert" / "tokenizer.json"]
        made_of = digest(case.recording.digest, case.recorded, *own)
        found.append(Entry(case, case.name, folder, made_of))
    return once(found)


# What is recorded
# -------------------------------------------------------------------------------------------------


def chunks_of(recorded: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(name, query chunk, passage chunk) of every recorded GradCache run of a case."""
    found = []
    for name in recorded:
        if name.startswith("gc_q"):
            query, passage = name.removeprefix("gc_q").split("_")[:2]
            found.append((name, int(query), int(passage.removeprefix("p"))))
    return found


def num_layers_times_width() -> int:
    """Of the deepest recorded encoder; 0 without recordings."""
    configs = [config for own in recordings() if (config := own.json("bert_config.json"))]
    return max((c["num_hidden_layers"] * c["hidden_size"] for c in configs), default=0)


def _poolings(own: Recording, node: Any, path: tuple[str, ...]) -> Iterator[Pooling]:
    if not isinstance(node, dict):
        return
    if isinstance(node.get("loss"), float):
        name = "/".join(path)
        yield Pooling(own, name, _settings(name.lower(), node), node)
    for key, value in node.items():
        yield from _poolings(own, value, (*path, key))


def _settings(name: str, node: Mapping[str, Any]) -> Encoder:
    names = {
        "cls": "cls",
        "first": "cls",
        "mean": "mean",
        "avg": "mean",
        "average": "mean",
        "eos": "eos",
        "last": "eos",
    }
    said = str(node.get("pooling") or "") or next(
        (word for word in re.findall("[a-z]+", name) if word in names), "cls"
    )
    norm = re.search(r"(no_?|un)?norm(?:ali[sz]ed?)?[ =_:]*(true|false|1|0)?(?![a-z])", name)
    is_normalised = norm is not None and not norm[1] and norm[2] not in ("false", "0")
    heat = re.search(r"(?<![a-z])(?:t|temp|temperature)[ =_:]*([0-9]*\.?[0-9]+)", name)
    return Encoder(
        pooling=names[said],  # pyright: ignore[reportArgumentType]
        normalize=bool(node.get("normalize", is_normalised)),
        temperature=float(node.get("temperature", heat[1] if heat else 1.0)),
    )


# The recorded model
# -------------------------------------------------------------------------------------------------


def encoder_of(variant: str) -> Encoder:
    """What "untied_pooler_norm" says."""
    words = variant.split("_")
    unknown = {*words} - {"tied", "untied", "pooler", "norm"}
    assert not unknown, f"variant {variant}: {unknown} is not understood here"
    projection: Any = {"width": WIDTH} if "pooler" in words else None
    return Encoder.model_validate(
        {"tied": words[0] == "tied", "projection": projection, "normalize": "norm" in words}
    )


def retriever(
    recording: Recording, variant: str, dtype: torch.dtype, *, dropout: float = 0.0
) -> Retriever:
    """Our model with the recorded weights, in training mode."""
    how = encoder_of(variant)
    query, passage = (
        _bert(recording, "bert_q.safetensors", dropout),
        None if how.tied else _bert(recording, "bert_p.safetensors", dropout),
    )
    pooler = None
    if how.projection is not None:
        weights = recording.tensors("pooler_untied_32_16.safetensors")
        pooler = Pooler(32, WIDTH, tied=how.tied, seed=0, dtype=torch.float32)
        pooler.load_state_dict({name: weights[name] for name in pooler.state_dict()})
    read = {"query": reader_of(query), "passage": reader_of(passage or query)}
    return Retriever(query, passage, how=how, pooler=pooler, read=read).to(dtype).train()


def _bert(recording: Recording, name: str, dropout: float) -> BertModel:
    values = recording.json("bert_config.json")
    config = BertConfig(
        **{key: value for key, value in values.items() if key != "attn_implementation"}
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    # dropout draws its numbers elsewhere in fused attention
    model = BertModel._from_config(config, attn_implementation="eager", add_pooling_layer=False)
    missing, unexpected = model.load_state_dict(recording.tensors(name), strict=False)
    assert not missing
    assert all(key.startswith("pooler.") for key in unexpected)
    return model


def batch_of(recording: Recording, queries: range, passages: int) -> Batch:
    """The recorded batch of these queries with so many passages each."""
    found = recording.tensors("tokens.safetensors")
    query, passage = (
        slice(queries.start, queries.stop),
        slice(queries.start * passages, queries.stop * passages),
    )
    return {
        "query_ids": found["query_input_ids"][query].long(),
        "query_mask": found["query_attention_mask"][query].long(),
        "passage_ids": found["passage_input_ids"][passage].long(),
        "passage_mask": found["passage_attention_mask"][passage].long(),
        "counts": torch.full((len(queries),), passages),
        "identities": torch.zeros(len(queries) * passages, dtype=torch.int64),
    }


def ours(name: str) -> str | None:
    """Our name of a recorded parameter; None for one that we do not build."""
    if _UNUSED in name:
        return None
    for theirs, own in _NAMES.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def named(recorded: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Recorded values by our names."""
    for name, value in recorded.items():
        own = ours(name)
        if own is not None:
            yield own, value


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
