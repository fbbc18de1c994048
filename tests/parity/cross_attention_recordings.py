"""Recorded runs of the published cross-attention model: what a case folder holds, and how its
inputs are to be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from tests.parity.recordings import Entry, digest, folders, once
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.cross_attention.decoder.weights import load_added

SYSTEM = "cross_attention"
NEEDED = ("meta.json", "inputs.safetensors", "xattn.safetensors", "outputs.safetensors")
# Longest first: "encoder_attention_mask" contains "attention_mask", "context_input_ids" contains
# "input_ids".
FIELDS = (
    "encoder_attention_mask",
    "context_attention_mask",
    "encoder_hidden_states",
    "context_input_ids",
    "attention_mask",
    "input_ids",
    "labels",
)
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One folder of recorded numbers."""

    folder: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text())

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return load_file(self.folder / "inputs.safetensors")

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        return load_file(self.folder / "outputs.safetensors")

    @cached_property
    def published(self) -> dict[str, Tensor]:
        return load_file(self.folder / "xattn.safetensors")

    @property
    def base_folder(self) -> Path:
        return self.folder.parent / self.meta["base"]

    @property
    def family(self) -> str:
        return json.loads((self.base_folder / "config.json").read_text())["model_type"]

    @property
    def kind(self) -> str:
        if any(name.startswith("final.") for name in self.outputs):
            return "training"
        return "generation" if "sequences" in self.outputs else "forward"

    @cached_property
    def dtype(self) -> torch.dtype:
        """bf16 when anything recorded is, or says so: results of a bf16 model may have been stored
        as fp32.
        """
        recorded = [*self.inputs.values(), *self.outputs.values(), *self.published.values()]
        said = [
            self.folder.name,
            *(str(value) for key, value in self.meta.items() if key != "note"),
        ]
        is_bf16 = any(tensor.dtype == torch.bfloat16 for tensor in recorded)
        return (
            torch.bfloat16
            if is_bf16 or any(re.search("bf16|bfloat16", text) for text in said)
            else torch.float32
        )

    @property
    def scores_pads(self) -> bool:
        """A label is predicted from a pad row, whose value and gradient depend on the attention
        kernel.
        """
        if self.kind != "forward":
            return False
        return bool(
            (
                (self.inputs["labels"][:, 1:] != -100)
                & (self.inputs["attention_mask"][:, :-1] == 0)
            ).any()
        )

    @property
    def layers(self) -> Layers:
        given = self.meta["xattn_args"]
        return Layers(
            count=given["n_cross_attn_layers"],
            stride=given["cross_attn_layers_stride"],
            shared_weights=given["cross_attn_shared_weights"],
            # accepted and ignored by the other two
            shared_projections=self.family == "gpt_bigcode"
            and given["cross_attn_shared_projections"],
            after=given["cross_attn_final_layer"],
            width=given["cross_attn_hidden_size"],
            heads=None if self.family == "mistral" else given["cross_attn_num_attention_heads"],
            kv_heads=None
            if self.family == "mistral"
            else given.get("cross_attn_num_key_value_heads"),
            attention_bias=bool(given.get("cross_attn_attention_bias", False)),
            base_attention=self.family == "mistral",  # it ignored width and heads
            key_dropout=given["cross_attn_dropout_prob"],
            skip=bool(given.get("cross_attn_skip_connections", False)),
            initialisation="published",
        )

    def call(self, batch: Batch) -> Batch:
        """One recorded micro-batch as the arguments of forward; Llama and Mistral counted pads as
        positions.
        """
        found = arguments(batch, self.dtype)
        if self.family == "gpt_bigcode" or self.kind == "generation":
            return found
        places = {"position_ids": _all_counted(found["attention_mask"])}
        mask = found.get("encoder_attention_mask", found.get("context_attention_mask"))
        if mask is not None:
            places["context_position_ids"] = _all_counted(mask.flatten(1))
        return found | places

    @property
    def key_masks(self) -> dict[int, Tensor] | None:
        masks = {
            int(name.rpartition(".")[2]): m
            for name, m in self.outputs.items()
            if name.startswith("kept_mask.")
        }
        return masks or None

    def model(self, dtype: torch.dtype | None = None) -> CrossAttentionModel:
        """The rebuilt model with the recorded weights, in the recorded mode."""
        base = load_base(self.base_folder, kernel="published_eager" if self.scores_pads else "sdpa")
        model = CrossAttentionModel(base, self.layers)
        load_added(model, self.published, source=self.folder.name)
        return model.to(dtype or self.dtype).train(self.meta.get("mode", "eval") == "train")


def _all_counted(mask: Tensor) -> Tensor:
    """(B, L) mask -> (B, L) positions 0 to L-1."""
    return torch.arange(mask.shape[1]).expand(mask.shape)


def recorded_cases() -> list[Entry[Case]]:
    """Every folder that holds a complete case."""
    places = [folder for root in folders(SYSTEM) for folder in sorted(root.iterdir())]
    complete = [
        Case(folder) for folder in places if all((folder / name).is_file() for name in NEEDED)
    ]
    return once(
        Entry(case, case.folder.name, case.folder, digest(*_files(case))) for case in complete
    )


def _files(case: Case) -> list[Path]:
    own = [case.folder / name for name in (*NEEDED, "encoded.safetensors")]
    return own + [case.base_folder / name for name in ("config.json", "model.safetensors")]


