"""A student that learns from a teacher is better after the same steps than on labels alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests.contract.runs import train
from tests.ranks import run_on_ranks
from trainer.data import lookup


def llama(width: int, layers: int) -> dict[str, Any]:
    config = {"model_type": "llama", "vocab_size": 768, "hidden_size": width}
    config |= {"intermediate_size": 2 * width, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 96}
    return {"config": {**config, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}}


TEACHER: dict[str, Any] = {
    "task": "causal_lm",
    "base": llama(96, 2),
    "tokenizer": {"vocab_size": 768, "corpus": "lookup"},
    "data": {"source": "files", "max_tokens": 96},
    "train": {
        **{"steps": 150, "global_batch": 32, "micro_batch": 32, "eval_batch": 50},
        **{"precision": "fp32", "log_every": 150, "eval_every": 150, "save_every": 150},
    },
    "optim": {"lr": 3e-3},
    "schedule": {"shape": "cosine", "warmup_steps": 20},
    "deepspeed": "zero1",
}
STUDENT = vary(
    TEACHER,
    base=llama(32, 1),
    train={"steps": 200, "global_batch": 8, "micro_batch": 8}
    | dict.fromkeys(("log_every", "eval_every", "save_every"), 200),
)


def _score(values: dict[str, Any], folder: Path, savedir: Path) -> dict[str, float]:
    return train(values, folder, savedir, 1)[1][-1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_student_of_a_trained_teacher_has_a_lower_loss_than_on_labels_alone(
    tmp_path: Path,
) -> None:
    """On made-up facts, held out. Both see the same rows in the same order."""
    for split, count in (("train", 1600), ("valid", 200)):
        rows = itertools.islice(lookup.texts(split, facts=2), count)
        lines = (json.dumps({"text": row["text"]}) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))

    def score(values: dict[str, Any]) -> dict[str, float]:
        return run_on_ranks(1, _score, values, tmp_path, tmp_path / "runs")[0]

    teacher = score(TEACHER)["valid/loss"]
    gains = list[float]()
    for seed in (1, 2):
        alone = vary(STUDENT, train={"seed": seed}, base={**STUDENT["base"], "seed": seed})
        block = {"base": {"experiment": TEACHER}, "top_k": 256, "weight": 0.5}
        labels, both = score(alone), score({**alone, "teacher": block})
        gains.append(labels["valid/loss"] - both["valid/loss"])
        print(
            f"SHOW seed {seed}: held-out loss of the teacher {teacher:.4f}; of the student on "
            f"labels {labels['valid/loss']:.4f}, with the teacher {both['valid/loss']:.4f} "
            f"(divergence {both['valid/divergence']:.4f})"
        )
    assert min(gains) > 0


PAGE = Path(__file__).resolve().parents[2] / "docs" / "distillation.md"


@pytest.mark.long
def test_the_example_of_the_page_trains_both(tmp_path: Path) -> None:
    from trainer.config.groups import with_steps

    example = PAGE.read_text().split("```python\n")[-1].partition("```")[0]
    defined: dict[str, Any] = {}
    exec(example, defined)
    for split, count in (("train", 80), ("valid", 20)):
        rows = itertools.islice(lookup.texts(split, facts=2), count)
        lines = (json.dumps({"text": row["text"]}) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    teacher, student = with_steps(defined["EXP_GROUPS"]["pair"], 4)
    assert student["teacher"]["base"]["experiment"] == teacher
    scores = [
        run_on_ranks(1, _score, one, tmp_path, tmp_path / "runs")[0] for one in (teacher, student)
    ]
    assert ["valid/divergence" in one for one in scores] == [False, True]
