"""Recorded runs of the published plausibility verifier: what their files hold, and how they are
read.

batches.safetensors and expected.json hold single-process losses and gradients; expected_2rank.json
and grads_2rank.safetensors, where present, those of batches whose rows were split over processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from tests.parity.recordings import Entry, digest, folders, once
from trainer.tasks.vera.losses import Statements

SYSTEM = "vera"
TEMPERATURE, COEFFICIENT = 0.05, 0.1
DEFAULT = "mce+bce", 4  # the published program's loss function and contrastive type
TERMS = ("loss", "scoring", "contrastive")

T = TypeVar("T")

# B groups, C columns, L tokens, D width, S statements


@dataclass(frozen=True)
class Recording:
    """A folder of recorded weights, batches and results."""

    folder: Path

    def tensors(self, name: str = "batches.safetensors") -> dict[str, Tensor]:
        """A file of tensors; {} where it is absent."""
        file = self.folder / name
        return _load(file) if file.is_file() else {}

    def json(self, name: str = "expected.json") -> dict[str, Any]:
        """A JSON file; {} where it is absent."""
        file = self.folder / name
        return json.loads(file.read_text()) if file.is_file() else {}

    def batches(self) -> list[Batch]:
        names = [name for name in self.tensors() if name.endswith(".logits")]
        return [Batch(self, name.removesuffix(".logits")) for name in sorted(names)]

    @property
    def weights(self) -> list[Path]:
        return [self.folder / name for name in ("state_dict.safetensors", "t5-tiny/config.json")]


@cache
def _load(file: Path) -> dict[str, Tensor]:
    return load_file(file)


@dataclass(frozen=True)
class Batch:
    """A recorded batch by its name."""

    recording: Recording
    name: str

    def __getitem__(self, part: str) -> Tensor:
        return self.recording.tensors()[f"{self.name}.{part}"]

    def rows(self, part: str, rows: Sequence[int] | None) -> Tensor:
        """Some rows of a part, or all of them."""
        return self[part] if rows is None else self[part][list(rows)]


@dataclass(frozen=True)
class Loss:
    """A batch, a loss function and a contrastive type, and what is recorded of them."""

    batch: Batch
    loss_fn: Any
    contrastive_type: Any
    recorded: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.batch.name}|{self.loss_fn}|ctr{self.contrastive_type}"


@dataclass(frozen=True)
class Split:
    """A batch whose rows were split over processes, and what is recorded of it."""

    name: str
    batch: Batch
    rows: Sequence[Sequence[int]]  # by rank
    recorded: Mapping[
        str, Any
    ]  # of TERMS: a list by rank, or the mean over ranks; "grad_norm": the averaged gradient's


def recordings() -> list[Recording]:
    return [Recording(folder) for folder in folders(SYSTEM)]


def batches() -> list[Entry[Batch]]:
    """Every batch, as far as its numbers are compared without the weights."""
    return once(_entry(batch, batch, batch.name) for own in recordings() for batch in own.batches())


def batches_with_weights() -> list[Entry[Batch]]:
    return once(
        _entry(batch, batch, batch.name, *own.weights)
        for own in recordings()
        for batch in own.batches()
    )


def losses() -> list[Entry[Loss]]:
    return once(
        _entry(loss, loss.batch, loss.name, loss.recorded)
        for own in recordings()
        for loss in _losses(own, "terms")
    )


def gradient_norms() -> list[Entry[Loss]]:
    return once(
        _entry(loss, loss.batch, loss.name, loss.recorded, *own.weights)
        for own in recordings()
        for loss in _losses(own, "grad_norms")
    )


def _losses(own: Recording, block: str) -> list[Loss]:
    return [loss_named(own, name, values) for name, values in own.json().get(block, {}).items()]


def gradients() -> list[Entry[Loss]]:
    """The batches whose gradients of the default loss are recorded, as {parameter: gradient}."""
    found: list[Entry[Loss]] = []
    for own in recordings():
        by_batch: dict[str, dict[str, Tensor]] = {}
        for name, tensor in own.tensors().items():
            batch, mark, parameter = name.partition(".grad.")
            if mark:
                by_batch.setdefault(batch, {})[parameter] = tensor
        for batch, recorded in sorted(by_batch.items()):
            loss = Loss(Batch(own, batch), *DEFAULT, recorded)
            files = [own.folder / "batches.safetensors", *own.weights]
            found.append(_entry(loss, loss.batch, loss.name, *files))
    return once(found)


@cache
def _numbers(batch: Batch) -> str:
    """The digest of all that is recorded of a batch, but no gradients."""
    found: list[Any] = []
    for name, tensor in sorted(batch.recording.tensors().items()):
        if name.startswith(f"{batch.name}.") and ".grad." not in name:
            found += [name, tensor.tolist()]
    return digest(found)


def _entry(case: T, batch: Batch, name: str, *made_of: Any) -> Entry[T]:
    """The entry of a case that is made of the batch's numbers and of these files and values."""
    return Entry(case, name, batch.recording.folder, digest(_numbers(batch), *made_of))


def loss_named(own: Recording, name: str, recorded: Mapping[str, Any]) -> Loss:
    """The loss that "BATCH|LOSS_FN|ctrTYPE" stands for."""
    batch, loss_fn, contrastive = name.split("|")
    return Loss(Batch(own, batch), loss_fn, int(contrastive.removeprefix("ctr")), recorded)


