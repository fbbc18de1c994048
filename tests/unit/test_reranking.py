"""rerank as a person starts it, on a cross-encoder that was never trained."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from tests import forked
from tests.facts import experiment, facts, write_facts
from tests.forked import TRAINER
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.__main__ import app
from trainer.config.identity import exp_id
from trainer.data.readers.rankings import Hit, read_run
from trainer.data.shard_folder import ShardFolder
from trainer.errors import DataError
from trainer.protocol.abilities import Reranks
from trainer.protocol.task import Places
from trainer.retrieval import reranking

NUM_PASSAGES, NUM_QUERIES, DEPTH = 24, 6, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its questions, a ranking of them, and the run folder of a cross-encoder."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    for name in ("retriever, cross", "retriever"):
        values = experiment(name, folder)
        task = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
        run_folder = folder / "results" / exp_id(values)
        weights = {name: p.detach() for name, p in task.model().named_parameters()}
        task.export(weights, run_folder / "best")
        (run_folder / "exp_dict.json").write_text(json.dumps(values))
    rows = facts(0, NUM_PASSAGES)
    corpus = [{"docid": f"p{n}", "text": row["context"]} for n, row in enumerate(rows)]
    questions = [
        {"query_id": f"q{n}", "query": row["question"]} for n, row in enumerate(rows[:NUM_QUERIES])
    ]
    for name, lines in (("corpus.jsonl", corpus), ("queries.jsonl", questions)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    hits = [
        f"q{n} Q0 p{(n + rank) % NUM_PASSAGES} {rank} {9 - rank} first\n"
        for n in range(NUM_QUERIES)
        for rank in range(DEPTH + 2)
    ]
    (folder / "run.trec").write_text("".join(hits))
    return folder


def argv(folder: Path, *flags: str, name: str = "retriever, cross") -> list[str]:
    which = ["--exp_id", exp_id(experiment(name, folder)), "-sb", str(folder / "results")]
    return ["rerank", *which, "--cache_dir", str(folder / "cache"), *flags]


def of_run(folder: Path, out: Path, **how: Any) -> list[str]:
    texts = ["--queries", str(folder / "queries.jsonl"), "--passages", str(folder / "corpus.jsonl")]
    first = ["--run", str(folder / "run.trec"), "--depth", str(DEPTH)]
    return argv(folder, *first, *texts, "--out", str(out), "--batch", "5", **how)


def _small_shards() -> None:
    """Shards of two questions, for forked.run."""
    reranking.SHARD_QUESTIONS = 2


@pytest.fixture(scope="module")
def ranked(folder: Path) -> Path:
    """The ranking that an undisturbed command wrote."""
    result = forked.run(*TRAINER, *of_run(folder, folder / "again.trec"), first=_small_shards)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("again.trec: 6 questions, 24 hits")
    assert not (folder / "again.trec.scores").exists()
    return folder / "again.trec"


def scores_of(folder: Path, texts: list[tuple[str, list[dict[str, Any]]]]) -> list[float]:
    values = experiment("retriever, cross", folder)
    task = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    assert isinstance(task, Reranks)
    model = task.load_export(folder / "results" / exp_id(values) / "best")
    with torch.no_grad():
        return task.relevance(model, task.lists_of(texts)).tolist()


def test_the_first_hits_stand_in_the_order_of_the_models_own_scores(
    folder: Path, ranked: Path
) -> None:
    before, after = read_run(folder / "run.trec"), read_run(ranked)
    assert list(after) == list(before)
    rows = facts(0, NUM_PASSAGES)
    for number, (question, hits) in enumerate(after.items()):
        names = [hit.passage for hit in before[question][:DEPTH]]
        assert {hit.passage for hit in hits} == set(names)
        passages = [{"text": rows[int(name[1:])]["context"]} for name in names]
        scores = scores_of(folder, [(rows[number]["question"], passages)])
        wanted = dict(zip(names, scores, strict=True))
        got = [hit.score for hit in hits]
        assert got == sorted(got, reverse=True)
        assert got == pytest.approx([wanted[hit.passage] for hit in hits], abs=1e-5)


def _killed_in_its_second_shard() -> None:
    """A fault for forked.run: shards of two questions, and no word after the first of them."""
    _small_shards()
    write = ShardFolder.write_shard

    def dying(self: ShardFolder, number: int, *args: Any, **facts: Any) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, number, *args, **facts)

    ShardFolder.write_shard = dying


def _first_shard_is_there() -> None:
    """A fault for forked.run: the first shard is not computed again."""
    _small_shards()
    write = ShardFolder.write_shard

    def refusing(self: ShardFolder, number: int, *args: Any, **facts: Any) -> None:
        assert number > 0
        write(self, number, *args, **facts)

    ShardFolder.write_shard = refusing


def test_new_scores_put_the_best_first_and_equal_ones_keep_their_order() -> None:
    hits = {"q": [Hit("a", 3.0), Hit("b", 2.0), Hit("c", 1.0)]}
    scores = [np.array([0.0, 5.0, 5.0], dtype=np.float32)]
    (ordered,) = reranking.reordered(hits, scores).values()
    assert [(hit.passage, hit.score) for hit in ordered] == [("b", 5.0), ("c", 5.0), ("a", 0.0)]


def test_a_command_that_was_killed_goes_on_and_two_processes_share_the_rest(
    folder: Path, ranked: Path, tmp_path: Path
) -> None:
    words = of_run(folder, tmp_path / "run.trec")
    killed = forked.run(*TRAINER, *words, first=_killed_in_its_second_shard)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run.trec").exists()
    other = forked.run(*TRAINER, *words, "--precision", "bf16")
    assert other.returncode == 2
    says("vectors_of_others", other.stderr, key="precision", was="fp32", now="bf16")
    for rank in forked.start_ranks(2, *TRAINER, *words, first=_first_shard_is_there):
        ended = rank.finish()
        assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run.trec").read_bytes() == ranked.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["run.trec"]


def test_scores_that_were_altered_are_refused_and_lost_ones_are_computed_again(
    tmp_path: Path,
) -> None:
    lists = [(f"q{n}", [{"text": "a"}, {"text": "b"}]) for n in range(5)]
    plan = reranking.ScoresPlan("m", reranking.digest_of(lists), len(lists), 2, "fp32")
    scored: list[str] = []

    def scorer(of_shard: Any) -> np.ndarray:
        scored.extend(question for question, _ in of_shard)
        return np.arange(2 * len(of_shard), dtype=np.float32) + float(of_shard[0][0][1:])

    wanted = reranking.scores_of(tmp_path / "s", lists, scorer, plan=plan)
    shard = tmp_path / "s" / "scores-00001.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with refused("vectors_altered", at=shard.name):
        reranking.scores_of(tmp_path / "s", lists, scorer, plan=plan)
    for lose in (shard.unlink, lambda: shard.write_bytes(whole[:-1])):
        lose()
        scored.clear()
        again = reranking.scores_of(tmp_path / "s", lists, scorer, plan=plan)
        assert scored == ["q2", "q3"]
        assert [one.tolist() for one in again] == [one.tolist() for one in wanted]


def test_training_rows_get_the_scores_of_a_teacher_positives_first(
    folder: Path, tmp_path: Path
) -> None:
    rows = facts(0, 6)
    passages = [{"docid": f"p{n}", "text": row["context"]} for n, row in enumerate(rows)]
    mined = [
        {"query_id": "q", "query": row["question"], "positive_passages": [passages[n]]}
        | {"negative_passages": passages[n + 1 : n + 1 + more]}
        for n, more, row in ((0, 3, rows[0]), (2, 1, rows[2]))
    ]
    path, out = tmp_path / "mined.jsonl", tmp_path / "taught.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mined))
    words = argv(folder, "--rows", str(path), "--out", str(out))
    result = forked.run(*TRAINER, *words)
    assert result.returncode == 0, result.stderr
    taught = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{**row, "scores": None} for row in taught] == [{**row, "scores": None} for row in mined]
    texts = [
        (row["query"], [*row["positive_passages"], *row["negative_passages"]]) for row in mined
    ]
    got = [score for row in taught for score in row["scores"]]
    assert got == pytest.approx(scores_of(folder, texts), abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], fault("rerank_source")),
        (["--run", "run.trec"], fault("rerank_texts")),
        (
            ["--run", "r", "--queries", "q", "--passages", "p", "--drop_above", "1"],
            fault("drop_without_rows"),
        ),
        (["--rows", "r", "--format", "csv"], fault("flag_choice", flag="--format csv")),
        (["--rows", "r", "--precision", "fp8"], fault("flag_choice", flag="--precision fp8")),
        (
            ["--rows", "r", "--queries", "q", "--depth", "3", "--format", "msmarco"],
            fault("rerank_two_kinds", flags="--queries, --depth, --format"),
        ),
        (
            ["--run", "r", "--queries", "q", "--passages", "p", "--tag", "a b"],
            fault("run_tag", got="'a b'"),
        ),
    ],
)
def test_what_cannot_be_reranked_is_refused_in_words(flags: list[str], said: Fault) -> None:
    result = CliRunner().invoke(app, ["rerank", "-sb", "results", "--out", "out", *flags])
    assert result.exit_code == 2, result.output
    says(said, " ".join(result.output.split()))


def test_a_model_without_pairs_and_a_run_of_other_questions_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    words = of_run(folder, tmp_path / "run.trec", name="retriever")
    result = forked.run(*TRAINER, *words)
    assert result.returncode == 2
    says("scores_no_pairs", result.stderr, task="retriever")
    words = argv(folder, "--in", str(folder / "corpus.jsonl"), "--side", "passage")
    result = forked.run(*TRAINER, "encode", *words[1:], "--out", str(tmp_path / "vectors"))
    assert result.returncode == 2
    says("no_vectors_of_pairs", result.stderr, task="retriever", form="cross")
    (tmp_path / "other.trec").write_text("x Q0 p1 1 2.0 t\n")
    words = of_run(folder, tmp_path / "run.trec")
    words[words.index("--run") + 1] = str(tmp_path / "other.trec")
    result = forked.run(*TRAINER, *words)
    assert result.returncode == 2
    says("ranking_of_others", result.stderr, count=NUM_QUERIES, ours="x", theirs="q0")


def test_behind_two_dashes_torchrun_takes_no_flag_of_ours_for_one_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torchrun = get_args_parser()
    group: Any = typer.main.get_command(app)
    taken: set[str] = set()
    for name, command in group.commands.items():
        for flag in (flag for one in command.params for flag in one.opts if flag.startswith("-")):
            words = ["--nproc_per_node", "2", "-m", "--", "trainer", name, flag, "x"]
            assert torchrun.parse_args(words).training_script_args == words[5:]
            try:
                torchrun.parse_args([word for word in words if word != "--"])
            except SystemExit:
                taken.add(flag)
    assert taken == {"--run"}, "docs/retrieval.md says of which flags"
    assert "--run-path" in capsys.readouterr().err


def test_a_judge_leaves_out_negatives_that_it_prefers_to_the_positive(
    folder: Path, tmp_path: Path
) -> None:
    rows = facts(0, NUM_PASSAGES)
    passages = [
        {"docid": f"p{n}", "title": "", "text": row["context"]} for n, row in enumerate(rows)
    ]
    mined = [
        {
            "query_id": f"q{n}",
            "query": rows[n]["question"],
            "positive_passages": passages[n : n + 1],
            "negative_passages": passages[n + 1 : n + 6],
        }
        for n in range(4)
    ]
    path, out = tmp_path / "mined.jsonl", tmp_path / "judged.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mined))
    words = argv(folder, "--rows", str(path), "--out", str(out))
    result = forked.run(*TRAINER, *words, "--drop_margin", "0")
    assert result.returncode == 0, result.stdout + result.stderr
    wanted: dict[str, list[str]] = {}
    for row in mined:
        every = [*row["positive_passages"], *row["negative_passages"]]
        first, *scores = scores_of(folder, [(row["query"], every)])
        pairs = zip(row["negative_passages"], scores, strict=True)
        kept = [passage["docid"] for passage, score in pairs if score <= first]
        wanted |= {row["query_id"]: kept} if kept else {}
    got = {
        row["query_id"]: [passage["docid"] for passage in row["negative_passages"]]
        for row in map(json.loads, out.read_text().splitlines())
    }
    assert got == wanted
    assert sum(map(len, got.values())) < 20


def test_a_row_without_passages_or_texts_is_refused() -> None:
    row = {"query": "q", "positive_passages": [], "negative_passages": []}
    with pytest.raises(DataError) as caught:
        reranking.list_of(row, "rows.jsonl, line 1")
    says("row_without_passages", caught.value, at="rows.jsonl, line 1")
