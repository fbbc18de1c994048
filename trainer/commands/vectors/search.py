"""`search`: the passages whose vectors are nearest to the questions', exactly or by an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.commands import options
from trainer.commands.retrieval import Depth, Format, check_run, write_run
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from trainer.retrieval.embeddings import Embeddings
    from trainer.retrieval.exact_search import Hits
    from trainer.retrieval.vector_index import IndexOptions

FaissSpec = Annotated[
    str | None,
    typer.Option(
        "--faiss",
        help='Search with a FAISS index, built once: HNSW32, "IVF1024,Flat", Flat.',
    ),
]
IndexFolder = Annotated[
    Path | None,
    typer.Option(
        "--index", help="The folder of the FAISS index; index-... in the first --passages."
    ),
]
EfSearch = Annotated[
    int | None,
    typer.Option(
        "--ef_search",
        min=1,
        help="HNSW: candidates of a question. Chosen by recall.",
    ),
]
Nprobe = Annotated[
    int | None,
    typer.Option("--nprobe", min=1, help="IVF: lists that are searched. Chosen by recall."),
]


@options.guard
def search(
    queries: Annotated[
        Path, typer.Option("--queries", help="The folder of questions' vectors that encode wrote.")
    ],
    passages: Annotated[
        list[Path],
        typer.Option(
            "--passages", help="A folder of passages' vectors; may be given several times."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The run file to write.")],
    depth: Depth = 100,
    run_format: Format = "trec",
    tag: Annotated[str, typer.Option("--tag", help="trec: the name of the run.")] = "dense",
    faiss: FaissSpec = None,
    index: IndexFolder = None,
    ef_search: EfSearch = None,
    nprobe: Nprobe = None,
    remove_query: Annotated[
        bool,
        typer.Option("--remove_query", help="Leave out the passage with the question's own id."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the checksums of vectors and index first.")
    ] = False,
) -> None:
    """Find the passages with the highest dot products for every question, exactly; on a GPU if
    there is one.
    """
    from trainer.commands.vectors.forms import SEARCHES, one_form, stored
    from trainer.retrieval import rankings
    from trainer.retrieval.vector_index import IndexOptions, folder_of
    from trainer.runtime import distributed

    check_run(run_format, out, tag)
    distributed.init()
    if faiss is None and (index or ef_search or nprobe):
        raise ConfigError("--index, --ef_search and --nprobe are of an index: give --faiss.")
    form = one_form([queries, *passages])
    if form != "bi" and faiss is not None:
        raise ConfigError(
            f"--faiss searches one vector of each text, {queries} holds vectors of form="
            f'"{form}". Leave it out.'
        )
    questions, corpora = stored(form, queries, passages, verify=verify)
    num_hits = depth + remove_query
    if faiss is None:
        num_hits = min(num_hits, sum(corpus.plan.count for corpus in corpora))
    if form == "bi":
        wish = None
        if faiss is not None:
            folder = index or folder_of(passages[0], faiss)
            wish = IndexOptions(folder, faiss, num_hits, ef_search=ef_search, nprobe=nprobe)
        hits = _of_whole_texts(questions, corpora, wish, depth=num_hits, verify=verify)
    else:
        hits = SEARCHES[form](questions, corpora, num_hits)
    if distributed.is_main():
        cut = {"is_without_query": remove_query, "depth": depth}
        names = [name for corpus in corpora for name in corpus.ids]
        of_run = rankings.of_search(questions.ids, names, rows=hits.rows, scores=hits.scores, **cut)
        write_run(out, of_run, run_format, tag)


def _of_whole_texts(
    questions: Embeddings,
    corpora: Sequence[Embeddings],
    wish: IndexOptions | None,
    *,
    depth: int,
    verify: bool,
) -> Hits:
    """A search of one vector for each text, exact or by an index."""
    import numpy as np

    from trainer.retrieval import exact_search, stored_forms

    query_vectors = np.concatenate([stored_forms.floats(shard) for shard in questions.vectors])
    if wish is not None:
        return _hits_of_index(wish, corpora, query_vectors, verify=verify)
    shards = [shard for corpus in corpora for shard in corpus.vectors]
    return exact_search.search(query_vectors, shards, depth=depth)


def _hits_of_index(
    wish: IndexOptions, corpora: Sequence[Embeddings], queries: np.ndarray, *, verify: bool
) -> Hits:
    from trainer.retrieval import vector_index
    from trainer.runtime import distributed

    if distributed.world() > 1:
        raise ConfigError(
            "--faiss searches on one device: start it with python, not with torchrun."
        )
    if verify:
        vector_index.verify(wish.folder)
    index = vector_index.open_index(wish, corpora, queries)
    for line in index.lines(wish.folder):
        typer.echo(line)
    return index.search(queries, wish.depth)
