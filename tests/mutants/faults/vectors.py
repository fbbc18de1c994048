"""Faults in stored vectors, in the index beside them, and in what is told of both."""

from tests.mutants.fault import Fault

FORMS = "tests/unit/test_stored_forms.py"
INDEX = "tests/unit/test_vector_index.py"
EXACT = "tests/unit/test_exact_search.py"
DAMAGED = "tests/unit/test_damaged_vectors.py"
CARD = "tests/unit/test_card_scores.py"

FAULTS = [
    Fault(
        "trainer/models/losses.py",
        "self._is_late = leaves_weight and keeps",
        "self._is_late = keeps",
        why="an output layer gets no gradient from losses by target, as preferences have them",
        tests="tests/numerics/test_chunked_loss.py -k by_target",
    ),
    Fault(
        "trainer/switches.py",
        "if began is None or os.environ.get(CPU_KERNELS):",
        "if True:",
        why="what was begun without the kernels of a processor goes on to other bits",
        tests="tests/unit/test_switches.py",
    ),
    Fault(
        "trainer/launch/run_folder.py",
        "path.exists() and not options.resets(plan.id) and",
        "path.exists() and",
        why="a run that starts over keeps the kernels of the run that is moved aside",
        tests="tests/unit/test_switches.py",
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'return plan.get(CPU_KERNELS, "0") == "1"',
        "return True",
        why="a folder of vectors that was begun without kernels goes on with them",
        tests=DAMAGED,
    ),
    Fault(
        "trainer/retrieval/exact_search.py",
        'order = np.argsort(rows, kind="stable")',
        "order = np.arange(len(rows))",
        why="candidates of one question take the places of another's",
        tests=EXACT,
    ),
    Fault(
        "trainer/retrieval/exact_search.py",
        "np.divmod(np.flatnonzero(beats_QP), scores_QP.shape[1])",
        "np.divmod(np.flatnonzero(beats_QP), len(scores_QP))",
        why="on an Intel processor the candidates of a block come from other places",
        tests=EXACT,
    ),
    Fault(
        "trainer/retrieval/exact_search.py",
        "rows = (scores_P >= least).nonzero()[0]",
        "rows = np.argpartition(scores_P, -depth)[-depth:]",
        why="of passages that tie for the last place of a small search any is kept",
        tests=EXACT,
    ),
    Fault(
        "trainer/retrieval/exact_search.py",
        "return np.concatenate(list(parts))",
        "return np.concatenate(list(parts)[::-1])",
        why="a search of one question in threads finds passages of the wrong part",
        tests=EXACT,
    ),
    Fault(
        "trainer/retrieval/stored_forms.py",
        "scales = sizes_ND.max(axis=1) / 127",
        "scales = np.broadcast_to(sizes_ND.max() / 127, len(sizes_ND))",
        why="one large vector takes the digits of all others",
        tests=FORMS,
    ),
    Fault(
        "trainer/retrieval/stored_forms.py",
        "scores_QN[np.arange(len(rows)), rows] = -np.inf",
        "pass",
        why="a vector that finds itself raises the recall that is told",
        tests=FORMS,
    ),
    Fault(
        "trainer/retrieval/vector_index.py",
        "    if record.model != model:",
        "    if False:",
        why="an index of another model is searched, or refused without its name",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/vector_index.py",
        "    if [part.digest for part in record.parts] != digests[: len(record.parts)]:",
        "    if False:",
        why="an index of other vectors answers with positions of these",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/vector_index.py",
        "        if size != record.file.size:",
        "        if False:",
        why="FAISS reads a torn file",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/vector_index.py",
        'path = folder / f"index-{index.ntotal}.faiss"',
        'path = folder / "index-0.faiss"',
        why="a search that is killed while an index grows leaves one that nobody can read",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/vector_index.py",
        "record is None or len(record.parts) < len(corpora)",
        "record is None",
        why="an index grows and its new passages are forgotten, and its recall is the old one",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/vector_index.py",
        "            record = _record_for(options, corpora)  # another",
        "            pass  # another",
        why="a search that waited for the one that built an index builds it again",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/index_recall.py",
        "num_found += int(min(num_tied))",
        "num_found += int(num_tied[1])",
        why="passages of the last score count in the place of better ones that an index misses",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/judging.py",
        "    names = {query.id for query in queries} or None  # before --only: it adds no question\n"
        "    queries = [query for query in queries if only is None or query.id in only]\n",
        "    queries = [query for query in queries if only is None or query.id in only]\n"
        "    names = {query.id for query in queries} or None\n",
        why="ids of --only that no query has are measured",
        tests="tests/unit/test_retrieval_commands.py -k only_takes",
    ),
    Fault(
        "trainer/retrieval/index_recall.py",
        "is_deep = depth <= self.depth and",
        "is_deep =",
        why="the recall of 10 hits is told for 50",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/index_recall.py",
        'return max(value, depth) if self.name == "efSearch" else value',
        "return value",
        why="the recall of 100 candidates is told for the 16 that a search of few hits visits",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/index_recall.py",
        "        if settings[-1].reaches_target:",
        "        if settings:",
        why="an index is searched by its smallest setting, and finds half",
        tests=INDEX,
    ),
    Fault(
        "trainer/retrieval/embeddings.py",
        "lambda: shards.is_whole(plan.num_shards)",
        "lambda: shards.is_finished",
        why="a finished folder that lost a shard cannot be mended, and encode says that all is well",
        tests=f"{DAMAGED} -k lost",
    ),
    Fault(
        "trainer/retrieval/embeddings.py",
        "sha256 not in (None, hashlib.sha256(content).hexdigest())",
        "False",
        why="hits are told under the ids of other passages",
        tests=f"{DAMAGED} -k beside",
    ),
    Fault(
        "trainer/retrieval/embeddings.py",
        "    if names != wanted:",
        "    if len(names) != len(wanted):",
        why="one bit of a name has the vectors of a shard stand for those of another",
        tests=f"{DAMAGED} -k two_shards",
    ),
    Fault(
        "trainer/data/shard_folder.py",
        "if self.notes_kernels and has_kernels else plan",
        "if False else plan",
        why="a folder mixes vectors of two kernels, whose last bits differ",
        tests=f"{DAMAGED} -k kernels",
    ),
    Fault(
        "trainer/exports/card.py",
        '.partition("e")',
        '.partition("E")',
        why="the Hub takes a loss of 1e-05 for a text",
        tests=CARD,
    ),
]
