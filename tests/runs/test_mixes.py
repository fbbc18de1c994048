"""A run over several sources: it reads the same rows on any number of ranks and after any kill, tells
losses by source, and refuses a source that is not there before it writes anything.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests import forked
from tests.contract.runs import lines_of, train, untimed
from tests.facts import LLAMA, experiment, facts, write_facts
from tests.long import long_but
from tests.ranks import run_on_ranks
from tests.wording import Fault, fault, says
from trainer import tasks

STEPS, SAVE_EVERY = 12, 3
TRAIN = {"steps": STEPS, "global_batch": 6, "micro_batch": 1, "save_every": SAVE_EVERY}
TRAIN |= {"eval_every": 6, "log_every": 4}  # a kill comes between a save and a line
MIX: dict[str, Any] = {
    "told.jsonl": {"weight": 0.5, "valid_share": 0.3},
    "asked": {
        "weight": 0.3,
        "files": {"train": "asked.csv"},
        "source": "files",
        "loss_on": "answer",
    },
    "chats": {"weight": 0.2, "source": "chat", "valid_share": 0.4, "chat_template": "plain"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=20, valid=4)
    rows = facts(100, 140)
    told = "".join(json.dumps({"text": row["text"]}) + "\n" for row in rows[:19])
    (folder / "told.jsonl").write_text(told)
    asked = "".join(f'"{row["question"]}","{row["answer"]}"\n' for row in rows[19:26])
    (folder / "asked.csv").write_text("prompt,completion\n" + asked)
    (folder / "chats").mkdir()
    turns = [{"prompt": row["question"], "completion": row["answer"]} for row in rows[26:35]]
    (folder / "chats" / "part.jsonl").write_text("".join(json.dumps(one) + "\n" for one in turns))
    (folder / "empty.jsonl").write_text("")
    return folder


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    values = experiment("causal_lm", folder, base=LLAMA, train=TRAIN)
    return vary({**values, "data": {"source": "files", "max_tokens": 64, "mix": MIX}}, **changes)


def counted_run(
    values: dict[str, Any], folder: Path, savedir: Path, rows_read: Path, kill_at: int | None = None
) -> str:
    """The run's folder. The rows of every step are written to a file of this rank; at a step, the
    process ends by SIGKILL.
    """
    from trainer.runtime import distributed
    from trainer.training import loop

    windows = loop.windows

    def counted(*args: Any, **how: Any) -> Iterator[Any]:
        with (rows_read / f"{distributed.rank()}.jsonl").open("a") as file:
            for window in windows(*args, **how):
                rows = [int(row) for rows in window.rows for row in rows]
                file.write(json.dumps([window.step, rows]) + "\n")
                file.flush()
                if window.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield window

    loop.windows = counted  # type: ignore[assignment]
    run, _ = train(values, folder, savedir)
    return str(run)


def steps_of(rows_read: Path) -> dict[int, list[int]]:
    """The rows of every step on all ranks; a step that was repeated must have read the same."""
    of_ranks: list[dict[int, list[int]]] = []
    for path in sorted(rows_read.glob("*.jsonl")):
        of_rank: dict[int, list[int]] = {}
        for line in path.read_text().splitlines():
            step, rows = json.loads(line)
            assert of_rank.setdefault(step, rows) == rows
        of_ranks.append(of_rank)
    return {step: sorted(chain(*(one[step] for one in of_ranks))) for step in of_ranks[0]}


def read_rows(
    world: int, values: dict[str, Any], folder: Path, savedir: Path, kill_at: int | None = None
) -> tuple[dict[int, list[int]], str | None]:
    """The rows of every step of one start of a run, and its folder if it came to its end."""
    rows_read = savedir.with_name(f"{savedir.name}-rows-{len(list(savedir.parent.iterdir()))}")
    rows_read.mkdir(parents=True)
    try:
        run = run_on_ranks(world, counted_run, values, folder, savedir, rows_read, kill_at)[0]
    except AssertionError:
        if kill_at is None:
            raise
        run = None
    return steps_of(rows_read), run


def test_a_killed_mix_goes_on_with_the_same_rows_and_the_same_bits_on_other_ranks_too(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder)
    whole, run = read_rows(1, values, folder, tmp_path / "whole")
    assert run is not None
    assert len(whole) == STEPS
    begun, _ = read_rows(1, values, folder, tmp_path / "killed", kill_at=7)
    went_on, again = read_rows(1, values, folder, tmp_path / "killed")
    assert {**begun, **went_on} == whole
    assert min(went_on) in (3, 6)  # of the newest state that was whole
    assert untimed(Path(str(again)) / "metrics.jsonl") == untimed(Path(run) / "metrics.jsonl")
    on_two, _ = read_rows(2, values, folder, tmp_path / "two")
    assert on_two == whole

    lines = lines_of(Path(run))
    last = next(line for line in reversed(lines) if "loss" in line)
    counts = Counter(source_of(row, run) for rows in whole.values() for row in rows)
    assert [counts[place] for place in range(3)] == pytest.approx([21.6, 14.4, 36], abs=2)
    sizes = sizes_of(run)
    for place, label in enumerate(("asked", "chats", "told")):
        assert last[f"epoch_{label}"] == pytest.approx(counts[place] / sizes[place])
    labels = [{name: line[name] for name in line if name.startswith("loss_")} for line in lines]
    assert {name for of_line in labels for name in of_line} == {
        "loss_told",
        "loss_asked",
        "loss_chats",
    }
    scored = [line for line in lines if "valid/loss" in line]
    assert len(scored) == 2
    assert all({"valid/loss_told", "valid/loss_chats"} <= line.keys() for line in scored)
    assert all("valid/loss_asked" not in line for line in scored)


def sizes_of(run: str) -> list[int]:
    """The training rows of each source, as the run wrote them down."""
    sources = json.loads((Path(run) / "data.json").read_text())["splits"]["train"]["sources"]
    return [source["rows"] for source in sources.values()]


def source_of(row: int, run: str) -> int:
    for place, size in enumerate(sizes_of(run)):
        if row < size:
            return place
        row -= size
    raise AssertionError(row)


@pytest.mark.long
def test_a_mix_is_one_list_of_rows_whatever_kills_it_and_on_how_many_ranks_it_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    steps = 33
    values = values_of(folder, train={"steps": steps, "save_every": 2})
    values["data"] |= {"mixing": {"changes": [{"after": 17, "weights": {
        "told.jsonl": 0.2, "asked": 0.3, "chats": 0.5}}]}}  # fmt: skip
    whole, _ = read_rows(1, values, folder, tmp_path / "whole")
    killed: dict[int, list[int]] = {}
    for number, kill_at in enumerate((1, 4, 8, 10, 13, 17, 20, 24, 27, 31)):
        world = (1, 2, 3)[number % 3]
        read, _ = read_rows(world, values, folder, tmp_path / "killed", kill_at=kill_at)
        killed |= {step: rows for step, rows in read.items() if step < kill_at}
        assert all(rows == whole[step] for step, rows in read.items() if step < kill_at)
    read, run = read_rows(3, values, folder, tmp_path / "killed")
    assert run is not None
    assert killed | read == whole
    assert len(whole) == steps


MIXES: dict[str, dict[str, Any]] = {
    "causal_lm": {
        "mix": {"train.jsonl": 0.5, "valid.jsonl": 0.5},
        "files": {"valid": "valid.jsonl"},
    },
    "preference": {
        "mix": {"train.jsonl": 0.5, "valid.jsonl": 0.5},
        "files": {"valid": "valid.jsonl"},
    },
    "cross_attention": {"mix": {"train.jsonl": 0.5, "valid.jsonl": 0.5}},
    "fid": {"mix": {"train.jsonl": 0.5, "valid.jsonl": 0.5}},
    "summariser": {"mix": {"train.jsonl": None, "valid.jsonl": {"prefix": "in short: "}}},
    "retriever": {
        "mix": {"queries/train.jsonl": 0.5, "queries/dev.jsonl": 0.5},
        "files": {"valid": "queries/dev.jsonl"},
    },
    "vera": {"mix": {"choices": 0.7, "judged": 0.3}},
}


@pytest.mark.parametrize("name", long_but(("fid", "preference"), tasks.names()))
def test_every_task_trains_on_a_mix(name: str, folder: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = dict(experiment(name, folder, train={"steps": 3}))
    values["data"] = {**values["data"], **MIXES[name]}
    run, _ = run_on_ranks(1, train, values, folder, tmp_path)[0]
    lines = lines_of(run)
    last = next(line for line in reversed(lines) if "loss" in line)
    assert len([key for key in last if key.startswith("epoch_")]) == 2
    has_labels = name not in ("preference", "retriever", "vera")
    of_sources = [line for line in lines if any(key.startswith("loss_") for key in line)]
    assert bool(of_sources) == has_labels


def command(folder: Path, savedir: Path, values: dict[str, Any], *flags: str) -> Any:
    groups = savedir.with_suffix(".json")
    groups.write_text(json.dumps({"one": [values]}))
    where = ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    given = ["-e", "one", "--exp_configs", str(groups), "-sb", str(savedir), *where, *flags]
    return forked.run(*forked.TRAINVAL, *given)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("absent.jsonl", fault("mix_absent")), ("empty.jsonl", fault("mix_source"))],
)
def test_a_source_that_is_not_there_is_refused_before_anything_is_written(
    name: str, wrong: Fault, folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder)
    values["data"]["mix"] = {"told.jsonl": 0.5, name: 0.5}
    done = command(folder, tmp_path / "runs", values)
    assert done.returncode == 2
    says(wrong, done.stderr, name=name)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_a_run_ends_where_its_source_does_and_a_source_that_has_grown_is_named(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder, train={"steps": 50, "save_every": 2})
    values["data"] = {
        "source": "files",
        "max_tokens": 64,
        "mix": {"told.jsonl": 0.5, "grows.jsonl": 0.5},
        "mixing": {"ends": "stop"},
    }
    rows = "".join(json.dumps({"text": row["text"]}) + "\n" for row in facts(200, 208))
    (folder / "grows.jsonl").write_text(rows)
    done = command(folder, tmp_path / "runs", values)
    assert done.returncode == 0, done.stderr
    (status,) = (tmp_path / "runs").glob("*/status.json")
    assert json.loads(status.read_text())["total"] == 2  # of eight rows three a step

    (status.parent / "final").rename(status.parent / "moved")
    (folder / "grows.jsonl").write_text(rows + json.dumps({"text": "one more"}) + "\n")
    grown = command(folder, tmp_path / "runs", values)
    assert grown.returncode == 2
    says("mix_grown", " ".join(grown.stderr.split()), name="grows.jsonl", had=8, has=9)
