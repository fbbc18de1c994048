"""Exports of preferences answer prompts, score answers, and do it for strangers by the program of their
card.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import exported
from tests.contract.runs import from_folder, train
from tests.exported import SHORT
from tests.facts import TINY_T5, experiment, write_facts
from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import load
from trainer.evaluation.predict import judge_rows, open_export, predict_rows
from trainer.protocol.abilities import Prediction, Search

PROMPT, ANSWER = "Where is the red key?", " In the cellar."
# the program of a card writes 32 tokens
LORA: dict[str, Any] = {"lora": {"r": 4, "targets": "all-linear"}}
EXPORTS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "chat": {"data": {"source": "chat", "chat_template": "plain"}},
    "t5": {"base": TINY_T5},
    "t5 that writes": {
        "base": TINY_T5,
        "preference": {"loss": "orpo"},
        "train": {**SHORT, "steps": 30, "eval_every": 30},
        "optim": {"lr": 1e-2},
    },
    "reward": {"preference": {"loss": "reward"}},
    "t5 reward": {"base": TINY_T5, "preference": {"loss": "reward"}},
}
ADAPTED = {
    f"{name} with adapters": {**EXPORTS[name], **LORA} for name in ("decoder", "t5", "reward")
}
if find_spec("peft"):
    EXPORTS |= ADAPTED


def _trained(values: dict[str, dict[str, Any]], folder: Path, savedir: Path) -> dict[str, Path]:
    return {name: train(one, folder, savedir)[0] / "final" for name, one in values.items()}


@pytest.fixture(scope="module")
def finals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """final/ of a run of each kind."""
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=16, valid=4)
    how = {"train": SHORT, "optim": {"lr": 1e-3}}
    values = {name: experiment("preference", folder, **how | own) for name, own in EXPORTS.items()}
    for name in ADAPTED.keys() & values.keys():
        values[name] = from_folder(values[name], folder / "bases")
    return run_on_ranks(1, _trained, values, folder, tmp_path_factory.mktemp("runs"))[0]


def predicted(
    final: Path, rows: list[dict[str, Any]], folder: Path, how: Prediction
) -> list[dict[str, Any]]:
    opened = open_export(final, data=None, cache_dir=folder / "cache")
    placed = [(f"row {number}", row) for number, row in enumerate(rows)]
    cut_tokens = judge_rows(opened, placed, how, what="rows")
    return predict_rows(opened, placed, how, batch=4, cut_tokens=cut_tokens)


@pytest.mark.long
def test_the_program_of_a_card_answers_or_scores_as_predict_does(
    finals: dict[str, Path], tmp_path: Path
) -> None:
    exports = {name: ("preference", final, {}) for name, final in finals.items()}
    theirs = exported.told(exports, tmp_path / "stranger")
    answers: list[str] = []
    for name, final in finals.items():
        assert "error" not in theirs[name], (name, theirs[name])
        (printed,) = theirs[name]["shown"]
        is_reward = "reward" in name
        row = {"prompt": PROMPT} | ({"completion": ANSWER} if is_reward else {})
        (own,) = predicted(final, [row], tmp_path, Prediction(max_tokens=32))
        if is_reward:
            assert float(printed) == pytest.approx(own["reward"], abs=1e-6), name
        else:
            assert printed == own["prediction"] + "\n", name
            answers.append(own["prediction"])
    assert len(set(filter(None, answers))) > 1, "they write something"


@pytest.mark.long
@pytest.mark.parametrize("name", ["decoder", "t5"])
def test_a_policy_answers_prompts_and_scores_answers_of_one_file(
    name: str, finals: dict[str, Path], tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "prompt": PROMPT},
        {"id": "b", "prompt": PROMPT, "completion": ANSWER},
        {"id": "c", "prompt": PROMPT * 2},
    ]
    found = predicted(finals[name], rows, tmp_path, Prediction(Search(num_beams=2), max_tokens=4))
    assert [one["id"] for one in found] == ["a", "b", "c"]
    assert [sorted(one) for one in found[:2]] == [
        ["id", "prediction"],
        ["id", "log_probability", "tokens"],
    ]


@pytest.mark.long
def test_an_encoder_decoder_answers_in_python_as_predict_does(
    finals: dict[str, Path], tmp_path: Path
) -> None:
    final = finals["t5 that writes"]
    (row,) = predicted(final, [{"prompt": PROMPT}], tmp_path, Prediction(max_tokens=8))
    text, run = row["prediction"], load(final, cache_dir=tmp_path / "cache")
    assert run.answer(PROMPT, max_tokens=8) == text != ""
    stop = text[len(text) // 2]
    assert run.answer(PROMPT, max_tokens=8, stop=stop) == text.partition(stop)[0]
    with refused("draws_no_answers"):
        run.answer(PROMPT, temperature=0.5)


@pytest.mark.long
def test_a_reward_model_answers_no_prompt(finals: dict[str, Path], tmp_path: Path) -> None:
    with refused("answer_scored_absent"):
        predicted(finals["reward"], [{"prompt": PROMPT}], tmp_path, Prediction())
