"""A retriever of form late or sparse as MTEB searches with it: by its own exact search."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.files.atomic import refusals
from trainer.protocol.abilities import EmbedsTokens, EmbedsWords, Side
from trainer.retrieval import embeddings
from trainer.retrieval.late import token_embeddings, token_search
from trainer.retrieval.sparse import word_search, word_weights
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row
    from trainer.retrieval.exact_search import Hits

Rankings = dict[str, dict[str, float]]  # of each question the scores of passages
_Search = Callable[..., "Hits"]  # questions, folders of passages and depth


def _words_found(queries: Any, corpora: Sequence[Any], *, depth: int) -> Hits:
    return word_search.search(queries, corpora, depth=depth).hits


@dataclass(frozen=True)
class VectorForm:
    """What makes, keeps and compares the vectors of a form."""

    store: Any  # its module: write, encoder_of, shard_rows
    plan: type[embeddings.EmbeddingsPlan]
    of_plan: dict[str, Any]  # what its plan states besides
    search: _Search


def form_of(task: Any) -> VectorForm | None:
    """The form of a task; None for one that makes a vector of a text, or none."""
    if isinstance(task, EmbedsTokens):
        own = {"mean": task.late.mean, "pool_factor": 1.0}
        return VectorForm(token_embeddings, token_embeddings.TokenPlan, own, token_search.search)
    if isinstance(task, EmbedsWords):
        return VectorForm(word_weights, word_weights.WordPlan, {}, _words_found)
    return None


class TrainedSearcher:
    """MTEB's SearchProtocol. Vectors lie in a folder until the next corpus comes."""

    def __init__(
        self, form: VectorForm, task: Any, model: nn.Module, *, batch: int, meta: Any
    ) -> None:
        self._form, self._task, self._model, self._batch = form, task, model, batch
        self.mteb_model_meta = meta
        self._names: list[str] = []
        self._corpus: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def index(self, corpus: Iterable[Mapping[str, Any]], **_: Any) -> None:
        """Encode the passages of a task."""
        rows = [_row(one, number) for number, one in enumerate(corpus)]
        self._names = [str(one["id"]) for one in corpus]
        self._begin()
        self._corpus = self._stored("passage", rows, "passages")

    def _begin(self) -> None:
        """A new folder, below that of the cache, which all ranks see."""
        if distributed.is_main():
            cache = self._task.places.cache_dir
            with refusals(cache):
                cache.mkdir(parents=True, exist_ok=True)
                self._folder = tempfile.TemporaryDirectory(prefix="mteb-", dir=cache)

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> Rankings:
        """The scores of the best passages of each question. top_ranked: those that may be found."""
        names = [str(one["id"]) for one in queries]
        rows = [_row(one, number) for number, one in enumerate(queries)]
        questions = self._stored("query", rows, f"questions-{embeddings.digest_of(rows)[0][:16]}")
        depth = len(self._names) if top_ranked is not None else min(top_k, len(self._names))
        hits = self._form.search(questions, [self._corpus], depth=depth)
        found: Rankings = {}
        for name, places, scores in zip(names, hits.rows, hits.scores, strict=True):
            of_question = {
                self._names[place]: float(score)
                for place, score in zip(places, scores, strict=True)
                if place >= 0
            }
            if top_ranked is not None:
                # a passage that shares no word with a question has no score, and is ranked last
                of_question = {one: of_question.get(one, 0.0) for one in top_ranked.get(name, ())}
            found[name] = of_question
        return found

    def _stored(self, side: Side, rows: list[Row], name: str) -> Any:
        """The fp32 vectors of texts in a folder that all ranks see. A collective."""
        store = self._form.store
        folder = Path(on_main(lambda: self._folder and self._folder.name) or ".")
        texts, count = embeddings.digest_of(rows)
        plan = self._form.plan(
            model="",
            texts=texts,
            side=side,
            dtype="float32",
            count=count,
            shard_rows=store.shard_rows(count, distributed.world()),
            **self._form.of_plan,
        )
        encode = store.encoder_of(self._task, self._model, side=side, batch=self._batch)
        return store.write(folder / name, lambda: iter(rows), encode, plan=plan)


def _row(one: Mapping[str, Any], number: int) -> Row:
    """A text of MTEB under its place: ids of MTEB may be any text. An instruction stands behind the
    question, as MTEB joins them.
    """
    text = one.get("text")
    if not isinstance(text, str):
        raise ConfigError(
            f"--mteb: got rows of {', '.join(one)}, and the model reads texts. Leave such tasks "
            "out."
        )
    instruction = one.get("instruction")
    title = {"title": one["title"]} if one.get("title") else {}
    return {"id": str(number), **title, "text": f"{text} {instruction}" if instruction else text}
