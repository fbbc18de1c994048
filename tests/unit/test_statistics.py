"""Statistics of data: the truncation ledger, padding, duplicates, decoded examples, and the run
that is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import tasks
from trainer.data.token_store import TokenStore, open_store
from trainer.models.losses import IGNORED
from trainer.protocol.abilities import Uncut
from trainer.protocol.task import Batch, Encoded, Places, Text
from trainer.statistics import picture, table
from trainer.statistics.counts import count_rows, is_empty
from trainer.statistics.examples import texts
from trainer.statistics.frequencies import Frequencies
from trainer.statistics.ledger import Ledger, refuse_lost_labels
from trainer.statistics.report import report
from trainer.tasks.token_task import TokenTask

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SCITLDR, T5 = SHARED / "summarisation" / "scitldr", SHARED / "tokenizers" / "t5"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def words(ids: Any) -> str:
    return " ".join(f"w{number}" for number in ids)


# The ledger
# --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=20),
    st.integers(1, 40),
)
def test_tokens_and_labels_lost_are_what_is_behind_the_limit(
    rows: list[tuple[int, int]], limit: int
) -> None:
    ledger = Ledger(words)
    for number, (length, start) in enumerate(rows):
        ledger.add(
            str(number), {"f": Uncut([list(range(length))], limit, "data.f", labels_from=start)}
        )
    found = ledger.report()["f"]

    def lost(at: int) -> tuple[int, int]:
        kept = [(length, start, min(length, at)) for length, start in rows]
        return (
            sum(length - k for length, _, k in kept),
            sum(max(0, length - start) - max(0, k - start) for length, start, k in kept),
        )

    assert (found["tokens"]["lost"], found["labels"]["lost"]) == lost(limit)
    assert (found["tokens"]["of"], found["labels"]["of"]) == lost(0)
    assert found["rows_cut"] == sum(length > limit for length, _ in rows)
    for index, kind in enumerate(("tokens", "labels")):
        total, enough = lost(0)[index], found[kind]["limit_below_1_percent"]
        good = [at for at in range(1, 41) if lost(at)[index] < 0.01 * total or lost(at)[index] == 0]
        assert enough == good[0], kind


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=8))
def test_frequencies_are_those_that_counting_one_by_one_gives(rows: list[list[int]]) -> None:
    frequencies, counter = Frequencies(), Counter(token for row in rows for token in row)
    for row in rows:
        frequencies.add({"f": Uncut([row, row[:1]], 3, "data.f")})
        counter.update(row[:1])
    found = frequencies.report(words)
    if not counter:
        assert found == {}
        return
    one = found["f"]
    assert (one["tokens"], one["different"]) == (counter.total(), len(counter))
    assert one["occur_once"] == sum(count == 1 for count in counter.values()) / len(counter)
    assert {text: count for text, count, _ in one["frequent"]} == {
        words([token]): count for token, count in counter.items()
    }
    assert sum(share for _, _, share in one["frequent"]) == pytest.approx(1.0)


def test_answers_are_lost_when_no_kept_text_holds_one() -> None:
    ledger = Ledger(words)
    passages = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    for identity, answer in (
        ("front", "w2 w3"),
        ("behind", "w5"),
        ("other", "w9"),
        ("nowhere", "w50"),
        ("part", "5"),
    ):
        ledger.add(
            identity,
            {"passages": Uncut(passages, 3, "data.p", holds_answers=True)},
            answers=["", answer],
        )
    found = ledger.report()["passages"]
    assert found["answers"] == {"lost": 1, "of": 3, "share": 1 / 3, "limit_below_1_percent": 5}
    assert found["labels"] is None
    assert found["worst_rows"][0]["tokens_lost"] == 3


def test_the_limit_for_answers_forgives_less_than_one_percent() -> None:
    ledger = Ledger(words)
    for number in range(300):
        place = 20 if number < 2 else 9 if number < 6 else 1
        text = [0] * (place - 1) + [7] + [0] * (30 - place)
        ledger.add(
            str(number), {"p": Uncut([text], 5, "data.p", holds_answers=True)}, answers=["w7"]
        )
    found = ledger.report()["p"]["answers"]
    assert (found["lost"], found["of"], found["limit_below_1_percent"]) == (6, 300, 9)


# Counts and examples
# ----------------------------------------------------------------------------------------------


def test_repeated_and_empty_fields_are_counted() -> None:
    rows = [
        {"id": "a", "text": "x", "list": ["y"], "number": 1},
        {"id": "b", "text": "x", "list": ["", " "], "number": 1},
        {"id": "c", "text": "x", "list": ["y"], "number": 1, "extra": None},
        {"id": "d", "text": "x", "list": ["y"], "number": 1},
        {"id": "e", "text": "\n", "list": [], "number": 2},
    ]
    counts = count_rows(object(), rows, Ledger(words))  # pyright: ignore[reportArgumentType] (no task is asked anything)
    found = counts.report()
    assert found["duplicates"] == {
        "row": 1,
        "text": 3,
        "list": 2,
        "extra": 0,
        "pairs": [["d", "a"]],
    }
    assert found["empty"] == {"text": 1, "list": 2, "extra": 1}
    other = count_rows(object(), [{"id": 1, "text": "x"}, {"id": 2, "text": "z"}], Ledger(words))  # pyright: ignore
    assert other.shared_with(counts) == {"row": 0, "text": 1}


def test_a_number_is_not_empty() -> None:
    assert [is_empty(value) for value in (0, False, "", [], [[]], {}, None)] == [
        False,
        False,
        *[True] * 5,
    ]


class Described:
    """A task of which only its texts are asked."""

    def __init__(self, texts: dict[str, Text]) -> None:
        self._texts = texts

    def describe(self, batch: Batch) -> dict[str, Text]:
        return self._texts

    def decode(self, ids: Any) -> str:
        return words(ids)


def test_segments_show_what_is_in_the_loss() -> None:
    ids, is_real = torch.tensor([[1, 2, 3, 4, 0]]), torch.tensor([[1, 1, 1, 1, 0]])
    in_loss = torch.tensor([[False, False, True, True, False]])
    task: Any = Described(
        {"read": Text(ids, is_real, in_loss), "context": Text(ids[:, :2]), "none": Text(ids[:, :0])}
    )
    found = texts(task, {})
    assert found["read"] == [
        {"text": "w1 w2", "in_loss": False},
        {"text": "w3 w4", "in_loss": True},
    ]
    assert found["context"] == [{"text": "w1 w2", "in_loss": None}]
    assert found["none"] == []


class Named(TokenTask[Any]):
    """A task of which only the names of its batches matter."""

    def __init__(self) -> None: ...
    def operate(self, base: Any) -> Any: ...
    def limits(self) -> dict[str, int]:
        return {}

    def decode(self, ids: Any) -> str:
        return words(ids)


def test_batches_named_as_transformers_names_them_are_described_without_a_word() -> None:
    ids, mask = torch.tensor([[1, 2, 3, 4, 0]]), torch.tensor([[1, 1, 1, 1, 0]])
    labels = torch.tensor([[IGNORED, IGNORED, 3, 4, IGNORED]])
    task: Any = Named()
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "context_input_ids": ids[:, :2],
    }
    found = texts(task, batch)
    assert found["input_ids"] == [
        {"text": "w1 w2", "in_loss": False},
        {"text": "w3 w4", "in_loss": True},
    ]
    assert found["context_input_ids"] == [{"text": "w1 w2", "in_loss": False}]
    assert texts(task, {"tokens": ids[0]})["tokens"][0]["in_loss"] is None
    apart = texts(task, {"input_ids": ids, "attention_mask": mask, "labels": labels[:, 2:]})
    assert apart == {
        "input_ids": [{"text": "w1 w2 w3 w4", "in_loss": False}],
        "labels": [{"text": "w3 w4", "in_loss": True}],
    }


# Whole reports
# --------------------------------------------------------------------------------------------------


def of(
    values: dict[str, Any], folder: Path, cache: Path, splits: tuple[str, ...] = ("train", "valid")
) -> dict[str, Any]:
    cfg = tasks.parse(values)
    return report(cfg, tasks.load(cfg, Places(folder, cache, folder)), splits, cache_dir=cache)


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_has_statistics(name: str, folder: Path, tmp_path: Path) -> None:
    found = json.loads(json.dumps(of(experiment(name, folder), folder, tmp_path)))
    for split in ("train", "valid"):
        one = found["splits"][split]
        assert one["rows"] > 0
        assert one["fields"]["length"]["max"] >= one["fields"]["length"]["p50"] > 0
        for of_field in one["fields"].values():
            assert sum(of_field["histogram"]["counts"]) == of_field["texts"]
        assert 1 <= len(one["examples"]) <= 3
        assert all(
            segments for example in one["examples"] for segments in example["texts"].values()
        )
        assert 0.0 <= one["padding"]["by_length"] < 1.0
    shown = table.text(found, is_coloured=False)
    assert "train: " in shown
    assert "\x1b" not in shown
    picture.draw(tmp_path / "stats.png", found)
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")


def test_the_ledger_of_a_task_agrees_with_what_its_encoding_counted(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("summariser", folder, data={"source_tokens": 20, "target_tokens": 3})
    one = of(values, folder, tmp_path)["splits"]["train"]
    labels = one["ledger"]["targets"]["labels"]
    assert (labels["lost"], labels["of"]) == (one["lost_labels"]["lost"], one["lost_labels"]["of"])
    assert labels["lost"] > 0
    assert one["truncated_rows"] >= max(entry["rows_cut"] for entry in one["ledger"].values())


def test_fids_ledger_counts_answers_that_passages_lose(folder: Path, tmp_path: Path) -> None:
    values = experiment("fid", folder, data={"passage_tokens": 24, "target_tokens": 2})
    one = of(values, folder, tmp_path)["splits"]["train"]
    assert one["ledger"]["passages"]["answers"]["lost"] > 0
    assert one["ledger"]["targets"]["labels"]["lost"] == one["lost_labels"]["lost"] > 0


def test_a_micro_batch_left_to_the_plan_counts_as_the_whole_step(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("cross_attention", folder)
    whole = values | {"train": values["train"] | {"micro_batch": values["train"]["global_batch"]}}
    found = of(values | {"train": values["train"] | {"micro_batch": "auto"}}, folder, tmp_path)
    assert (
        found["splits"]["train"]["padding"]
        == of(whole, folder, tmp_path)["splits"]["train"]["padding"]
    )


def test_collated_padding_counts_the_pads_of_the_batches(folder: Path, tmp_path: Path) -> None:
    padded = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 1, "n_head": 2}
    train = {"global_batch": 8, "micro_batch": 8}
    values = experiment("causal_lm", folder, base={"config": padded}, train=train)
    task = tasks.load(tasks.parse(values), Places(folder, tmp_path, folder))
    assert not task.is_packed
    padding = of(values, folder, tmp_path)["splits"]["train"]["padding"]
    assert padding["collated"] == pytest.approx(padding["by_length"]), (
        "one field: both say the same"
    )
    budget = of({**values, "train": {**values["train"], "bucket_steps": 8}}, folder, tmp_path)  # type: ignore[dict-item]
    assert budget["splits"]["train"]["padding"]["by_length"] < padding["by_length"]
    assert task.unit == "tokens"


@pytest.mark.long
@pytest.mark.skipif(
    not SCITLDR.is_dir() or not T5.is_dir(), reason="../shared/data has no SciTLDR or T5 vocabulary"
)
def test_scitldr_has_its_known_lengths(tmp_path: Path) -> None:
    from exp_configs import EXP_GROUPS, vary

    values = vary(EXP_GROUPS["summarise_scitldr_cpu"][0], tokenizer=str(T5))
    fields = of(values, SCITLDR, tmp_path, ("train",))["splits"]["train"]["fields"]
    assert [fields["source"][key] for key in ("p50", "p95", "max")] == [222, 356, 638]
    assert [fields["targets"][key] for key in ("p50", "p95")] == [28, 49]


def test_the_command_writes_json_and_a_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from trainer.__main__ import app

    groups = tmp_path / "groups.py"
    values = experiment("summariser", folder)
    groups.write_text(f"print('read')\nEXP_GROUPS = {{'facts': [{values!r}]}}\n")
    told = ["stats", "-e", "facts", "--exp_configs", str(groups), "--data_path", str(folder)]
    told += [
        "--cache_dir",
        str(tmp_path / "cache"),
        "--out",
        str(tmp_path / "out"),
        "--splits",
        "train",
    ]
    done = CliRunner().invoke(app, told)
    assert done.exit_code == 0, done.output
    assert "data.source_tokens=64" in done.output
    assert "«in the" in done.output
    # with rows that are still to be encoded, of which it tells, too; it draws nothing
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plain = CliRunner().invoke(app, [*told, "--json", "--cache_dir", str(tmp_path / "other")])
    statistics = json.loads(plain.stdout, parse_constant=pytest.fail)
    assert statistics["splits"]["train"]["rows"] == 64
    assert re.search(
        r"source: [\d,]+ different tokens, \d+% of them once; most frequent: '", done.output
    )
    assert (
        json.loads((tmp_path / "out" / "stats.json").read_text())["splits"]["train"]["rows"] == 64
    )
    assert (tmp_path / "out" / "stats.png").is_file()


# Refusal
# --------------------------------------------------------------------------------------------------


def store_of(tmp_path: Path, lost: list[tuple[int, int]]) -> TokenStore:
    rows = [{"n": number} for number in range(len(lost))]
    return open_store(
        lambda: rows,
        lambda row: Encoded({"ids": [1]}, lost_labels=lost[row["n"]]),
        encoding_id=str(lost),
        split="train",
        cache_dir=tmp_path,
        length=lambda encoded: 1,
    )


def test_a_store_remembers_how_many_labels_were_lost(tmp_path: Path) -> None:
    store = store_of(tmp_path, [(3, 10), (0, 10)])
    assert store.lost_labels() == (3, 20)
    assert store[0].keys() == {"ids"}
    refuse_lost_labels(store, most=0.15)
    with refused("labels_cut", lost=3, count=20, split="train", share="15.0%"):
        refuse_lost_labels(store, most=0.14)


def _a_refused_run_and_one_that_is_allowed(folder: Path, tmp_path: Path) -> int:
    from trainer.launch.run import run
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(tmp_path, data_path=folder, cache_dir=tmp_path / "cache")
    values = experiment("summariser", folder, data={"target_tokens": 3}, train={"steps": 1})
    with refused("labels_cut", most=0.05):
        run(plan(values, options, world=1, rank=0), options, Preemption())
    allowed = experiment(
        "summariser", folder, data={"target_tokens": 3}, train={"steps": 1, "max_lost_labels": 0.9}
    )
    return run(plan(allowed, options, world=1, rank=0), options, Preemption())


def test_a_run_refuses_to_start_when_labels_vanish(folder: Path, tmp_path: Path) -> None:
    assert run_on_ranks(1, _a_refused_run_and_one_that_is_allowed, folder, tmp_path) == [0]
