"""Recorded runs of Tevatron v1 and GradCache: what their files hold, and our model with the
recorded weights.

Every file that the recordings' README names is read when it is there: losses and gradients on one
rank and two, with GradCache and dropout, traces of training, choices of passages, a run of the
published program, and other poolings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from trainer.models.decoder.streams import reader_of
from trainer.tasks.protocol import Batch
from trainer.tasks.retriever.config import Encoder
from trainer.tasks.retriever.model import Pooler, Retriever

PROJECT = Path(__file__).resolve().parents[2]
ROOT = Path(os.environ.get("LATHE_PARITY", PROJECT.parent / "shared" / "parity")) / "retriever"
DTYPES = {"f64": torch.float64, "f32": torch.float32}
_NAMES = {"lm_q.": "query_model.", "lm_p.": "passage_model."}  # theirs and ours
_UNUSED = (
    ".pooler.dense."  # BERT's own pooler, which never gets a gradient and which we do not build
)
WIDTH = 16  # of the recorded projection


@dataclass(frozen=True)
class Case:
    """One model, number of passages and precision, and what is recorded of its loss."""

    name: str  # "f64/tied/n2"
    recorded: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name.split("/")[0]]

    @property
    def variant(self) -> str:
        return self.name.split("/")[1]

    @property
    def passages(self) -> int:
        return int(self.name.split("/")[2].removeprefix("n"))


def read_json(name: str) -> Any:
    file = ROOT / name
    return json.loads(file.read_text()) if file.is_file() else {}


@cache
def tensors(name: str) -> dict[str, Tensor]:
    file = ROOT / name
    return load_file(file) if file.is_file() else {}


def losses(world: int) -> list[Case]:
    """expected_world<n>.json: {"<f64|f32>/<variant>/n<passages>": {"local" | "xdev": ...}}."""
    found = read_json(f"expected_world{world}.json")
    return [Case(name, recorded) for name, recorded in found.items() if name != "meta"]


def chunks_of(recorded: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(name, query chunk, passage chunk) of every recorded GradCache run of a case."""
    found = []
    for name in recorded:
        if name.startswith("gc_q"):
            query, passage = name.removeprefix("gc_q").split("_")[:2]
            found.append((name, int(query), int(passage.removeprefix("p"))))
    return found


def more(world: int, start: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The entries of expected_more_world<n>.json whose names start so."""
    found = read_json(f"expected_more_world{world}.json")
    return [(name, recorded) for name, recorded in found.items() if name.startswith(start)]


def num_layers_times_width() -> int:
    """Of the recorded encoder; 0 without recordings."""
    config = read_json("bert_config.json")
    return config["num_hidden_layers"] * config["hidden_size"] if config else 0


def full_gradients() -> list[str]:
    """Names like f64_tied_n2 of grads_<name>.safetensors."""
    return sorted(path.stem.removeprefix("grads_") for path in ROOT.glob("grads_*.safetensors"))


def selections() -> list[Mapping[str, Any]]:
    return read_json("negative_selection.json").get("cases", [])


def driver_runs() -> list[Path]:
    return sorted(ROOT.glob("v1_driver_*.json"))


@dataclass(frozen=True)
class Pooling:
    """A loss of the later program with one pooling, and what is recorded of it."""

    name: str
    how: Encoder
    recorded: Mapping[str, Any]


def poolings() -> list[Pooling]:
    """Every object of v2_expected.json that holds a loss: its settings stand in it, or in the keys
    that lead to it.
    """
    return list(_poolings(read_json("v2_expected.json"), ()))


def _poolings(node: Any, path: tuple[str, ...]) -> Iterator[Pooling]:
    if not isinstance(node, dict):
        return
    if isinstance(node.get("loss"), float):
        name = "/".join(path)
        yield Pooling(name, _settings(name.lower(), node), node)
    for key, value in node.items():
        yield from _poolings(value, (*path, key))


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


def params(found: Sequence[Any], what: str) -> list[Any]:
    """Parameters for pytest: the cases, or one that skips and says what is absent."""
    if found:
        return [pytest.param(case, id=_id(case, index)) for index, case in enumerate(found)]
    reason = f"no {what} in $LATHE_PARITY/retriever (default ../shared/parity)"
    return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]


def _id(case: Any, index: int) -> str:
    if isinstance(case, (Case, Path, Pooling)):
        return case.name
    return case if isinstance(case, str) else case[0] if isinstance(case, tuple) else str(index)


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


def retriever(variant: str, dtype: torch.dtype, *, dropout: float = 0.0) -> Retriever:
    """Our model with the recorded weights, in training mode."""
    how = encoder_of(variant)
    query, passage = (
        _bert("bert_q.safetensors", dropout),
        None if how.tied else _bert("bert_p.safetensors", dropout),
    )
    pooler = None
    if how.projection is not None:
        weights = tensors("pooler_untied_32_16.safetensors")
        pooler = Pooler(32, WIDTH, tied=how.tied, seed=0, dtype=torch.float32)
        pooler.load_state_dict({name: weights[name] for name in pooler.state_dict()})
    read = {"query": reader_of(query), "passage": reader_of(passage or query)}
    return Retriever(query, passage, how=how, pooler=pooler, read=read).to(dtype).train()


def _bert(name: str, dropout: float) -> BertModel:
    values = json.loads((ROOT / "bert_config.json").read_text())
    config = BertConfig(
        **{key: value for key, value in values.items() if key != "attn_implementation"}
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    # dropout draws its numbers elsewhere in fused attention
    model = BertModel._from_config(config, attn_implementation="eager", add_pooling_layer=False)
    missing, unexpected = model.load_state_dict(tensors(name), strict=False)
    assert not missing
    assert all(key.startswith("pooler.") for key in unexpected)
    return model


def batch_of(queries: range, passages: int) -> Batch:
    """The recorded batch of these queries with so many passages each."""
    found = tensors("tokens.safetensors")
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
