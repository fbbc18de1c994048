"""Faults in the service: exactly once, what is told, who may."""

from tests.mutants.fault import Fault

VIEW = "tests/serve/test_job_view.py"
HOSTILE = "tests/serve/test_hostile_requests.py"
STREAM = "tests/serve/test_live_stream.py"
TURNS = "tests/serve/test_turns.py"
ODD = "tests/jobs/test_odd_folders.py"

FAULTS = [
    Fault(
        "trainer/models/texts.py",
        "positions_RL = (mask_RL.cumsum(-1) - 1).clamp(min=0)[:, -step_RL.shape[1] :]",
        "positions_RL = (mask_RL * 0 + 1).cumsum(-1)[:, -step_RL.shape[1] :] - 1",
        why="a text that waits beside a longer one is another than alone",
        tests="tests/numerics/test_texts.py",
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
        'is_before_cancel = not ends or (row.ended_at or "") <= min(ends)',
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
        "jobs/serve/turn/reader.py",
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
    Fault(
        "jobs/serve/keeper.py",
        "        except Exception as error:  # of any kind, so that no job of another waits for ever\n",
        "        except OSError as error:\n",
        why="one job whose offer is gone stops the jobs of everybody",
        tests=f"{TURNS} -k poisoned",
    ),
    Fault(
        "jobs/serve/turn/reader.py",
        "        except Exception as error:  # of any kind: the jobs of others are read all the same\n",
        "        except OSError as error:\n",
        why="one wish of another shape fails no job, and its own waits for ever",
        tests=f"{TURNS} -k poisoned",
    ),
    Fault(
        "jobs/serve/keeper.py",
        "            may_pass = is_transient(error)\n",
        "            may_pass = False\n",
        why="a disk that is full for a moment fails the jobs that wait, for good",
        tests=f"{TURNS} -k full_disk",
    ),
    Fault(
        "jobs/serve/turn/troubles.py",
        "return not is_transient and time.monotonic() - trouble.since >= self.confirm_s",
        "return not is_transient",
        why="a folder that is moved at this moment fails its job for good",
        tests=f"{TURNS} -k 'moment or lasts'",
    ),
    Fault(
        "jobs/serve/turn/reader.py",
        'has_ended = before is not None and before["status"] == "succeeded"',
        "has_ended = False",
        why="a job that has succeeded fails when its folder cannot be entered any more",
        tests=f"{TURNS} -k succeeded",
    ),
    Fault(
        "jobs/serve/keeper.py",
        "        is_unwanted |= failure is not None\n",
        "        is_unwanted |= False\n",
        why="a job that has failed goes on training",
        tests=f"{TURNS} -k while_it_runs",
    ),
    Fault(
        "jobs/serve/rows.py",
        "value: Any = json_value(content.decode())  # as the trainings read it",
        "value: Any = json.loads(content.decode())",
        why="half of an emoji is taken in, and no training can read it",
        tests=f"{TURNS} -k poisoned",
    ),
    Fault(
        "jobs/serve/requests.py",
        "return super().render(plain(content))",
        "raise",
        why="one NaN in the dictionary of one run ends the list of all results",
        tests=f"{TURNS} -k json_has_no_word",
    ),
    Fault(
        "jobs/record/status.py",
        "row = as_shown(_row(case, verdict, sight))  # before an odd value is on record for good",
        "row = _row(case, verdict, sight)",
        why="one odd reason ends the table of all runs",
        tests=ODD,
    ),
    Fault(
        "jobs/record/paths.py",
        "    except OSError:\n        return True\n",
        "    except ValueError:\n        return True\n",
        why="a colleague's private run folder ends status for everybody",
        tests=ODD,
    ),
    Fault(
        "jobs/record/events.py",
        "    if job.exp_id != exp_id:\n",
        "    if False:\n",
        why="a record that was copied shows another experiment's state",
        tests=ODD,
    ),
    Fault(
        "jobs/report/scores.py",
        "        except Exception as error:  # of any kind: it must not hide the others\n",
        "        except ValueError as error:\n",
        why="one run folder ends the results of all",
        tests=ODD,
    ),
]
