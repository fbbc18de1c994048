"""Makes tests/parity/recorded out of a folder of whole recordings: the smallest cases of each
system, and of large tensors some rows.

    python -m tests.parity.smallest PARITY DATA

PARITY: a folder like $LATHE_PARITY. DATA: a folder like $LATHE_DATA, whose statements/ hold the
publishers' files of two small sets.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from tests.parity.packing import PACKED, SAME, write_packed
from tests.parity.recordings import LEFT_OUT

Tensors = dict[str, Tensor]

WHOLE = {
    "cross_attention": [
        "base_mqa/config.json",
        "base_mqa/generation_config.json",
        "base_mqa/model.safetensors",
        "H_encode/inputs.safetensors",
        "H_encode/meta.json",
        "H_encode/xattn.safetensors",
        "K_generate/inputs.safetensors",
        "K_generate/meta.json",
        "K_generate/outputs.safetensors",
        "text/fim.json",
        "text/formats.json",
        "text/metrics.json",
        "text/postproc.json",
    ],
    "fid": [
        "data/train3.json",
        "eval_cases.json",
        "fb302/meta.json",
        "fb302/public_style_checkpoint/config.json",
        "init/config.json",
        "init/model.safetensors",
        "min417/meta.json",
        "tokenizer/ids_3.0.2.json",
        "tokenizer/ids_4.17.0.json",
        "tokenizer/ids_5.23.0.json",
        "tokenizer/prompts_and_ids.json",
        "tokenizer/spiece.model",
    ],
    "retriever": [
        "bert_config.json",
        "bert_p.safetensors",
        "bert_q.safetensors",
        "deepspeed_trace_6steps.json",
        "expected_more_world1.json",
        "expected_world1.json",
        "negative_selection.json",
        "pooler_untied_32_16.safetensors",
        "reps_f64_tied_n2.safetensors",
        "tinybert/config.json",
        "tinybert/special_tokens_map.json",
        "tinybert/tokenizer.json",
        "tinybert/tokenizer_config.json",
        "tinybert/vocab.txt",
        "tokens.safetensors",
        "toy/train.jsonl",
        "toy_pretok/train.jsonl",
        "v1_driver_world1_plain.json",
    ],
    "vera": ["adapters/golden_conversion.json", "t5-tiny/config.json"],
}
EQUAL = {
    "cross_attention/K_generate/xattn.safetensors": "cross_attention/H_encode/xattn.safetensors"
}
STATEMENTS = ["numersense/LICENSE", "numersense/validation.masked.tsv", "wsc273/WSCollection.xml"]
OF_TWO_RANKS = ("meta", "f64/tied/n2", "f64/untied_pooler_norm/n2", "f32/tied/n1")
BATCHES = ("mixed", "bool_true_plus_false", "single_bool_false", "single_mc_2", "single_mc_3")
# Rows that stay of every tensor, the one with the largest number among them.
NUM_ROWS = {
    "cross_attention/base_mqa/base_io.safetensors": {"logits": 5, "last_hidden_state": 5},
    "cross_attention/H_encode/encoded.safetensors": {"encoder_hidden_states": 8},
    "cross_attention/H_encode/outputs.safetensors": {"": 4, "grad.": 2, "logits": 5},
    "fid/fb302/forward_L30.safetensors": {"grad::": 2, "encoder_last_hidden": 24, "logits": 6},
    "retriever/grads_f64_tied_n2.safetensors": {"": 2},
}


def main(parity: Path, data: Path) -> None:
    """Write the folder anew, all but its README.md."""
    for path in PACKED.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    for system, names in WHOLE.items():
        for name in names:
            write_packed(PACKED / system / name, (parity / system / name).read_bytes())
    for name in STATEMENTS:
        content = (data / "statements" / name).read_bytes()
        write_packed(PACKED / "statements" / name, content)
    for name, source in EQUAL.items():
        assert (parity / name).read_bytes() == (parity / source).read_bytes()
    (PACKED / SAME).write_text(json.dumps(EQUAL, indent=1) + "\n")
    for name, num_rows in NUM_ROWS.items():
        rewrite(parity, name, lambda tensors, of=num_rows: with_some_rows(tensors, of))
    rewrite(parity, "vera/batches.safetensors", of_few_batches)
    used = used_tokens(of_few_batches(tensors_of(parity / "vera/batches.safetensors")))
    rewrite(parity, "vera/state_dict.safetensors", lambda tensors: of_tokens(tensors, used))
    rewrite_json(parity, "vera/expected.json", expected_of_few_batches)
    rewrite_json(parity, "retriever/expected_world2.json", of_few_cases)


def tensors_of(path: Path) -> Tensors:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(parity: Path, name: str, change: Callable[[Tensors], Tensors]) -> None:
    """Write the file `name` with other tensors."""
    write_packed(PACKED / name, save(change(tensors_of(parity / name))))


def with_some_rows(tensors: Tensors, num_rows: Mapping[str, int]) -> Tensors:
    """num_rows: by the start of a tensor's name; the longest that fits counts. Others stay whole."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        starts = [start for start in num_rows if name.startswith(start)]
        is_whole = not starts or tensor.ndim < 2 or not tensor.is_floating_point()
        found[name] = tensor if is_whole else some_rows(tensor, num_rows[max(starts, key=len)])
    return found


def some_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """(..., D) with LEFT_OUT in all rows but `num_rows` evenly spaced ones, the row of the largest
    number, and rows of zeros, which take no room.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    stays = (rows == 0).all(-1)
    stays[torch.linspace(0, len(rows) - 1, min(num_rows, len(rows))).long()] = True
    stays[rows.abs().max(-1).values.argmax()] = True
    return torch.where(stays[:, None], rows, LEFT_OUT).reshape(tensor.shape)


def rewrite_json(parity: Path, name: str, change: Callable[[Any], Any]) -> None:
    content = json.dumps(change(json.loads((parity / name).read_text())), indent=1)
    write_packed(PACKED / name, content.encode())


def of_few_cases(world2: dict[str, Any]) -> dict[str, Any]:
    """Some of the retriever's losses on two ranks."""
    return {name: world2[name] for name in OF_TWO_RANKS}


def expected_of_few_batches(expected: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of BATCHES: {"batches": {NAME: ...}, "terms": {"NAME|...": ...}, ...}."""
    return {
        block: {key: v for key, v in values.items() if key.partition("|")[0] in BATCHES}
        if block in ("batches", "terms", "grad_norms")
        else values
        for block, values in expected.items()
    }


def of_few_batches(tensors: Tensors) -> Tensors:
    """Vera's batches, and of gradients some rows of those of batch `mixed`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        batch = name.partition(".")[0]
        if batch == "mixed" or (batch in BATCHES and ".grad." not in name):
            found[name] = tensor
    return with_some_rows(found, {"mixed.grad.": 2})


def used_tokens(tensors: Tensors) -> Tensor:
    ids = [t.flatten() for name, t in tensors.items() if name.endswith("input_ids")]
    return torch.cat(ids).unique()


def of_tokens(tensors: Tensors, used: Tensor) -> Tensors:
    """Vera's weights, with 0 for the vectors of tokens that stand in no recorded batch."""
    whole = tensors["model.shared.weight"]
    vectors = torch.zeros_like(whole)
    vectors[used] = whole[used]
    return tensors | {"model.shared.weight": vectors}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
