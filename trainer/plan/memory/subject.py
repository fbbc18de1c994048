"""The subject of a plan: an experiment with its task and rows, even without data or base."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.config import deepspeed_config
from trainer.config.auto import with_steps
from trainer.config.schema import Experiment
from trainer.config.userfile import placed
from trainer.data.vocabulary import byte_level_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.files import hub
from trainer.models import base_source
from trainer.plan.memory.deepspeed_terms import Zero
from trainer.plan.memory.measure import Kernels, Kind, MeasureRequest, with_value
from trainer.plan.memory.planned_rows import RowsByNumber, Specimens, StoredRows, epochs_of
from trainer.protocol.abilities import refuse_sharing

if TYPE_CHECKING:
    from trainer.data.order import Sharding
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Places, Task

# Ids of padding and end in byte_level_tokenizer, which replaces a published tokenizer here.
_STAND_IN: dict[str, Any] = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 0}


@dataclass(frozen=True)
class Subject:
    """An experiment, as far as a plan needs it."""

    values: dict[str, Any]  # the dictionary of the experiment
    cfg: Experiment
    ds: dict[str, Any]  # complete (deepspeed_config.build)
    sharding: Sharding
    task: Task
    places: Places
    train: RowsByNumber
    valid: RowsByNumber
    answers: bool  # summaries or answers are generated in evaluation
    notes: list[str] = field(default_factory=list)  # assumptions of the plan
    kernels: Kernels = "fakegpu"  # with which every step is measured

    @property
    def zero(self) -> Zero:
        return self.zero_of(self.ds)

    def of_processor(self) -> Subject:
        """The same on a processor: its steps take a processor's kernels, and no input of a block
        goes anywhere, for it is its own host.
        """
        planned = replace(self, kernels="cpu")
        if not self.cfg.train.activation_offload:
            return planned
        train = self.cfg.train.model_copy(update={"activation_offload": False})
        note = "on a processor train.activation_offload changes nothing"
        return replace(
            planned,
            values=with_value(self.values, "train.activation_offload", False),
            cfg=self.cfg.model_copy(update={"train": train}),
            notes=[*self.notes, note],
        )

    def zero_of(self, ds: dict[str, Any]) -> Zero:
        accumulates = self.sharding.accumulation > 1 or self.sharding.micro_tokens is not None
        return Zero.of(
            ds,
            accumulates=accumulates,
            keeps_frozen=self.cfg.train.frozen == "replicate",
        )

    def with_deepspeed(self, preset: str) -> dict[str, Any]:
        """The complete dictionary of another DeepSpeed file, under which as many ranks share rows.

        ConfigError when the experiment cannot run with it.
        """
        file = deepspeed_config.read(preset)
        if self.sharding.sharing > 1:
            file["sequence_parallel_size"] = self.sharding.sharing
        return deepspeed_config.build(
            file,
            train=self.cfg.train,
            optim=self.cfg.optim,
            world=self.sharding.world,
            source=preset,
        )

    def training_request(
        self, numbers: Any, values: dict[str, Any] | None = None
    ) -> MeasureRequest:
        """The request to measure a training step over these rows. values: another dictionary than
        the subject's.
        """
        return self.request("train", self.train.encoded_rows(numbers, is_drawn=True), values)

    def request(
        self, kind: Kind, rows: list[dict[str, list[int]]], values: dict[str, Any] | None = None
    ) -> MeasureRequest:
        """The request to measure one step over these encoded rows. values: as above."""
        return MeasureRequest(
            values or self.values,
            kind,
            rows,
            accumulates=kind == "train" and self.zero.accumulates,
            device=self.kernels,
            sharing=self.sharding.sharing if kind in ("train", "evaluate") else 1,
        )


def subject_of(
    values: dict[str, Any],
    *,
    ds: dict[str, Any],
    sharding: Sharding,
    places: Places,
    store_of: Callable[[Task, str], TokenStore],
    answers: bool,
) -> Subject:
    """Make the subject of an experiment. store_of: opens the encoded rows of a split like a run.

    ConfigError when the base is out of reach and its shape is not in T5_SHAPES.
    """
    values, notes = reachable(values, places)
    cfg = tasks.parse(values)
    task = tasks.load(cfg, places)
    refuse_sharing(task, sharding.sharing)
    try:
        if len(notes) > 1:
            raise DataError(notes.pop())
        rows: dict[str, RowsByNumber] = {
            split: StoredRows(store_of(task, split), task, split) for split in ("train", "valid")
        }
    except (DataError, ConfigError) as error:
        specimens = Specimens(task)
        rows = {"train": specimens, "valid": specimens}
        notes = [
            *notes,
            f"{str(error).splitlines()[0].rstrip('.')}: every row is taken to fill its limits",
        ]
    if sharding.sharing > 1:
        own = f"sequence_parallel_size={sharding.sharing}"
        notes.append(f"other DeepSpeed files are planned as if they said {own}, too")
    epochs = cfg.train.epochs
    if epochs is not None:
        is_counted = isinstance(rows["train"], StoredRows)
        if not is_counted:
            notes.append(f"nobody knows how many steps {epochs:g} epochs are: one step is planned")
        all_epochs = epochs_of(rows["train"], sharding, cfg.train.seed)
        cfg = with_steps(cfg, math.ceil(all_epochs.count(epochs)) if is_counted else 1)
    if sharding.mix is not None and isinstance(rows["train"], StoredRows):
        mixture: Any = epochs_of(rows["train"], sharding, cfg.train.seed)
        cfg = with_steps(cfg, mixture.steps_of(cfg.train.steps))
    return Subject(
        values, cfg, ds, sharding, task, places, rows["train"], rows["valid"], answers, notes
    )


def reachable(values: dict[str, Any], places: Places) -> tuple[dict[str, Any], list[str]]:
    """The experiment with a base that can be read here, and a note on each replacement."""
    cfg = tasks.parse(values)
    shape = published_shape(cfg.base) if isinstance(cfg.base, str) else None
    if shape is None:
        return values, []
    try:
        if not hub.may_answer() and not Path(placed(str(cfg.base))).is_dir():
            raise ConfigError("no connection")  # transformers would try for half a minute
        base_source.config_of(cfg.base, places)
        return values, []
    except ConfigError:
        notes = [f"the Hub is out of reach: {cfg.base} is planned for by its published shape"]
    if cfg.tokenizer is not None:
        return with_value(values, "base", {"config": shape}), notes
    values = with_value(values, "base", {"config": shape | _STAND_IN})
    values = with_value(values, "tokenizer", str(byte_level_tokenizer(places.cache_dir)))
    return values, [*notes, "the tokenizer of the base is out of reach"]


# Published shapes
# ------------------------------------------------------------------------------------------------
# Source: the config.json files of google-t5/t5-* and google/t5-v1_1-* on the Hugging Face Hub.


def _t5(d_model: int, d_kv: int, d_ff: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": d_model,
        "d_kv": d_kv,
        "d_ff": d_ff,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


_GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

T5_SHAPES: dict[str, dict[str, Any]] = {
    "t5-small": _t5(512, 64, 2048, 6, 8),
    "t5-base": _t5(768, 64, 3072, 12, 12),
    "t5-large": _t5(1024, 64, 4096, 24, 16),
    "t5-3b": _t5(1024, 128, 16384, 24, 32),
    "t5-11b": _t5(1024, 128, 65536, 24, 128),
    "t5-v1_1-small": _t5(512, 64, 1024, 8, 6) | _GATED,
    "t5-v1_1-base": _t5(768, 64, 2048, 12, 12) | _GATED,
    "t5-v1_1-large": _t5(1024, 64, 2816, 24, 16) | _GATED,
    "t5-v1_1-xl": _t5(2048, 64, 5120, 24, 32) | _GATED,
    "t5-v1_1-xxl": _t5(4096, 64, 10240, 24, 64) | _GATED,
}
_OWNERS = ("google-t5/", "google/")


def published_shape(name: str) -> dict[str, Any] | None:
    """The config of a published T5 by its Hub id, with or without its owner; flan-T5 has the shapes
    of T5 v1.1.
    """
    for owner in _OWNERS:
        name = name.removeprefix(owner)
    return T5_SHAPES.get(name.replace("flan-t5-", "t5-v1_1-"))
