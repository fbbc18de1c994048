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

    from trainer.commands.vectors.forms import Found
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
    from trainer.commands.vectors.forms import SEARCHES, one_form
    from trainer.retrieval import rankings
    from trainer.retrieval.vector_index import IndexOptions, folder_of
    from trainer.runtime import distributed

    check_run(run_format, out)
    distributed.init()
    num_hits = depth + remove_query
    if faiss is None and (index or ef_search or nprobe):
        raise ConfigError("--index, --ef_search and --nprobe are of an index: give --faiss.")
    form = one_form([queries, *passages])
    if form == "bi":
        wish = None
        if faiss is not None:
            folder = index or folder_of(passages[0], faiss)
            wish = IndexOptions(folder, faiss, num_hits, ef_search=ef_search, nprobe=nprobe)
        found = _of_whole_texts(queries, passages, wish, depth=num_hits, verify=verify)
    else:
        if faiss is not None:
            raise ConfigError(
                f"--faiss searches one vector of each text, {queries} holds vectors of form="
                f'"{form}". Leave it out.'
            )
        found = SEARCHES[form](queries, passages, depth=num_hits, verify=verify)
    if distributed.is_main():
        cut = {"is_without_query": remove_query, "depth": depth}
        rows, scores = found.hits.rows, found.hits.scores
        of_run = rankings.of_search(
            found.questions, found.passages, rows=rows, scores=scores, **cut
        )
        write_run(out, of_run, run_format, tag)


def _of_whole_texts(
    queries: Path, passages: list[Path], wish: IndexOptions | None, *, depth: int, verify: bool
) -> Found:
    """A search of one vector for each text, exact or by an index."""
    import numpy as np

    from trainer.commands.vectors.forms import Found, check_vectors
    from trainer.retrieval import embeddings, exact_search, stored_forms
    from trainer.runtime.distributed import on_main

    questions, corpora = embeddings.read(queries), [embeddings.read(folder) for folder in passages]
    check_vectors(questions, corpora)
    for vectors in (questions, *corpora) if verify else ():
        embeddings.verify(vectors)
    on_main(lambda: embeddings.refuse_ids_twice(corpora))
    query_vectors = np.concatenate([stored_forms.floats(shard) for shard in questions.vectors])
    if wish is None:
        shards = [shard for corpus in corpora for shard in corpus.vectors]
        hits = exact_search.search(query_vectors, shards, depth=depth)
    else:
        hits = _hits_of_index(wish, corpora, query_vectors, verify=verify)
    return Found(questions.ids, [name for corpus in corpora for name in corpus.ids], hits)


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
