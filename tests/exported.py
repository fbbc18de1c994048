"""What strangers compute from our exports, and what we do: for tests that bound the difference, and
for the table of benchmarks/exports.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.contract.runs import from_folder
from tests.facts import LLAMA, TINY_T5, experiment
from tests.families import runs
from trainer import tasks
from trainer.data.padding import pad_right
from trainer.models.losses import IGNORED
from trainer.models.packed.layout import pack_labelled, pack_targets
from trainer.protocol.task import Places

STRANGER = Path(__file__).with_name("stranger.py")
TEXTS = ["Where is the red key?", "Ada keeps the red key in the cellar. " * 2, "A coin."]
PASSAGES = [
    {"title": "Ada", "text": "Ada keeps the red key in the cellar."},
    {"title": "attic", "text": "The attic is empty."},
]
SHORT = {"steps": 2, "eval_every": 1, "save_every": 2, "best": None}
NAMES = ("cross_attention", "rotary", "causal_lm", "summariser", "fid", "retriever", "vera")
LIMIT = {"query_tokens": 32, "passage_tokens": 32}  # sentence-transformers knows one for both
ADAPTED = (  # with LoRA, whose base is a folder
    "cross_attention with adapters",
    "causal_lm with adapters",
    "summariser with adapters",
    "fid with adapters",
    "retriever with adapters",
    "vera with adapters",
)


def values_of(name: str, folder: Path) -> dict[str, Any]:
    """The experiment that is called so, on the facts in `folder`."""
    if name in ADAPTED:
        values = values_of(name.partition(" ")[0], folder)
        lora = {"r": 4, "targets": "all-linear"}
        return from_folder({**values, "lora": lora}, folder / "bases")
    task = "cross_attention" if name == "rotary" else name
    own: dict[str, Any] = {"train": SHORT, "optim": {"lr": 1e-3}}
    if name == "rotary":
        own |= {"base": LLAMA, "data": {"template": "plain", "chunked": True}}
        own |= {"layers": {"stride": 1}}
    if name == "fid":
        own |= {"base": {**TINY_T5, "seed": 3}}
    if name == "summariser":
        own |= {"generation": {"min_tokens": 4, "num_beams": 2, "no_repeat_ngram": 2}}
    if name == "retriever":
        own |= {"data": LIMIT}
    return experiment(task, folder, **own)


def trained(
    values: dict[str, dict[str, Any]], folder: Path, savedir: Path
) -> dict[str, tuple[Path, list[float]]]:
    """By name: a run's folder and losses, on the ranks of this process group."""
    return runs(values, folder, savedir, 0)


def loaded(values: dict[str, Any], folder: Path, export: Path) -> tuple[Any, Any]:
    """The task of an experiment, and its model as exported, in evaluation mode."""
    cfg = tasks.parse(values)
    task: Any = tasks.load(cfg, Places(folder, folder / "cache", folder))
    return task, task.load_export(export).eval()


def asked(task: Any) -> dict[str, Any]:
    """The inputs that both sides get."""
    return _ASKED[task.cfg.task](task)


