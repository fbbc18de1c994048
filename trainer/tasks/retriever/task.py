"""A dense retriever: it maps queries and passages to vectors, and learns to put a query's vector
near those of its passages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.config.optimizer.lora import Lora
from trainer.config.schema import Base, RandomBase
from trainer.errors import ConfigError
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import adapters, base_model, base_source
from trainer.models.weights import absent, taken
from trainer.protocol.abilities import Side
from trainer.protocol.task import Batch, Places, Text
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.tasks.retriever import (
    export,
    metrics,
    sentence_folder,
)
from trainer.tasks.retriever.apart.task import TwoSidedTask
from trainer.tasks.retriever.batches import Batches, texts_of
from trainer.tasks.retriever.config import Config, Encoder
from trainer.tasks.retriever.loss.pool_loss import PoolLoss
from trainer.tasks.retriever.model import (
    LogScale,
    Retriever,
    first_numbers,
    is_causal,
    most_calls,
    pooler_of,
    texts_by_name,
)
from trainer.tasks.retriever.tokens import Tokens

log = logging.getLogger(__name__)


class Task(TwoSidedTask):
    """Each text becomes one vector."""

    base_name: ClassVar[str] = ""  # operate() gives the base of one side as it is
    _dims: int | None = None  # numbers of a vector that embed() gives; None: all

    def __init__(self, cfg: Config, places: Places) -> None:
        self.places = places
        self.how: Encoder = cfg.encoder  # an exported model may say otherwise
        base = self._side(cfg.base, export.QUERY)
        of_query: dict[str, Any] = {"base": base}
        if base != cfg.base and not cfg.tokenizer:
            of_query["tokenizer"] = base_source.resolve(cfg.base, places)
        tokenizer = base_source.tokenizer_of(
            cfg.model_copy(update=of_query), places, needs_eos=False
        )
        super().__init__(cfg, places, tokenizer=tokenizer)
        self.tokens = Tokens(self.tokenizer, cfg.data)
        self._pool_loss = PoolLoss(cfg)
        if cfg.encoder.pooling == "cls" and is_causal(base_source.config_of(base, places)):
            raise ConfigError(
                'encoder.pooling="cls": in a decoder the first token sees nothing but itself. '
                'Use "eos" or "mean".'
            )

    # Model
    # ----------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        source = base_source.resolve(self.cfg.base, self.places)
        export.refuse_base(source, "bi")
        model = self._both(self.cfg.base, self.cfg.encoder, self.cfg.lora, init_from=self.init_from)
        absent.refuse(model, is_trained=True)
        if isinstance(source, RandomBase):
            return model
        folder = Path(source)
        if export.is_projected(folder):
            if model.pooler is not None:
                export.load_pooler(model.pooler, folder)
            else:
                log.warning("%s projects its vectors, this experiment does not", folder)
        if distributed.is_main():
            sentence_folder.warn_of_another(folder, self.cfg.encoder)
        return model

    def load_export(self, folder: Path) -> nn.Module:
        how = export.encoder_of(folder, self.cfg.encoder)
        export.check_holds_model(folder, tied=how.tied)
        export.refuse_other_tokenizer(folder, self.tokenizer, self.places.cache_dir)
        self._follow(folder, how)
        sides = export.sides(folder, tied=how.tied)
        lora = adapters.read(sides[export.QUERY])
        if lora is None:
            model = self._both(str(folder), how, None)
        else:
            description = export.read_description(folder)
            if description is not None:
                trained_on = description.base_fingerprint
                adapters.refuse_another_base(folder, trained_on, self.fingerprint())
            model = self._both(self.cfg.base, how, lora)
            for side, place in sides.items():
                adapters.load(getattr(model, side), place)
        absent.refuse(model, is_trained=False)
        if model.pooler is not None:
            export.load_pooler(model.pooler, folder)
        return model.eval()

    def skeleton(self) -> nn.Module:
        how: Any = {"kind": "encoder", "bits": self.cfg.train.base_bits}

        def side(name: str) -> Any:
            encoder = base_model.skeleton(self._side(self.cfg.base, name), self.places, **how)
            return self.operated(encoder, self.cfg.lora)

        with torch.device("meta"):
            return self._retriever(side, self.cfg.encoder)

    def _both(
        self, base: Base, how: Encoder, lora: Lora | None, *, init_from: str | None = None
    ) -> Retriever:
        """A retriever of one or two loaded encoders, with new adapters if `lora` is given, and with
        the weights of the folder `init_from` that fit.
        """
        loaded: Any = {"precision": self.cfg.train.precision, "kind": "encoder"}
        loaded["bits"] = None if lora is None else self.cfg.train.base_bits

        def side(name: str) -> Any:
            encoder = base_model.load(self._side(base, name), self.places, **loaded)
            if init_from is not None:
                taken.take(encoder, init_from)
            return self.operated(encoder, lora)

        return self._retriever(side, how)

    def _retriever(self, encoder_of: Any, how: Encoder) -> Retriever:
        query, passage = encoder_of(export.QUERY), None if how.tied else encoder_of(export.PASSAGE)
        width, dtype = query.config.hidden_size, next(query.parameters()).dtype
        pooler = pooler_of(how.projection, how, width=width, seed=self.cfg.train.seed, dtype=dtype)
        nested = self.cfg.loss.matryoshka
        widest = max(nested.dims, default=0) if nested else 0
        whole = width if how.projection is None else how.projection.width
        if widest > whole:
            raise ConfigError(
                f"loss.matryoshka.dims: got {widest}, but the vectors of this model have {whole} "
                f"numbers, want at most so many. Use {whole} for the whole vector."
            )
        read = {"query": self.reader(query)}
        read["passage"] = read["query"] if passage is None else self.reader(passage)
        scale = LogScale(how.temperature, dtype) if how.learn_temperature else None
        parts: Any = {"pooler": pooler, "log_scale": scale, "read": read}
        parts["layers"] = nested.layers if nested else ()
        return Retriever(query, passage, how=how, **parts)

    def operate(self, base: Any) -> Any:
        if self.cfg.dropout is not None:
            base_model.set_dropout(base, self.cfg.dropout)
        return base

    def bases(self) -> list[Base]:
        return [self._side(self.cfg.base, side) for side in (export.QUERY, export.PASSAGE)]

    def _side(self, base: Base, side: str) -> Base:
        """The base of one side: a folder with query_model/ and passage_model/ holds two."""
        source = None if isinstance(base, RandomBase) else base_source.resolve(base, self.places)
        return (
            str(Path(source) / side)
            if isinstance(source, str) and (Path(source) / side).is_dir()
            else base
        )

    def _follow(self, folder: Path, how: Encoder) -> None:
        """Embed texts as the exported model was trained, even if this experiment says otherwise."""
        self.how = how
        description = export.read_description(folder)
        if description is None:
            return
        trained = {name: getattr(description, name) for name in export.DESCRIBED_DATA}
        if export.tell_changes(folder, trained, dict(self.cfg.data)):
            self.tokens = Tokens(self.tokenizer, self.cfg.data.model_copy(update=trained))

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        names = [export.QUERY] if self.cfg.encoder.tied else [export.QUERY, export.PASSAGE]
        configs = {
            side: base_model.exported_config(
                self._side(self.cfg.base, side), self.places, kind=self.kind
            )
            for side in names
        }
        own = {"configs": configs, "tokenizer": self.tokenizer, "fingerprint": self.fingerprint()}
        weights = self.whole(weights, names)
        export.write(folder, weights, self.cfg, adapters_into=self.export_adapters, **own)

    # Batches
    # ----------------------------------------------------------------------------------------------

    @property
    def _batches(self) -> Batches:
        return Batches(self.cfg, self.tokens, is_packed=self.is_packed)

    def describe(self, batch: Batch) -> dict[str, Text]:
        return texts_by_name(batch)

    # Scores
    # ----------------------------------------------------------------------------------------------

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """Every metric of metrics.retrieval_metrics: each query of the split is compared with the
        passages of all its rows.
        """
        texts = texts_of(batch)
        vectors = model(**texts, calls=most_calls(texts))
        table = metrics.table_of(batch, vectors["queries"], vectors["passages"])
        temperature = self.how.temperature
        if "log_scale" in vectors:
            temperature = float((-vectors["log_scale"][0]).exp())
        measure = partial(metrics.retrieval_metrics, temperature=temperature)
        return {"retrieval": GatheredValues(table, measure)}

    # Embedding
    # ----------------------------------------------------------------------------------------------

    def embed(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        """(N, E) fp32 vectors of N token rows."""
        texts = to_device(self.laid_out(rows, side))
        vectors_NE = model(**texts)["queries" if side == "query" else "passages"].float()
        if self._dims is None:
            return vectors_NE
        return first_numbers(vectors_NE, self._dims, normalize=self.how.normalize)

    def shorten(self, model: Any, dims: int) -> None:
        if dims > model.width:
            raise ConfigError(
                f"--dims {dims}: got vectors of {model.width} numbers, want at most so many. Leave "
                "it out for whole vectors."
            )
        nested = self.cfg.loss.matryoshka
        self._tell_untrained("--dims", dims, nested.dims if nested else (), "numbers")
        self._dims = dims

    def keep_layers(self, model: Any, count: int) -> None:
        nested = self.cfg.loss.matryoshka
        if model.keep_layers(count):
            self._tell_untrained("--layers", count, nested.layers if nested else (), "blocks")

    def _tell_untrained(self, flag: str, got: int, trained: Sequence[int], what: str) -> None:
        """Warn of vectors that the loss of this experiment does not train."""
        if got in trained or not distributed.is_main():
            return
        log.warning(
            "%s %d: loss.matryoshka.%s of this experiment is %s, so that vectors of the first %d "
            "%s are not trained, and may find little.",
            flag,
            got,
            flag.removeprefix("--"),
            list(trained) or "not set",
            got,
            what,
        )
