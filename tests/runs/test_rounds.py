"""`rounds` as a person starts it: killed at any place it gives the same vectors, every round begins
with the weights of the one before, and what does not belong together is refused.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import forked
from tests.facts import experiment, facts, write_facts
from tests.forked import TRAINER
from tests.wording import says
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.data.readers.jsonl import read_jsonl
from trainer.protocol.task import Places
from trainer.training.engine import Engine

NUM_PASSAGES, NUM_ROUNDS, KILLS = 90, 4, 5


@dataclass(frozen=True)
class Place:
    folder: Path
    judge: str  # the id of a cross-encoder

    def words(self, name: str, *flags: str, rounds: int = NUM_ROUNDS) -> list[str]:
        """The command of a loop with a folder of runs of its own."""
        folder, own = self.folder, self.folder / name
        which = ["-e", "tiny", "--exp_configs", str(folder / "groups.py"), "-sb", str(own / "runs")]
        texts = ["--queries", str(folder / "queries.jsonl"), "--split", "train"]
        texts += ["--passages", str(folder / "corpus.jsonl"), "--valid_split", "valid"]
        how = ["--near", "1", "--count", "3", "--last", "20", "--rounds", str(rounds)]
        out = ["--out", str(own / "loop"), "--cache_dir", str(folder / "cache")]
        return [*TRAINER, "rounds", *which, *texts, *how, *out, *flags]


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def exported(values: dict[str, Any], folder: Path, to: Path) -> None:
    task = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    task.export(dict(task.model().state_dict()), to)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A corpus, its questions, a retriever to begin with and a cross-encoder, both untrained."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    exported(experiment("retriever", folder), folder, folder / "base")
    cross = experiment("retriever, cross", folder)
    exported(cross, folder, folder / "judges" / exp_id(cross) / "best")
    (folder / "judges" / exp_id(cross) / "exp_dict.json").write_text(json.dumps(cross))
    tiny = experiment(
        "retriever", folder, base=str(folder / "base"), train={"eval_every": 6, "save_every": 2}
    )
    (folder / "groups.py").write_text(f"EXP_GROUPS = {{'tiny': [{tiny!r}]}}\n")
    rows = facts(0, NUM_PASSAGES)
    passages = [{"docid": f"p{n}", "text": row["context"]} for n, row in enumerate(rows)]
    lines(folder / "corpus.jsonl", passages)
    questions = [
        {
            "query_id": f"q{n}",
            "query": row["question"],
            "gold": f"p{n}",
            "split": "train" if n < 32 else "valid",
        }
        for n, row in enumerate(rows[:48])
    ]
    lines(folder / "queries.jsonl", questions)
    return Place(folder, str(folder / "judges" / exp_id(cross)))


def small_shards() -> None:
    """For forked.run: shards of 16 vectors."""
    from trainer.rounds import stages

    stages.SHARD_ROWS = 16


def counted(count_file: str, dies_at: int | None) -> None:
    """For forked.run: count the files that are put in their place and the steps that are made, and
    end the process before one of them. Shards are small.
    """
    small_shards()
    place, step, done = os.replace, Engine.step, [0]

    def count() -> None:
        done[0] += 1
        Path(count_file).write_text(str(done[0]))
        if done[0] == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def placing(*args: Any, **how: Any) -> None:
        count()
        place(*args, **how)

    def stepping(*args: Any, **how: Any) -> Any:
        count()
        return step(*args, **how)

    os.replace, Engine.step = placing, stepping


def content(own: Path) -> dict[str, bytes]:
    """Vectors, rankings, mined rows and weights of a loop, by their paths."""
    kinds = ("loop/**/*.npy", "loop/**/*.trec", "loop/**/*.jsonl", "runs/*/final/*.safetensors")
    paths = sorted(path for kind in kinds for path in own.glob(kind))
    return {str(path.relative_to(own)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def whole(place: Place) -> Place:
    """The same with a loop that nothing disturbed, mined by the model and by words, and judged."""
    count = partial(counted, str(place.folder / "events"), None)
    done = forked.run(*place.words("whole", *FLAGS, "--judge", place.judge), first=count)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


FLAGS = ("--by", "both", "--judge_margin", "0")


@pytest.mark.long
def test_a_loop_killed_five_times_gives_the_same_vectors_bit_for_bit(whole: Place) -> None:
    events = int((whole.folder / "events").read_text())
    draw = random.Random(47)
    words = whole.words("killed", *FLAGS, "--judge", whole.judge)
    for _ in range(KILLS):
        at = draw.randint(1, events // (KILLS + 1))
        count = partial(counted, str(whole.folder / "killed-events"), at)
        done = forked.run(*words, first=count)
        assert done.returncode == -signal.SIGKILL, f"at {at}: {done.stdout}{done.stderr}"
    done = forked.run(*words, first=small_shards)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, got = (content(whole.folder / name) for name in ("whole", "killed"))
    assert got.keys() == wanted.keys()
    assert [path for path in wanted if got[path] != wanted[path]] == []
    # shards of 16: 6 of passages, 2 of training and 1 of validation questions, of 5 models; of
    # the last one no training questions
    assert sum(path.endswith(".npy") and "vectors" in path for path in got) == 5 * 9 - 2


@pytest.mark.long
def test_the_table_tells_what_the_rounds_are_and_each_is_an_ordinary_run(whole: Place) -> None:
    first = (whole.folder / "whole/loop/rounds.json").read_text()
    done = forked.run(*whole.words("whole", *FLAGS, "--judge", whole.judge), first=small_shards)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (whole.folder / "whole/loop/rounds.json").read_text() == first, "seconds, too"
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    titles, _, start, *rounds = rows
    assert titles[:4] == ["round", "recall@10", "recall@100", "ndcg@10"]
    assert titles[4:] == ["judged false", "seconds", "experiment"]
    assert [row[0] for row in (start, *rounds)] == [str(n) for n in range(NUM_ROUNDS + 1)]
    assert (start[4], start[6]) == ("-", "-")
    assert all(0 < float(row[4]) < 1 for row in rounds)
    own = whole.folder / "whole"
    dictionaries = []
    for number, row in enumerate(rounds, start=1):
        values = json.loads((own / "runs" / row[6] / "exp_dict.json").read_text())
        assert exp_id(values) == row[6]
        dictionaries.append(values)
        mined = read_jsonl(own / "loop" / f"round-{number}" / "mined.jsonl")
        trained = {one["query_id"]: one for one in read_jsonl(own / values_file(values))}
        judged = sum(len(one["negative_passages"]) for one in mined)
        kept = sum(len(one["negative_passages"]) for one in trained.values())
        assert float(row[4]) == pytest.approx((judged - kept) / judged, abs=1e-4)
        for one in trained.values():
            count = len(one["positive_passages"])
            assert all(score <= max(one["scores"][:count]) for score in one["scores"][count:])
    assert [one["base"] for one in dictionaries[1:]] == [
        {"experiment": one} for one in dictionaries[:-1]
    ]


def values_file(values: dict[str, Any]) -> str:
    return f"loop/{values['data']['files']['train']}"


@pytest.mark.long
def test_vectors_are_those_of_the_round_and_its_measures_those_of_its_ranking(
    whole: Place,
) -> None:
    own = whole.folder / "whole"
    for number in range(NUM_ROUNDS + 1):
        folder = own / "loop" / f"round-{number}"
        passages, valid = (
            np.concatenate([np.load(path) for path in sorted((folder / name).glob("*.npy"))])
            for name in ("passages", "valid")
        )
        scores = valid.astype(np.float32) @ passages.astype(np.float32).T
        # the passage of question n is passage n, and the first validation question is number 32
        ranks = [int((row > row[32 + n]).sum()) for n, row in enumerate(scores)]
        measures = json.loads((folder / "measures.json").read_text())
        assert measures["recall@10"] == pytest.approx(np.mean([rank < 10 for rank in ranks]))
    before, after = (
        np.load(own / "loop" / f"round-{n}" / "passages" / "vectors-00000.npy") for n in (1, 2)
    )
    assert np.abs(before - after).max() > 1e-3


@pytest.mark.long
def test_rows_mined_with_another_model_are_refused_by_its_digest(
    whole: Place, tmp_path: Path
) -> None:
    shutil.copytree(whole.folder / "whole", tmp_path / "other")
    place = Place(whole.folder, whole.judge)
    words = [
        word.replace(str(whole.folder / "other"), str(tmp_path / "other"))
        for word in place.words("other", *FLAGS, "--judge", whole.judge)
    ]
    ids = [row["id"] for row in json.loads((tmp_path / "other/loop/rounds.json").read_text())]
    (weights,) = (tmp_path / "other/runs" / ids[1] / "final").glob("*.safetensors")
    tensors = load_file(weights)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, weights, metadata={"format": "pt"})
    done = forked.run(*words, first=small_shards)
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    says("vectors_of_others", said, key="model")
    for vectors in ("passages", "valid", "train"):
        shutil.rmtree(tmp_path / "other/loop/round-1" / vectors)
    done = forked.run(*words, first=small_shards)
    assert done.returncode == 2, done.stdout + done.stderr
    says("rounds_of_others", " ".join(done.stderr.split()), round=1)


@pytest.mark.long
def test_a_loop_of_other_flags_is_refused_and_a_longer_one_goes_on(
    whole: Place,
) -> None:
    shutil.copytree(whole.folder / "whole", whole.folder / "longer")
    for flags, key in ((("--judge_margin", "1"), "verdict"), (("--seed", "1"), "seed")):
        words = whole.words("longer", *FLAGS, "--judge", whole.judge, *flags)
        done = forked.run(*words, first=small_shards)
        assert done.returncode == 2, done.stdout + done.stderr
        says("vectors_of_others", " ".join(done.stderr.split()), key=key)
    name = json.loads((whole.folder / "whole/loop/rounds.json").read_text())[1]["id"]
    other = str(whole.folder / "whole" / "runs" / name)  # a retriever
    done = forked.run(*whole.words("none", *FLAGS, "--judge", other))
    assert done.returncode == 2, done.stdout + done.stderr
    says("scores_no_pairs", " ".join(done.stderr.split()), task="retriever")
    words = whole.words("longer", *FLAGS, "--judge", whole.judge, rounds=NUM_ROUNDS + 1)
    done = forked.run(*words, first=small_shards)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (whole.folder / "longer/loop" / f"round-{NUM_ROUNDS + 1}" / "measures.json").is_file()
