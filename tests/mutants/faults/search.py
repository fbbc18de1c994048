"""Faults in searching: where a run stops, what goes on, what is told of it."""

from tests.mutants.fault import Fault

UNTIL = "tests/runs/test_until.py -k bits"
SWEEPS = "tests/jobs/test_sweeps.py"
GROUPS = "tests/unit/test_sweep_groups.py"
REPORT = "tests/jobs/test_search_report.py"

FAULTS = [
    Fault(
        "trainer/training/loop.py",
        "step.stop or due.save or progress.step == session.until",
        "step.stop or due.save",
        why="a run that --until stops loses the steps since its last checkpoint",
        tests=UNTIL,
    ),
    Fault(
        "trainer/training/validation.py",
        "                _every_score(session, progress)",
        "                _is_best(session, progress, _every_score(session, progress))",
        why="the evaluation of a rung changes best/, the patience and the learning rate",
        tests=UNTIL,
    ),
    Fault(
        "jobs/search/drive.py",
        "early[-1:] or every[:1]",
        "early[-1:]",
        why="a search that begins anew throws away the trials that were trained further",
        tests=SWEEPS + " -k begins_anew",
    ),
    Fault(
        "jobs/search/drive.py",
        'stop = [] if until is None else [f"--until={until}"]',
        "stop = list[str]()",
        why="every trial of a search is trained to its end",
        tests=SWEEPS + " -k further",
    ),
    Fault(
        "jobs/search/drive.py",
        "            self.record.append(*asked(trials))",
        "            asked(trials)",
        why="a killed search does not know what it has submitted",
        tests=SWEEPS + " -k killed",
    ),
    Fault(
        "jobs/search/drive.py",
        "return of_step[0].get(search.metric) if of_step else None",
        "return next((one[search.metric] for one in every[::-1] if search.metric in one), 0.0)",
        why="a trial that has diverged is promoted for an earlier score",
        tests=SWEEPS + " -k diverges",
    ),
    Fault(
        "jobs/submit/group.py",
        "before is not None and (after is None or after > before)",
        "before is not None",
        why="a trial is submitted again and again for the step that it has come to",
        tests=SWEEPS + " -k paused",
    ),
    Fault(
        "trainer/config/sweeps/sweep.py",
        "return max(count // self.reduction, 1)",
        "return max(count // 2, 1)",
        why="a search costs more than it says and does not obey search.reduction",
        tests=GROUPS + " -k costs",
    ),
    Fault(
        "trainer/config/sweeps/sweep.py",
        'random.Random(f"{self.search.seed}/{number}/{again}/{key}")',
        'random.Random(f"{self.search.seed}/{number}/{again}/{len(self.axes)}")',
        why="one more key in a sweep changes the values of all others, and their ids",
        tests=GROUPS + " -k draws",
    ),
    Fault(
        "jobs/report/matter.py",
        "rest = (1 - between / whole) * (len(ranks) - 1) / (len(ranks) - groups)",
        "rest = 1 - between / whole",
        why="a key with many values seems to matter by chance alone",
        tests=REPORT + " -k share",
    ),
]