# Statements
# --------------------------------------------------------------------------------------------------


class Verifier(nn.Module):
    """A stock T5 encoder and a head, with the recorded weights under the recorded names."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        weights = recording.tensors("state_dict.safetensors")
        config = T5Config.from_pretrained(recording.folder / "t5-tiny")
        self.model: Any = T5EncoderModel(config)
        self.linear = nn.Linear(self.model.config.d_model, 1)
        missing, unexpected = self.load_state_dict(weights, strict=False)
        assert (missing, unexpected) == (["model.encoder.embed_tokens.weight"], [])
        assert self.model.encoder.embed_tokens.weight is self.model.shared.weight

    def statements(self, batch: Batch, rows: Sequence[int] | None = None) -> Statements:
        """The statements of some rows of a recorded batch, run through the model."""
        structure = recorded_statements(batch, rows)
        ids_BCL, mask_BCL = (
            batch.rows(f"sourcess_{part}", rows) for part in ("input_ids", "attention_mask")
        )
        ids_SL, mask_SL = (
            part[structure.group_S, structure.column_S] for part in (ids_BCL, mask_BCL)
        )
        states_SLD = self.model(input_ids=ids_SL, attention_mask=mask_SL).last_hidden_state
        hidden_SD = states_SLD[torch.arange(len(ids_SL)), mask_SL.sum(-1) - 1]
        return Statements(
            self.linear(hidden_SD)[:, 0],
            hidden_SD,
            structure.group_S,
            structure.column_S,
            structure.is_gold_S,
            structure.is_multiple_choice_G,
        )


def recorded_statements(batch: Batch, rows: Sequence[int] | None = None) -> Statements:
    """The statements of some rows of a recorded batch, with the recorded logits and states."""
    group_S, column_S = batch.rows("mask", rows).nonzero(as_tuple=True)
    has_gold_B = batch.rows("first_is_corrects", rows).bool()
    return Statements(
        batch.rows("logits", rows)[group_S, column_S],
        batch.rows("hidden", rows)[group_S, column_S],
        group_S,
        column_S,
        has_gold_B[group_S] & (column_S == 0),
        batch.rows("is_mcs", rows).bool(),
    )


# Rows split over processes
# ------------------------------------------------------------------------------------------


def splits() -> list[Entry[Split]]:
    """Every object of expected_2rank.json that lists rows: by rank, or in one object for
    each rank.
    """
    found: list[Entry[Split]] = []
    for own in recordings():
        file = own.folder / "expected_2rank.json"
        if file.is_file():
            every = list(_splits(own, own.json(file.name), ()))
            assert every, f"{file} lists no rows in a way that is understood here"
            made_of = [file, own.folder / "grads_2rank.safetensors", *own.weights]
            found += [_entry(split, split.batch, split.name, *made_of) for split in every]
    return once(found)


def _splits(own: Recording, node: Any, path: tuple[str, ...]) -> Iterator[Split]:
    if not isinstance(node, dict):
        return
    by_rank = [
        entry
        for entry in _entries(node)
        if isinstance(entry, dict) and _is_row_list(entry.get("rows"))
    ]
    if len(by_rank) > 1:
        shared = {
            term: [entry[term] for entry in by_rank]
            for term in TERMS
            if all(term in e for e in by_rank)
        }
        yield _split(own, node, path, [entry["rows"] for entry in by_rank], shared)
        return
    for key, value in node.items():
        lists = list(value.values()) if isinstance(value, dict) else value
        if (
            "rows" in key
            and isinstance(lists, list)
            and len(lists) > 1
            and all(map(_is_row_list, lists))
        ):
            yield _split(own, node, path, lists, {})
            return
    for key, value in node.items():
        yield from _splits(own, value, (*path, key))


def _entries(node: dict[str, Any]) -> list[Any]:
    """What may be one object for each rank: the node's own values, or those of the list that it
    holds.
    """
    lists = [
        value
        for value in node.values()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    return lists[0] if lists else list(node.values())


def _is_row_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(row) is int for row in value)


def _split(
    own: Recording,
    node: dict[str, Any],
    path: tuple[str, ...],
    rows: list[list[int]],
    by_rank: dict[str, Any],
) -> Split:
    words = [*path, *(value for value in node.values() if isinstance(value, str))]
    named = [
        batch
        for batch in own.batches()
        if any(batch.name == word or word.startswith(f"{batch.name}|") for word in words)
    ]
    recorded = {term: node[term] for term in TERMS if term in node} | by_rank
    norm = next((value for key, value in node.items() if key.startswith("grad_norm")), None)
    norm = norm.get("total") if isinstance(norm, dict) else norm
    recorded |= {} if norm is None else {"grad_norm": norm}
    batch = named[0] if named else Batch(own, "mixed")
    return Split(path[-1] if path else "all", batch, rows, recorded)


def split_gradients(split: Split) -> dict[str, Tensor]:
    """{parameter: gradient}, out of grads_2rank.safetensors, averaged over ranks; empty where none
    is recorded.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in split.batch.recording.tensors("grads_2rank.safetensors").items():
        start = max(name.find("model."), name.find("linear."))
        prefix, parameter = name[:start].removesuffix("grad.").rstrip(".|/"), name[start:]
        if prefix in ("", split.name, split.batch.name) or prefix.endswith(f".{split.name}"):
            found[parameter] = tensor
    return found
