"""Faults in which rows share a step, in chunks of tokens, and in Matryoshka over layers."""

from tests.mutants.fault import Fault

STEPS = "tests/unit/test_arranged_steps.py"
BATCHES = "tests/unit/test_retriever_batches.py"
CHUNKS = "tests/numerics/test_retriever_chunks.py -m 'not long' -k 'not auto'"
LAYERS = "tests/numerics/test_matryoshka_layers.py -m 'not long'"

FAULTS = [
    Fault(
        "trainer/data/arranged/steps.py",
        "behind = 1 + max(",
        "behind = max(",
        why="two questions of one passage stand in a step",
        tests=STEPS,
    ),
    Fault(
        "trainer/data/arranged/steps.py",
        "        return [row for row in late if not self._exchange(row)]",
        "        return late",
        why="rows are left out that other steps could take",
        tests=STEPS,
    ),
    Fault(
        "trainer/data/arranged/arrangement.py",
        '    rows = rows[np.argsort(rank[numbers], kind="stable")]',
        '    rows = rows[np.argsort(numbers, kind="stable")]',
        why="steps are cut across topics",
        tests=STEPS,
    ),
    Fault(
        "trainer/data/mixed/mixture.py",
        "                    counts[source] += share * rows",
        "                    counts[source] += share",
        why="a step of one source has a single row",
        tests=STEPS,
    ),
    Fault(
        "trainer/tasks/retriever/batching/together.py",
        "source.astype(np.int64) * _ODD",
        "source.astype(np.int64) * 0",
        why="passages of two sources are taken for one because their numbers are equal",
        tests=BATCHES,
    ),
    Fault(
        "trainer/tasks/retriever/model.py",
        'whole = whole[torch.cat([piece["texts"] for piece in of_side]).argsort()]',
        'whole = whole[torch.cat([piece["texts"] for piece in of_side])]',
        why="queries learn the passages of others",
        tests=CHUNKS,
    ),
    Fault(
        "trainer/tasks/retriever/model.py",
        "vectors[-1] = vectors[-1] + 0.0 * unused.sum()",
        "vectors[-1] = vectors[-1] + unused.sum()",
        why="the loss of a rank depends on how many chunks another one has",
        tests=CHUNKS,
    ),
    Fault(
        "trainer/models/inner_layers.py",
        "seen[layer] = self._norm(states)",
        "seen[layer] = states",
        why="a decoder of fewer blocks gives other vectors than were trained",
        tests=LAYERS,
    ),
]
