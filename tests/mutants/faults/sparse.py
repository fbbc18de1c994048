"""Faults in sparse retrievers, and in the search of their weights."""

from tests.mutants.fault import Fault

SPARSE = "tests/unit/test_sparse.py"
FORMS = "tests/unit/test_other_forms.py"

FAULTS = [
    Fault(
        "trainer/tasks/retriever/sparse/pooling.py",
        "                place = torch.where(is_more, place + chunk.first, ",
        "                place = torch.where(is_more, place, ",
        why="of a long text the wrong token learns a word",
        tests=SPARSE,
    ),
    Fault(
        "trainer/tasks/retriever/sparse/pooling.py",
        "            slopes = (gradient_NV[chunk.texts] * (-weights).exp())",
        "            slopes = gradient_NV[chunk.texts]",
        why="the logarithm of a weight has the slope 1",
        tests=SPARSE,
    ),
    Fault(
        "trainer/tasks/retriever/sparse/loss.py",
        'means = {side: sums[side] / pool[f"{side}_count"].sum() for side in sums}',
        'means = {side: sums[side] / len(pool[f"{side}_count"]) for side in sums}',
        why="a regulariser is of sums over micro-batches and not of the mean of texts",
        tests=SPARSE,
    ),
    Fault(
        "trainer/tasks/retriever/sparse/loss.py",
        "total = total * share.clamp(max=1.0).square()",
        "total = total * share.clamp(max=1.0)",
        why="the warm-up is linear, and weights are pressed to 0 before they mean something",
        tests=SPARSE,
    ),
    Fault(
        "trainer/tasks/retriever/sparse/loss.py",
        'return super()._of_pool(pool) + len(pool["counts"]) * regularisers(',
        "return super()._of_pool(pool) + regularisers(",
        why="the more queries a step has, the less its regularisers count",
        tests="tests/numerics/test_sparse_sentence_transformers.py -m '' -k splade",
    ),
    Fault(
        "trainer/data/order.py",
        "            STEP: np.array([step + 1]),",
        "            STEP: np.array([step]),",
        why="the first step of a warm-up has no regulariser, other than documented",
        tests="tests/unit/test_order.py",
    ),
    Fault(
        "trainer/retrieval/sparse/word_search.py",
        "    is_hit = hits.scores > 0",
        "    is_hit = hits.scores >= 0",
        why="passages that share no word with a question fill its ranking",
        tests=SPARSE,
    ),
    Fault(
        "trainer/retrieval/sparse/word_weights.py",
        'return sparse.vstack(parts, format="csr")[np.argsort(order)]',
        'return sparse.vstack(parts, format="csr")[order]',
        why="weights of words lie under the ids of other texts",
        tests=SPARSE,
    ),
    Fault(
        "trainer/retrieval/sparse/word_weights.py",
        "    parts = (exact[exact != 0], kept.indices, kept.indptr)",
        "    parts = (exact, kept.indices, kept.indptr)",
        why="weights that float16 rounds to 0 move all weights behind them to other words",
        tests=SPARSE,
    ),
    Fault(
        "trainer/retrieval/sparse/word_search.py",
        "        counts_V += np.diff(index.indptr)",
        "        counts_V = np.diff(index.indptr)",
        why="the FLOPS of a search are those of its last block of passages",
        tests=SPARSE,
    ),
    Fault(
        "trainer/tasks/retriever/sparse/pooling.py",
        "            del of_cells  # before those of the next chunk are there",
        "            pass",
        why="the logits of two chunks are in memory at once",
        tests=SPARSE,
    ),
    Fault(
        "trainer/tasks/retriever/sparse/task.py",
        "        forms.refuse_other_tokenizer(folder, self.tokenizer, self.places.cache_dir)",
        "        pass",
        why="a model of another tokenizer encodes other words, silently",
        tests=FORMS,
    ),
]
