"""Preferences are learnt: a language model that answers another question than the one that was asked
answers the asked one afterwards, also about people whom no training row names; and a run that was
killed ends with the same bits.

The two answers of a pair differ in two words or three. DPO learns to tell them apart, too, but lowers the
probability of both, until what the model writes is no sentence any more (docs/log.md).
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
from tests.ranks import run_alone, run_on_ranks
from trainer.data import lookup

ROWS, ASKED, KILLED_AT = 6000, 100, 120
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


def _tuned(base: Path) -> dict[str, Any]:
    (tiny,) = exp_configs.EXP_GROUPS["preference_tiny"]
    values = vary(tiny, optim={"lr": 2e-3}, preference={"loss": "orpo", "beta": 1.0})
    values = vary(values, train={"steps": 300, "eval_every": 100, "save_every": 100})
    return {**values, "base": str(base), "tokenizer": str(base)}


def _trained(
    values: dict[str, Any], folder: Path, savedir: Path
) -> tuple[Path, list[dict[str, Any]]]:
    return train(values, folder, savedir)


def _killed_and_resumed(values: dict[str, Any], folder: Path, savedir: Path) -> Path:
    """The folder of a run that died in the step behind KILLED_AT, and was started again."""
    from trainer.training import loop

    original, seen = loop.train_step, []

    def dying(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) > KILLED_AT:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    loop.train_step = dying
    with pytest.raises(KeyboardInterrupt):
        train(values, folder, savedir)
    loop.train_step = original
    return train(values, folder, savedir)[0]


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
    wanted = [next(one for one in RELATIONS if one in row["chosen"]) for row in rows]
    return [
        [relation for relation in RELATIONS if relation in one["prediction"]] == [asked]
        for one, asked in zip(answers, wanted, strict=True)
    ]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_model_answers_what_was_asked_once_people_prefer_it(tmp_path: Path) -> None:
    before = run_on_ranks(1, _trained, _base(tmp_path), tmp_path, tmp_path / "base")[0][0] / "final"
    values = _tuned(before)
    run, lines = run_on_ranks(1, _trained, values, tmp_path, tmp_path / "tuned")[0]
    last = next(line for line in reversed(lines) if "valid/accuracy" in line)
    assert last["valid/accuracy"] >= 0.95
    shares = [
        sum(run_alone(_relations, final, tmp_path)) / ASKED for final in (before, run / "final")
    ]
    assert shares[0] <= 0.1
    assert shares[1] >= 0.85
    (killed,) = run_on_ranks(1, _killed_and_resumed, values, tmp_path, tmp_path / "killed")
    weights = [one / "final" / "model.safetensors" for one in (run, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
