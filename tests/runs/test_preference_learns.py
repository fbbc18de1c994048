"""Preferences are learnt: a language model that answers another question than the one that was asked
answers the asked one afterwards, also about people whom no training row names; and a run that was
killed ends with the same bits.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import exp_configs
from exp_configs import vary
from tests.contract.runs import train
from tests.contract.test_task_contract import _die_then_resume
from tests.ranks import run_alone, run_on_ranks
from trainer.data import lookup

ROWS, ASKED = 6000, 100
RELATIONS = ("lives in", "was born in", "works in", "has been to")


def _base(folder: Path) -> dict[str, Any]:
    """A language model that learns the sentence that nobody prefers."""
    for split, count in (("train", ROWS), ("valid", 50)):
        rows = islice(lookup.preferences(split), count)
        lines = [{"prompt": row["prompt"], "completion": row["rejected"]} for row in rows]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{split}.jsonl").write_text(text)
    (tiny,) = exp_configs.EXP_GROUPS["preference_tiny"]
    values = vary(tiny, task="causal_lm", data={"source": "files", "loss_on": "answer"})
    best = {"best": None, "best_is": "min", "steps": 200, "eval_every": 200, "save_every": 200}
    return vary(values, train=best, optim={"lr": 3e-3})


def _trained(
    values: dict[str, Any], folder: Path, savedir: Path
) -> tuple[Path, list[dict[str, Any]]]:
    return train(values, folder, savedir)


def _relations(final: Path, folder: Path) -> list[bool]:
    """By held-out question: whether the generated answer says what was asked."""
    from trainer.evaluation.predict import judge_rows, open_export, predict_rows
    from trainer.protocol.abilities import Prediction

    rows = list(islice(lookup.preferences("valid"), ASKED))
    opened = open_export(final, data=None, cache_dir=folder / "cache")
    placed = [(f"row {number}", {"prompt": row["prompt"]}) for number, row in enumerate(rows)]
    how = Prediction(max_tokens=32)
    cut_tokens = judge_rows(opened, placed, how, what="questions")
    answers = predict_rows(opened, placed, how, batch=50, cut_tokens=cut_tokens)
    for one, row in list(zip(answers, rows, strict=True))[:3]:
        print(row["prompt"], "->", one["prediction"])
    wanted = [next(one for one in RELATIONS if one in row["chosen"]) for row in rows]
    return [
        [relation for relation in RELATIONS if relation in one["prediction"]] == [asked]
        for one, asked in zip(answers, wanted, strict=True)
    ]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_answers_what_was_asked_once_people_prefer_it(tmp_path: Path) -> None:
    before = run_on_ranks(1, _trained, _base(tmp_path), tmp_path, tmp_path / "base")[0][0] / "final"
    (tiny,) = exp_configs.EXP_GROUPS["preference_tiny"]
    values = {**tiny, "base": str(before), "tokenizer": str(before)}
    run, lines = run_on_ranks(1, _trained, values, tmp_path, tmp_path / "tuned")[0]
    last = next(line for line in reversed(lines) if "valid/accuracy" in line)
    assert last["valid/accuracy"] >= 0.95
    shares = [
        sum(run_alone(_relations, final, tmp_path)) / ASKED for final in (before, run / "final")
    ]
    print(last, shares)
    assert shares[0] <= 0.1
    assert shares[1] >= 0.9
    ranks = run_on_ranks(1, _die_then_resume, values, tmp_path, tmp_path / "killed", 0)
    outcome, killed = ranks[0]
    assert outcome == "killed"
    weights = [one / "final" / "model.safetensors" for one in (run, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
