"""A cross-encoder: it reads a query together with each of its passages, and learns to score the
relevant ones above the others.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.data.formats import picked
from trainer.data.padding import pad_right
from trainer.errors import ConfigError
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import adapters, base_model, base_source
from trainer.models.families import family_of
from trainer.models.head import load_head
from trainer.models.packed.layout import pack
from trainer.models.weights import model_folder
from trainer.protocol.abilities import IdLists, Uncut
from trainer.protocol.task import Batch, Encoded, Places, Row, Text
from trainer.runtime.batch import to_device
from trainer.tasks.retriever import rows, selection, sentence_folder
from trainer.tasks.retriever.config import Config, Data
from trainer.tasks.retriever.cross import heads, losses, metrics
from trainer.tasks.retriever.cross.model import Ranker
from trainer.tasks.retriever.cross.pairs import Pairs
from trainer.tasks.retriever.export import (
    DESCRIBED_DATA,
    OF_CROSS,
    refuse_base,
    refuse_lost_head,
    refuse_other_form,
    refuse_other_tokenizer,
    tell_changes,
)
from trainer.tasks.retriever.tokens import passage_of
from trainer.tasks.token_task import TokenTask

log = logging.getLogger(__name__)

# What a batch says besides what the model reads.
_BESIDE = ("relevance", "is_there", "slots")
_NO_ACTIVATION = "torch.nn.modules.linear.Identity"


class Task(TokenTask[Config]):
    """A row is a query with its passages: a list, which is never split. The loss is a mean over
    lists.
    """

    unit: ClassVar[str] = "queries"
    kind: ClassVar[base_model.Kind] = "encoder"
    rows_are_of_files: ClassVar[bool] = True

    def __init__(self, cfg: Config, places: Places) -> None:
        tokenizer = base_source.tokenizer_of(cfg, places, needs_eos=False)
        super().__init__(cfg, places, tokenizer=tokenizer)
        self._classifier = heads.classifier_of(base_source.config_of(cfg.base, places))
        self.pairs = Pairs(self.tokenizer, cfg.data)

    # Model
    # ----------------------------------------------------------------------------------------------

    def operate(self, base: Any) -> nn.Module:
        if self.cfg.dropout is not None:
            base_model.set_dropout(base, self.cfg.dropout)
        self._refuse_beyond_positions(base.config)
        seed, dropout = self.cfg.train.seed, self.cfg.dropout
        return Ranker(base, self.reader(base), seed=seed, dropout=dropout)

    def _refuse_beyond_positions(self, config: Any) -> None:
        """ConfigError when a pair may be longer than the positions that a base has learnt."""
        data, positions = self.cfg.data, getattr(config, "max_position_embeddings", None)
        longest = data.query_tokens + data.passage_tokens
        if positions is not None and family_of(config).positions_follow_pad:
            positions -= config.pad_token_id + 1
        if positions is not None and longest > positions:
            raise ConfigError(
                f"data.query_tokens={data.query_tokens} and data.passage_tokens="
                f"{data.passage_tokens} make pairs of {longest} tokens, longer than the model's "
                f"{positions} positions. Lower one of them by {longest - positions}."
            )

    def fill_head(self, head: Any, source: str) -> bool:
        """From head.safetensors beside adapters, else from the weights of a classifier. Of a body
        with its pooler alone the output layer stays new.
        """
        if load_head(head, source):
            return True
        if adapters.are_in(Path(source)):
            return False
        missing = heads.load(head, source, body=self._body)
        if missing:
            refuse_lost_head(source, "cross")
            log.info("%s lacks of the head: %s", source, ", ".join(missing))
        return not missing

    @property
    def _body(self) -> str:
        """The name of the body in a classifier of transformers."""
        return self._classifier.base_model_prefix

    def model(self) -> nn.Module:
        refuse_base(base_source.resolve(self.cfg.base, self.places), "cross")
        return super().model()

    def load_export(self, folder: Path) -> nn.Module:
        refuse_other_form(folder, "cross")
        path = folder / OF_CROSS
        if path.is_file():
            self._follow(path)
        model = super().load_export(folder).eval()
        refuse_other_tokenizer(folder, self.tokenizer, self.places.cache_dir)
        return model

    def _follow(self, path: Path) -> None:
        """Join texts as the exported model was trained, even if this experiment says otherwise."""
        try:
            trained = {name: json.loads(path.read_text())[name] for name in DESCRIBED_DATA}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: {error!r}. Export the model again.") from None
        data = self.cfg.data
        if tell_changes(path.parent, trained, dict(data)):
            self.pairs = Pairs(self.tokenizer, data.model_copy(update=trained))

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """A classifier of transformers with one output; adapters without their base have their head
        in head.safetensors.
        """
        if self.cfg.exports_adapters:
            super().export(weights, folder)
        else:
            self._export_classifier(self.whole(weights, [self.base_name]), folder)
        data = self.cfg.data.model_dump()
        said = {name: data[name] for name in DESCRIBED_DATA}
        (folder / OF_CROSS).write_text(json.dumps(said, indent=2) + "\n")

    def _export_classifier(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        config, data = self.exported_config(), self.cfg.data
        parts: dict[str, dict[str, Tensor]] = {self.base_name: {}, "head": {}}
        for name, values in weights.items():
            part, _, own = name.partition(".")
            parts[part][own] = values
        names = heads.names_of(heads.form_of(config), parts["head"], body=self._body)
        whole = {f"{self._body}.{name}": values for name, values in parts[self.base_name].items()}
        whole |= {names[name]: values for name, values in parts["head"].items()}
        config.dtype = next(iter(whole.values())).dtype
        tokenizer = sentence_folder.with_pad(self.tokenizer)
        if tokenizer is self.tokenizer:
            tokenizer = copy.deepcopy(tokenizer)
        # sentence-transformers cuts a pair there, the longer text first
        tokenizer.model_max_length = data.query_tokens + data.passage_tokens
        model_folder.write(folder, config, tokenizer, whole)

    def exported_config(self) -> Any:
        """That of a classifier with one output; sentence-transformers is told that scores are no
        probabilities.
        """
        config = base_source.config_of(self.cfg.base, self.places)
        config.architectures, config.num_labels = [self._classifier.__name__], 1
        config.sentence_transformers = {"activation_fn": _NO_ACTIVATION}
        if config.pad_token_id is None:  # without it, transformers scores one text at a time
            config.pad_token_id = self.pad
        return config

    # Data
    # ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        places, data = self.places, self.cfg.data
        of_split = rows.rows(data, split, places.data_path, cache_dir=places.cache_dir)
        # neighbours in the embedded corpus may be equal, and a row may have no others
        if data.source != "stdlib_docs":
            of_split = rows.without_own_positives(of_split)
        sizes = (data.passages, data.positives) if split == "train" else (1, 1)
        usable = selection.trainable(of_split, *sizes)
        return ({**row, "item": item} for item, row in picked.enumerated(usable))

    def encode(self, row: Row) -> Encoded:
        """Ids of the query and of all its passages, positives first, without special tokens."""
        pairs = self.pairs
        whole_query = pairs.plain([row["query"]], "query")
        whole = pairs.plain([*row["positives"], *row["negatives"]], "passage")
        (query,), passages = pairs.cut(whole_query, "query"), pairs.cut(whole, "passage")
        cuts = {
            "queries": pairs.cut_of(whole_query, "query"),
            "passages": pairs.cut_of(whole, "passage"),
        }
        return Encoded(
            {
                "query": query,
                "passages": [token for tokens in passages for token in tokens],
                "lengths": [len(tokens) for tokens in passages],
                "num_positives": [len(row["positives"])],
                "item": [row["item"]],
            },
            is_truncated=any(any(cut.lost) for cut in cuts.values()),
            cuts=cuts,
        )

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """query; and passages, positives and negatives; without special tokens."""
        pairs = self.pairs
        texts = [*row["positives"], *row["negatives"]]
        query, passages = pairs.plain([row["query"]], "query"), pairs.plain(texts, "passage")
        return {
            "query": Uncut(query, pairs.room("query"), "data.query_tokens"),
            "passages": Uncut(passages, pairs.room("passage"), "data.passage_tokens"),
        }

    def limits(self) -> dict[str, int]:
        data = self.cfg.data
        return {
            "data.query_tokens": data.query_tokens,
            "data.passage_tokens": data.passage_tokens,
        }

    def specimen(self) -> Row:
        """A row with as many passages as a query has in training; token ids if the data hold
        ids.
        """
        text: Any = self.filler()
        if self.cfg.data.source == "pretokenised":
            text = [self.pad] * max(self.limits().values())
        negatives = [text] * (self.cfg.data.passages - 1)
        return {"query": text, "positives": [text], "negatives": negatives, "item": 0}

    def encoding_id(self) -> str:
        data: Data = self.cfg.data
        # the stored lengths depend on the number of passages
        described = {name: getattr(data, name) for name in DESCRIBED_DATA}
        return self.encoded_under(form="cross", passages=data.passages, **described)

    def length(self, encoded: Mapping[str, Any]) -> int:
        longest = len(encoded["query"]) + int(max(encoded["lengths"]))
        return self.cfg.data.passages * longest

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """The pairs of Q lists, P together, list by list and positives first, as the model reads
        them; of N passages of the longest list, is_there (Q, N) bool and relevance (Q, N) fp32, 1
        of a positive; and slots (P,), where each pair stands in the flattened lists.
        """
        seed = self.cfg.train.seed
        places = [selection.choose(row, self.cfg.data, seed=seed) for row in rows]
        lists = [
            (row["query"], [passage_of(row, index) for index in chosen])
            for row, chosen in zip(rows, places, strict=True)
        ]
        counts = torch.tensor([len(chosen) for chosen in places])
        is_there = torch.arange(int(counts.max())) < counts[:, None]
        relevance = torch.zeros(is_there.shape)
        for number, (row, chosen) in enumerate(zip(rows, places, strict=True)):
            labels = [float(index < int(row["num_positives"][0])) for index in chosen]
            relevance[number, : len(chosen)] = torch.tensor(labels)
        slots = is_there.flatten().nonzero()[:, 0]
        batch = self.lay_out(lists)
        return {**batch, "is_there": is_there, "relevance": relevance, "slots": slots}

    def lay_out(self, lists: Sequence[IdLists]) -> Batch:
        """What the model reads of queries with their passages, all without special tokens."""
        couples = [(query, passage) for query, passages in lists for passage in passages]
        ids = [self.pairs.join(*couple) for couple in couples]
        types = [self.pairs.types(*couple) for couple in couples] if self._has_types else None
        if self.is_packed:
            batch = pack(ids, bucketed=True)
            if types is not None:
                batch["types"] = torch.tensor([one for row in types for one in row])
            return batch
        tokens, mask = pad_right(ids, self.pad)
        batch = {"input_ids": tokens, "attention_mask": mask}
        if types is not None:
            batch["types"] = pad_right(types, 0)[0]
        return batch

    @cached_property
    def _has_types(self) -> bool:
        """Whether the tokenizer tells the two texts apart, and the body listens."""
        config = base_source.config_of(self.cfg.base, self.places)
        return self.pairs.has_types and getattr(config, "type_vocab_size", 0) > 1

    def describe(self, batch: Batch) -> dict[str, Text]:
        if "tokens" in batch:
            rows_of_batch = batch["tokens"].split(batch["starts"].diff().tolist())
            texts = [Text(ids) for ids in rows_of_batch]
        else:
            both = zip(batch["input_ids"], batch["attention_mask"], strict=True)
            texts = [Text(ids, mask) for ids, mask in both]
        return {f"pair {number}": text for number, text in enumerate(texts, start=1)}

    # Loss and scores
    # ----------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["relevance"]), device=batch["relevance"].device)

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        for batch in window:
            yield losses.of_lists(self._lists(model, batch), self.cfg.cross).sum()

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """The loss, and metrics.of_lists: each query's passages are compared with each other."""
        lists = self._lists(model, batch)
        loss_Q = losses.of_lists(lists, self.cfg.cross)
        return {"loss": Ratio(loss_Q.sum(), self.units(batch)), **metrics.of_lists(lists)}

    def _lists(self, model: nn.Module, batch: Batch) -> losses.Lists:
        read = {name: tensor for name, tensor in batch.items() if name not in _BESIDE}
        return losses.lists_of(model(**read)["scores"], batch)

    # Reranking
    # ----------------------------------------------------------------------------------------------

    def lists_of(self, texts: Sequence[tuple[str, Sequence[Row]]]) -> list[IdLists]:
        """The ids of queries with their passages, cut to the limits, as `relevance` takes them."""
        pairs = self.pairs
        queries = pairs.cut(pairs.plain([query for query, _ in texts], "query"), "query")
        flat = [passage for _, passages in texts for passage in passages]
        ids = iter(pairs.cut(pairs.plain(flat, "passage"), "passage"))
        of_queries = zip(queries, texts, strict=True)
        return [(query, [next(ids) for _ in passages]) for query, (_, passages) in of_queries]

    def relevance(self, model: nn.Module, lists: Sequence[IdLists]) -> Tensor:
        """(P,) fp32 scores of the pairs of queries with their passages, list by list. model: in
        evaluation mode.
        """
        return model(**to_device(self.lay_out(lists)))["scores"]
