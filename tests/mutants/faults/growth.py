"""Faults in what must not grow: looks at finished runs, texts tokenised again, memory taken anew."""

from tests.mutants.fault import Fault

MANY = "tests/serve/test_many_finished.py"
KEPT = "tests/unit/test_kept_memory.py"
TEXTS = "tests/unit/test_causal_lm_task.py"

FAULTS = [
    Fault(
        "jobs/record/events.py",
        "    note_change(folder.path.parent, folder.path.name)\n",
        "",
        why="a server sees a job that another process sent again a minute later",
        tests=f"{MANY} -k record_that",
    ),
    Fault(
        "trainer/telemetry/run_record.py",
        "            note_change(self.folder.absolute().parent, self.folder.name)\n",
        "",
        why="a server sees a run that starts again a minute later",
        tests=f"{MANY} -k starts_again",
    ),
    Fault(
        "jobs/serve/tickets.py",
        "        note_change(self.path.parents[2], self.path.name)  # <base>",
        "        pass  # <base>",
        why="a wish about a finished job waits a minute at the other server",
        tests=f"{MANY} -k two_servers",
    ),
    Fault(
        "jobs/serve/turn/watched.py",
        "if before.get(name) != inode}",
        "if name not in before}",
        why="a run folder that was put in the place of another is shown as the other",
        tests=f"{MANY} -k replaced",
    ),
    Fault(
        "jobs/serve/turn/watched.py",
        "            self._left = due\n",
        "            self._left = set()\n",
        why="a change is lost because the index was full when it was read",
        tests=f"{MANY} -k could_not_be_written",
    ),
    Fault(
        "jobs/serve/turn/watched.py",
        "is_all = changed is None or epoch != self._epoch",
        "is_all = changed is None",
        why="an index that was deleted stays empty for a minute",
        tests=f"{MANY} -k index_that_is_deleted",
    ),
    Fault(
        "jobs/serve/turn/watched.py",
        "is_settled = time.time() - about.st_mtime > SETTLED_S",
        "is_settled = True",
        why="a run that came within one tick of the clock is never listed",
        tests=f"{MANY} -k one_tick",
    ),
    Fault(
        "jobs/serve/turn/watched.py",
        "        if len(self._order) <= LOOKS:\n",
        "        if True:\n",
        why="an idle server looks at every finished run",
        tests=f"{MANY} -k idle_turn",
    ),
    Fault(
        "jobs/serve/index.py",
        "grp = :group,\n",
        "\n",
        why="a run by hand that was submitted later stays out of its group",
        tests=f"{MANY} -k record_that",
    ),
    Fault(
        "trainer/run_changes.py",
        "            return set() if was_absent else None\n",
        "            return set()\n",
        why="what changed before the log was removed by hand is not looked at",
        tests=f"{MANY} -k log_tells",
    ),
    Fault(
        "trainer/tasks/causal_lm/text_tokens.py",
        "                self._counts |= new\n",
        "                pass\n",
        why="every reading of the rows tokenises all long texts again",
        tests=f"{TEXTS} -k second_reading",
    ),
    Fault(
        "trainer/tasks/causal_lm/text_tokens.py",
        "if len(chunk) == _TEXTS_AT_ONCE or letters",
        "if len(chunk) == 1 or letters",
        why="texts are tokenised one by one",
        tests=f"{TEXTS} -k many_at_a_time",
    ),
    Fault(
        "trainer/runtime/host_memory.py",
        "    _is_empty = True\n    _return_free()",
        "    _is_empty = True",
        why="the heap grows with every length of a step",
        tests=f"{KEPT} -k beyond_a_step",
    ),
    Fault(
        "trainer/runtime/host_memory.py",
        "max(_needed, held)",
        "held",
        why="a short step makes every longer one give back",
        tests=f"{KEPT} -k heap_has_grown",
    ),
    Fault(
        "trainer/runtime/host_memory.py",
        "if held <= (1 + KEPT) * _needed:",
        "if held < _needed:",
        why="equal steps give everything back and take it anew",
        tests=f"{KEPT} -k equal_steps",
    ),
    Fault(
        "trainer/runtime/host_memory.py",
        "        if _is_kept:\n            _set(mmap=_NEVER",
        "        if False:\n            _set(mmap=_NEVER",
        why="a run under ZeRO-3 takes its memory anew at each step",
        tests=f"{KEPT} -k base_is_read",
    ),
    Fault(
        "trainer/api/process_state.py",
        "        stack.callback(host_memory.let_go)\n",
        "",
        why="a notebook keeps the memory of a run that is over",
        tests=f"{KEPT} -k program_that",
    ),
    Fault(
        "trainer/runtime/device_defaults.py",
        "is_kept = host_memory.keep(os.environ)",
        "is_kept = False",
        why="a step on a processor takes its memory anew, page by page",
        tests=f"{KEPT} -k 'keeps_freed'",
    ),
]
