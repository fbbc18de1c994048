"""Recorded runs of the published Fusion-in-Decoder implementations: what their files hold, and how
they are read.

A reference is a folder with meta.json; forward_*.safetensors, trained_*.safetensors and
best_toy*.safetensors beside it are its cases, and so is every training log in meta.json.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import T5Tokenizer

from trainer import tasks
from trainer.data.padding import flat
from trainer.models.losses import IGNORED
from trainer.protocol.task import Encoded, Places
from trainer.tasks.fid.interchange import import_model
from trainer.tasks.fid.task import Task

PROJECT = Path(__file__).resolve().parents[2]
ROOT = Path(os.environ.get("LATHE_PARITY", PROJECT.parent / "shared" / "parity")) / "fid"
INIT = ROOT / "init"
QUESTIONS = ROOT / "data" / "train3.json"
TOKENIZER = ROOT / "tokenizer"
GRADIENT = "grad::"
ATTENTIONS = ("padded", "bucketed")


@dataclass(frozen=True)
class Reference:
    """One published implementation on one version of transformers."""

    folder: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text())

    @property
    def has_cross_bias(self) -> bool:
        """transformers before 4.0 gave cross-attention position biases."""
        return int(self.meta["transformers"].split(".")[0]) < 4

    @property
    def has_slow_tokenizer(self) -> bool:
        """Its ids are those of transformers 5; the fast tokenizer of 4.x finds an extra piece at
        spaces it drops.
        """
        return "Fast" not in self.meta.get("tokenizer_class", "")

    def task(
        self,
        tokenizer: Path,
        *,
        base: Path | None = None,
        lengths: Mapping[str, Any],
        **reader: Any,
    ) -> Task:
        """The task whose model and batches are this reference's; `reader` overrides how it runs."""
        given = {"dropout": 0.0, "compat_cross_bias": self.has_cross_bias, **reader}
        return task_of(tokenizer, base=base or INIT, reader=given, **lengths)


@dataclass(frozen=True)
class Forward:
    """One recorded batch with its logits, states, gradients and answers."""

    reference: Reference
    file: Path

    @property
    def name(self) -> str:
        return self.file.stem.partition("_")[2]

    @property
    def meta(self) -> dict[str, Any]:
        return self.reference.meta["cases"][self.name]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.file)

    @cached_property
    def mask(self) -> Tensor:
        """(B, N, L) bool."""
        return self.tensors["attention_mask"].bool()

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {
            n.removeprefix(GRADIENT): t for n, t in self.tensors.items() if n.startswith(GRADIENT)
        }

    def rows(self) -> list[Encoded]:
        """The recorded ids as Task.encode would give them; the question stands in every passage."""
        return [
            {
                "question": [],
                **flat(
                    [ids[real].tolist() for ids, real in zip(passages, masks, strict=True)],
                    "passages",
                ),
                **flat([labels[labels != IGNORED].tolist()], "targets"),
            }
            for passages, masks, labels in zip(
                self.tensors["input_ids"], self.mask, self.tensors["labels"], strict=True
            )
        ]

    def task(self, tokenizer: Path, *, base: Path | None = None, **reader: Any) -> Task:
        """The task whose model and batches are the recorded ones; `reader` overrides how it
        runs.
        """
        return self.reference.task(tokenizer, base=base, lengths=self.lengths, **reader)

    @property
    def lengths(self) -> dict[str, int | None]:
        return lengths_of(self.meta)


@dataclass(frozen=True)
class Told:
    """One recorded batch as far as meta.json tells of it, which it does of batches that have no
    file here as well.
    """

    reference: Reference
    name: str

    @property
    def meta(self) -> dict[str, Any]:
        return self.reference.meta["cases"][self.name]

    def rows(self) -> list[Encoded]:
        """Rows of the reference's own ids of prompts and targets, cut as the case says; three
        prompts a question.
        """
        said = recorded_json("tokenizer", f"ids_{self.reference.meta['transformers']}.json")
        targets = said["target_fb" if self.reference.has_slow_tokenizer else "target_default"]
        lengths = lengths_of(self.meta)
        passages = [ids[: lengths["passage_tokens"]] for ids in said["ids"]]
        return [
            {
                "question": [],
                **flat(passages[3 * row : 3 * row + 3], "passages"),
                **flat([target[: lengths["target_tokens"]]], "targets"),
            }
            for row, target in enumerate(targets)
        ]


