"""Faults in submitting: exactly once, exit codes, the record, the queue, what runs again, secrets,
snapshots.
"""

from tests.mutants.fault import Fault

RUN = "tests/jobs/test_run.py"
QUEUE = "tests/jobs/test_queue.py"
RECORD = "tests/jobs/test_record.py"
SENDING = "tests/jobs/test_sending.py"
MEETING = "tests/jobs/test_rendezvous.py -k 'not real_slurm and not ten_times'"
STATES = "tests/jobs/test_states.py"
KEYS = "tests/jobs/test_keys.py"
REFUSALS = "tests/jobs/test_refusals.py"
SNAPSHOT = "tests/jobs/test_snapshot.py -k 'not this_repository and not git_hook'"

FAULTS = [
    Fault(
        "jobs/report/scores.py",
        "direction = directions.get(name) or direction_of(name)",
        'direction = directions.get(name) or direction_of(name) or "max"',
        why="results calls the highest value of any unknown metric its best",
        tests="tests/jobs/test_results.py -k nobody_knows",
    ),
    # The rendezvous
    Fault(
        "jobs/node/rendezvous.py",
        'f"{token} {number}".encode()',
        'f"{number}".encode()',
        why="all jobs of a host meet at one port",
        tests=MEETING,
    ),
    Fault(
        "jobs/node/rendezvous.py",
        "f\"{spec['token']}_{node.restarts()}\"",
        'f"lathe_{node.restarts()}"',
        why="two jobs at one port become one world of mixed ranks",
        tests=MEETING,
    ),
    Fault(
        "jobs/node/rendezvous.py",
        "if not node.is_leader() or is_free(first):",
        "if first:",
        why="a port that is taken is minutes of silence while GPUs are held",
        tests=MEETING,
    ),
    # What one experiment throws is its own
    Fault(
        "jobs/submit/send.py",
        "            errors[spec.folder] = error",
        "            raise error",
        why="one full or closed folder keeps a whole array from being sent",
        tests=SENDING + " -k array",
    ),
    Fault(
        "jobs/submit/group.py",
        "    if row is not None and row.read_error is not None:",
        "    if False:",
        why="a job that runs in a folder nobody can read is sent a second time",
        tests="tests/jobs/test_odd_folders.py -k second_copy",
    ),
    Fault(
        "jobs/record/verdict.py",
        'return "cancelled" if attempt.end_wanted_for is None else "paused"',
        'return "cancelled"',
        why="a job that is only paused is called cancelled",
        tests="tests/jobs/test_status.py -k 'wish or paused'",
    ),
    Fault(
        "jobs/record/status.py",
        "(newest.state, newest.reason) == (last.state, last.reason)",
        "(row.state, row.reason) == (last.state, last.reason)",
        why="each submission writes a reason into the record that nobody gave",
        tests="tests/jobs/test_status.py -k reason",
    ),
    Fault(
        "jobs/submit/prepare.py",
        'if name == "device" and text.endswith(".json"):',
        "if False:",
        why="a job looks for its calibration in its code snapshot and fails",
        tests=REFUSALS + " -k calibration",
    ),
    Fault(
        "jobs/record/by_hand.py",
        "    if holder is not None:",
        "    if False:",
        why="a live run whose folder was moved away is sent a second time",
        tests="tests/jobs/test_moved_folder.py",
    ),
    Fault(
        "jobs/node/wrapper.py",
        "while child.poll() is None or _saves_on(attempt, stop):",
        "while child.poll() is None:",
        why="a training in a container is killed while it saves, and loses its steps",
        tests=RUN + " -k container_dies",
    ),
    Fault(
        "jobs/backends/local/runner.py",
        "        except Exception as error:  # of any kind: it must not keep the others waiting",
        "        except KeyboardInterrupt as error:",
        why="one odd folder in the queue ends the runner of all jobs",
        tests=QUEUE + " -k is_no_job",
    ),
    Fault(
        "trainer/files/atomic.py",
        "if stat.S_ISREG(about.st_mode):",
        "if not stat.S_ISDIR(about.st_mode):",
        why="a pipe in the place of a file counts as an empty one, in silence",
        tests="tests/jobs/test_odd_folders.py -k status_shows",
    ),
    # A base before those that begin with its model
    Fault(
        "jobs/submit/policy.py",
        'if decision.action == "send" and awaited is not None:',
        "if False:",
        why="a child is sent beside its base and fails as bad input for ever",
        tests="tests/jobs/test_bases_first.py -k in_process",
    ),
    Fault(
        "jobs/backends/local/runner.py",
        "is_held = self._awaits_base(facts) or any(",
        "is_held = any(",
        why="the local queue starts a child before its base has a model",
        tests="tests/jobs/test_bases_first.py -k 'local_queue'",
    ),
    Fault(
        "jobs/submit/request.py",
        "            if not is_there(base.record) and not is_there(base.status):",
        "            if False:",
        why="an experiment whose base nobody runs waits for ever, in silence",
        tests="tests/jobs/test_bases_first.py -k never_run",
    ),
    # What a person and a scheduler say
    Fault(
        "jobs/gres.py",
        'if name == "gpu")',
        "if name)",
        why="gres=gpu:4,nvme:3600 asks torchrun for 3,604 processes",
        tests="tests/jobs/test_gres.py -k 'not real_slurm'",
    ),
    Fault(
        "jobs/record/verdict.py",
        "    if observed is not None and observed.is_missing and files.starts:",
        "    if False:",
        why="a job that was killed and forgotten counts as cancelled by a person",
        tests=STATES,
    ),
    Fault(
        "jobs/submit/control.py",
        "            is_refused = is_refused and not has_turn",
        "            pass",
        why="what met a limit on the number of jobs is never sent",
        tests=f"{SENDING} -k room",
    ),
    Fault(
        "jobs/submit/send.py",
        "if job is None or job.last is None or job.last.reason != reason:",
        "if True:",
        why="the record of a job that waits for its turn grows with each reconcile",
        tests=f"{SENDING} -k room",
    ),
    Fault(
        "jobs/node/pulse.py",
        "        return moment - self._since < ALIVE_S",
        "        return by_date_s < ALIVE_S",
        why="a dead start on a node whose clock is ahead keeps its job waiting",
        tests=f"{RUN} -k clock",
    ),
    Fault(
        "jobs/record/times.py",
        "    return max(by_disk_s, 0.0)\n",
        "    return by_date_s\n",
        why="a job whose node's clock is ahead is running while nothing runs",
        tests=f"{RUN} -k clock",
    ),
    Fault(
        "jobs/backends/slurm/backend.py",
        "for name, text in variables.items()),",
        "for name, text in ()),",
        why="the python of an environment module does not start on the node",
        tests="tests/jobs/test_backends.py -k library_path",
    ),
    # The wrapper
    Fault(
        "jobs/node/wrapper.py",
        "if not create_json(attempt.start_file(start), facts):",
        "if write_json(attempt.start_file(start), facts):",
        why="a second start overwrites the first, and both train in one folder",
        tests=RUN,
    ),
    Fault(
        "jobs/node/wrapper.py",
        "    if attempt.give_up_file.exists():\n",
        "    if False:\n",
        why="an attempt that was given up starts beside the one that took its place",
        tests=RUN,
    ),
    Fault(
        "jobs/node/wrapper.py",
        "        if _lives(other, stop):",
        "        if False:",
        why="two attempts train in one folder at the same time",
        tests=RUN,
    ),
    Fault(
        "jobs/node/wrapper.py",
        '    if ended is not None and ended["code"] != EXIT_PREEMPTED:',
        "    if False:",
        why="a finished attempt runs again when its scheduler requeues it",
        tests=RUN,
    ),
    Fault(
        "jobs/record/state_table.py",
        'EndRule("preempted", code=EXIT_PREEMPTED',
        'EndRule("failed", code=EXIT_PREEMPTED',
        why="a preempted job is not run again",
        tests=RUN,
    ),
    Fault(
        "jobs/node/wrapper.py",
        "facts.st_mode & 0o077",
        "facts.st_mode & 0o007",
        why="a key that the whole group can read is used without a word",
        tests=RUN,
    ),
    Fault(
        "jobs/node/wrapper.py",
        "        node.kill_descendants()",
        "        pass",
        why="ranks that a launcher left behind hold the GPU",
        tests=RUN,
    ),
    # The queue of a machine
    Fault(
        "jobs/backends/local/queue.py",
        "            os.rename(aside, target)",
        "            shutil.copytree(aside, target, dirs_exist_ok=True)",
        why="a token that enters the queue twice replaces a job that may run",
        tests=QUEUE,
    ),
    Fault(
        "jobs/backends/local/queue.py",
        'sync(aside / "entry.json")',
        "pass",
        why="after a power cut a submitted job is an empty file",
        tests=QUEUE,
    ),
    Fault(
        "trainer/runtime/process.py",
        'return "alive" if birth(process["pid"]) == process["birth"] else "gone"',
        'return "alive" if birth(process["pid"]) else "gone"',
        why="another process of the same number is taken for a job",
        tests=QUEUE,
    ),
    Fault(
        "jobs/backends/local/runner.py",
        'if not create_json(entry.folder / "started.json", own):',
        'if write_json(entry.folder / "started.json", own, is_durable=False):',
        why="after a power cut a job that runs is started a second time",
        tests=QUEUE,
    ),
    Fault(
        "jobs/backends/local/runner.py",
        'if len(gpus) < facts["gpus"] or self._free_cpus() < facts["cpus"]:\n                '
        "return",
        'if len(gpus) < facts["gpus"] or self._free_cpus() < facts["cpus"]:\n                '
        "continue",
        why="small jobs overtake a large one for ever",
        tests=QUEUE,
    ),
    Fault(
        "jobs/backends/local/runner.py",
        "entry.end(EXIT_PREEMPTED, RESTARTED)",
        "entry.end(EXIT_BAD_INPUT, RESTARTED)",
        why="what ran before the machine was restarted is not run again",
        tests=QUEUE,
    ),
    Fault(
        "jobs/backends/local/runner.py",
        "                pass_fds=(alive,),\n",
        "",
        why="a job gives its lock back at once: another container takes it for one that has ended",
        tests=QUEUE,
    ),
    # The record
    Fault(
        "jobs/record/events.py",
        "            os.fsync(file.fileno())",
        "            pass",
        why="an intent that is not on the disk before sending: after a power cut the job is sent "
        "twice",
        tests=f"{RECORD} {SENDING}",
    ),
    Fault(
        "jobs/record/events.py",
        '            lines = b"\\n" + lines',
        "            pass",
        why="after a killed writer the next event is lost with the torn line",
        tests=RECORD,
    ),
    # Sending exactly once
    Fault(
        "jobs/submit/send.py",
        "    ids = ids_of(sent, backend)",
        "    ids = list[str]()",
        why="a job whose answer was lost is sent a second time",
        tests=SENDING,
    ),
    Fault(
        "jobs/submit/send.py",
        "    if age_s < resend_s:",
        "    if False:",
        why="what the scheduler does not know yet is sent again at once",
        tests=SENDING,
    ),
    Fault(
        "jobs/submit/send.py",
        "        give_up(folder, earlier)",
        "        pass",
        why="an attempt that was thought lost starts later, beside the new one",
        tests=SENDING,
    ),
    # Which state, and whether to run again
    Fault(
        "jobs/record/verdict.py",
        'else "unknown" if is_seen else "unseen"',
        'else "unknown"',
        why="jobs are called lost while the scheduler cannot be reached, and are sent again",
        tests=STATES,
    ),
    Fault(
        "jobs/record/verdict.py",
        "is_fresh=seconds_since(sent_at) < LISTING_S",
        "is_fresh=False",
        why="a job is called lost before its scheduler has listed it",
        tests=STATES,
    ),
    Fault(
        "jobs/record/state_table.py",
        'exit="bad input", reason=BAD_INPUT, reason_of="exit"',
        'exit="bad input", reason_of="exit"',
        why="bad input is retried without anybody having changed it",
        tests=STATES,
    ),
    Fault(
        "jobs/submit/policy.py",
        "may_repeat=times <= limit",
        "may_repeat=times < limit",
        why="a job is retried or resumed once less than its dictionary says",
        tests=STATES,
    ),
    Fault(
        "jobs/record/state_table.py",
        'DecisionRule("skip", _TOO_OFTEN, state="preempted", may_repeat=False),',
        "",
        why="a preempted job is run again for ever",
        tests=STATES,
    ),
    Fault(
        "jobs/submit/policy.py",
        "BACK_OFF_S * 2 ** (times - 2)",
        "BACK_OFF_S",
        why="a job that fails at once is sent every 15 seconds for ever",
        tests=STATES,
    ),
    # Secrets and snapshots
    Fault(
        "jobs/secret_keys.py",
        "        and not SECRET.search(name)\n",
        "",
        why="WANDB_API_KEY of the shell stands in the scheduler's file",
        tests=KEYS,
    ),
    Fault(
        "jobs/secret_keys.py",
        "        and not any(secret in value for secret in hidden)\n",
        "",
        why="a secret inside another variable stands in the scheduler's file",
        tests=KEYS,
    ),
    Fault(
        "jobs/code/snapshot.py",
        'total.update(f"{entry.mode} {entry.sha256} ".encode()',
        'total.update(f"{entry.sha256} ".encode()',
        why="a script that was made executable is sent as it was before",
        tests=SNAPSHOT,
    ),
    Fault(
        "jobs/code/snapshot.py",
        "    if selection.dirty and not allow_dirty:",
        "    if False:",
        why="uncommitted code trains without anybody knowing",
        tests=SNAPSHOT,
    ),
    Fault(
        "jobs/code/repository.py",
        "    if installed is not None:",
        "    if installed is None:",
        why="an installed version takes all packages beside it for its code, and can send no job",
        tests=SNAPSHOT,
    ),
    Fault(
        "jobs/code/repository.py",
        "    if record is None:\n",
        "    if True:\n",
        why="code that was edited where it is installed trains without anybody knowing",
        tests=SNAPSHOT,
    ),
    Fault(
        "jobs/code/snapshot.py",
        "    why = secret_keys.secret_in(",
        "    why = None and secret_keys.secret_in(",
        why="a key that a change removes is stored in the patch",
        tests=SNAPSHOT,
    ),
    # What cannot be sent
    Fault(
        "jobs/backends/local/queue.py",
        '        if isinstance(end.get("code"), int):',
        '        if "code" in end:',
        why="an ended.json of another shape ends `status` of every job with a traceback",
        tests=QUEUE,
    ),
    Fault(
        "jobs/submit/prepare.py",
        'dict(flags) if steps is None else {"steps": str(steps), **flags}',
        "dict(flags)",
        why="a run that --steps made shorter than its warm-up trains here and fails as a job",
        tests=REFUSALS,
    ),
    Fault(
        "jobs/submit/prepare.py",
        "            **start,\n",
        "",
        why="a base that is a relative folder is looked for in the snapshot, which has no weights",
        tests=REFUSALS,
    ),
    Fault(
        "jobs/submit/refusals.py",
        "        problems += _absent_folders(",
        "        _absent_folders(",
        why="a job whose base does not exist is sent, and fails on its node",
        tests=REFUSALS,
    ),
    Fault(
        "trainer/config/userfile.py",
        "    return path if os.path.exists(path) else name\n",
        "    return path\n",
        why="a Hub id is looked for in the folder in which the job was submitted",
        tests=REFUSALS,
    ),
    Fault(
        "jobs/submit/group.py",
        "    refuse_link_out(folder.path)\n",
        "",
        why="a job trains in a folder outside of its base, in which another may train",
        tests=REFUSALS,
    ),
    Fault(
        "jobs/submit/group.py",
        "        lacks_test=lacks_test(folder.path, request.flags),\n",
        "",
        why="--test of a run that is done is skipped as done",
        tests="tests/jobs/test_finished_untested.py",
    ),
    Fault(
        "jobs/node/wrapper.py",
        "== EXIT_OK and not has_work:",
        "== EXIT_OK:",
        why="a job that is sent for the test of a run that is done does nothing",
        tests="tests/jobs/test_run.py -k attempt_for",
    ),
]
