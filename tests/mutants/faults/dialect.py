"""Faults in the OpenAI dialect: preferences, checkpoints, batches, webhooks."""

from tests.mutants.fault import Fault

BATCHES = "tests/serve/test_batches.py"
CHECKPOINTS = "tests/serve/test_checkpoint_models.py"
KEEPER = "tests/serve/test_keeper.py"
OPENAI = "tests/serve/test_openai_dialect.py"
PREFERENCES = "tests/serve/test_preference_jobs.py"
WEBHOOKS = "tests/serve/test_webhooks.py"

FAULTS = [
    Fault(
        "jobs/serve/batches/turn.py",
        'if one["custom_id"] not in self._ids)',
        "if one)",
        why="after a kill every request of a batch is answered once more, and twice in its file",
        tests=f"{BATCHES} -k goes_on",
    ),
    Fault(
        "jobs/serve/batches/folder.py",
        "        file.truncate(end)\n",
        "",
        why="the half of a line that a kill left makes a batch's file unreadable",
        tests=f"{BATCHES} -k whole_or_not_there",
    ),
    Fault(
        "jobs/serve/batches/turn.py",
        "if answer.has_ended_worker:",
        "if False:",
        why="one request that ends the model's process fails the fifteen beside it",
        tests=f"{BATCHES} -k spoils_no_other",
    ),
    Fault(
        "jobs/serve/batches/runner.py",
        "                self._turns[one[0].owner],\n",
        "",
        why="one owner's many batches keep all others waiting",
        tests=f"{BATCHES} -k owners_take_turns",
    ),
    Fault(
        "jobs/serve/batches/turn.py",
        "return self.folder.is_cancelled() or self.batch.has_expired",
        "return self.folder.is_cancelled()",
        why="a batch goes on for ever after its window",
        tests=f"{BATCHES} -k expired",
    ),
    Fault(
        "jobs/serve/dialect/new_jobs.py",
        "if match[1].purpose != uploads.FINE_TUNE:",
        "if False:",
        why="a file that nobody checked as rows is trained on",
        tests=f"{BATCHES} -k another_purpose",
    ),
    Fault(
        "jobs/serve/dialect/saved_steps.py",
        'return all(os.stat(folder / one["name"]).st_size == one["size"] for one in files)',
        "return True",
        why="a checkpoint that is half written is offered as a model",
        tests=f"{CHECKPOINTS} -k only_whole",
    ),
    Fault(
        "jobs/serve/dialect/names.py",
        'if job is None or not sees(job["lathe"]["owner"]) or not _STEP.fullmatch(step):',
        "if job is None or not _STEP.fullmatch(step):",
        why="everybody may ask the checkpoints of others",
        tests=f"{CHECKPOINTS} -k whoever_sees",
    ),
    Fault(
        "jobs/serve/rows/preferences.py",
        "conversations[0] == conversations[1]",
        "False",
        why="a row of two equal answers is counted as learnt, and left out without a word",
        tests=f"{PREFERENCES} -k 'mistake_in_a_row'",
    ),
    Fault(
        "jobs/serve/requests.py",
        'without = {"method": {"dpo"}} if self.method_name == "supervised" else None',
        "without = None",
        why="after an update a repeated request with its key is refused as another one",
        tests=f"{PREFERENCES} -k of_before",
    ),
    Fault(
        "jobs/serve/job_view.py",
        'if is_first_end and row.state == "succeeded" and facts.refusals:',
        "if False:",
        why="a model that its gate keeps back is listed",
        tests="tests/serve/test_job_view.py -k gate",
    ),
    Fault(
        "jobs/serve/webhooks/outbox.py",
        'if is_there(self.told / f"{name}.json"):',
        "if False:",
        why="after each restart every address is told everything again",
        tests=f"{WEBHOOKS} -k written_once",
    ),
    Fault(
        "jobs/serve/webhooks/sender.py",
        "if 200 <= status < 300:",
        "if status < 400:",
        why="a message that was answered with a redirect is never sent again",
        tests=f"{WEBHOOKS} -k redirect",
    ),
    Fault(
        "jobs/serve/webhooks/sender.py",
        "elif at - seconds(message.created_at) > GIVE_UP_S:",
        "elif False:",
        why="an address that is gone is called for ever",
        tests=f"{WEBHOOKS} -k three_days",
    ),
    Fault(
        "jobs/serve/webhooks/endpoints.py",
        "if mode & 0o037:",
        "if False:",
        why="whoever reads the secret can forge messages",
        tests=f"{WEBHOOKS} -k others_may",
    ),
    Fault(
        "jobs/serve/batches/asking.py",
        "ensure_ascii=False",
        "ensure_ascii=True",
        why="a line that is short enough is refused as too long, because its letters are escaped",
        tests=f"{BATCHES} -k short_enough",
    ),
    Fault(
        "jobs/serve/batches/turn.py",
        'path.open("ab", buffering=0)',
        'path.open("ab")',
        why="half of a line that a full disk refused takes all later answers with it",
        tests=f"{BATCHES} -k leaves_nothing_behind",
    ),
    Fault(
        "jobs/serve/batches/runner.py",
        "except Exception as error:  # of any kind: the next look may go better",
        "except ZeroDivisionError as error:",
        why="one look at a folder that failed ends the batches of everybody",
        tests=f"{BATCHES} -k look_that_failed",
    ),
    Fault(
        "jobs/serve/batches/folder.py",
        'if is_there_already and is_there(target / "batch.json"):',
        "if False:",
        why="the second of two servers with one key refuses the batch that it should show",
        tests=f"{BATCHES} -k same_key_one_makes",
    ),
    Fault(
        "jobs/serve/batches/folder.py",
        "self._ended[batch_id] = state",
        "self._ended[batch_id] = BatchState(batch, check, None, end, end)",
        why="a cancelled batch forgets when its cancellation was asked for",
        tests=f"{BATCHES} -k cancelled_batch_keeps",
    ),
    Fault(
        "jobs/serve/dialect/names.py",
        "    if is_refused(job):",
        "    if False:",
        why="a model that its gate refused is asked by the name of a checkpoint",
        tests=f"{CHECKPOINTS} -k gate_refused",
    ),
    Fault(
        "jobs/serve/dialect/models.py",
        "    if later:",
        "    if False:",
        why="a job whose model was deleted waits for it for ever",
        tests=f"{OPENAI} -k before_that_has_ended",
    ),
    Fault(
        "jobs/serve/requests.py",
        'if value not in (None, "auto") and value != getattr(inside, name):',
        "if False:",
        why="a number of epochs beside `method` is lost without a word",
        tests=f"{OPENAI} -k silent_choice",
    ),
    Fault(
        "jobs/serve/turn/reader.py",
        "at=_failed_at(before) or now()",
        "at=now()",
        why="a job that failed is told to webhooks again at every look",
        tests=f"{KEEPER} -k stays_at_its_time",
    ),
    Fault(
        "jobs/serve/webhooks/endpoints.py",
        "if len({*urls}) < len(urls):",
        "if False:",
        why="two entries of one address sign each other's messages",
        tests=f"{WEBHOOKS} -k stands_twice",
    ),
    Fault(
        "jobs/serve/webhooks/outbox.py",
        "known.events.get(event, at)",
        "min(known.events.values(), default=at)",
        why="an event that is added to an address is told for all that ended long ago",
        tests=f"{WEBHOOKS} -k told_from_then_on",
    ),
    Fault(
        "jobs/serve/webhooks/sender.py",
        "first = first or error",
        "first = error",
        why="an address counts as well while a message to it has not arrived",
        tests=f"{WEBHOOKS} -k as_long_as_one",
    ),
]
