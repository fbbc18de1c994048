"""The verifier's metrics give the published program's numbers: its scores, its choices and its
evaluation.

An evaluation is a file *booleans*.json, a list of {"task", "logit", "score", "label"} in order of
problems, and beside it the file of the same name with "stats", which holds the metrics under the
names they were logged by: eval/mc/acc/TASK, eval/mc/acc_unweighted_SET and eval/bool/SET_METRIC.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.recordings import Entry, digest, folders, once, params
from tests.parity.vera_recordings import SYSTEM, Batch, batches
from tests.tolerance import assert_close
from trainer.tasks.vera.calibration import ece, scores_of
from trainer.tasks.vera.metrics import COLUMN, Kind, Part, best_rows, statement_metrics

# As tests/tolerance.py means them: an exponential, a sum and a quotient.
SCORES = {"what": "scores", "depth": 3, "margin": 0.3, "scale": 1.0}
METRIC = 1e-6  # absolute; no evaluation is among the recordings in which rounding was measured
BOOLEANS = {
    "csqa2",
    "symkd_anno",
    "gengen_anno",
    "spatial_cs",
    "strategyqa",
    "creak",
    "rainier_anno",
}
UNSEEN_1 = {"wsc273", "copa", "numersense", "prost", "spatial_cs", "rainier_anno"}
UNSEEN_2 = {"swag", "hellaswag", "codah", "story_cloze_test", "alphanli", "strategyqa", "creak"}
OURS = {
    "acc": "weighted_accuracy",
    "auroc": "auroc",
    "t_ap": "ap_true",
    "t_p": "precision_true",
    "t_r": "recall_true",
    "t_f1": "f1_true",
    "f_ap": "ap_false",
    "f_p": "precision_false",
    "f_r": "recall_false",
    "f_f1": "f1_false",
    "ece": "ece",
}
MEANS = {"all": "mean"}
OF_STATEMENTS = re.compile(rf"bool/(?P<set>.+)[_/](?P<metric>{'|'.join(OURS)})")
OF_CHOICES = re.compile(r"mc/acc(/|_unweighted_)(?P<set>.+)")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation by the published program."""

    file: Path

    @property
    def stats_file(self) -> Path:
        return self.file.with_name(self.file.name.replace("booleans", "stats"))

    @cached_property
    def statements(self) -> list[dict[str, Any]]:
        found = list(_statements(json.loads(self.file.read_text())))
        assert found, f"{self.file} holds no statements in a way that is understood here"
        return found

    @cached_property
    def stats(self) -> dict[str, float]:
        """By path of keys; the program's None and NaN as NaN."""
        return dict(_numbers(json.loads(self.stats_file.read_text()), ""))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row["task"] for row in self.statements))

    @cached_property
    def metrics(self) -> dict[str, float]:
        return statement_metrics(self.table, self.tasks, kinds(self.tasks), parts(self.tasks))

    @property
    def table(self) -> np.ndarray:
        """A true statement of multiple choice begins a problem, a boolean is one; both are in the
        order of the file.
        """
        rows, group, column = [], -1, 0
        for row in self.statements:
            is_first = row["task"] in BOOLEANS or row["label"] == 1
            group, column = (group + 1, 0) if is_first else (group, column + 1)
            rows.append((self.tasks.index(row["task"]), group, column, row["logit"], row["label"]))
        return np.array(rows, dtype=np.float64)

    def recorded(self, pattern: re.Pattern[str]) -> dict[str, float]:
        """By our names; a mean over no task, and those of a class that a set has not, are absent
        here.
        """
        found: dict[str, float] = {}
        is_known = False
        for name, value in self.stats.items():
            match = re.search(f"(^|/){pattern.pattern}$", name)
            is_known = is_known or bool(match)
            if match and pattern is OF_CHOICES and not math.isnan(value):
                found[f"accuracy/{MEANS.get(match['set'], match['set'])}"] = value
            elif (
                match
                and pattern is OF_STATEMENTS
                and self._has_class(match["set"], match["metric"])
            ):
                found[f"{OURS[match['metric']]}/{match['set']}"] = _f1_of_nothing(
                    match["metric"], value
                )
        assert is_known, (
            f"{self.file.name}: no recorded metric is called like {pattern.pattern!r}, but "
            f"{list(self.stats)[:9]}"
        )
        return found

    def _has_class(self, name: str, metric: str) -> bool:
        of_part = parts(self.tasks)
        members = [
            task for task in self.tasks if name in ("all", task) or of_part[task].startswith(name)
        ]
        labels = {row["label"] for row in self.statements if row["task"] in members}
        needed = {"t": {1}, "f": {0}, "a": {0, 1} if metric == "auroc" else set()}.get(
            metric[0], set()
        )
        return needed <= labels


def _f1_of_nothing(metric: str, value: float) -> float:
    """F1 of precision 0 and recall 0 was recorded as NaN, and is 0 here."""
    return 0.0 if metric in ("t_f1", "f_f1") and math.isnan(value) else value


