"""Faults in late interaction, and in searches of vectors of tokens."""

from tests.mutants.fault import Fault

LATE = "tests/unit/test_late.py"
SEARCH = "tests/unit/test_token_search.py"
FORMS = "tests/unit/test_other_forms.py"

FAULTS = [
    Fault(
        "trainer/models/lean/maxsim.py",
        '_reduced(passages_ME @ block_TE.T, "max", lengths_P)',
        '_reduced(passages_ME @ block_TE.T, "mean", lengths_P)',
        why="a vector is compared with the mean of a passage's, not with the nearest",
        tests=LATE,
    ),
    Fault(
        "trainer/models/lean/maxsim.py",
        "with torch.autocast(passages_ME.device.type, enabled=False):",
        "if True:",
        why="rerank --precision bf16 gives many passages the same score",
        tests=LATE,
    ),
    Fault(
        "trainer/models/lean/maxsim.py",
        "blocks = queries_TE.split(max(1, budget // max(1, len(passages_ME))))",
        "blocks = queries_TE.split(max(1, budget))",
        why="the products of a large pool are in memory at once",
        tests=LATE,
    ),
    Fault(
        "trainer/tasks/retriever/late/batches.py",
        'piece["seen"] = mask * (torch.arange(ids.shape[1]) < own_lengths)',
        'piece["seen"] = mask',
        why="tokens attend to the mask tokens behind a query",
        tests=LATE,
    ),
    Fault(
        "trainer/tasks/retriever/late/batches.py",
        "for start, of_row in zip(starts, places, strict=False) for at in of_row]",
        "for start, of_row in zip(starts, places, strict=False) for at, _ in enumerate(of_row)]",
        why="the vectors of punctuation are kept, and those of the last tokens lost",
        tests=LATE,
    ),
    Fault(
        "trainer/tasks/retriever/late/model.py",
        "with nullcontext() if read is None else recomputation.nothing_of(body):",
        "with nullcontext():",
        why="recomputed blocks of padded queries attend as on a stream",
        tests=LATE,
    ),
    Fault(
        "trainer/tasks/retriever/late/task.py",
        "return found / queries.lengths[:, None] if self.late.mean else found",
        "return found",
        why="reranking forgets late.mean",
        tests=LATE,
    ),
    Fault(
        "trainer/retrieval/late/token_search.py",
        "position += len(lengths)",
        "position += 1",
        why="hits of later shards name other passages",
        tests=SEARCH,
    ),
    Fault(
        "trainer/retrieval/late/token_search.py",
        "scores_QP = scores_QP / of_few[:, None]",
        "pass",
        why="a search forgets late.mean",
        tests=SEARCH,
    ),
    Fault(
        "trainer/retrieval/late/pooling.py",
        "others, wanted = vectors_KE[1:], max(",
        "others, wanted = vectors_KE[:-1], max(",
        why="pooling takes [CLS] twice, and forgets the last token",
        tests=SEARCH,
    ),
    Fault(
        "trainer/retrieval/late/token_embeddings.py",
        "        of_rows = [texts[place] for place in np.argsort(order)]",
        "        of_rows = [texts[place] for place in order]",
        why="vectors of tokens lie under the ids of other texts",
        tests=LATE,
    ),
    Fault(
        "trainer/tasks/retriever/late/task.py",
        '        forms.refuse_base(base_source.resolve(self.cfg.base, self.places), "late")',
        "        pass",
        why="a ColBERT starts from a dense retriever with a random projection, and a line of the log says so",
        tests=FORMS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        "            lock.acquire()",
        "            pass",
        why="two commands write one folder, and one deletes what the other is writing",
        tests=FORMS,
    ),
    Fault(
        "trainer/harness/searcher.py",
        "        depth = len(self._names) if top_ranked is not None else min(top_k, len(self._names))",
        "        depth = min(top_k, len(self._names))",
        why="of the passages that a reranking task gives, those that are not found score 0",
        tests="tests/unit/test_harness.py",
    ),
]
