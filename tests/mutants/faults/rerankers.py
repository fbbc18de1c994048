"""Faults in cross-encoders, and in rankings that they order anew."""

from tests.mutants.fault import Fault

CROSS = "tests/unit/test_cross_encoder.py -m 'not long'"
RERANK = "tests/unit/test_reranking.py"

FAULTS = [
    Fault(
        "trainer/tasks/retriever/cross/losses.py",
        "return both & (self.labels_QN[:, :, None] > self.labels_QN[:, None, :])",
        "return both & (self.labels_QN[:, :, None] >= self.labels_QN[:, None, :])",
        why="a cross-encoder is taught to put equally relevant passages below each other",
        tests=CROSS,
    ),
    Fault(
        "trainer/tasks/retriever/cross/losses.py",
        "    discounts_N = torch.log2(1.0 + ranks_N)",
        "    discounts_N = torch.log2(2.0 + ranks_N)",
        why="LambdaLoss weighs ranks otherwise than published",
        tests=CROSS,
    ),
    Fault(
        "trainer/tasks/retriever/cross/losses.py",
        ".masked_fill(~lists.is_there_QN, 0.0).sum(-1) / lists.counts_Q",
        ".sum(-1) / lists.counts_Q",
        why="passages that a shorter list does not have are learnt as negatives",
        tests=CROSS,
    ),
    Fault(
        "trainer/tasks/retriever/cross/pairs.py",
        "        first = len(self.before) + len(query) + len(self.between)\n",
        "        first = len(self.before) + len(query)\n",
        why="the separator between the texts of a pair is of the other type than elsewhere",
        tests=CROSS,
    ),
    Fault(
        "trainer/tasks/retriever/cross/metrics.py",
        "equal_QNN & (~is_relevant_QN[:, None, :] | is_earlier_NN)",
        "equal_QNN & is_earlier_NN",
        why="a model that gives every passage the same score looks right",
        tests=CROSS,
    ),
    Fault(
        "trainer/tasks/retriever/cross/task.py",
        'config.sentence_transformers = {"activation_fn": _NO_ACTIVATION}',
        "pass",
        why="sentence-transformers gives a sigmoid of our scores",
        tests="tests/unit/test_cross_encoder.py",
    ),
    Fault(
        "trainer/models/packed/stock.py",
        '        options["token_type_ids"] = batch["types"][None]',
        "        pass",
        why="a BERT reads query and passage as one text",
        tests=CROSS,
    ),
    Fault(
        "trainer/retrieval/reranking.py",
        'order = np.argsort(-of_hits, kind="stable")',
        'order = np.argsort(of_hits, kind="stable")',
        why="the worst passages stand first",
        tests=RERANK,
    ),
    Fault(
        "trainer/retrieval/reranking.py",
        "            scores[places] = of_batch.float().cpu().numpy()",
        "            scores[start : start + batch] = of_batch.float().cpu().numpy()",
        why="passages get the scores of others of another length",
        tests=RERANK,
    ),
    Fault(
        "trainer/retrieval/reranking.py",
        "[] if shards.is_finished else shards.own_missing(plan.num_shards)",
        "range(plan.num_shards)",
        why="a command that was killed begins again",
        tests=RERANK,
    ),
]
