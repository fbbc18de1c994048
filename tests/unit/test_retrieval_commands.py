"""encode, search, bm25, judge, mine and contexts as a person starts them, on a retriever that was
never trained.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests import forked
from tests.facts import experiment, facts, write_facts
from tests.forked import TRAINER
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.__main__ import app
from trainer.config.identity import exp_id
from trainer.config.own_rows import OwnRows, Splits
from trainer.data import left_out
from trainer.data.readers import retrieved
from trainer.data.readers.questions import Query
from trainer.data.readers.rankings import Hit, read_run
from trainer.protocol.abilities import Embeds
from trainer.protocol.task import Places
from trainer.retrieval import embeddings
from trainer.retrieval.judging import UNKNOWN, run_measures

NUM_PASSAGES, NUM_QUERIES = 40, 12


@dataclass(frozen=True)
class Place:
    folder: Path
    values: dict[str, Any]

    @property
    def run_folder(self) -> Path:
        return self.folder / "results" / exp_id(self.values)

    def path(self, name: str) -> str:
        return str(self.folder / name)


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A corpus, its questions, and a run folder that holds a model."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    found = Place(folder, experiment("retriever", folder))
    rows = facts(0, NUM_PASSAGES)
    lines(
        folder / "corpus.jsonl",
        [{"docid": f"p{n}", "text": row["context"]} for n, row in enumerate(rows)],
    )
    questions = [
        {
            "query_id": f"q{n}",
            "query": row["question"],
            "answers": [row["answer"]],
            "gold": f"p{n}",
            "split": "test",
        }
        for n, row in enumerate(rows[:NUM_QUERIES])
    ]
    lines(
        folder / "queries.jsonl",
        [*questions, {"query_id": "t", "query": "not asked", "split": "train"}],
    )
    task = tasks.load(
        tasks.parse(found.values), Places(folder, folder / "cache", folder / "results")
    )
    task.export(dict(task.model().state_dict()), found.run_folder / "best")
    (found.run_folder / "exp_dict.json").write_text(json.dumps(found.values))
    return found


def encode(
    place: Place, side: str, *flags: str, world: int = 1, out: Path | None = None, **how: Any
) -> list[subprocess.CompletedProcess[str]]:
    """What `encode` of one side did on each of so many ranks."""
    argv = encoding(place, side, *flags, out=out)
    return [forked.run(*argv, **how)] if world == 1 else forked.run_ranks(world, *argv, **how)


def encoding(place: Place, side: str, *flags: str, out: Path | None = None) -> list[str]:
    """The command of encode() in words."""
    name = "corpus.jsonl" if side == "passage" else "queries.jsonl"
    given = [
        "--exp_id",
        exp_id(place.values),
        "-sb",
        place.path("results"),
        "--cache_dir",
        place.path("cache"),
    ]
    chosen = ["--split", "test"] if side == "query" else ["--shard_rows", "16", "--batch", "8"]
    where = str(out or place.path(side))
    argv = [*TRAINER, "encode", *given, "--in", place.path(name), "--side", side, "--out", where]
    return [*argv, *chosen, *flags]


def command(*argv: str) -> list[str]:
    """What a command without a model prints, run in this process."""
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def output_of_refused(*argv: str) -> str:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def found(place: Place) -> Place:
    """The same with both folders of vectors, made by one and by two processes, and the run of a
    search.
    """
    for side, world in (("query", 1), ("passage", 2)):
        for done in encode(place, side, "--dtype", "float32", world=world):
            assert done.returncode == 0, done.stdout + done.stderr
    folders = ["--queries", place.path("query"), "--passages", place.path("passage")]
    words = ["--out", place.path("run.trec"), "--depth", "10", "--verify"]
    done = forked.run(*TRAINER, "search", *folders, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("run.trec: 12 questions, 120 hits")
    return place


def test_encoded_and_searched_is_the_order_of_the_models_own_dot_products(found: Place) -> None:
    task = tasks.load(tasks.parse(found.values), Places(None, found.folder / "cache", found.folder))
    assert isinstance(task, Embeds)
    model = task.load_export(found.run_folder / "best")
    vectors = {
        side: np.concatenate(
            [
                task.embed(model, [ids], side=side).detach().numpy()
                for ids in task.ids(texts, side=side)
            ]
        )
        for side, texts in {
            "query": [{"text": row["question"]} for row in facts(0, NUM_QUERIES)],
            "passage": [{"text": row["context"], "title": ""} for row in facts(0, NUM_PASSAGES)],
        }.items()
    }
    scores = vectors["query"] @ vectors["passage"].T
    run = read_run(found.folder / "run.trec")
    assert list(run) == [f"q{n}" for n in range(NUM_QUERIES)]
    for n, hits in enumerate(run.values()):
        np.testing.assert_allclose(
            [hit.score for hit in hits], -np.sort(-scores[n])[:10], atol=1e-5
        )
        np.testing.assert_allclose(
            [scores[n][int(hit.passage[1:])] for hit in hits],
            [hit.score for hit in hits],
            atol=1e-5,
        )


def test_the_folder_says_which_model_made_it(found: Place) -> None:
    made = embeddings.read(found.folder / "passage").plan
    assert (
        made.model
        == embeddings.fingerprint(found.run_folder / "best")
        == embeddings.read(found.folder / "query").plan.model
    )
    assert (made.count, made.shard_rows, made.dtype) == (NUM_PASSAGES, 16, "float32")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--side", "both"], fault("flag_choice", flag="--side both", choices="query or passage")),
        (
            ["--side", "query", "--dtype", "int4"],
            fault(
                "flag_choice", flag="--dtype int4", choices="float16 or float32 or int8 or binary"
            ),
        ),
        (
            ["--side", "query", "--precision", "fp16"],
            fault("flag_choice", flag="--precision fp16", choices="fp32 or bf16"),
        ),
        (["--side", "query", "--dtype", "int8"], fault("small_questions", dtype="int8")),
    ],
)
def test_encoding_is_refused_in_words(flags: list[str], said: Fault) -> None:
    asked = ["-sb", "results", "--in", "corpus.jsonl", "--out", "vectors"]
    says(said, output_of_refused("encode", *asked, *flags))


def _doubting() -> None:
    """A fault for forked.run_ranks: whoever reads the corpus doubts a passage."""
    digest_of = embeddings.digest_of

    def doubting(rows: Iterable[dict[str, Any]]) -> tuple[str, int]:
        left_out.note("corpus.jsonl, line 1", "odd passages")
        return digest_of(rows)

    embeddings.digest_of = doubting


def test_no_rank_waits_for_one_that_strict_refuses(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "vectors"
    argv = encoding(place, "passage", "--strict", out=out)
    ranks = [rank.finish() for rank in forked.start_ranks(2, *argv, first=_doubting)]
    assert [done.returncode for done in ranks] == [2, 2]
    said = [done.stdout + done.stderr for done in ranks]
    assert any("odd passages" in text for text in said)
    assert not out.exists()


def _killed_before_the_plan_has_its_name() -> None:
    """A fault for forked.run: the command dies when its plan is whole under its hidden name."""
    replace: Callable[..., None] = os.replace

    def dying(source: Path, target: Path) -> None:
        if target.name == "plan.json":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = dying


def test_encode_killed_while_it_writes_its_plan_goes_on_and_leaves_no_temporary_files(
    found: Place, tmp_path: Path
) -> None:
    out = tmp_path / "vectors"
    flags = ("query", "--dtype", "float32")
    (killed,) = encode(found, *flags, out=out, first=_killed_before_the_plan_has_its_name)
    assert killed.returncode == -signal.SIGKILL
    (left,) = out.iterdir()
    assert left.match(".plan.json.*.tmp")
    left.with_name(".plan.json.0123abcd.tmp").touch()  # of a kill before its first byte
    (done,) = encode(found, *flags, out=out)
    assert done.returncode == 0, done.stderr
    undisturbed = found.folder / "query"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in undisturbed.iterdir()
    )
    assert all(
        (out / path.name).read_bytes() == path.read_bytes() for path in undisturbed.iterdir()
    )


def test_vectors_of_the_wrong_side_are_not_searched(found: Place) -> None:
    folders = ["--queries", found.path("passage"), "--passages", found.path("query")]
    done = forked.run(*TRAINER, "search", *folders, "--out", found.path("no.trec"))
    assert done.returncode == 2
    says("vectors_of_other_side", done.stderr, side="passage", wanted="query")
    assert not (found.folder / "no.trec").exists()


def test_more_numbers_than_vectors_have_are_refused_before_anything_is_written(
    found: Place, tmp_path: Path
) -> None:
    (done,) = encode(found, "query", "--dims", "1000", out=tmp_path / "wide")
    assert done.returncode == 2
    says("dims_of_vectors", done.stderr, dims=1000, has=16)
    assert not (tmp_path / "wide").exists()


@pytest.mark.long
def test_the_first_numbers_of_vectors_are_searched_and_judged(found: Place, tmp_path: Path) -> None:
    of = {side: str(tmp_path / side) for side in ("query", "passage")}
    for side, dtype in (("query", "float32"), ("passage", "int8")):
        (done,) = encode(found, side, "--dims", "8", "--dtype", dtype, out=tmp_path / side)
        assert done.returncode == 0, done.stdout + done.stderr
        assert embeddings.read(tmp_path / side).dim == 8
    run = ["--out", str(tmp_path / "run.trec"), "--depth", "10"]
    done = forked.run(
        *TRAINER, "search", "--queries", of["query"], "--passages", of["passage"], *run
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = ["--queries", found.path("queries.jsonl"), "--split", "test"]
    recall = values(command("judge", "--run", str(tmp_path / "run.trec"), *asked, "--at", "10"))
    assert 0 < recall["recall@10"] <= 1
    whole = ["--queries", found.path("query"), "--passages", of["passage"]]
    done = forked.run(*TRAINER, "search", *whole, "--out", str(tmp_path / "no.trec"))
    assert done.returncode == 2
    says("vectors_of_two_models", done.stderr)


@pytest.mark.long
def test_fewer_blocks_give_vectors_of_a_model_of_their_own(found: Place, tmp_path: Path) -> None:
    for side in ("query", "passage"):
        (done,) = encode(found, side, "--layers", "1", "--dims", "8", out=tmp_path / side)
        assert done.returncode == 0, done.stdout + done.stderr
    task: Any = tasks.load(
        tasks.parse(found.values), Places(found.folder, found.folder / "cache", found.folder)
    )
    model = task.load_export(found.run_folder / "best")
    task.keep_layers(model, 1)
    task.shorten(model, 8)
    first = json.loads((found.folder / "queries.jsonl").read_text().splitlines()[0])
    ids = task.ids([{"text": first["query"]}], side="query")
    wanted = task.embed(model, ids, side="query").detach().numpy()
    vectors = embeddings.read(tmp_path / "query").vectors[0]
    np.testing.assert_allclose(vectors[:1].astype(np.float32), wanted, atol=2e-3)
    both = ["--queries", found.path("query"), "--passages", str(tmp_path / "passage")]
    done = forked.run(*TRAINER, "search", *both, "--out", str(tmp_path / "no.trec"))
    assert done.returncode == 2
    says("vectors_of_two_models", done.stderr)
    (done,) = encode(found, "query", "--layers", "3", out=tmp_path / "more")
    assert done.returncode == 2
    says("layers_beyond_base", done.stderr, got=3, blocks=2, most=2)


def test_int8_passages_are_encoded_with_their_recall_and_searched(found: Place) -> None:
    out = found.folder / "int8"
    (done,) = encode(found, "passage", "--dtype", "int8", "--shard_rows", "40", out=out)
    assert done.returncode == 0, done.stderr
    recall = embeddings.read(out).recall["10"]
    assert f"recall@10 {recall:.3f}" in done.stdout
    words = ["--out", found.path("int8.trec"), "--depth", "10"]
    folders = ["--queries", found.path("query"), "--passages", str(out)]
    done = forked.run(*TRAINER, "search", *folders, *words)
    assert done.returncode == 0, done.stderr
    exact, of_int8 = (read_run(found.folder / name) for name in ("run.trec", "int8.trec"))
    for question, hits in of_int8.items():
        np.testing.assert_allclose(
            [hit.score for hit in hits], [hit.score for hit in exact[question]], rtol=0.02
        )


def values(printed: list[str]) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split() for line in printed)}


def test_a_run_is_judged_by_positives_by_judgements_and_by_answers(found: Place) -> None:
    run, queries = (
        ["--run", found.path("run.trec")],
        ["--queries", found.path("queries.jsonl"), "--split", "test"],
    )
    judgements = "query-id\tcorpus-id\tscore\n" + "".join(
        f"q{n}\tp{n}\t1\n" for n in range(NUM_QUERIES)
    )
    (found.folder / "qrels.tsv").write_text(judgements)
    by_positives = values(command("judge", *run, *queries, "--at", "3", "--at", "10"))
    by_judgements = values(
        command("judge", *run, "--qrels", found.path("qrels.tsv"), "--at", "3", "--at", "10")
    )
    assert by_positives == by_judgements
    assert set(by_positives) > {"recall@3", "mrr@10", "ndcg@10", "map"}
    corpus = ["--passages", found.path("corpus.jsonl")]
    by_answers = values(command("judge", *run, *queries, *corpus, "--at", "3", "--at", "10"))
    assert by_positives.items() < by_answers.items()
    assert (
        by_answers["answer_recall@10"] >= by_answers["recall@10"]
    )  # a gold passage holds its answer
    assert by_answers["answer_recall@10"] > 0


def test_a_run_is_judged_on_some_questions_only(found: Place) -> None:
    (found.folder / "only.txt").write_text("\ufeffq1\nq4\n")
    run = read_run(found.folder / "run.trec")
    flags = [
        "--run",
        found.path("run.trec"),
        "--queries",
        found.path("queries.jsonl"),
        "--at",
        "10",
    ]
    printed = values(command("judge", *flags, "--only", found.path("only.txt")))
    expected = [f"p{n}" in {hit.passage for hit in run[f"q{n}"]} for n in (1, 4)]
    assert printed["recall@10"] == sum(expected) / 2


def test_ids_of_only_that_nothing_has_are_noted(tmp_path: Path) -> None:
    ranked = {"q1": [Hit("p1", 1.0)]}
    (tmp_path / "qrels").write_text("q1 0 p1 1\nq2 0 p9 1\n")
    with left_out.reading() as notes:
        found = run_measures(
            ranked, [], tmp_path / "qrels", passages=None, only={"q1", "Q2"}, at=[1]
        )
    assert found["recall@1"] == 1.0
    assert notes.counts == {UNKNOWN: 1}
    assert notes.first[0].place == "question 'Q2'"


def test_only_takes_questions_away_and_adds_none(tmp_path: Path) -> None:
    ranked = {"q1": [Hit("p1", 1.0)], "q2": [Hit("p1", 1.0)]}
    (tmp_path / "qrels").write_text("q1 0 p1 1\nq2 0 p2 1\n")
    queries = [Query("q1", "who", [], [])]
    how: dict[str, Any] = {"passages": None, "at": [1]}
    assert run_measures(ranked, queries, tmp_path / "qrels", only=None, **how)["recall@1"] == 1
    with refused("qrels_of_others", path=str(tmp_path / "qrels"), question="q1"):
        run_measures(ranked, queries, tmp_path / "qrels", only={"q2"}, **how)
    with refused("only_of_others", count=1, id="Q1", question="q1"):
        run_measures(ranked, queries, tmp_path / "qrels", only={"Q1"}, **how)
    (tmp_path / "qrels").write_text("q1 0 p1 0\n")
    with refused("qrels_of_others", question="q1"):
        run_measures(ranked, [], tmp_path / "qrels", only=None, **how)


@pytest.mark.parametrize("command", ["encode", "bm25"])
def test_an_id_of_two_passages_is_refused_before_anything_is_made(
    command: str, place: Place, tmp_path: Path
) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    lines(corpus, [{"docid": "a", "text": "one word"}, {"docid": "a", "text": "two words"}])
    flags = ["--passages", str(corpus), "--queries", place.path("queries.jsonl")]
    argv = [*TRAINER, "bm25", *flags, "--out", str(out)]
    if command == "encode":
        argv = encoding(place, "passage", out=out)
        argv[argv.index("--in") + 1] = str(corpus)
    done = forked.run(*argv)
    assert done.returncode == 2, done.stderr
    says("id_of_two_texts", done.stderr, what="passages", id="a", text="two words")
    assert not out.exists()


def test_what_cannot_be_judged_is_refused(found: Place) -> None:
    assert "give --run or --scored, one of them" in output_of_refused("judge")
    absent = found.path("absent.txt")
    flags = ["--run", found.path("run.trec"), "--only", absent]
    says("file_unreadable", output_of_refused("judge", *flags), at=absent)
    assert "nothing says what is relevant" in output_of_refused(
        "judge", "--run", found.path("run.trec")
    )
    said = output_of_refused("judge", "--run", found.path("run.trec"), "--split", "test")
    says("split_of_no_queries", said, split="test")
    both = ["--scored", found.path("scored.json"), "--qrels", "q", "--remove_query"]
    says("scored_two_kinds", output_of_refused("judge", *both), flags="--qrels, --remove_query")


@pytest.mark.parametrize("command", ["search", "bm25", "fuse", "rerank", "mine", "contexts"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
    command: str, tmp_path: Path
) -> None:
    two = ["--queries", "absent", "--passages", "absent"]
    flags = {
        "search": two,
        "bm25": two,
        "fuse": ["--run", "absent", "--run", "absent"],
        "rerank": ["-sb", "absent", "--rows", "absent"],
        "mine": ["--run", "absent", *two],
        "contexts": ["--run", "absent", *two],
    }[command]
    for out in (Path("."), tmp_path):
        says("out_is_folder", output_of_refused(command, *flags, "--out", str(out)), out=str(out))
    absent = str(tmp_path / "no" / "out")
    says("out_folder_absent", output_of_refused(command, *flags, "--out", absent))
    packed = str(tmp_path / "run.trec.gz")
    says("out_packed", output_of_refused(command, *flags, "--out", packed), out=packed)


def test_a_reader_and_a_ranking_are_compared(tmp_path: Path) -> None:
    ctxs = [{"id": str(n), "text": "t", "score": score} for n, score in enumerate([0.2, 0.1, 0.7])]
    (tmp_path / "scored.json").write_text(
        json.dumps([{"question": "q", "answers": ["a"], "ctxs": ctxs}])
    )
    printed = values(command("judge", "--scored", str(tmp_path / "scored.json"), "--at", "1"))
    assert printed == {"inversions": 2, "overlap@1": 0, "reach@1": 3}


def test_mined_negatives_train_a_retriever(found: Place) -> None:
    given = [
        "--run",
        found.path("run.trec"),
        "--queries",
        found.path("queries.jsonl"),
        "--split",
        "test",
    ]
    corpus = ["--passages", found.path("corpus.jsonl")]
    mined = found.folder / "mined.jsonl"
    (said,) = command("mine", *given, *corpus, "--out", str(mined), "--count", "3")[-1:]
    rows = [json.loads(line) for line in mined.read_text().splitlines()]
    assert said == f"{mined}: {len(rows)} of 12 questions"
    assert len(rows) > 6
    assert all(1 <= len(row["negative_passages"]) <= 3 for row in rows)
    assert not any(
        row["answers"][0] in passage["text"] for row in rows for passage in row["negative_passages"]
    )
    changed = experiment("retriever", found.folder, data={"files": {"train": "mined.jsonl"}})
    task = tasks.load(
        tasks.parse(changed), Places(found.folder, found.folder / "cache", found.folder)
    )
    assert [row["id"] for row in task.rows("train")] == [row["query_id"] for row in rows]


def test_a_reader_reads_what_was_found(found: Place) -> None:
    given = [
        "--run",
        found.path("run.trec"),
        "--queries",
        found.path("queries.jsonl"),
        "--split",
        "test",
    ]
    out = found.folder / "valid.json"
    command(
        "contexts",
        *given,
        "--passages",
        found.path("corpus.jsonl"),
        "--out",
        str(out),
        "--depth",
        "4",
    )
    how = {"own": OwnRows(files=Splits(valid="valid.json")), "contexts": 9, "sort_by_score": True}
    rows = list(retrieved.rows(found.folder, "valid", source="fid", **how))
    run = read_run(found.folder / "run.trec")
    assert [[ctx["id"] for ctx in row["ctxs"]] for row in rows] == [
        [hit.passage for hit in run[f"q{n}"][:4]] for n in range(12)
    ]
    texts = [row["context"] for row in facts(0, NUM_PASSAGES)]
    assert all(ctx["text"] == texts[int(ctx["id"][1:])] for row in rows for ctx in row["ctxs"])


def test_bm25_writes_a_run_that_is_judged_alike(found: Place) -> None:
    pytest.importorskip("bm25s", reason="the extra bm25 is not installed")
    given = ["--queries", found.path("queries.jsonl"), "--split", "test"]
    corpus, out = ["--passages", found.path("corpus.jsonl")], found.path("bm25.txt")
    command("bm25", *given, *corpus, "--out", out, "--depth", "5", "--format", "tevatron")
    printed = values(command("judge", "--run", out, *given, "--at", "5"))
    assert printed["recall@5"] > 0.5
    assert "--format run: want trec, tevatron, msmarco" in output_of_refused(
        "bm25", *given, *corpus, "--out", out, "--format", "run"
    )
