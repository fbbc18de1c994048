"""Faults in the OpenAI dialect: preferences, checkpoints, batches, webhooks."""

from tests.mutants.fault import Fault

BATCHES = "tests/serve/test_batches.py"
CHECKPOINTS = "tests/serve/test_checkpoint_models.py"
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
]
