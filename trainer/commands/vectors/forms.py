"""The forms of vectors that models make: what writes each, what searches it, and which flags it
knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.retrieval.exact_search import Hits


@dataclass(frozen=True)
class VectorWriter:
    """What `encode` writes the vectors of a task with."""

    store: Any  # the module of the form: write, encoder_of, shard_rows
    plan: type[Any]
    of_plan: dict[str, Any]  # what its plan states besides
    of_encoder: dict[str, Any]


def writer_of(
    task: Any,
    *,
    side: str,
    dtype: str,
    dims: int | None,
    factor: float | None,
    layers: int | None = None,
) -> VectorWriter:
    """The writer of a task's vectors. ConfigError for a flag of another form, and for a task that
    makes no vectors.
    """
    from trainer.protocol.abilities import Embeds, EmbedsTokens, EmbedsWords
    from trainer.retrieval import embeddings
    from trainer.retrieval.late import token_embeddings
    from trainer.retrieval.sparse import word_weights

    if isinstance(task, EmbedsTokens):
        for flag, value in (("--dims", dims), ("--layers", layers)):
            if value is not None:
                raise ConfigError(_of_other(flag, "bi", "late"))
        if dtype not in token_embeddings.DTYPES:
            raise ConfigError(
                f"--dtype {dtype}: want {' or '.join(token_embeddings.DTYPES)} for a model of "
                'form="late".'
            )
        if factor is not None and side == "query":
            raise ConfigError("--pool_factor is for passages; questions keep all of their vectors.")
        if factor is not None and not math.isfinite(factor):
            raise ConfigError(f"--pool_factor {factor}: want a finite number of at least 1.")
        pooled = {"pool_factor": float(factor or 1)}
        of_plan = {**pooled, "mean": task.late.mean}
        return VectorWriter(token_embeddings, token_embeddings.TokenPlan, of_plan, pooled)
    if isinstance(task, EmbedsWords):
        of_others = (
            ("--dims", dims, "bi"),
            ("--layers", layers, "bi"),
            ("--pool_factor", factor, "late"),
        )
        for flag, value, form in of_others:
            if value is not None:
                raise ConfigError(_of_other(flag, form, "sparse"))
        if dtype not in word_weights.DTYPES:
            raise ConfigError(
                f"--dtype {dtype}: want {' or '.join(word_weights.DTYPES)} for a model of "
                'form="sparse".'
            )
        word_weights.scipy_sparse()
        return VectorWriter(word_weights, word_weights.WordPlan, {}, {})
    if not isinstance(task, Embeds):
        form = getattr(task.cfg, "form", None)
        of_form = "" if form is None else f' of form="{form}"'
        raise ConfigError(
            f"task {task.cfg.task!r}{of_form} makes no vectors. Name an experiment of a retriever "
            'of form="bi", "late" or "sparse".'
        )
    if factor is not None:
        raise ConfigError(_of_other("--pool_factor", "late", "bi"))
    return VectorWriter(embeddings, embeddings.EmbeddingsPlan, {}, {})


def _of_other(flag: str, form: str, own: str) -> str:
    return f'{flag} is for models of form="{form}", this one is of form="{own}". Leave it out.'


def one_form(folders: Sequence[Path]) -> str:
    """The form of all these folders of vectors; ConfigError when they differ."""
    from trainer.retrieval.embeddings import form_of

    forms = {folder: form_of(folder) for folder in folders}
    first, *others = forms
    for other in others:
        if forms[other] != forms[first]:
            raise ConfigError(
                f'{first} holds vectors of form="{forms[first]}", {other} of form='
                f'"{forms[other]}", which no search compares. Encode both by one model.'
            )
    return forms[first]


def search_tokens(questions: Any, corpora: Sequence[Any], depth: int) -> Hits:
    """An exact search of token vectors."""
    from trainer.retrieval.late import token_search

    return token_search.search(questions, corpora, depth=depth)


def search_words(questions: Any, corpora: Sequence[Any], depth: int) -> Hits:
    """An exact search of weights of words; it tells how many words texts have, and share."""
    from trainer.retrieval.sparse import word_search
    from trainer.runtime import distributed

    found = word_search.search(questions, corpora, depth=depth)
    if distributed.is_main():
        count = sum(corpus.plan.count for corpus in corpora)
        of_passage = sum(corpus.stored for corpus in corpora) / max(1, count)
        typer.echo(
            f"{questions.words:.1f} words of a question, {of_passage:.1f} of a passage, "
            f"{found.flops:.3f} in common (FLOPS), on average"
        )
    return found.hits


# Of each form besides "bi": what searches its vectors.
SEARCHES = {"late": search_tokens, "sparse": search_words}


def stored(
    form: str, queries: Path, passages: Sequence[Path], *, verify: bool
) -> tuple[Any, list[Any]]:
    """Folders of vectors of one form, which are opened and fit together. A collective.

    ConfigError for sides or models that do not, DataError for an id of two passages, and with
    `verify` for a file that is not the one that was written.
    """
    from trainer.retrieval import embeddings
    from trainer.retrieval.late import token_embeddings
    from trainer.retrieval.sparse import word_weights
    from trainer.runtime.distributed import on_main

    read = {"late": token_embeddings.read, "sparse": word_weights.read}.get(form, embeddings.read)
    questions, corpora = read(queries), [read(folder) for folder in passages]
    for vectors, side in ((questions, "query"), *((corpus, "passage") for corpus in corpora)):
        if vectors.plan.side != side:
            raise ConfigError(
                f"{vectors.folder} holds vectors of side {vectors.plan.side}, want {side}."
            )
        if vectors.plan.model != questions.plan.model:
            raise ConfigError(
                f"{vectors.folder} and {questions.folder} are of different models: encode both by "
                "one."
            )
        if verify:
            embeddings.verify(vectors)
    on_main(lambda: embeddings.refuse_ids_twice(corpora))
    return questions, corpora
