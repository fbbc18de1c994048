"""Faults that let one tenant see, keep or break what is another's."""

from tests.mutants.fault import Fault

ISOLATION = "tests/serve/test_steps_isolation.py"
ATTACKS = "tests/serve/test_steps_attacks.py"
AGAIN = "tests/serve/test_steps_again.py"
NAMES = "tests/serve/test_steps_names.py"
RUNS = "tests/serve/test_driven_runs.py"

FAULTS = [
    Fault(
        "jobs/serve/steps/operations.py",
        "        room.is_needed = is_first\n",
        "        pass\n",
        why="rows that come twice at once count twice",
        tests=f"{AGAIN} -k come_twice_at_once",
    ),
    Fault(
        "jobs/serve/steps/context.py",
        "writes=writes or as_client is not None)",
        "writes=writes)",
        why="a token that only reads opens all weights to another one",
        tests=f"{NAMES} -k only_reads",
    ),
    Fault(
        "jobs/serve/steps/context.py",
        "    if run is None or not _may(client, run.owner, writes=writes or as_client is not None):\n",
        "    if run is None:\n",
        why="weights of another token are loaded, copied and downloaded",
        tests=ISOLATION,
    ),
    Fault(
        "jobs/serve/steps/catalogue/archives.py",
        "    run, facts = await run_in_threadpool(visible_weights, request, path, writes=True)\n",
        "    run, facts = await run_in_threadpool(visible_weights, request, path)\n",
        why="a token that only reads downloads weights",
        tests=ISOLATION,
    ),
    Fault(
        "jobs/serve/steps/upkeep/usage.py",
        "and steps.runs.is_repeat(facts, seq):",
        "and seq < 0:",
        why="an operation that is sent again is refused where the quota is used up",
        tests=f"{AGAIN} -k come_twice_at_once",
    ),
    Fault(
        "jobs/serve/steps/upkeep/usage.py",
        '        yield sessions.folder(session) / "copies"\n',
        "        pass\n",
        why="copies of weights count for no quota",
        tests=ATTACKS,
    ),
    Fault(
        "jobs/serve/steps/operations.py",
        "        if wire.num_parts(content, MOST_PARTS) > MOST_PARTS:\n",
        "        if wire.num_parts(content, MOST_PARTS) < 0:\n",
        why="a body of 32 MiB takes gigabytes once it is parsed",
        tests=ATTACKS,
    ),
    Fault(
        "jobs/serve/steps/datums.py",
        "    _refuse_sparse(request)\n",
        "",
        why="sparse tensors of a few bytes fill the memory of the server",
        tests=ATTACKS,
    ),
    Fault(
        "jobs/serve/steps/sessions.py",
        "if (one := _readable(path, of)) is not None]",
        "if (one := _read(path, of)) is not None]",
        why="one file that nobody can read stops the lists of all",
        tests=ATTACKS,
    ),
    Fault(
        "jobs/serve/live/driven.py",
        "        steps.sessions.mark_run_deleted(facts.id)  # first: no operation comes from now on\n",
        "",
        why="a run that was deleted begins a new log",
        tests=RUNS,
    ),
    Fault(
        "jobs/report/operations.py",
        '        _moment(work.get("began")),\n',
        '        _moment(header.get("time")),\n',
        why="no operation takes any time",
        tests=RUNS,
    ),
]