@dataclass(frozen=True)
class Trained:
    """Weights out of a reference's own training, and perhaps what it answered with them."""

    forward: Forward  # the batch that it answered
    file: Path

    @property
    def name(self) -> str:
        return self.file.parent.name if self.file.suffix == ".bin" else self.file.stem

    @property
    def log(self) -> str | None:
        """The training in meta.json that ended here: trained_acc1_bs1 with train_acc1_bs1, best_toy
        with train_toy.
        """
        log = re.sub(r"^(trained|best)_", "train_", self.name)
        return log if log in self.forward.reference.meta else None

    @cached_property
    def said(self) -> dict[str, Tensor]:
        """What is recorded beside the weights, by its name without underscores."""
        if self.file.suffix == ".bin":
            return {}
        return {n.strip("_"): t for n, t in load_file(self.file).items() if n.startswith("__")}

    def imported(self, folder: Path) -> Path:
        """The weights as a folder of a plain T5, made by the project's own import."""
        source = self.file.parent if self.file.suffix == ".bin" else folder / "source"
        if source != self.file.parent:
            source.mkdir()
            shutil.copyfile(INIT / "config.json", source / "config.json")
            weights = {n: t for n, t in load_file(self.file).items() if not n.startswith("__")}
            save_file(weights, source / "model.safetensors")
        import_model(
            source, out=folder / "base", compat_cross_bias=self.forward.reference.has_cross_bias
        )
        return folder / "base"


@dataclass(frozen=True)
class Training:
    """A reference's own training from the common start, step by step."""

    forward: Forward  # the batch that its micro-batches are rows of
    name: str

    @property
    def meta(self) -> dict[str, Any]:
        return self.forward.reference.meta[self.name]

    @property
    def settings(self) -> dict[str, Any]:
        return self.meta.get("opt") or self.meta["args"]

    @property
    def accumulation(self) -> int:
        return self.settings.get("accumulation_steps") or self.settings["grad_accumulation"]

    @property
    def warmup(self) -> int:
        return self.settings.get("warmup_steps") or self.settings["num_warmup_steps"]

    @property
    def total(self) -> int:
        """Optimizer steps of the schedule: FiD was told them, and counts micro-batches elsewhere;
        minFiD divides.
        """
        return (
            self.settings.get("scheduler_steps")
            or self.settings.get("total_steps")
            or len(self.steps)
        )

    @property
    def losses(self) -> list[float]:
        return [
            entry["loss"] if isinstance(entry, dict) else entry
            for entry in self.meta["log"]["micro"]
        ]

    @property
    def steps(self) -> list[dict[str, float]]:
        return self.meta["log"]["opt"]

    @property
    def exact_matches(self) -> dict[int, float]:
        """Exact match behind so many micro-batches."""
        if "evals" in self.meta:
            return {entry["micro_step"]: entry["em"] for entry in self.meta["evals"]}
        lines = re.findall(
            r"step +(\d+) / .*?val EM: .*?\((\d+) / (\d+)", self.meta.get("run_log", "")
        )
        return {int(step) * self.accumulation: int(good) / int(of) for step, good, of in lines}

    @property
    def best_step(self) -> int:
        """The micro-batches behind which exact match was best for the first time."""
        found = self.exact_matches
        return max(found, key=lambda step: (found[step], -step), default=len(self.losses))

    def orders(self) -> Iterator[list[list[int]]]:
        """The rows of every micro-batch: as recorded, or else in any order that every epoch
        repeats.
        """
        micro = self.meta["log"]["micro"]
        if isinstance(micro[0], dict):
            yield [entry["idx"] for entry in micro]
            return
        size = self.settings["batch_size"]
        for order in itertools.permutations(range(len(self.forward.mask))):
            epoch = [list(order[start : start + size]) for start in range(0, len(order), size)]
            yield [epoch[step % len(epoch)] for step in range(len(micro))]

    def experiment(self, tokenizer: Path) -> dict[str, Any]:
        """The training as an experiment of ours."""
        reader = {"dropout": 0.0, "compat_cross_bias": self.forward.reference.has_cross_bias}
        settings = self.settings
        changed = {
            "train": {
                "steps": self.total,
                "global_batch": 1,
                "micro_batch": 1,
                "precision": "fp32",
            },
            "optim": {
                "lr": settings["lr"],
                "weight_decay": settings["weight_decay"],
                "decay": "all",
                "clip": settings["clip"],
            },
            "schedule": {"shape": "linear", "warmup_steps": self.warmup},
        }
        return {
            **experiment(tokenizer, base=INIT, reader=reader, **self.forward.lengths),
            **changed,
        }


