"""What a stranger does with exported folders: a process that has transformers, and no `trainer`.

    python tests/stranger.py FOLDER

FOLDER holds asked.pt, {name: {"task", "folder", inputs}}; told.pt is written beside it: by name
{"of a tensor": what the foreign loader computes, "shown": what each program of the card prints}; {"error"} where the loader fails. It runs in
transformers 4.57, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import BaseModelOutput

PROGRAM = re.compile(r"^## How to load it$.*?(?=^## )", re.M | re.S)
CODE = re.compile(r"```python\n(.*?)```", re.S)


def cross_attention(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    if Path(folder, "adapter_config.json").is_file():
        build = get_class_from_dynamic_module(
            "modeling_cross_attention.LatheCrossAttentionForCausalLM", folder
        )
        model: Any = build.from_pretrained(folder)  # type: ignore[attr-defined]
    else:
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(folder, trust_remote_code=True)
    rows = {name: asked[name] for name in ("input_ids", "attention_mask", "labels")}
    context = {name: asked[name] for name in asked if name.startswith("context_")}
    out = model(**rows, **context)
    read = model.encode(context["context_input_ids"], context["context_attention_mask"])
    again = model(**rows, context=read)
    assert torch.equal(again.logits, out.logits)
    ids, mask = asked["input_ids"][:1], asked["attention_mask"][:1]
    once = read._replace(
        keys_values=tuple(tuple(x[:1] for x in pair) for pair in read.keys_values),
        kept_BL=read.kept_BL[:1],
    )
    how = {"attention_mask": mask, "context": once, "max_new_tokens": 5}
    made = {
        "greedy": model.generate(ids, **how),
        "beams": model.generate(ids, num_beams=3, num_return_sequences=2, **how),
    }
    return {"loss": out.loss, "logits": out.logits, **made}


def _attention(folder: str) -> dict[str, str]:
    """What a card says of models that cap their attention."""
    is_capped = 'attn_implementation="eager"' in Path(folder, "README.md").read_text()
    return {"attn_implementation": "eager"} if is_capped else {}


def causal_lm(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **_attention(folder))
    out = model(**asked)
    ends = model.generation_config
    said = [ends.eos_token_id, ends.pad_token_id]
    return {"loss": out.loss, "logits": out.logits, "ends": said}


def summariser(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, **_attention(folder))
    made = model.generate(asked["input_ids"], attention_mask=asked["attention_mask"])
    out = model(**asked)
    return {"loss": out.loss, "logits": out.logits, "made": made}


def fid(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, **_attention(folder))
    encoder = model.get_encoder()
    states = [encoder(input_ids=torch.tensor([ids])).last_hidden_state for ids in asked["passages"]]
    fused = BaseModelOutput(last_hidden_state=torch.cat(states, dim=1))  # type: ignore[arg-type]
    mask = torch.ones(fused.last_hidden_state.shape[:2], dtype=torch.long)  # type: ignore[union-attr]
    given = {"encoder_outputs": fused, "attention_mask": mask}
    made = model.generate(**given)
    out = model(**given, labels=asked["labels"])
    return {"loss": out.loss, "logits": out.logits, "made": made}


def retriever(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    if not Path(folder, "modules.json").is_file():
        return {}
    model = SentenceTransformer(folder, device="cpu")
    how = {"convert_to_tensor": True}
    return {
        "queries": model.encode_query(asked["texts"], **how),
        "passages": model.encode_document(asked["texts"], **how),
    }


def vera(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    build = get_class_from_dynamic_module("plausibility.PlausibilityScorer", folder)
    scorer: Any = build.from_pretrained(folder)  # type: ignore[attr-defined]
    return {"scores": torch.tensor(scorer(asked["texts"]))}


def preference(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    return {}  # its card's program says all


def shown(folder: Path) -> dict[str, Any]:
    """What each program of a card prints, run in its folder; of a retriever's last one "plain",
    the vectors of its query and its passage.
    """
    (part,) = PROGRAM.findall((folder / "README.md").read_text())
    printed: list[str] = []
    names: dict[str, Any] = {}
    os.chdir(folder)
    for code in CODE.findall(part):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            names: dict[str, Any] = {}
            exec(compile(code, f"{folder.name}'s card", "exec"), names)
        printed.append(out.getvalue())
    if isinstance(names.get("queries"), Tensor):
        return {"shown": printed, "plain": torch.cat([names["queries"], names["passages"]])}
    return {"shown": printed}


def main(folder: Path) -> None:
    sys.modules["trainer"] = None  # type: ignore[assignment]  # whoever imports it fails
    asked: dict[str, dict[str, Any]] = torch.load(folder / "asked.pt")
    told: dict[str, Any] = {}
    for name, one in asked.items():
        place, task = Path(one.pop("folder")), one.pop("task")
        try:
            with torch.no_grad():
                found: dict[str, Tensor] = globals()[task](str(place), one)
            told[name] = {**found, **shown(place)}
        except Exception as error:  # any: what fails is told by its name, and the others go on
            told[name] = {"error": f"{type(error).__name__}: {error}"}
    torch.save(told, folder / "told.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