def _statements(node: Any) -> Iterator[dict[str, Any]]:
    """Every object with a logit, wherever it is."""
    if isinstance(node, dict) and {"task", "logit", "label"} <= node.keys():
        yield node
    elif isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _statements(value)


def _numbers(node: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _numbers(value, f"{path}/{key}" if path else key)
    elif isinstance(node, list):
        for value in node:
            yield from _numbers(value, path)
    elif node is None or isinstance(node, int | float):
        yield path, math.nan if node is None else float(node)


def kinds(tasks: list[str]) -> dict[str, Kind]:
    return {task: "boolean" if task in BOOLEANS else "multiple_choice" for task in tasks}


def parts(tasks: list[str]) -> dict[str, Part]:
    return {
        task: "unseen1" if task in UNSEEN_1 else "unseen2" if task in UNSEEN_2 else "seen"
        for task in tasks
    }


def table_of(batch: Batch) -> np.ndarray:
    """The recorded statements of a batch; every problem is a task of its own."""
    recorded = {name: batch[name] for name in ("mask", "logits", "first_is_corrects")}
    group_S, column_S = (index.numpy() for index in recorded["mask"].nonzero(as_tuple=True))
    logit_S = recorded["logits"].double().numpy()[group_S, column_S]
    label_S = (column_S == 0) & recorded["first_is_corrects"].bool().numpy()[group_S]
    return np.stack([group_S, group_S, column_S, logit_S, label_S], axis=1).astype(np.float64)


def evaluations() -> list[Entry[Evaluation]]:
    found: list[Entry[Evaluation]] = []
    for folder in folders(SYSTEM):
        for file in sorted(folder.rglob("*booleans*.json")):
            case = Evaluation(file)
            made_of = digest(file, case.stats_file)
            found.append(Entry(case, str(file.relative_to(folder)), folder, made_of))
    return once(found)


every_batch = pytest.mark.parametrize("batch", params(batches(), "batches.safetensors", SYSTEM))
every_evaluation = pytest.mark.parametrize(
    "evaluation", params(evaluations(), "eval_booleans.json", SYSTEM)
)


@every_batch
def test_scores_of_a_batch_are_the_recorded_ones(batch: Batch) -> None:
    scores_BC = torch.from_numpy(scores_of(batch["logits"]))
    assert_close(scores_BC, batch["scores"], **SCORES)


@every_batch
def test_the_chosen_column_of_every_problem_of_a_batch_is_the_recorded_one(batch: Batch) -> None:
    table = table_of(batch)
    assert table[best_rows(table), COLUMN].tolist() == batch["preds"].tolist()


@every_batch
def test_a_multiple_choice_problem_of_a_batch_is_right_exactly_when_it_was(batch: Batch) -> None:
    corrects, is_choice = (
        batch["corrects"].tolist(),
        batch["is_mcs"].tolist(),
    )
    names = [f"problem {row}" for row in range(len(corrects))]
    of_problem: Mapping[str, Kind] = {
        name: "multiple_choice" if choice else "boolean"
        for name, choice in zip(names, is_choice, strict=True)
    }
    found = statement_metrics(table_of(batch), names, of_problem, dict.fromkeys(names, "seen"))
    wanted = {
        name: float(right)
        for name, right in zip(names, corrects, strict=True)
        if of_problem[name] != "boolean"
    }
    assert {name: found[f"accuracy/{name}"] for name in wanted} == wanted
    assert ("accuracy/mean" in found) == bool(wanted)


@every_evaluation
def test_scores_of_an_evaluation_are_the_recorded_ones(evaluation: Evaluation) -> None:
    scores = scores_of([row["logit"] for row in evaluation.statements])
    assert_close(scores.tolist(), [row["score"] for row in evaluation.statements], **SCORES)


@every_evaluation
def test_accuracy_of_an_evaluation_is_the_recorded_one(evaluation: Evaluation) -> None:
    wanted = evaluation.recorded(OF_CHOICES)
    found = {name: value for name, value in evaluation.metrics.items() if name in wanted}
    assert found == pytest.approx(wanted, abs=METRIC, rel=0)


@every_evaluation
def test_every_metric_of_statements_of_an_evaluation_is_the_recorded_one(
    evaluation: Evaluation,
) -> None:
    wanted = evaluation.recorded(OF_STATEMENTS)
    found = {name: value for name, value in evaluation.metrics.items() if name in wanted}
    assert found == pytest.approx(wanted, abs=METRIC, rel=0)


@every_evaluation
def test_the_calibration_error_of_recorded_scores_is_the_recorded_one(
    evaluation: Evaluation,
) -> None:
    """From the scores themselves, so that it does not rest on our sigmoid."""
    labels, scores = ([row[name] for row in evaluation.statements] for name in ("label", "score"))
    assert ece(scores, labels) == pytest.approx(
        evaluation.recorded(OF_STATEMENTS)["ece/all"], abs=METRIC, rel=0
    )
