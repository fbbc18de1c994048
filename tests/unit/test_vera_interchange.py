"""Public verifiers in and out: the head, its bias and the temperature in embedding rows that
nothing else uses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from tests.wording import refused
from trainer.models.head import load_head
from trainer.tasks.vera.interchange import export_model, import_model
from trainer.tasks.vera.model import Verifier, read_temperature


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder as the public ones are: an encoder whose rows 32097 to 32099 hold T, the bias and
    the head.
    """
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=32128,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    model = T5EncoderModel(config)
    with torch.no_grad():
        model.shared.weight[32099] = torch.arange(8.0)
        model.shared.weight[32098] = 0.25
        model.shared.weight[32097] = 1.5
    model.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def unpacked_by_hand(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What the model card says to do."""
    model = T5EncoderModel.from_pretrained(folder).eval()
    hidden = model(ids).last_hidden_state[:, -1]
    weight, bias, temperature = (model.shared.weight[row] for row in (32099, 32098, 32097))
    return torch.sigmoid((hidden @ weight + bias[0]) / temperature[0])


def ours(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = Verifier(T5EncoderModel.from_pretrained(folder), seed=0).eval()
    assert load_head(model.head, str(folder))
    return torch.sigmoid(
        model(input_ids=ids, attention_mask=torch.ones_like(ids))["logits"]
        / read_temperature(folder)
    )


def test_an_imported_verifier_scores_as_its_card_says_and_packs_back(
    packed: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 9, 700, 1], [3, 3, 31000, 1]])
    import_model(packed, out=tmp_path / "imported")
    assert torch.allclose(
        ours(tmp_path / "imported", ids), unpacked_by_hand(packed, ids), atol=1e-6
    )
    assert read_temperature(tmp_path / "imported") == 1.5
    export_model(tmp_path / "imported", out=tmp_path / "again")
    one, two = (
        T5EncoderModel.from_pretrained(folder).state_dict()
        for folder in (packed, tmp_path / "again")
    )
    for name, tensor in one.items():
        kept = torch.ones(len(tensor), dtype=torch.bool)
        if name in ("shared.weight", "encoder.embed_tokens.weight"):
            kept[[32097, 32098]] = False  # of these only column 0 means something
            assert torch.equal(tensor[~kept, 0], two[name][~kept, 0])
        assert torch.equal(tensor[kept], two[name][kept]), name
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == [
        "T5EncoderModel"
    ]


def test_a_plain_t5_is_not_taken_for_a_verifier(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32128, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    model = T5EncoderModel(config)
    with torch.no_grad():
        model.shared.weight[32097] = -1.0
    model.save_pretrained(tmp_path / "t5")
    with refused("plain_t5"):
        import_model(tmp_path / "t5", out=tmp_path / "out")
    with refused("head_absent"):
        export_model(tmp_path / "t5", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_without_such_rows_and_an_existing_folder_are_refused(
    packed: Path, tmp_path: Path
) -> None:
    T5EncoderModel(
        T5Config(vocab_size=100, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "small")
    with refused("verifier_vocabulary", ids=32099):
        import_model(tmp_path / "small", out=tmp_path / "out")
    with refused("path_exists"):
        import_model(packed, out=tmp_path)