def lengths_of(meta: Mapping[str, Any]) -> dict[str, int | None]:
    """How a case cuts passages and targets; FiD says -1 for targets that are not cut, minFiD never
    cuts them.
    """
    most = meta.get("answer_maxlength", -1)
    passages = meta["text_maxlength"] if "text_maxlength" in meta else meta["max_length"]
    return {"passage_tokens": passages, "target_tokens": most if most > 0 else None}


def experiment(
    tokenizer: Path, *, base: Path, reader: dict[str, Any], **data: Any
) -> dict[str, Any]:
    """An experiment on the recorded questions."""
    files = {"train": QUESTIONS.name, "valid": QUESTIONS.name}
    return {
        "task": "fid",
        "base": str(base),
        "tokenizer": str(tokenizer),
        "data": {"source": "fid", "contexts": 100, "files": files, **data},
        "reader": reader,
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "precision": "fp32"},
        "optim": {"lr": 1e-3},
        "deepspeed": "zero0",
    }


def task_of(tokenizer: Path, *, base: Path = INIT, reader: dict[str, Any], **data: Any) -> Task:
    values = experiment(tokenizer, base=base, reader=reader, **data)
    cfg: Any = tasks.parse(values)
    return Task(
        cfg, Places(QUESTIONS.parent, tokenizer.parent / "cache", tokenizer.parent / "runs")
    )


def write_tokenizer(folder: Path) -> Path:
    """The recorded SentencePiece model as a tokenizer that an experiment can name."""
    if not TOKENIZER.is_dir():
        pytest.skip("no tokenizer in $LATHE_PARITY/fid (default ../shared/parity)")
    T5Tokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def num_blocks_times_width() -> int:
    """Of the common start, encoder and decoder together; 0 without recordings."""
    if not (INIT / "config.json").is_file():
        return 0
    config = json.loads((INIT / "config.json").read_text())
    return (config["num_layers"] + config["num_decoder_layers"]) * config["d_model"]


# Discovery
# --------------------------------------------------------------------------------------------------


def references() -> list[Reference]:
    return [Reference(file.parent) for file in sorted(ROOT.glob("*/meta.json"))]


def forwards() -> list[Forward]:
    return [
        Forward(own, file)
        for own in references()
        for file in sorted(own.folder.glob("forward_*.safetensors"))
    ]


def told() -> list[Told]:
    return [Told(own, name) for own in references() for name in own.meta.get("cases", {})]


def trained() -> list[Trained]:
    """Every file of trained weights whose reference has the batch that such weights answer: the one
    cut to 30.
    """
    patterns = ("trained_*.safetensors", "best_toy*.safetensors", "*/pytorch_model.bin")
    return [
        Trained(forward, file)
        for forward in forwards()
        if forward.name == "L30"
        for pattern in patterns
        for file in sorted(forward.reference.folder.glob(pattern))
    ]


def trainings() -> list[Training]:
    return [
        Training(forward, name)
        for forward in forwards()
        if forward.name == "L30"
        for name, value in forward.reference.meta.items()
        if isinstance(value, dict) and "micro" in value.get("log", {})
    ]


def cases(found: Sequence[Any], names: Sequence[str], what: str) -> list[Any]:
    """Parameters for pytest: the cases, or one that skips and says what is absent."""
    if found:
        return [pytest.param(case, id=name) for case, name in zip(found, names, strict=True)]
    reason = f"no {what} in $LATHE_PARITY/fid (default ../shared/parity)"
    return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]


def recorded_json(*path: str) -> Mapping[str, Any]:
    """A JSON file below the recordings; skips where it is absent."""
    file = ROOT.joinpath(*path)
    if not file.is_file():
        pytest.skip(f"no {'/'.join(path)} in $LATHE_PARITY/fid (default ../shared/parity)")
    return json.loads(file.read_text())
