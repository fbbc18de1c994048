"""Faults in what a person sees and does: signals, early refusals, names and messages."""

from tests.mutants.fault import Fault

SIGNALS = "tests/runs/test_signals.py -m 'not long'"
PREFLIGHT = "tests/runs/test_preflight.py"
UNCLEAR = "tests/runs/test_unclear_input.py"
TALK = "tests/unit/test_talk.py"

FAULTS = [
    Fault(
        "trainer/config/userfile.py",
        "return self.source_to_code(self.get_data(self.path), self.path)",
        "return super().get_code(fullname)",
        why="a quick change of a file of groups is passed over",
        tests="tests/unit/test_lathe_command.py",
    ),
    Fault(
        "trainer/training/loop.py",
        "            progress.owes_evaluation = due.evaluation",
        "            progress.owes_evaluation = False",
        why="an evaluation that Ctrl-C ended is never done: its scores are missing, and the rate differs",
        tests=SIGNALS,
    ),
    Fault(
        "trainer/training/scoring.py",
        "        rng.restore(before)",
        "        rng.seed_everything(0, 0)",
        why="a run that is evaluated, or stopped in it, draws other dropout afterwards",
        tests="tests/unit/test_rng.py -k evaluation",
    ),
    Fault(
        "trainer/launch/preflight.py",
        "    if not has_begun(plan):  # runs of older",
        "    if has_begun(plan):  # runs of older",
        why="a warm-up longer than the run is found out when it has begun, and never before",
        tests=PREFLIGHT,
    ),
    Fault(
        "trainer/data/token_store.py",
        "hashes[start:stop] = hashes[start:stop] * _FACTOR + own",
        "hashes[start:stop] = hashes[start:stop] * _FACTOR + np.uint64(1)",
        why="every validation row counts as one that is trained on",
        tests=PREFLIGHT,
    ),
    Fault(
        "trainer/config/identity.py",
        '            yield from _foreign(item, f"{path}[{index}]")',
        "            yield from ()",
        why="a tuple or NaN in a list has an id that its own file does not give back",
        tests="tests/unit/test_config.py",
    ),
    Fault(
        "jobs/submit/control.py",
        "    return _each_again(request, rows, survey(request.base, backend_of=request.backend_of))",
        "    return _each_again(request, rows, rows)",
        why="retry of one experiment sends more of its group than max_parallel",
        tests="tests/jobs/test_sending.py",
    ),
    Fault(
        "trainer/demo/talk.py",
        '_SPLIT = "test"',
        '_SPLIT = "train"',
        why="the demo asks about people whom it has read about",
        tests=TALK,
    ),
    Fault(
        "trainer/demo/talk.py",
        '{**row, "ctxs": []}',
        "row",
        why="the demo says that it answers without a context, and reads one",
        tests=TALK,
    ),
    Fault(
        "trainer/training/options.py",
        'require("wandb", "wandb")',
        "pass",
        why="a run whose tracker is not installed trains for hours without it",
        tests="tests/unit/test_extras.py",
    ),
]