def ours(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """What our model makes of them."""
    with torch.no_grad():
        return _OURS[task.cfg.task](task, model, given)


def told(
    exports: Mapping[str, tuple[str, Path, dict[str, Any]]],
    folder: Path,
    *,
    python: str | Path = sys.executable,
) -> dict[str, Any]:
    """By name: what a process without `trainer` makes of (task, folder, inputs); "error" where it
    fails.

    python: of the environment whose transformers loads them.
    """
    folder.mkdir(exist_ok=True)
    content = {
        name: {"task": task, "folder": str(place), **given}
        for name, (task, place, given) in exports.items()
    }
    torch.save(content, folder / "asked.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "code"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), str(STRANGER), str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "told.pt")


def said(task: Any, model: Any) -> str | None:
    """What the first program of the card has to print; None where it prints numbers alone, or
    goes on with a text.
    """
    context = [passage["text"] for passage in PASSAGES]
    rows: dict[str, list[dict[str, Any]]] = {
        "cross_attention": [
            {"question": question, "contexts": context[:1], "answers": [""]}
            for question in ("Where is the red key?", "Who has a key?")
        ],
        "fid": [{"question": "Where does Ada keep the red key?", "ctxs": PASSAGES, "id": "0"}],
        "summariser": [{"document": " ".join(context), "question": "", "summaries": []}],
    }
    if task.cfg.task not in rows:
        return None
    asked = [{"answers": [], **row} for row in rows[task.cfg.task]]
    encoded = [task.encode(row) for row in asked]
    with torch.no_grad():
        found = task.answers(model, encoded, [{**row, "answers": []} for row in asked])
    return "".join(f"{text}\n" for text in found.predictions)


def both(
    exports: Mapping[str, tuple[dict[str, Any], Path]], folder: Path, place: Path
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name, of (experiment, exported folder): what we make of an input, with what the card's
    first program has to print as "said", and what strangers make of it.
    """
    own: dict[str, dict[str, Any]] = {}
    asked_of: dict[str, Any] = {}
    for name, (values, export) in exports.items():
        task, model = loaded(values, folder, export)
        given = asked(task)
        own[name] = ours(task, model, given) | {"said": said(task, model)}
        asked_of[name] = (values["task"], export, given)
    theirs = told(asked_of, place)
    errors = {name: one["error"] for name, one in theirs.items() if "error" in one}
    assert not errors, errors
    return {name: (own[name], theirs[name]) for name in own}


# Inputs
# --------------------------------------------------------------------------------------------------


def _rows(lengths: list[int], pad: int) -> dict[str, Tensor]:
    """Random ids, padded on the right, and labels for them."""
    generator = torch.Generator().manual_seed(3)
    lists = [torch.randint(2, 90, (n,), generator=generator).tolist() for n in lengths]
    ids, mask = pad_right(lists, pad)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORED),
    }


def _asked_with_context(task: Any) -> dict[str, Any]:
    context = _rows([11, 4, 7], task.prompts.pad)
    named = {f"context_{key}": context[key] for key in ("input_ids", "attention_mask")}
    return _rows([9, 3, 6], task.prompts.pad) | named


def _asked_seq2seq(task: Any) -> dict[str, Any]:
    targets = _rows([4, 2, 6], task.pad)["labels"]
    return {**_rows([9, 3, 6], task.pad), "labels": targets}


def _asked_of_passages(task: Any) -> dict[str, Any]:
    row = {"id": "0", "question": TEXTS[0], "answers": ["in the cellar"], "ctxs": PASSAGES}
    encoded = task.encode(row)
    return {
        "passages": task._prompts_of(encoded),
        "labels": task.collate([encoded])["labels"],
    }


_ASKED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "cross_attention": _asked_with_context,
    "causal_lm": lambda task: _rows([9, 3, 6], task.pad),
    "summariser": _asked_seq2seq,
    "fid": _asked_of_passages,
    "retriever": lambda task: {"texts": TEXTS},
    "vera": lambda task: {"texts": TEXTS},
}

# Ours
# --------------------------------------------------------------------------------------------------


def _mean(loss: Tensor, labels: Tensor, shift: int = 0) -> Tensor:
    return loss / (labels[:, shift:] != IGNORED).sum()


def _ours_with_context(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    without = {name: x for name, x in given.items() if name != "labels"}
    return {
        "loss": _mean(model(**given).loss, given["labels"], 1),
        "logits": model(**without).logits,
    }


def _ours_of_seq2seq(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    stream = task.collate(
        [
            {"source": ids[mask == 1].tolist(), "targets": [], "targets_lengths": []}
            for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)
        ]
    )
    stream |= _targets(given["labels"])
    return {"loss": _mean(model(**stream)["loss"], given["labels"])}


def _targets(labels: Tensor) -> dict[str, Tensor]:
    return pack_targets([row[row != IGNORED].tolist() for row in labels])


def _ours_of_lines(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    pairs = zip(given["input_ids"], given["attention_mask"], strict=True)
    rows = [ids[mask == 1].tolist() for ids, mask in pairs]
    stream = pack_labelled(rows, [[1] * len(row) for row in rows])
    return {"loss": _mean(model(**stream)["loss"], given["labels"], 1)}


def _ours_of_passages(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    from trainer.tasks.fid.fused_layout import pack

    packed = pack([given["passages"]], bucketed=True)
    batch = {**packed, **_targets(given["labels"])}
    return {"loss": _mean(model(**batch)["loss"], given["labels"])}


def _ours_of_texts(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for side, name in (("query", "queries"), ("passage", "passages")):
        ids = task.ids([{"text": text} for text in given["texts"]], side=side)
        found[name] = task.embed(model, ids, side=side)
    if task.cfg.exports_adapters:  # of which sentence-transformers knows nothing
        found = {}
    of_card = [("query", TEXTS[0]), ("passage", PASSAGES[0]["text"])]
    ids_of = [(side, task.ids([{"text": text}], side=side)) for side, text in of_card]
    return found | {
        "plain": torch.cat([task.embed(model, ids, side=side) for side, ids in ids_of]),
    }


def _ours_of_statements(task: Any, model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    from trainer.tasks.vera.calibration import scores_of

    batch = task.read([task.statement_ids(text) for text in given["texts"]])
    scores = scores_of(model(**batch)["logits"], temperature=task.temperature)
    return {"scores": torch.from_numpy(scores).float()}


_OURS: dict[str, Callable[[Any, Any, dict[str, Any]], dict[str, Tensor]]] = {
    "cross_attention": _ours_with_context,
    "causal_lm": _ours_of_lines,
    "summariser": _ours_of_seq2seq,
    "fid": _ours_of_passages,
    "retriever": _ours_of_texts,
    "vera": _ours_of_statements,
}
