"""Faults of the Tinker dialect: operations that are lost or done twice, and what tenants may see."""

from __future__ import annotations

from tests.mutants.fault import Fault

STEPS = "tests/serve/test_steps_dialect.py"
SAMPLES = "tests/unit/test_samples_as_tokens.py"
AGAIN = "tests/serve/test_steps_again.py"
NAMES = "tests/serve/test_steps_names.py"
DISK = "tests/serve/test_steps_disk.py"
FAULTS = [
    Fault(
        "jobs/serve/steps/operations.py",
        "        return before.fields\n",
        "        return load_fields(request, facts, body)\n",
        why="a loop that is sent again fails at a load whose state was overwritten since",
        tests=f"{AGAIN} -k load_that_is_sent_again",
    ),
    Fault(
        "jobs/serve/steps/catalogue/checkpoints.py",
        "for facts in over if steps.has_saved(facts, run)]",
        "for facts in over]",
        why="an hour of a state that is still to be saved deletes the one before it",
        tests=f"{NAMES} -k hour_that_is_over",
    ),
    Fault(
        "jobs/serve/steps/operations.py",
        "sampler/named.{seq}.{name}",
        "sampler/named.{name}",
        why="a sampler samples from weights that were saved later by the same name",
        tests=f"{NAMES} -k never_samples_from_other",
    ),
    Fault(
        "jobs/serve/steps/upkeep/driven_jobs.py",
        "        if last >= 0:",
        "        if last >= -1:",
        why="a new file that a full disk left empty hides all operations that wait",
        tests=f"{DISK} -k hides_no_operation",
    ),
    Fault(
        "jobs/serve/steps/runs.py",
        "while seq > writer.last_seq + 1:",
        "while False:",
        why="an operation that overtook the one before it fails the whole loop",
        tests=f"{STEPS} -k waits_for_the_one_before",
    ),
    Fault(
        "jobs/serve/steps/sampling/queues.py",
        "if is_over or time.monotonic() >= until:",
        "if True:",
        why="a worker that was silent once fails a sample for good, and its seed is lost",
        tests="tests/unit/test_sample_queues.py -k asked_again",
    ),
    Fault(
        "jobs/serve/steps/context.py",
        "return client.may_change(owner) if writes else client.sees(owner)",
        "return True",
        why="every token reads and drives the runs of all others",
        tests=f"{STEPS} -k sees_nothing",
    ),
    Fault(
        "jobs/serve/steps/upkeep/driven_jobs.py",
        "return look.last_operation > look.last_result",
        "return False",
        why="a run that was put aside never wakes, and its futures wait for ever",
        tests=f"{STEPS} -k wakes_it",
    ),
    Fault(
        "jobs/serve/steps/operations.py",
        'return await acknowledge(request, facts, seq, "refused", fields)',
        "raise Refusal(400, text)",
        why="after one wrong row every later operation of the loop is refused as a gap",
        tests=f"{STEPS} -k the_loop_goes_on",
    ),
    Fault(
        "jobs/serve/steps/sessions.py",
        "newest.pop((facts.kind, facts.name), None)  # it was overwritten",
        "pass",
        why="a state that was overwritten and deleted is listed again, without its files",
        tests=f"{STEPS} -k saved_states",
    ),
    Fault(
        "jobs/serve/steps/context.py",
        'return result.error is None and f"{folder}/".startswith(f"{facts.folder}/")',
        "return result.error is None",
        why="a step of the optimizer is answered as a save that a killed server never wrote down",
        tests=f"{STEPS} -k was_not_saved",
    ),
    Fault(
        "jobs/serve/steps/operations.py",
        "if (before.kind, before.name, before.overwrite) == (kind, name, may_replace):",
        "if before.kind == kind:",
        why="another save under a number that was used is acknowledged and never done",
        tests=f"{STEPS} -k saves_nothing_else",
    ),
    Fault(
        "jobs/serve/steps/catalogue/archives.py",
        "if not is_ours or expires < time.time():",
        "if expires < time.time():",
        why="whoever knows a name downloads the weights of others",
        tests=f"{STEPS} -k saved_states",
    ),
    Fault(
        "trainer/commands/texts/samples.py",
        "if token in self.stop_tokens or (self.stops and self._has_stop(token)):",
        "if self.stops and self._has_stop(token):",
        why="no sample ends before its most tokens",
        tests=f"{SAMPLES} -k ends_a_sample",
    ),
    Fault(
        "trainer/commands/texts/samples.py",
        "logprobs_V = logits_V.float().log_softmax(-1)\n        self.logprobs",
        "logprobs_V = logits_V.float()\n        self.logprobs",
        why="importance sampling weighs with numbers that are no log-probabilities",
        tests=f"{SAMPLES} -k its_own_logprob",
    ),
]
