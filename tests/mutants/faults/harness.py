"""Faults in published tasks on a run's model."""

from tests.mutants.fault import Fault

HARNESS = "tests/unit/test_harness.py"

FAULTS = [
    Fault(
        "trainer/harness/mteb.py",
        "own = rows[rank::world]",
        "own = rows",
        why="each rank reads every text",
        tests=HARNESS,
    ),
    Fault(
        "trainer/harness/mteb.py",
        'prompt_type == "document" else "query"',
        'prompt_type == "query" else "query"',
        why="queries are read as passages, and passages as queries",
        tests=HARNESS,
    ),
    Fault(
        "trainer/harness/lm_eval.py",
        "gains[metric] = Gain(value, paired if is_mean else None)",
        "gains[metric] = Gain(value, paired)",
        why="a metric that is no mean of rows has an interval",
        tests=HARNESS,
    ),
    Fault(
        "trainer/harness/lm_eval.py",
        "for of_model in (others, mine):",
        "for of_model in (mine, others):",
        why="broken rows are told as mended ones",
        tests=HARNESS,
    ),
    Fault(
        "trainer/harness/records.py",
        'return entry.get("weights"), entry.get("how"), entry',
        'return entry.get("weights"), entry',
        why="a file loses the answer to an earlier question",
        tests=HARNESS,
    ),
    Fault(
        "trainer/harness/records.py",
        'entry.get("how"), entry.get("against", {}).get("weights")',
        'entry.get("how")',
        why="a file loses the comparison with another model",
        tests=HARNESS,
    ),
    Fault(
        "trainer/evaluation/named_run.py",
        "values = own if about is None else about.experiment",
        "values = own",
        why="the base of an export that has left its run is the export",
        tests=HARNESS,
    ),
]
