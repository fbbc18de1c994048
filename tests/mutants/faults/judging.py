"""Faults in the comparison of two models, and in what it holds back."""

from tests.mutants.fault import Fault

PAIRED = "tests/unit/test_verdict.py"
JUDGEMENT = "tests/unit/test_judgement.py"
RUNS = "tests/runs/test_judge.py"

FAULTS = [
    Fault(
        "trainer/verdict/paired.py",
        "rows = draws.integers(num_rows, size=num_rows)",
        "rows = np.arange(num_rows)",
        why="an interval is a point",
        tests=PAIRED,
    ),
    Fault(
        "trainer/verdict/paired.py",
        "largest = max(largest, min(1.0, p_values[name] * (len(p_values) - place)))",
        "largest = max(largest, min(1.0, p_values[name]))",
        why="of many scores one is always better",
        tests=PAIRED,
    ),
    Fault(
        "trainer/verdict/paired.py",
        "if len(before) == len(after) == 1:\n        low",
        "if len(before) > 0:\n        low",
        why="the interval of several seeds is that of one",
        tests=PAIRED,
    ),
    Fault(
        "trainer/verdict/slices.py",
        "return (sums_RC / scale_C.astype(np.float32)).max(axis=1)",
        "return (sums_RC / scale_C.astype(np.float32))[:, 0]",
        why="the worst of many slices of equal models is named",
        tests=PAIRED,
    ),
    Fault(
        "trainer/verdict/slices.py",
        "if scores_C[worst] <= bound * (1 + _ROUNDING):",
        "if scores_C[worst] <= bound:",
        why="of scores that are often equal one in ten comparisons names a slice by chance",
        tests=PAIRED,
    ),
    Fault(
        "trainer/verdict/judgement.py",
        "return -one.effect, -one.high, -one.low",
        "return -one.effect, -one.low, -one.high",
        why="the gate of a loss looks at the better end of its interval",
        tests=JUDGEMENT,
    ),
    Fault(
        "trainer/verdict/judgement.py",
        "if not low >= bound.gain:",
        "if not gain >= bound.gain:",
        why="a gate lets through what may be no gain",
        tests=JUDGEMENT,
    ),
    Fault(
        "trainer/verdict/judgement.py",
        "if not all(np.array_equal(weights[0], one) for one in weights[1:]):",
        "if not weights:",
        why="losses by token of two tokenizers are compared",
        tests=JUDGEMENT,
    ),
    Fault(
        "trainer/judging/end_of_run.py",
        "    elif is_gated:\n",
        "    if is_gated:\n",
        why="a model that its gate refuses becomes final/",
        tests=RUNS,
    ),
    Fault(
        "trainer/judging/compare.py",
        'if how.overlap == "refuse":',
        'if how.overlap == "never":',
        why="a model is judged on rows that it was trained on",
        tests=RUNS,
    ),
    Fault(
        "trainer/training/run_plan.py",
        "has_export = is_refused or any",
        "has_export = any",
        why="a run that its gate refused trains its end again at every start",
        tests=RUNS,
    ),
    Fault(
        "trainer/verdict/paired.py",
        "p = second - first - half, second - first + half, max(p, p_of_seeds)",
        "p = second - first - half, second - first + half, p",
        why="two groups of seeds of one recipe are said to differ",
        tests=PAIRED,
    ),
    Fault(
        "trainer/verdict/judgement.py",
        "if score.outcome.num_rows < FEWEST_ROWS:",
        "if score.outcome.num_rows < 0:",
        why="a gate lets through what eight rows say",
        tests=JUDGEMENT,
    ),
    Fault(
        "trainer/judging/compare.py",
        "if comparison.before.model != START:",
        "if not comparison.before.model:",
        why="a run is compared with one that has trained on the rows",
        tests=RUNS,
    ),
    Fault(
        "trainer/judging/end_of_run.py",
        "if not on_main(lambda: has_line(plan.folder / METRICS, step, _WORSE_SLICES)):",
        "if step:",
        why="a comparison that died is logged twice",
        tests="tests/runs/test_judge_kills.py",
    ),
    Fault(
        "trainer/verdict/paired.py",
        "deals = max(SWAPS, _SWAPS_OF_SCORE * num_scores)",
        "deals = SWAPS",
        why="of more than a hundred scores no difference is shown, however clear",
        tests=JUDGEMENT,
    ),
    Fault(
        "trainer/judging/llm_judge.py",
        "return self._without_key(text) if isinstance(text, str)",
        "return text if isinstance(text, str)",
        why="a reply that repeats the key is stored with it",
        tests="tests/unit/test_llm_judge.py",
    ),
    Fault(
        "trainer/judging/compare.py",
        "    if old == new:\n        return\n",
        "    if old != new:\n        return\n",
        why="another comparison overwrites the one that stood there",
        tests="tests/unit/test_judged_runs.py",
    ),
]
