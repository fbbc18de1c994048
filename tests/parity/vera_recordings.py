"""Recorded runs of the published plausibility verifier: what their files hold, and how they are
read.

batches.safetensors and expected.json hold single-process losses and gradients; expected_2rank.json
and grads_2rank.safetensors, where present, those of batches whose rows were split over processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from trainer.tasks.vera.losses import Statements

PROJECT = Path(__file__).resolve().parents[2]
ROOT = Path(os.environ.get("LATHE_PARITY", PROJECT.parent / "shared" / "parity")) / "vera"
TEMPERATURE, COEFFICIENT = 0.05, 0.1
DEFAULT = "mce+bce", 4  # the published program's loss function and contrastive type
TERMS = ("loss", "scoring", "contrastive")

# B groups, C columns, L tokens, D width, S statements


@dataclass(frozen=True)
class Loss:
    """A batch, a loss function and a contrastive type, and what is recorded of them."""

    batch: str
    loss_fn: Any
    contrastive_type: Any
    recorded: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.batch}|{self.loss_fn}|ctr{self.contrastive_type}"


@dataclass(frozen=True)
class Split:
    """A batch whose rows were split over processes, and what is recorded of it."""

    name: str
    batch: str
    rows: Sequence[Sequence[int]]  # by rank
    recorded: Mapping[
        str, Any
    ]  # of TERMS: a list by rank, or the mean over ranks; "grad_norm": the averaged gradient's


@cache
def tensors() -> dict[str, Tensor]:
    return _load("batches.safetensors")


@cache
def expected() -> dict[str, Any]:
    file = ROOT / "expected.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def batches() -> list[str]:
    return sorted(name.removesuffix(".logits") for name in tensors() if name.endswith(".logits"))


def losses() -> list[Loss]:
    return [loss_named(name, values) for name, values in expected().get("terms", {}).items()]


def gradient_norms() -> list[Loss]:
    return [loss_named(name, values) for name, values in expected().get("grad_norms", {}).items()]


def gradients() -> list[Loss]:
    """The batches whose gradients of the default loss are recorded in full, as {parameter:
    gradient}.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors().items():
        batch, mark, parameter = name.partition(".grad.")
        if mark:
            found.setdefault(batch, {})[parameter] = tensor
    return [Loss(batch, *DEFAULT, recorded) for batch, recorded in sorted(found.items())]


def loss_named(name: str, recorded: Mapping[str, Any]) -> Loss:
    """The loss that "BATCH|LOSS_FN|ctrTYPE" stands for."""
    batch, loss_fn, contrastive = name.split("|")
    return Loss(batch, loss_fn, int(contrastive.removeprefix("ctr")), recorded)


def _load(name: str) -> dict[str, Tensor]:
    file = ROOT / name
    return load_file(file) if file.is_file() else {}


def cases(found: Sequence[Any], what: str) -> list[Any]:
    """Parameters for pytest: the cases, or one that skips and says what is absent."""
    if found:
        return [
            pytest.param(case, id=case if isinstance(case, str) else case.name) for case in found
        ]
    reason = f"no {what} in $LATHE_PARITY/vera (default ../shared/parity)"
    return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]


# Statements
# --------------------------------------------------------------------------------------------------


class Verifier(nn.Module):
    """A stock T5 encoder and a head, with the recorded weights under the recorded names."""

    def __init__(self) -> None:
        super().__init__()
        weights = _load("state_dict.safetensors")
        self.model: Any = T5EncoderModel(T5Config.from_pretrained(ROOT / "t5-tiny"))
        self.linear = nn.Linear(self.model.config.d_model, 1)
        missing, unexpected = self.load_state_dict(weights, strict=False)
        assert (missing, unexpected) == (["model.encoder.embed_tokens.weight"], [])
        assert self.model.encoder.embed_tokens.weight is self.model.shared.weight

    def statements(self, batch: str, rows: Sequence[int] | None = None) -> Statements:
        """The statements of some rows of a recorded batch, run through the model."""
        structure = recorded_statements(batch, rows)
        ids_BCL, mask_BCL = (
            _of(batch, f"sourcess_{part}", rows) for part in ("input_ids", "attention_mask")
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


def recorded_statements(batch: str, rows: Sequence[int] | None = None) -> Statements:
    """The statements of some rows of a recorded batch, with the recorded logits and states."""
    group_S, column_S = _of(batch, "mask", rows).nonzero(as_tuple=True)
    has_gold_B = _of(batch, "first_is_corrects", rows).bool()
    return Statements(
        _of(batch, "logits", rows)[group_S, column_S],
        _of(batch, "hidden", rows)[group_S, column_S],
        group_S,
        column_S,
        has_gold_B[group_S] & (column_S == 0),
        _of(batch, "is_mcs", rows).bool(),
    )


def _of(batch: str, what: str, rows: Sequence[int] | None) -> Tensor:
    tensor = tensors()[f"{batch}.{what}"]
    return tensor if rows is None else tensor[list(rows)]


# Rows split over processes
# ------------------------------------------------------------------------------------------


def splits() -> list[Split]:
    """Every object of expected_2rank.json that lists rows: by rank, or in one object for
    each rank.
    """
    file = ROOT / "expected_2rank.json"
    if not file.is_file():
        return []
    found = list(_splits(json.loads(file.read_text()), ()))
    assert found, f"{file} lists no rows in a way that is understood here: {file.read_text()[:300]}"
    return found


def _splits(node: Any, path: tuple[str, ...]) -> Iterator[Split]:
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
        yield _split(node, path, [entry["rows"] for entry in by_rank], shared)
        return
    for key, value in node.items():
        lists = list(value.values()) if isinstance(value, dict) else value
        if (
            "rows" in key
            and isinstance(lists, list)
            and len(lists) > 1
            and all(map(_is_row_list, lists))
        ):
            yield _split(node, path, lists, {})
            return
    for key, value in node.items():
        yield from _splits(value, (*path, key))


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
    node: dict[str, Any], path: tuple[str, ...], rows: list[list[int]], by_rank: dict[str, Any]
) -> Split:
    words = [*path, *(value for value in node.values() if isinstance(value, str))]
    named = [
        batch
        for batch in batches()
        if any(batch == word or word.startswith(f"{batch}|") for word in words)
    ]
    recorded = {term: node[term] for term in TERMS if term in node} | by_rank
    norm = next((value for key, value in node.items() if key.startswith("grad_norm")), None)
    norm = norm.get("total") if isinstance(norm, dict) else norm
    recorded |= {} if norm is None else {"grad_norm": norm}
    return Split(path[-1] if path else "all", named[0] if named else "mixed", rows, recorded)


def split_gradients(split: Split) -> dict[str, Tensor]:
    """{parameter: gradient}, out of grads_2rank.safetensors, averaged over ranks; empty where none
    is recorded.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in _load("grads_2rank.safetensors").items():
        start = max(name.find("model."), name.find("linear."))
        prefix, parameter = name[:start].removesuffix("grad.").rstrip(".|/"), name[start:]
        if prefix in ("", split.name, split.batch) or prefix.endswith(f".{split.name}"):
            found[parameter] = tensor
    return found
