"""Recorded runs of the published Fusion-in-Decoder implementations: what their files hold, and how
they are read.

A reference is a folder with meta.json; forward_*.safetensors, trained_*.safetensors and
best_toy*.safetensors beside it are its cases, and so is every training log in meta.json.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import T5Tokenizer

from tests.parity.recordings import Entry, digest, folders, once
from trainer import tasks
from trainer.data.padding import flat
from trainer.models.losses import IGNORED
from trainer.protocol.task import Encoded, Places
from trainer.tasks.fid.interchange import import_model
from trainer.tasks.fid.task import Task

SYSTEM = "fid"
GRADIENT = "grad::"
ATTENTIONS = ("padded", "bucketed")
VERSIONS = ("3.0.2", "4.17.0", "5.23.0")  # of transformers, whose ids of the same texts differ

T = TypeVar("T")


@dataclass(frozen=True)
class Recording:
    """A folder of references with the start, the questions and the tokenizer that they share."""

    folder: Path

    @property
    def init(self) -> Path:
        return self.folder / "init"

    @property
    def questions(self) -> Path:
        return self.folder / "data" / "train3.json"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def digest(self) -> str:
        """Of what the references share."""
        start = [self.init / name for name in ("config.json", "model.safetensors")]
        return digest(self.questions, self.tokenizer / "spiece.model", *start)

    def json(self, *path: str) -> Mapping[str, Any]:
        """A JSON file; skips where it is absent."""
        file = self.folder.joinpath(*path)
        if not file.is_file():
            pytest.skip(f"no {'/'.join(path)} is recorded")
        return json.loads(file.read_text())


@dataclass(frozen=True)
class Reference:
    """One published implementation on one version of transformers."""

    folder: Path

    @property
    def recording(self) -> Recording:
        return Recording(self.folder.parent)

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
        return task_of(self.recording, tokenizer, base=base, reader=given, **lengths)


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
        version = self.reference.meta["transformers"]
        said = self.reference.recording.json("tokenizer", f"ids_{version}.json")
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
            init = self.forward.reference.recording.init
            shutil.copyfile(init / "config.json", source / "config.json")
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
        recording, lengths = self.forward.reference.recording, self.forward.lengths
        return experiment(recording, tokenizer, reader=reader, **lengths) | changed


def lengths_of(meta: Mapping[str, Any]) -> dict[str, int | None]:
    """How a case cuts passages and targets; FiD says -1 for targets that are not cut, minFiD never
    cuts them.
    """
    most = meta.get("answer_maxlength", -1)
    passages = meta["text_maxlength"] if "text_maxlength" in meta else meta["max_length"]
    return {"passage_tokens": passages, "target_tokens": most if most > 0 else None}


def experiment(
    recording: Recording,
    tokenizer: Path,
    *,
    base: Path | None = None,
    reader: dict[str, Any],
    **data: Any,
) -> dict[str, Any]:
    """An experiment on the recorded questions, from the common start unless told."""
    name = recording.questions.name
    files = {"train": name, "valid": name}
    return {
        "task": "fid",
        "base": str(base or recording.init),
        "tokenizer": str(tokenizer),
        "data": {"source": "fid", "contexts": 100, "files": files, **data},
        "reader": reader,
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "precision": "fp32"},
        "optim": {"lr": 1e-3},
        "deepspeed": "zero0",
    }


def task_of(
    recording: Recording,
    tokenizer: Path,
    *,
    base: Path | None = None,
    reader: dict[str, Any],
    **data: Any,
) -> Task:
    values = experiment(recording, tokenizer, base=base, reader=reader, **data)
    cfg: Any = tasks.parse(values)
    folder = tokenizer.parent
    return Task(cfg, Places(recording.questions.parent, folder / "cache", folder / "runs"))


def write_tokenizer(recording: Recording, folder: Path) -> Path:
    """The recorded SentencePiece model as a tokenizer that an experiment can name."""
    if not recording.tokenizer.is_dir():
        pytest.skip("no tokenizer is recorded")
    T5Tokenizer.from_pretrained(recording.tokenizer).save_pretrained(folder)
    return folder


def num_blocks_times_width() -> int:
    """Of the deepest common start, encoder and decoder together; 0 without recordings."""
    files = [entry.case.init / "config.json" for entry in recordings()]
    configs = [json.loads(file.read_text()) for file in files if file.is_file()]
    return max(
        ((c["num_layers"] + c["num_decoder_layers"]) * c["d_model"] for c in configs), default=0
    )


# Discovery
# --------------------------------------------------------------------------------------------------


def recordings() -> list[Entry[Recording]]:
    """Every folder of references, once where all that they share is equal."""
    names = ("prompts_and_ids.json", *(f"ids_{version}.json" for version in VERSIONS))
    found: list[Entry[Recording]] = []
    for folder in folders(SYSTEM):
        own = Recording(folder)
        told = [own.tokenizer / name for name in names]
        told += [folder / "eval_cases.json", folder / "fb302" / "meta.json"]
        found.append(Entry(own, "texts", folder, digest(own.digest, *told)))
    return once(found)


def references() -> list[Reference]:
    places = [path for folder in folders(SYSTEM) for path in sorted(folder.glob("*/meta.json"))]
    return [Reference(path.parent) for path in places]


def _every_forward() -> list[Forward]:
    return [
        Forward(own, file)
        for own in references()
        for file in sorted(own.folder.glob("forward_*.safetensors"))
    ]


def _entry(case: T, reference: Reference, name: str, *made_of: Any) -> Entry[T]:
    """The entry of a case that is made of these files and values, and of what references share."""
    own = digest(reference.recording.digest, *made_of)
    return Entry(case, f"{reference.folder.name}-{name}", reference.folder, own)


def forwards() -> list[Entry[Forward]]:
    return once(_entry(c, c.reference, c.name, c.file, c.meta) for c in _every_forward())


def told() -> list[Entry[Told]]:
    every = [Told(own, name) for own in references() for name in own.meta.get("cases", {})]
    return once(_entry(case, case.reference, case.name, case.meta) for case in every)


def trained() -> list[Entry[Trained]]:
    """Every file of trained weights whose reference has the batch that such weights answer: the one
    cut to 30.
    """
    patterns = ("trained_*.safetensors", "best_toy*.safetensors", "*/pytorch_model.bin")
    every = [
        Trained(forward, file)
        for forward in _every_forward()
        if forward.name == "L30"
        for pattern in patterns
        for file in sorted(forward.reference.folder.glob(pattern))
    ]
    return once(_entry(c, c.forward.reference, c.name, c.file, c.forward.file) for c in every)


def trainings() -> list[Entry[Training]]:
    every = [
        Training(forward, name)
        for forward in _every_forward()
        if forward.name == "L30"
        for name, value in forward.reference.meta.items()
        if isinstance(value, dict) and "micro" in value.get("log", {})
    ]
    return once(
        _entry(case, case.forward.reference, case.name, case.meta, _ids(case.forward))
        for case in every
    )


def _ids(case: Forward) -> list[Any]:
    names = ("input_ids", "attention_mask", "labels")
    return [case.tensors[name].tolist() for name in names]
