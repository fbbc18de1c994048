"""Faults in the service: exactly once, what is told, who may."""

from tests.mutants.fault import Fault

VIEW = "tests/serve/test_job_view.py"
HOSTILE = "tests/serve/test_hostile_requests.py"
STREAM = "tests/serve/test_live_stream.py"

FAULTS = [
    Fault(
        "trainer/models/texts.py",
        "positions_RL = (mask_RL.cumsum(-1) - 1).clamp(min=0)[:, -step_RL.shape[1] :]",
        "positions_RL = (mask_RL * 0 + 1).cumsum(-1)[:, -step_RL.shape[1] :] - 1",
        why="a text that waits beside a longer one is another than alone",
        tests="tests/numerics/test_texts.py",
    ),
    Fault(
        "trainer/models/texts.py",
        "if token in self.ends:",
        "if token == min(self.ends):",
        why="a text goes on behind the second token that ends it",
        tests="tests/numerics/test_texts.py",
    ),
    Fault(
        "trainer/models/weights/generation_file.py",
        "model.generation_config = GenerationConfig(**(ids | missing))",
        "_ = GenerationConfig(**(ids | missing))",
        why="penalties of a base are obeyed by training's evaluations alone",
        tests="tests/numerics/test_ways_to_generate.py -k fid",
    ),
    Fault(
        "trainer/tasks/token_task.py",
        "[self.end, *self._ends_of_file()]",
        "[self.end]",
        why="a base's second stop token ends no text",
        tests="tests/numerics/test_ways_to_generate.py",
    ),
    Fault(
        "trainer/tasks/fid/task.py",
        "max_tokens + 1,",
        "max_tokens,",
        why="one token asked of fid is a traceback, n tokens are n - 1",
        tests="tests/numerics/test_ways_to_generate.py -k asked",
    ),
    Fault(
        "trainer/commands/answer.py",
        '"length" if whole.is_cut else "stop"',
        '"stop"',
        why="an answer that was cut says that it ended",
        tests="tests/numerics/test_ways_to_generate.py -k asked",
    ),
    Fault(
        "jobs/serve/answers/workers.py",
        "if not is_over and all(each.has_left for each in batch):",
        "if not is_over and any(each.has_left for each in batch):",
        why="a client that leaves ends the answers of those beside it",
        tests="tests/serve/test_answers.py",
    ),
    Fault(
        "jobs/serve/job_view.py",
        'is_before_cancel = cancel is None or (row.ended_at or "") <= cancel.at',
        "is_before_cancel = True",
        why="a job that was told to be cancelled becomes a success",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/job_view.py",
        'last.wish == "pause" or row.history[-1].at < last.at',
        'last.wish == "pause"',
        why="a job that is to go on counts as cancelled, and never does",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/keeper.py",
        "is_same = size >= before.end and _digest(file, before.end) == before.mark",
        "is_same = size >= before.end",
        why="events are lost when a run that resumed has written more than it had",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/tickets.py",
        'f"{owner}\\0{key}"',
        'f"{key}"',
        why="an Idempotency-Key of one token finds the job of another",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/access.py",
        "        return self.owner in (None, owner)",
        "        return True",
        why="a token sees the jobs and files of others",
        tests=HOSTILE,
    ),
    Fault(
        "jobs/serve/app.py",
        "        if not self.gate.is_our_origin(headers):\n",
        "        if False:\n",
        why="a page of another site starts jobs",
        tests=HOSTILE,
    ),
    Fault(
        "jobs/serve/uploads.py",
        "        if not self.is_whole:\n",
        "        if False:\n",
        why="half of an upload is kept as a file",
        tests=HOSTILE,
    ),
    Fault(
        "jobs/serve/live/stream.py",
        "            self.since = tick\n",
        "            pass\n",
        why="pages are sent every line every second",
        tests=STREAM,
    ),
    Fault(
        "jobs/serve/live/series.py",
        "is_replaced = facts.st_ino != place.file or facts.st_size < place.end",
        "is_replaced = facts.st_size < place.end",
        why="the curves of a run that resumed have steps that it took back",
        tests=STREAM,
    ),
    Fault(
        "jobs/serve/live/runs.py",
        "row.exp_id not in names",
        "False",
        why="nothing tells the runs of a group apart on the page",
        tests=STREAM,
    ),
    Fault(
        "jobs/serve/index.py",
        'whose, values = ("", []) if owner is None else ("where owner = ?", [owner])',
        'whose, values = "", []\n        owner = None',
        why="the page shows a token what others run",
        tests=STREAM,
    ),
    Fault(
        "jobs/record/patience.py",
        "is_known = last is not None and set(ids) <= set(last.ids)",
        "is_known = last is not None",
        why="a job of which a slow scheduler has said nothing yet counts as lost",
        tests="tests/serve/test_patience.py",
    ),
]
