"""What most tasks share: one pretrained model, one tokenizer, and a loss that is a sum over
labelled tokens.

A task derives from TokenTask and overrides what is different. Nothing outside the tasks knows of
this class.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from trainer.config.identity import canonical_json
from trainer.config.optimizer.lora import Lora
from trainer.config.schema import Base, Experiment
from trainer.config.userfile import placed
from trainer.data import vocabulary
from trainer.errors import ConfigError
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import adapters, base_model, base_source, recomputation
from trainer.models.decoder import streams
from trainer.models.frozen.quantized import Bits
from trainer.models.head import HEAD_FILE, load_head, write_head
from trainer.models.inputs.neftune import noise_fields
from trainer.models.losses import IGNORED
from trainer.models.weights import absent, generation_file, model_folder, taken
from trainer.protocol.task import Batch, Places, Text

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Experiment)
# For each token of the highest limit: no tokenizer makes less than one token of six words.
_FILLER_WORDS = 6


def refuse_beyond_positions(base: Any, max_tokens: int) -> None:
    """ConfigError when data.max_tokens is longer than the positions that a base has learnt."""
    positions = getattr(base.config, "max_position_embeddings", None)
    if positions is not None and max_tokens > positions:
        raise ConfigError(
            f"data.max_tokens={max_tokens} is longer than the model's {positions} positions. Use "
            f"at most {positions}."
        )


class TokenTask(ABC, Generic[C]):
    """A model of transformers under the name `base_name` of the task's module and, if need be, new
    weights as `head`.

    Its batches are named as transformers names them: input_ids, attention_mask, labels.
    """

    unit: ClassVar[str] = "tokens"
    kind: ClassVar[base_model.Kind] = "causal_lm"  # what is taken of the base
    base_name: ClassVar[str] = "base"

    def __init__(self, cfg: C, places: Places, *, tokenizer: Any = None) -> None:
        self.cfg, self.places = cfg, places
        if tokenizer is None:  # a base of another kind may have no tokenizer that fits
            base_model.check_kind(cfg.base, places, self.kind)
        self.tokenizer = base_source.tokenizer_of(cfg, places) if tokenizer is None else tokenizer
        self._export: Path | None = None  # the folder that load_export has read

    @cached_property
    def pad(self) -> int:
        return vocabulary.pad_id(self.tokenizer)

    @cached_property
    def end(self) -> int:
        return vocabulary.eos_id(self.tokenizer)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a generated text: the tokenizer's end, then those of
        generation_config.json, of the export that was loaded, else of the base.
        """
        if self._export is not None and generation_file.is_in(self._export):
            ends = generation_file.ends_of_base(str(self._export), None)
        else:
            source = base_source.resolve(self.cfg.base, self.places)
            config = base_source.config_of(self.cfg.base, self.places)
            ends = generation_file.ends_of_base(source, config)
        return list(dict.fromkeys([self.end, *ends]))

    @property
    def exported_ends(self) -> int | list[int]:
        """`ends` as generation_config.json writes them."""
        return self.ends[0] if len(self.ends) == 1 else self.ends

    # Model
    # ----------------------------------------------------------------------------------------------

    @abstractmethod
    def operate(self, base: Any) -> nn.Module:
        """The task's module around a base, which may be on the meta device."""

    def model(self) -> nn.Module:
        self._tell_unused_settings()
        model = self.loaded(
            self.cfg.base, self.cfg.lora, bits=self.cfg.train.base_bits, init_from=self.init_from
        )
        absent.refuse(model, is_trained=True)
        return model

    @property
    def init_from(self) -> str | None:
        """The folder whose weights are taken over the base's."""
        name = self.cfg.init_from
        return None if name is None or self.cfg.inserts_layers else placed(name)

    def _tell_unused_settings(self) -> None:
        """Log what the base's generation_config.json says and nothing here obeys."""
        if self.kind == "encoder":
            return
        source = base_source.resolve(self.cfg.base, self.places)
        config = base_source.config_of(self.cfg.base, self.places)
        unused = generation_file.unused_of_base(source, config)
        if unused:
            log.warning(
                "base: its %s says %s. Texts are generated without that, here and from exports; "
                "the experiment and the flags of a command say how.",
                generation_file.NAME,
                ", ".join(f"{name}={value!r}" for name, value in unused.items()),
            )

    def skeleton(self) -> nn.Module:
        bits = self.cfg.train.base_bits
        base = base_model.skeleton(self.cfg.base, self.places, kind=self.kind, bits=bits)
        return self.operated(base, self.cfg.lora)

    def load_export(self, folder: Path) -> nn.Module:
        """The folder says whether it holds a whole base or adapters, which belong into the
        experiment's.
        """
        self._export = folder
        lora = adapters.read(folder)
        if lora is None:
            model = self.loaded(str(folder), None)
        else:
            adapters.check_base(folder, base_source.fingerprint(self.cfg.base, self.places))
            model = self.loaded(self.cfg.base, lora, bits=self.cfg.train.base_bits)
            adapters.load(model.get_submodule(self.base_name), folder)
        absent.refuse(model, is_trained=False)
        head = _head_of(model)
        if head is not None and not self.fill_head(head, str(folder)):
            raise ConfigError(
                f"{folder} holds no head ({HEAD_FILE}, or in its weights), so it is no trained "
                f"model of task {self.cfg.package!r}. Give a best/ or final/ folder."
            )
        return model

    def loaded(
        self,
        base: Base,
        lora: Lora | None,
        *,
        bits: Bits | None = None,
        init_from: str | None = None,
    ) -> nn.Module:
        """The task's module with the weights of a base, and of the head beside it, if any; with new
        adapters, if any. bits: of the base's linear layers. init_from: a folder of which the
        weights that fit are taken instead.
        """
        how: Any = {"precision": self.cfg.train.precision, "kind": self.kind, "bits": bits}
        read = base_model.load(base, self.places, **how)
        if init_from is not None:
            taken.take(read, init_from)
        model = self.operated(read, lora)
        source, head = base_source.resolve(base, self.places), _head_of(model)
        if head is not None and isinstance(source, str):
            log.info(
                "the head %s %s",
                "goes on from" if self.fill_head(head, source) else "is new, none in",
                source,
            )
        return model

    def fill_head(self, head: nn.Module, source: str) -> bool:
        """Fill a head with what a folder or Hub id holds of it; False where that is not all."""
        return load_head(head, source)

    def operated(self, base: Any, lora: Lora | None) -> nn.Module:
        """The task's module around a base that has new adapters, if any."""
        if lora is None:
            return self.operate(base)
        model = self.operate(adapters.adapted(base, lora, seed=self.cfg.train.seed))
        adapters.freeze_rest(model.get_submodule(self.base_name), lora)
        return model

    @cached_property
    def is_packed(self) -> bool:
        """Whether micro-batches are streams of real tokens: where the base can read them."""
        configs = [base_source.config_of(base, self.places) for base in self.bases()]
        reasons = [reason for reason in map(streams.why_not, configs) if reason is not None]
        if reasons:
            log.info("rows are padded, for the base reads no streams: %s", reasons[0])
        return not reasons

    def bases(self) -> list[Base]:
        """What the model is made of."""
        return [self.cfg.base]

    def reader(self, body: Any) -> streams.Read | None:
        """How a body reads streams, recomputed where train.gradient_checkpointing says so; None
        where rows are padded.
        """
        if not self.is_packed:
            self.recompute(body)
            return None
        return streams.reader_of(body, recompute_every=self.cfg.train.recompute_every)

    def recompute(self, base: Any) -> None:
        """Compute blocks of the base again in the backward pass, where train.gradient_checkpointing
        says so.
        """
        recomputation.of_stock(base, every=self.cfg.train.recompute_every)

    def fingerprint(self) -> str:
        if self.cfg.lora is None:
            return ""
        return base_source.fingerprint(self.cfg.base, self.places)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        weights = self.whole(weights, [self.base_name])
        base, head = _below(weights, self.base_name), _below(weights, "head")
        config, generation = self.exported_config(), self.generation()
        if self.cfg.exports_adapters:
            self.export_adapters(base, folder)
            model_folder.write_tokenizer(folder, self.tokenizer)
        else:
            config.dtype = next(iter(base.values())).dtype
            model_folder.write(folder, config, self.tokenizer, base)
        if generation:
            generation_file.write(folder, config, **generation)
        if head:
            write_head(folder, head)

    def whole(self, weights: Mapping[str, Tensor], bases: Sequence[str]) -> Mapping[str, Tensor]:
        """The weights that an export holds, by name: where adapters are merged, those of the
        modules `bases` instead of their adapters; where adapters took a part out of the base, those
        that belong beside the whole of it.
        """
        lora = self.cfg.lora
        if lora is None or (self.cfg.exports_adapters and not adapters.changes_base(lora)):
            return weights
        if self.cfg.exports_adapters:
            return adapters.beside_the_whole_base(self.model(), weights, lora)
        model = self.full_precision_model().to(base_model.DTYPES[self.cfg.train.precision])
        return adapters.merged_weights(model, weights, bases=bases)

    def full_precision_model(self) -> nn.Module:
        """The module as the run began with it, all bits of its base there."""
        if self.cfg.train.base_bits is None:
            return self.model()
        train = self.cfg.train.model_copy(update={"base_bits": None})
        cfg = self.cfg.model_copy(update={"train": train})
        return type(self)(cfg, self.places).model()

    def export_adapters(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapters of one base, by their names in it."""
        lora = self.cfg.lora
        assert lora is not None
        if adapters.changes_base(lora):  # as `whole` has made them
            lora = adapters.beside_the_whole_base_as(lora)
        source = base_source.resolve(self.cfg.base, self.places)
        adapters.write(
            folder,
            weights,
            lora,
            kind=self.kind,
            base=source if isinstance(source, str) else None,
            fingerprint=self.fingerprint(),
        )

    def exported_config(self) -> Any:
        """The config.json of an export, with the name of the class that is trained."""
        return base_model.exported_config(self.cfg.base, self.places, kind=self.kind)

    def generation(self) -> dict[str, Any]:
        """What generation_config.json of an export says; {}: it has none."""
        return {}

    # Data
    # ----------------------------------------------------------------------------------------------

    def encoding_id(self) -> str:
        """Every key of the task's own blocks but those in `not_encoded`; a task whose encoding
        depends on less names that.
        """
        values = self.cfg.without_unread()
        own = {key: value for key, value in values.items() if key not in Experiment.model_fields}
        return self.encoded_under(**own)

    def earlier_encoding_ids(self) -> Sequence[str]:
        return ()

    def encoded_under(self, **settings: Any) -> str:
        """The encoding id of the task's name, its tokenizer and these settings."""
        identity = {"task": self.cfg.task, "tokenizer": vocabulary.tokenizer_id(self.tokenizer)}
        return canonical_json(identity | settings)

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def describe(self, batch: Batch) -> dict[str, Text]:
        """Every tensor of token ids under its own name; `labels` too, where they are not those of
        such a tensor.
        """
        labels = batch.get("labels")
        texts = {
            name: _text(name, batch)
            for name in batch
            if name == "tokens" or name.endswith("input_ids")
        }
        if labels is not None and all(text.ids.shape != labels.shape for text in texts.values()):
            written = labels[labels != IGNORED]
            texts["labels"] = Text(written, in_loss=torch.ones_like(written, dtype=torch.bool))
        return texts

    def noise(
        self, rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], width: int | None = None
    ) -> Batch:
        """neftune.noise_fields of the texts that a batch's rows are read from."""
        return noise_fields(rows, lengths, self.cfg.train.neftune_alpha, width=width)

    @abstractmethod
    def limits(self) -> dict[str, int]: ...

    def filler(self) -> str:
        """A text for specimen(), longer than every limit."""
        return "word " * (_FILLER_WORDS * max(self.limits().values(), default=512))

    # Loss and scores
    # ----------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        return (batch["labels"] != IGNORED).sum()

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        for batch in window:
            yield model(**batch)["loss"]

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """Every sum that the module returns, per unit: its loss, and what else it counts."""
        units = self.units(batch)
        return {name: Ratio(total, units) for name, total in model(**batch).items()}


def _head_of(model: nn.Module) -> nn.Module | None:
    return dict(model.named_children()).get("head")


def _below(weights: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    """The weights of one module, by their names within it."""
    prefix = f"{module}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def _text(name: str, batch: Batch) -> Text:
    """A tensor of ids with its attention mask and labels, which are found by name and shape."""
    ids, labels = batch[name], batch.get("labels")
    mask = batch.get(name.replace("input_ids", "attention_mask")) if name != "tokens" else None
    is_real = mask.bool() if mask is not None and mask.shape == ids.shape else None
    if labels is None:
        return Text(ids, is_real)
    # a context may be as long as the tokens that have the labels
    has_labels = labels.shape == ids.shape and not name.startswith("context_")
    return Text(
        ids, is_real, labels != IGNORED if has_labels else torch.zeros_like(ids, dtype=torch.bool)
    )
