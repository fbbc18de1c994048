"""Checkpoints that Vera's own run.py saved become bases of ours, with their heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import T5Config, T5EncoderModel

from tests.wording import refused
from trainer.models.head import load_head
from trainer.tasks.vera.interchange import import_model
from trainer.tasks.vera.model import Verifier, read_temperature

SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}


def written(path: Path, **changes: Any) -> tuple[T5EncoderModel, torch.nn.Linear]:
    """A file as run.py writes it, whose scores are numbers of numpy."""
    torch.manual_seed(3)
    model, linear = T5EncoderModel(T5Config(**SIZES)).eval(), torch.nn.Linear(8, 1)
    content = {
        "model": model.state_dict(),
        "linear": linear.state_dict(),
        "step": 48_000,
        "eval_accs": {0: np.float64(0.5), 48_000: np.float64(0.7)},
    }
    torch.save(content | changes, path)
    return model, linear


def test_a_checkpoint_of_run_py_scores_as_it_did_there(tmp_path: Path) -> None:
    model, linear = written(tmp_path / "ckp_48000.pth")
    import_model(tmp_path / "ckp_48000.pth", out=tmp_path / "out")
    ids = torch.tensor([[5, 9, 70, 1], [3, 3, 310, 1]])
    with torch.no_grad():
        wanted = linear(model(ids).last_hidden_state[:, -1])[:, 0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config[name] for name in SIZES} == SIZES
    ours = Verifier(T5EncoderModel.from_pretrained(tmp_path / "out"), seed=0).eval()
    assert load_head(ours.head, str(tmp_path / "out"))
    with torch.no_grad():
        logits = ours(input_ids=ids, attention_mask=torch.ones_like(ids))["logits"]
    assert torch.allclose(logits.flatten(), wanted, atol=1e-6)
    assert read_temperature(tmp_path / "out") == 1.0


def test_a_file_of_others_is_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "x.pth", tmp_path / "out"
    torch.save({"sd": {}}, file)
    with refused("vera_pickle"):
        import_model(file, out=out)
    written(file, model={"layers.0.weight": torch.ones(1)})
    with refused("t5_encoder_absent", at=str(file)):
        import_model(file, out=out)
    assert not out.exists()
