"""A run whose rows are encoded while it trains has the losses of one that encodes them first, to the
last bit: of every task that reads its rows from files, on several ranks, and after kills.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stream import Run, measure, write_rows
from tests import forked
from tests.contract.runs import losses, train, untimed
from tests.facts import LLAMA, experiment, write_facts
from tests.long import long_but
from tests.ranks import run_on_ranks
from tests.wording import says
from trainer.config.identity import exp_id

VERA = {"source": "files", "train_tasks": ["mine"], "valid_tasks": ["mine"], "boolean": ["mine"]}
VERA |= {"columns": {"statement": "chosen", "label": "label"}, "max_tokens": 48}
OF_TASK: dict[str, dict[str, Any]] = {
    "causal_lm": {"base": LLAMA},
    "cross_attention": {},
    "fid": {},
    "retriever": {},
    "summariser": {},
    "vera": {"data": VERA},
}
EPOCHS = {"epochs": 2, "global_batch": 6, "micro_batch": 1, "bucket_steps": 2, "eval_every": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=40, valid=8)
    for split in ("train", "valid"):
        path = folder / f"{split}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        labelled = [{**row, "label": number % 2} for number, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return folder


def values_of(task: str, folder: Path, *, is_streamed: bool, **of_train: Any) -> dict[str, Any]:
    values: dict[str, Any] = experiment(task, folder)
    values |= OF_TASK[task]
    if "epochs" in of_train:
        values["train"] = {key: one for key, one in values["train"].items() if key != "steps"}
    values["train"] = {**values["train"], **of_train}
    values["data"] = {**values["data"], **({"stream": True} if is_streamed else {})}
    return values


def losses_of(values: dict[str, Any], folder: Path, savedir: Path) -> list[float]:
    return losses(train(values, folder, savedir)[1])


@pytest.mark.parametrize("task", long_but(["causal_lm"], OF_TASK))
def test_losses_are_those_of_a_run_that_encodes_first(
    task: str, folder: Path, tmp_path: Path
) -> None:
    found = [
        run_on_ranks(
            1,
            losses_of,
            values_of(task, folder, is_streamed=is_streamed, **EPOCHS),
            folder,
            tmp_path / str(is_streamed),
        )[0]
        for is_streamed in (False, True)
    ]
    assert found[0]
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 3), (3, 1)])
def test_ranks_share_the_rows_of_a_stream(
    world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    found = [
        run_on_ranks(
            world,
            train,
            values_of("causal_lm", folder, is_streamed=is_streamed, **EPOCHS),
            folder,
            tmp_path / str(is_streamed),
            stage,
        )[0][0]
        for is_streamed in (False, True)
    ]
    lines = [untimed(Path(run) / "metrics.jsonl") for run in found]
    assert [line.get("loss") for line in lines[0]] == [line.get("loss") for line in lines[1]]


def command(folder: Path, savedir: Path, values: dict[str, Any], *flags: str) -> Any:
    groups = savedir.with_suffix(".json")
    groups.write_text(json.dumps({"one": [values]}))
    where = ["--data_path", str(folder), "--cache_dir", str(savedir.with_suffix(".cache"))]
    given = ["-e", "one", "--exp_configs", str(groups), "-sb", str(savedir), *where, *flags]
    return forked.run(*forked.TRAINVAL, *given)


def test_a_source_that_grew_is_refused_with_both_numbers_and_a_bad_row_by_its_place(
    tmp_path: Path,
) -> None:
    folder = write_facts(tmp_path / "facts", train=12, valid=4)
    values = values_of("causal_lm", folder, is_streamed=True, steps=2, save_every=1)
    values["base"] = LLAMA
    first = command(folder, tmp_path / "runs", values)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "index of train.jsonl: 12 rows in 1 file(s)" in first.stdout
    run = tmp_path / "runs" / exp_id(values)
    (run / "status.json").unlink()
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    grown = command(folder, tmp_path / "runs", values)
    assert grown.returncode == 2
    says("stream_grew", grown.stderr, then=12, now=13)
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": 5}) + "\n")
    bad = command(folder, tmp_path / "bad", values)
    assert bad.returncode == 2
    says("text_blank", bad.stderr, at="train.jsonl, line 14", key="text", value=5)
    left = (tmp_path / "bad" / exp_id(values) / "left_out.jsonl").read_text().splitlines()
    assert {"line": 14, "is_refused": True}.items() <= json.loads(left[-1]).items()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_hundred_thousand_rows_begin_soon_and_end_the_same_after_kills(
    kind: str, tmp_path: Path
) -> None:
    found = measure(tmp_path / "rows", 100_000, kind, 20, with_whole=True)
    assert found["undisturbed"]["code"] == 0
    assert found["same_after_kills"]
    assert found["same_as_whole"]
    assert found["undisturbed"]["first_step_s"] < found["whole"]["first_step_s"]


def test_the_benchmark_writes_equal_rows_again(tmp_path: Path) -> None:
    first = write_rows(tmp_path, 50, "jsonl").read_text()
    (tmp_path / "rows-50.jsonl").unlink()
    assert write_rows(tmp_path, 50, "jsonl").read_text() == first
    assert len({json.loads(line)["text"] for line in first.splitlines()}) == 50
    assert Run(tmp_path, {}, tmp_path / "runs").losses() == {}
