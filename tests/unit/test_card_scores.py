"""The scores of a model card, as the Hub reads them of its front matter."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

import exp_configs
from trainer.exports import card
from trainer.exports.record import Record

SCORES = {
    "step": 20.0,
    "valid/mrr@10": 0.734375,
    "valid/loss": 1e-05,
    "valid_dev/recall@1": 1.0,
}


def of_scores(folder: Path, scores: dict[str, float]) -> ModelCard:
    """The card of a small retriever with these scores."""
    values = exp_configs.EXP_GROUPS["sparse_tiny"][0]
    facts = {"lathe": "1", "exp_id": "0123456789abcdef", "data": {}, "files": {}}
    record = Record(**facts, experiment=values, scores=scores)  # pyright: ignore[reportArgumentType]
    return ModelCard(card.text(folder, record))


def test_the_hub_reads_every_score_of_a_card(tmp_path: Path) -> None:
    results = of_scores(tmp_path, SCORES).data.eval_results or []
    assert {(one.dataset_split, one.metric_type): one.metric_value for one in results} == {
        ("valid", "mrr@10"): 0.734375,
        ("valid", "loss"): 1e-05,
        ("valid_dev", "recall@1"): 1.0,
    }
    assert {one.task_type for one in results} == {"retriever"}
    assert {one.dataset_type for one in results} == {"stdlib_docs"}


def test_a_card_without_scores_says_none_to_the_hub(tmp_path: Path) -> None:
    for scores in ({}, {"step": 20.0}):
        found = of_scores(tmp_path, scores).data
        assert found.eval_results is None
        assert "model-index" not in found.to_dict()