def base_folders() -> list[Entry[Path]]:
    """The base models of which inputs and outputs are recorded."""
    names = ("base_io.safetensors", "config.json", "model.safetensors")
    return once(
        Entry(folder, folder.name, folder, digest(*(folder / name for name in names)))
        for root in folders(SYSTEM)
        for folder in sorted(root.glob("base_*"))
        if (folder / names[0]).is_file()
    )


def load_base(folder: Path, *, kernel: str = "sdpa") -> PreTrainedModel:
    """A recorded base model, stock, in fp32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=kernel
    )


def _published_eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers 4.39.1 computed it without a kernel: masked scores are replaced by
    the lowest number.

    transformers 5 adds the lowest number instead. Both make a row without any visible key uniform,
    but through the addition a gradient still reaches its scores (global norm 1.1366 instead of the
    recorded 1.1392).
    """
    groups = module.num_key_value_groups
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    if mask is not None:
        scores = torch.where(mask == 0, scores, torch.finfo(scores.dtype).min)
    attended = scores.float().softmax(-1).to(value.dtype) @ value.repeat_interleave(groups, dim=1)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register("published_eager", _published_eager)
AttentionMaskInterface.register("published_eager", eager_mask)


# Inputs, in whichever layout they were stored
# -------------------------------------------------------------------------


def batches(inputs: dict[str, Tensor]) -> list[Batch]:
    """The micro-batches of a file: numbered keys, stacked leading axes, or a single one."""
    numbered, plain = _by_number(inputs)
    context = {
        "context_input_ids",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "context_attention_mask",
    }
    if set(numbered) <= context:  # numbers count chunks or added layers, not batches
        return [one for stacked in _unstacked(inputs) for one in [stacked]]
    numbers = sorted({number for tensors in numbered.values() for number in tensors})
    return [{**plain, **{name: by[number] for name, by in numbered.items()}} for number in numbers]


def _unstacked(inputs: dict[str, Tensor]) -> Iterator[Batch]:
    extra = inputs["input_ids"].ndim - 2
    count = inputs["input_ids"].shape[:extra].numel()
    for k in range(count):
        yield {
            name: t.flatten(0, extra - 1)[k]
            if extra and t.shape[:extra] == inputs["input_ids"].shape[:extra]
            else t
            for name, t in inputs.items()
        }


def _by_number(
    inputs: dict[str, Tensor],
) -> tuple[dict[str, dict[tuple[int, ...], Tensor]], dict[str, Tensor]]:
    """Keys with a number ("labels.3", "step0.micro1.labels") by field and number, and the keys
    without any.
    """
    numbered: dict[str, dict[tuple[int, ...], Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in inputs.items():
        field = next((name for name in FIELDS if name in key), key)
        numbers = tuple(int(digits) for digits in re.findall(r"\d+", key.replace(field, "")))
        if numbers:
            numbered.setdefault(field, {})[numbers] = tensor
        else:
            plain[field] = tensor
    return numbered, plain


def arguments(batch: Batch, dtype: torch.dtype) -> Batch:
    """One recorded micro-batch as the keyword arguments of CrossAttentionModel.forward."""
    numbered, plain = _by_number(batch)
    lists = {field: [by[number] for number in sorted(by)] for field, by in numbered.items()}
    rows = len(plain["input_ids"])
    found: Batch = {
        name: plain[name] for name in ("input_ids", "attention_mask", "labels") if name in plain
    }
    mask = plain.get("context_attention_mask", plain.get("encoder_attention_mask"))
    masks = lists.get("context_attention_mask", lists.get("encoder_attention_mask"))
    if "encoder_hidden_states" in lists or "encoder_hidden_states" in plain:
        states = lists.get("encoder_hidden_states") or plain["encoder_hidden_states"]
        if isinstance(states, Tensor) and states.ndim == 4:
            states = list(states)
        found["encoder_hidden_states"] = (
            states.to(dtype) if isinstance(states, Tensor) else [own.to(dtype) for own in states]
        )
        return found | {"encoder_attention_mask": mask if masks is None else masks[0]}
    chunks = lists.get("context_input_ids") or _chunks(plain["context_input_ids"], rows)
    lengths = [chunk.shape[1] for chunk in chunks]
    if masks is None:
        assert mask is not None, "a recorded context has a mask"
        masks = (
            list(mask.split(lengths, dim=1))
            if mask.shape == (rows, sum(lengths))
            else _chunks(mask, rows)
        )
    if len(chunks) == 1:
        return found | {"context_input_ids": chunks[0], "context_attention_mask": masks[0]}
    return found | {"context_input_ids": _stack(chunks), "context_attention_mask": _stack(masks)}


def _chunks(tensor: Tensor, rows: int) -> list[Tensor]:
    """(B, L), chunk-major (N*B, L), (N, B, L) or (B, N, L) -> N times (B, L)."""
    if tensor.ndim == 2:
        return list(tensor.unflatten(0, (-1, rows)))
    return list(tensor if tensor.shape[1] == rows else tensor.transpose(0, 1))


def _stack(chunks: list[Tensor]) -> Tensor:
    """N times (B, L_n) -> (B, N, longest), padded with 0 on the left."""
    longest = max(chunk.shape[1] for chunk in chunks)
    return torch.stack(
        [torch.nn.functional.pad(chunk, (longest - chunk.shape[1], 0)) for chunk in chunks], dim=1
    )
