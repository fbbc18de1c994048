"""Faults in losses of preferences, and in what the start says of answers."""

from tests.mutants.fault import Fault

FORMULAS = "tests/numerics/test_preference.py"
ROWS = "tests/unit/test_preference_rows.py"

FAULTS = [
    Fault(
        "trainer/tasks/preference/losses.py",
        "        return self.logps - self.start",
        "        return self.logps",
        why="a loss that compares with the start does not",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/losses.py",
        "    return (ratio_gap_P - 1 / (2 * tau)).square()",
        "    return (ratio_gap_P - 1 / tau).square()",
        why="IPO aims at twice the gap",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/losses.py",
        "torch.where(label_B, answers.ratios - kl, kl - answers.ratios)",
        "torch.where(label_B, answers.ratios, -answers.ratios)",
        why="KTO forgets how far the model is from its start",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/task.py",
        'yield out["nll"] * (num_pairs / num_tokens) + odds.sum()',
        'yield out["nll"] * (len(odds) / len(batch["whole"])) + odds.sum()',
        why="ORPO's cross-entropy depends on how rows are dealt to micro-batches",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/model.py",
        "    firsts = np.cumsum(lengths) - lengths\n",
        "    firsts = np.cumsum(lengths)\n",
        why="the tokens of an answer are summed into the answer before",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/models/losses.py",
        "loss = (target_losses(logits_CV, targets_C) * factor[rows]).sum()",
        "loss = target_losses(logits_CV, targets_C).sum()",
        why="in chunks, every answer pulls alike, whatever its loss",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/start_store.py",
        '"rows": rows.digest, "count"',
        '"count"',
        why="a store of other rows is taken for one of these",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/task.py",
        "        if self.how.is_referred and self._export is not None:\n",
        "        if False:\n",
        why="a trained model is taken for its own start: no gap, no distance, no error",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/rows.py",
        "        if answers[0] == answers[1]:\n",
        "        if False:\n",
        why="pairs of equal answers are learnt",
        tests=ROWS,
    ),
    Fault(
        "trainer/tasks/preference/rows.py",
        '    return length - 1 if length and one[length - 1] == " " else length',
        "    return length",
        why="the blank before an answer stands at the end of its prompt, where no model expects it",
        tests=ROWS,
    ),
    Fault(
        "trainer/data/mixed/task.py",
        '    "encode_rows": _encode_rows,\n',
        '    "encode_rows": lambda self, rows: [self.encode(row) for row in rows],\n',
        why="the plan of a mix of conversations does not end",
        tests=ROWS,
    ),
    Fault(
        "trainer/models/encoder_decoder.py",
        "            texts=self.starts,\n",
        "",
        why="the second answer to a prompt of a T5 reads the first one",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/model.py",
        "by_answer.view(len(rows), -1).t().flatten()",
        "by_answer.view(len(rows), -1).flatten()",
        why="chosen and rejected answers of a T5 change places",
        tests=FORMULAS,
    ),
    Fault(
        "trainer/tasks/preference/trained.py",
        "    if has_prompt and has_answer:\n",
        "    if has_prompt:\n",
        why="a tuned model answers no prompt",
        tests=ROWS,
    ),
    Fault(
        "trainer/tasks/preference/rows.py",
        "        if alike and answers[0].prompt != alike[0].prompt:\n",
        "        if alike:\n",
        why="KTO measures its distance from the start on answers to the same prompt",
        tests=ROWS,
    ),
    Fault(
        "trainer/data/formats/normal_form.py",
        ', "beside"}',
        "}",
        why="a validation row of KTO that is a training row is not counted",
        tests=ROWS,
    ),
]
