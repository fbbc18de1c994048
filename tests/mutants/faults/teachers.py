"""Faults in what a teacher says, in where it is stored, and in the loss that learns from it."""

from tests.mutants.fault import Fault

FORMULAS = "tests/numerics/test_distillation.py"
VALUES = "tests/numerics/test_teacher.py"

FAULTS = [
    Fault(
        "trainer/models/distillation.py",
        "        return (log_q_NC.exp() * (log_q_NC - log_p_NC)).sum(-1)",
        "        return (log_p_NC.exp() * (log_p_NC - log_q_NC)).sum(-1)",
        why="reverse is forward",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/models/distillation.py",
        "log_p_NC = torch.cat([log_p_NC, lesson.rest_N.float()[:, None]], dim=1)",
        "log_p_NC = torch.cat([log_p_NC, log_q_NC[:, -1:]], dim=1)",
        why="what is left for all other tokens is the student's, not the teacher's",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/models/distillation.py",
        "return logits_NV[:, : self.vocabulary].float() / self.temperature",
        "return logits_NV.float() / self.temperature",
        why="ids that stand for no token take part where one vocabulary is padded to more",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/models/losses.py",
        "lesson.how.temperature**2",
        "lesson.how.temperature",
        why="a high temperature makes the teacher's gradients small",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/models/losses.py",
        "self.lesson.part(rows)",
        "self.lesson.part(slice(0, rows.stop - rows.start))",
        why="every chunk learns what the teacher says of the first one",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/distilled.py",
        'every: list[Row] = [{**rest, **flat([one], "targets")}',
        'every: list[Row] = [{**rest, **flat([list(one)[:1]], "targets")}',
        why="an answer that an epoch draws was never read",
        tests=VALUES,
    ),
    Fault(
        "trainer/data/readings/likely_tokens.py",
        '"rows": rows.digest, "count"',
        '"count"',
        why="a folder of other rows is taken for one of these",
        tests=VALUES,
    ),
    Fault(
        "trainer/data/readings/likely_tokens.py",
        'if checksum_of((ids, logps, rest)) != int(tensors["checksums"][entry]):',
        "if False:",
        why="a student learns from a damaged file",
        tests=VALUES,
    ),
    Fault(
        "trainer/tasks/distilled.py",
        "        if other:\n",
        "        if False:\n",
        why="a student learns probabilities of other tokens",
        tests=VALUES,
    ),
    Fault(
        "trainer/tasks/distilled.py",
        "            absent.refuse(model, is_trained=False)\n",
        "            pass\n",
        why="a student learns from an output layer that was drawn at random",
        tests=VALUES,
    ),
    Fault(
        "trainer/data/readings/row_store.py",
        "locks.enter_context(waiting_lock(lock_file, waiting_for=shards.path))",
        "pass",
        why="two runs that are started at once write the same folder",
        tests="tests/unit/test_row_stores.py",
    ),
    Fault(
        "trainer/data/readings/row_store.py",
        "if distributed.on_main(lambda: shards.is_whole(count)):",
        "if False:",
        why="a folder on a disk that is read-only serves nobody",
        tests="tests/unit/test_row_stores.py",
    ),
    Fault(
        "trainer/launch/start.py",
        "    _read_teacher(run, lap)\n",
        "    del lap\n",
        why="a run has no teacher",
        tests="tests/contract/test_teacher_runs.py",
    ),
]
