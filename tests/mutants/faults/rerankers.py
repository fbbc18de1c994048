"""Faults in cross-encoders, and in rankings that they order anew."""

from tests.mutants.fault import Fault

CROSS = "tests/unit/test_cross_encoder.py -m 'not long'"
RERANK = "tests/unit/test_reranking.py"
JUDGE = "tests/unit/test_false_negatives.py"
COPIES = "tests/unit/test_near_copies.py"

FAULTS = [
    Fault(
        "trainer/retrieval/rankings.py",
        "if not abs(hit.score) <= _LARGEST:",
        "if abs(hit.score) > _LARGEST:",
        why="a run file of several holds NaN where scores are far apart",
        tests="tests/unit/test_fuse.py",
    ),
    Fault(
        "trainer/commands/retrieval.py",
        "if len(tag.split()) != 1 or tag != tag.strip():",
        "if not tag:",
        why="a tag of two words makes a run file of seven columns",
        tests="tests/unit/test_fuse.py",
    ),
    Fault(
        "trainer/tasks/retriever/loss/teacher_scores.py",
        'if num_scored < 2 or not any(_is_scored(passage) for passage in row["positives"]):',
        "if num_scored < 2:",
        why="positives without a teacher's score are not told",
        tests="tests/unit/test_retriever_losses.py -k teach",
    ),
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
        "    if problem is not None:",
        "    if False:",
        why="a score that the disk has altered orders passages in silence",
        tests=RERANK,
    ),
    Fault(
        "trainer/retrieval/reranking.py",
        "for number in shards.own_missing(plan.num_shards):",
        "for number in range(plan.num_shards):",
        why="a command that was killed begins again",
        tests=RERANK,
    ),
    Fault(
        "trainer/retrieval/false_negatives.py",
        "self.margin is not None and score > best - self.margin",
        "self.margin is not None and score > best + self.margin",
        why="unknown positives within the margin are taught to be negatives",
        tests=JUDGE,
    ),
    Fault(
        "trainer/retrieval/false_negatives.py",
        "*(score for _, score in kept)]",
        "*of_negatives[: len(kept)]]",
        why="a student learns the scores of passages that were left out",
        tests=JUDGE,
    ),
    Fault(
        "trainer/retrieval/negatives.py",
        "found.setdefault(hit.passage, hit)",
        'found[f"{len(found)}"] = hit',
        why="what both rankings find is a negative twice",
        tests=JUDGE,
    ),
    Fault(
        "trainer/rounds/near_copies.py",
        "least * len(own) - _ROUNDING) + 1]",
        "least * len(own) - _ROUNDING)]",
        why="near copies of test questions are trained on",
        tests=COPIES,
    ),
    Fault(
        "trainer/rounds/leaks.py",
        "if number not in copies]",
        "if number in copies or True]",
        why="--drop_copies drops nothing",
        tests=COPIES,
    ),
    Fault(
        "trainer/rounds/dictionaries.py",
        'rest, "base": {"experiment": before}',
        'rest, "base": values["base"]',
        why="every round begins with the first model again",
        tests="tests/unit/test_round_dictionaries.py",
    ),
]
