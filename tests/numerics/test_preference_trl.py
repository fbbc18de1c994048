"""Losses, gradients and five steps of preferences are those of TRL 1.16 on the same rows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.facts import LLAMA, experiment, facts, write_facts
from tests.numerics.test_trl_masks import interpreter
from tests.trl_1_16 import __file__ as room
from trainer import tasks
from trainer.config.schema import RandomBase
from trainer.models import base_model
from trainer.protocol.task import Places

STEPS, LR = 5, 0.05
BETA = 0.3
WHOLE = {"max_length": None}
# By name: our block, and TRL's trainer with its configuration.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dpo": ({"beta": BETA}, "dpo", {"beta": BETA, **WHOLE}),
    "dpo normalised": (
        {"beta": 2.0, "length_normalised": True},
        "dpo",
        {"beta": 2.0, "loss_type": ["sigmoid_norm"], **WHOLE},
    ),
    "ipo": ({"loss": "ipo", "beta": BETA}, "dpo", {"beta": BETA, "loss_type": ["ipo"], **WHOLE}),
    "simpo": (
        {"loss": "simpo", "gamma": 0.7},
        "cpo",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0},
    ),
    "orpo": ({"loss": "orpo", "beta": BETA}, "orpo", {"beta": BETA}),
    "kto": (
        {"loss": "kto", "beta": BETA, "desirable": 1.5},
        "kto",
        {"beta": BETA, "desirable_weight": 1.5, **WHOLE},
    ),
    "reward": ({"loss": "reward"}, "reward", WHOLE),
    "reward with margins": (
        {"loss": "reward", "margin": True, "centre": 0.1},
        "reward",
        {"center_rewards_coefficient": 0.1, **WHOLE},
    ),
}


def _write(folder: Path) -> None:
    """Rows, a base and a scorer with the same body."""
    write_facts(folder)
    rows = [
        {"prompt": one["question"], "chosen": f" {one['answer']}", "rejected": f" {other}"}
        for one, other in zip(facts(0, 8), ["no", "the attic", "far away"] * 3, strict=False)
    ]
    margins = [{**row, "margin": n / 8} for n, row in enumerate(rows)]
    singles = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"]}
        | {"label": n % 3 > 0}
        for n, row in enumerate(rows)
    ]
    places = Places(folder, folder / "cache", folder / "runs")
    model = base_model.load(RandomBase(**LLAMA), places, precision="fp32", kind="causal_lm")
    tokenizer = _tokenizer(folder)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scorer.save_pretrained(folder / "scorer")
    files = {"pairs": rows, "margins": margins, "singles": singles, "reversed": singles[::-1]}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def _file(name: str) -> str:
    return {"kto": "singles", "reward with margins": "margins"}.get(name, "pairs")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.bos_token = None  # ORPO's trainer would write it before each prompt, ours does not
    return tokenizer


def _ours(folder: Path, name: str, block: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """The losses of five steps; the gradients of the first, and the weights after the last."""
    files = {"train": f"{_file(name)}.jsonl"}
    data = {"source": "files", "max_tokens": 128, "files": files}
    values = experiment("preference", folder, data=data, preference=block)
    values |= {"base": str(folder / "model"), "tokenizer": str(folder / "model")}
    task: Any = tasks.load(
        tasks.parse(values), Places(folder, folder / f"cache {name}", folder / "runs")
    )
    encoded = task.encode_rows(list(task.rows("train")))
    model = task.model().train()
    if block.get("loss") == "reward":
        scorer = load_file(folder / "scorer" / "model.safetensors")
        with torch.no_grad():
            model.head.weight.copy_(scorer["score.weight"])

    class Rows(list):  # what is read of a token store
        digest = name
        lengths = torch.tensor([task.length(row) for row in encoded]).numpy()

    task.read_start(lambda: task.model().eval(), {"train": Rows(encoded)}, batch=3)
    window = [task.collate(encoded)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, first = list[float](), dict[str, Any]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for loss in task.losses(model, window):
            mean = loss / task.units(window[0])
            mean.backward()
            losses.append(float(mean.detach()))
        first = first or {
            f"gradient.{k}": v.grad.clone() for k, v in _named(model) if v.grad is not None
        }
        optimizer.step()
    return losses, first | {f"weight.{k}": v.detach() for k, v in _named(model)}


def _named(model: Any) -> list[tuple[str, Any]]:
    """Weights under TRL's names."""
    if not hasattr(model, "head"):
        return list(model.base.named_parameters())
    own = [(f"model.{name}", one) for name, one in model.base.named_parameters()]
    return [*own, ("score.weight", model.head.weight)]


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The folder of both, and TRL's losses by name."""
    folder = tmp_path_factory.mktemp("preferences")
    _write(folder)
    asked = {
        name: {"trainer": trainer, "config": config, "rows": f"{_file(name)}.jsonl"}
        for name, (_, trainer, config) in CASES.items()
    }
    # KTO measures the divergence by answers behind prompts of other rows: of the row before in TRL,
    # of the next one here
    asked["kto"]["rows"] = "reversed.jsonl"
    program = Path(room).parent / "preferences.py"
    done = subprocess.run(
        [interpreter(), program, folder], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((folder / "told.json").read_text())
    return folder, told


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_trl(
    name: str, of_trl: tuple[Path, dict[str, list[float]]]
) -> None:
    folder, told = of_trl
    losses, tensors = _ours(folder, name, CASES[name][0])
    assert losses == pytest.approx(told[name], rel=1e-6, abs=1e-6)
    theirs = load_file(folder / f"{name}.safetensors")
    assert {*theirs} <= {*tensors}
    for key, want in theirs.items():
        torch.testing.assert_close(tensors[key], want, rtol=1e-5, atol=1e-6, msg=key)
