"""The summariser: its loss against transformers' own, its limits and padding, and the summaries it
writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bases import SEQ2SEQ, base_of
from tests.facts import TINY_T5, experiment, write_facts
from tests.families import experiment_on
from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import tasks
from trainer.data.padding import pad_right
from trainer.models.losses import IGNORED, token_cross_entropy
from trainer.protocol.abilities import Search
from trainer.protocol.task import DRAW, Places

ROW = {
    "id": "1",
    "document": "Ada keeps the red key in the cellar. The attic is empty.",
    "summaries": ["in the cellar"],
}
LONG = {
    "id": "2",
    "document": "Bruno keeps the map. " * 9,
    "summaries": ["the map that Bruno keeps " * 4, "kept"],
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def load(folder: Path, **changes: Any) -> Any:
    return tasks.load(
        tasks.parse(experiment("summariser", folder, **changes)),
        Places(folder, folder / "c", folder),
    )


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_the_loss_is_transformers_own_whatever_the_family(family: str, folder: Path) -> None:
    values = experiment_on("summariser", family, folder)
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "c", folder))
    model = task.model().eval()
    rows = [task.encode(row) for row in (ROW, LONG)]
    batch = task.collate(rows)
    (loss,) = task.losses(model, [batch])
    ids, mask = pad_right([row["source"] for row in rows], task.pad)
    padded = {"input_ids": ids, "attention_mask": mask, "labels": batch["labels"]}
    stock = model.base(**padded).loss * task.units(batch)
    torch.testing.assert_close(loss, stock, rtol=1e-5, atol=1e-5)
    alone = [float(next(task.losses(model, [task.collate([row])])).detach()) for row in rows]
    assert sum(alone) == pytest.approx(float(loss.detach()), rel=1e-4), "pads change nothing"


def slow_smoothed(logits: Tensor, targets: Tensor, smoothing: float) -> float:
    """Cross-entropy against (1 - smoothing) on the target and smoothing spread evenly over the
    vocabulary.
    """
    total = 0.0
    for row, target in zip(logits.double(), targets.tolist(), strict=True):
        logs = row - row.exp().sum().log()
        wanted = torch.full_like(logs, smoothing / len(logs))
        wanted[target] += 1 - smoothing
        total -= float((wanted * logs).sum())
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_label_smoothing_is_its_definition(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(5, 11, generator=generator), torch.tensor([0, 3, 10, 3, 7])
    found = float(token_cross_entropy(logits, targets, smoothing=smoothing))
    assert found == pytest.approx(slow_smoothed(logits, targets, smoothing), rel=1e-6)


def test_the_loss_is_smoothed_in_training_and_plain_in_evaluation(folder: Path) -> None:
    plain, smooth = load(folder), load(folder, label_smoothing=0.2)
    batch = plain.collate([plain.encode(ROW)])
    losses = {
        (name, mode): float(next(task.losses(task.model().train(mode), [batch])).detach())
        for name, task in (("plain", plain), ("smooth", smooth))
        for mode in (True, False)
    }
    assert (
        losses["plain", False]
        == losses["plain", True]
        == losses["smooth", False]
        != losses["smooth", True]
    )


def test_texts_are_cut_to_their_limits_and_keep_their_ends(folder: Path) -> None:
    task = load(folder, data={"source_tokens": 20, "target_tokens": 6})
    short, long = task.encode({**ROW, "document": "x"}), task.encode(LONG)
    assert len(long["source"]) == 20
    assert long["targets_lengths"] == [6, min(6, long["targets_lengths"][1])]
    assert long["source"][-1] == long["targets"][5] == task.end
    whole = task.uncut_fields(LONG)
    assert long["source"][:19] == whole["source"].texts[0][:19]
    assert long.is_truncated
    assert long.lost_labels == (len(whole["targets"].texts[0]) - 6, len(whole["targets"].texts[0]))
    assert short.is_truncated == (len(task.uncut_fields(ROW)["targets"].texts[0]) > 6)


def test_widths_are_the_longest_rounded_up_to_multiples_of_8(folder: Path) -> None:
    """Of a base that reads no streams."""
    task = load(folder, base=base_of("summariser", "t5gemma", vocab_size=384))
    rows = [task.encode(row) for row in (ROW, LONG)]
    batch = task.collate(rows)
    longest = max(len(row["source"]) for row in rows)
    assert batch["input_ids"].shape == (2, -(-longest // 8) * 8)
    assert batch["labels"].shape[1] % 8 == 0
    assert batch["attention_mask"].sum(1).tolist() == [len(row["source"]) for row in rows]
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [
        row["targets_lengths"][0] for row in rows
    ]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == task.pad).all()


def test_references_are_drawn_in_training_only_when_asked_for(folder: Path) -> None:
    def lengths(task: Any) -> set[int]:
        row = task.encode(LONG)
        drawn = [{**row, DRAW: np.array([n])} for n in range(4)]
        return {int((task.collate([each])["labels"] != IGNORED).sum()) for each in (*drawn, row)}

    first, second = load(folder).encode(LONG)["targets_lengths"]
    assert lengths(load(folder)) == {first}
    assert lengths(load(folder, data={"sample_summaries": True})) == {first, second}


def test_a_row_without_a_summary_trains_nothing(folder: Path) -> None:
    task = load(folder)
    batch = task.collate([task.encode({**ROW, "summaries": []})])
    assert int(task.units(batch)) == 0
    (loss,) = task.losses(task.model(), [batch])
    assert float(loss.detach()) == 0.0


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("t5", {}), ("t5", {"num_decoder_layers": 5}), ("t5gemma2", {})],
    ids=["t5", "t5 with a deeper decoder", "t5gemma2"],
)
def test_summaries_are_those_of_transformers_and_score_by_rouge(
    family: str, sizes: dict[str, int], folder: Path
) -> None:
    base = base_of("summariser", family, vocab_size=384)
    base = {**base, "config": {**base["config"], **sizes}}
    generation = {"num_beams": 3, "length_penalty": 0.6, "max_tokens": 7}
    task = load(folder, base=base, generation=generation)
    model = task.model().eval()
    raw = [task.question_row(row) for row in (ROW, LONG, {**ROW, "summaries": []})]
    rows = [task.encode(row) for row in (ROW, LONG, ROW)]
    found = task.answers(model, rows, raw)
    alone = []
    for row in rows:
        ids = torch.tensor([row["source"]])
        told = {"num_beams": 3, "length_penalty": 0.6, "max_new_tokens": 7, "do_sample": False}
        told |= {"use_cache": not sizes}  # its own cache has as many blocks as the encoder
        made = model.base.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **told)[
            0, 1:
        ]
        alone.append(task.tokenizer.decode(made, skip_special_tokens=True).strip())
    assert found.predictions == alone
    judged = [
        task.answer_scores(text, row["answers"]) for text, row in zip(alone, raw[:2], strict=False)
    ]
    for kind, score in found.scores.items():
        assert int(score.den) == 2, "a row without references has no score"
        assert score.value() == pytest.approx(sum(scores[kind] for scores in judged) / 2)


def test_several_answers_are_the_best_first(folder: Path) -> None:
    task = load(folder)
    model = task.model().eval()
    found = task.answers(
        model,
        [task.encode(ROW)],
        [task.question_row(ROW)],
        search=Search(num_beams=3, num_answers=2),
    )
    assert found.n_best is not None
    assert [len(texts) for texts in found.n_best] == [2]
    assert found.n_best[0][0] == found.predictions[0]
    with refused("draws_no_summaries", flag="--temperature"):
        task.answers(
            model, [task.encode(ROW)], [task.question_row(ROW)], search=Search(temperature=1.0)
        )


def test_adapters_in_what_reads_pictures_are_refused(folder: Path) -> None:
    base = base_of("summariser", "t5gemma2", vocab_size=384)
    with refused("family_reads_pictures", family="t5gemma2"):
        load(folder, base=base, lora={"r": 2}).skeleton()


def test_an_export_brings_along_what_reads_pictures_and_was_not_trained(
    folder: Path, tmp_path: Path
) -> None:
    task = load(folder, base=base_of("summariser", "t5gemma2", vocab_size=384))
    model = task.model()
    frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
    assert frozen
    assert all("vision_tower" in name or "multi_modal" in name for name in frozen)
    assert task.fingerprint().startswith("random:")
    trained = {name: x + 1 for name, x in model.named_parameters() if x.requires_grad}
    task.export(trained, tmp_path / "final")
    again = dict(task.load_export(tmp_path / "final").named_parameters())
    assert again.keys() == dict(model.named_parameters()).keys()
    for name, weight in again.items():
        assert torch.equal(weight, trained.get(name, model.get_parameter(name))), name


def test_what_is_no_t5_is_refused(folder: Path) -> None:
    with refused("family_of_summaries", family="bart"):
        load(
            folder, base={"config": {"model_type": "bart", "vocab_size": 384, "d_model": 16}}
        ).skeleton()
    with refused("end_differs"):
        load(folder, base={"config": {**TINY_T5["config"], "eos_token_id": 5}}).skeleton()


def _trained_and_evaluated(
    values: dict[str, Any], folder: Path, savedir: Path
) -> list[dict[str, float]]:
    """The validation scores in the log, and those of the exported model, of a run that summarises
    as it goes.
    """
    from trainer.evaluation.run import Question
    from trainer.evaluation.run import run as evaluate
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=folder, cache_dir=folder / "cache")
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options, Preemption()) == 0
    asked = Question(values, model="final", predictions=savedir / "pred.jsonl")
    found = evaluate(asked, options)
    lines = [
        json.loads(line) for line in (planned.folder / "metrics.jsonl").read_text().splitlines()
    ]
    last = {
        key.removeprefix("valid/"): value
        for key, value in lines[-1].items()
        if key.startswith("valid/rouge")
    }
    return [last, found]


def test_a_run_logs_rouge_that_any_ranks_and_the_command_agree_on(
    folder: Path, tmp_path: Path
) -> None:
    train = {"steps": 3, "answers": "all", "best": "valid/rouge1", "best_is": "max"}
    values = experiment("summariser", folder, train=train)
    found = {
        world: run_on_ranks(world, _trained_and_evaluated, values, folder, tmp_path / f"{world}")
        for world in (1, 2)
    }
    (said, again) = found[1][0]
    assert said.keys() == again.keys() == {"rouge1", "rouge2", "rougel", "rougelsum"}
    assert again == pytest.approx(said, rel=1e-6)
    for of_rank in found[2]:
        assert of_rank[1] == pytest.approx(said, abs=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "1" / "pred.jsonl").read_text().splitlines()]
    assert len(rows) == 22
    assert rows[0].keys() == {"id", "question", "answers", "prediction", "scores"}
    assert sum(row["scores"]["rouge1"] for row in rows) / 22 == pytest.approx(
        again["rouge1"], abs=1e-9
    )
