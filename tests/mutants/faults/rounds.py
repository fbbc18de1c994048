"""Faults in rounds of mining and training, in topics by a model, and in switches of the environment."""

from tests.mutants.fault import Fault

ROUNDS = "tests/unit/test_round_dictionaries.py"
COPIES = "tests/unit/test_near_copies.py"
BATCHES = "tests/unit/test_retriever_batches.py"
SWITCHES = "tests/unit/test_switches.py"

FAULTS = [
    Fault(
        "trainer/rounds/near_copies.py",
        '    if category == "Cf":',
        '    if category == "none":',
        why="an invisible character hides a test question among those that are trained on",
        tests=f"{COPIES} -k form_of_unicode",
    ),
    Fault(
        "trainer/rounds/near_copies.py",
        'if category[0] in "LNM"',
        'if category[0] in "LN"',
        why="questions in Hindi that differ by their vowels are taken for one",
        tests=f"{COPIES} -k vowels",
    ),
    Fault(
        "trainer/rounds/loop.py",
        "        lock.hold(loop.out)\n",
        "",
        why="two processes write one loop after its lock file was removed by hand",
        tests=f"{ROUNDS} -k another_process",
    ),
    Fault(
        "trainer/rounds/sources.py",
        'absent.discard(row["id"])',
        "absent.clear()",
        why="an absent passage is found after hours of encoding",
        tests=f"{ROUNDS} -k named_twice",
    ),
    Fault(
        "trainer/tasks/retriever/batching/topics.py",
        "cfg.train.seed if cfg.encoder.projection is not None else None",
        "None",
        why="a run has the topics of vectors that another seed projected",
        tests=f"{BATCHES} -k one_encoder",
    ),
    Fault(
        "trainer/tasks/retriever/batching/topics.py",
        '".bin", ".pt", ".json"',
        '".bin", ".json"',
        why="a retriever's new projection leaves its old topics in the cache",
        tests=f"{BATCHES} -k its_projection",
    ),
    Fault(
        "trainer/tasks/retriever/apart/task.py",
        'update={"chunk_tokens": None}',
        "update={}",
        why='a model that was trained with chunks of "auto" encodes text by text',
        tests="tests/numerics/test_retriever_chunks.py -k one_piece",
    ),
    Fault(
        "trainer/switches.py",
        'if word not in ("", on, off):',
        "if False:",
        why="LATHE_KEEP_MEMORY=false is on",
        tests=f"{SWITCHES} -k does_not_know",
    ),
    Fault(
        "trainer/plan/memory/measure.py",
        '"base": shapes, **kernels,',
        '"base": shapes,',
        why="a plan shows the memory of the other kernels of a processor",
        tests=f"{SWITCHES} -k one_kind",
    ),
    Fault(
        "trainer/launch/run_folder.py",
        "    if began not in (None, now):",
        "    if False:",
        why="a run goes on with kernels of other last bits, and nobody is told",
        tests=f"{SWITCHES} -k goes_on",
    ),
    Fault(
        "trainer/plan/time/rates.py",
        "kept=KEPT if is_kept else 0.0",
        "kept=KEPT",
        why="a plan leaves room for memory that the run gives back",
        tests="tests/unit/test_kept_memory.py -k leaves_room",
    ),
]
