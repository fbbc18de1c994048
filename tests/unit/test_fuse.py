"""`fuse`: one ranking of several."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.wording import Fault, fault, says
from trainer.__main__ import app
from trainer.data.readers.rankings import Hit, read_run
from trainer.retrieval.rankings import fused

WORDS = {"q": [Hit("a", 9.0), Hit("b", 5.0), Hit("c", 1.0)], "r": [Hit("a", 3.0), Hit("b", 3.0)]}
VECTORS = {"q": [Hit("d", 0.8), Hit("b", 0.7), Hit("a", 0.6)]}


def order(rankings: dict[str, list[Hit]], question: str = "q") -> list[tuple[str, float]]:
    return [(hit.passage, round(hit.score, 6)) for hit in rankings[question]]


def test_scores_are_scaled_for_each_question_and_weighted() -> None:
    both = fused([WORDS, VECTORS], [1.0, 2.0])
    assert order(both) == [("d", 2.0), ("b", 1.5), ("a", 1.0), ("c", 0.0)]


def test_a_weight_of_all_is_the_order_of_one_ranking() -> None:
    alone = fused([WORDS, VECTORS], [0.0, 1.0], depth=3)
    assert [passage for passage, _ in order(alone)] == ["d", "b", "a"]


def test_ranks_are_added_by_their_inverses() -> None:
    both = fused([WORDS, VECTORS], [1.0, 1.0], by="ranks")
    want = {"a": 1 / 61 + 1 / 63, "b": 2 / 62, "d": 1 / 61, "c": 1 / 63}
    assert order(both) == [(name, round(value, 6)) for name, value in want.items()]


def test_equal_scores_count_as_the_best_and_keep_their_order() -> None:
    both = fused([VECTORS, WORDS], [1.0, 1.0])
    assert order(both, "r") == [("a", 1.0), ("b", 1.0)]


def files(folder: Path) -> list[str]:
    (folder / "words.trec").write_text("q Q0 a 1 2.0 w\nq Q0 b 2 1.0 w\nr Q0 c 1 1.0 w\n")
    (folder / "vectors.tsv").write_text("q\tb\t0.9\nq\td\t0.1\n")
    return ["--run", str(folder / "words.trec"), "--run", str(folder / "vectors.tsv")]


def test_files_of_two_formats_become_one_and_a_lacking_question_is_told(tmp_path: Path) -> None:
    out = tmp_path / "both.trec"
    words = ["fuse", *files(tmp_path), "--weight", "1", "--weight", "0.5", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert order(read_run(out)) == [("a", 1.0), ("b", 0.5), ("d", 0.0)]
    assert order(read_run(out), "r") == [("c", 1.0)]
    refused = CliRunner().invoke(app, [*words, "--strict"])
    assert refused.exit_code == 2
    assert "'r'" in refused.output


def test_a_run_of_other_questions_is_refused(tmp_path: Path) -> None:
    both, other, out = files(tmp_path), tmp_path / "test.tsv", tmp_path / "out"
    other.write_text("other\tb\t0.9\n")
    result = CliRunner().invoke(app, ["fuse", *both, "--run", str(other), "--out", str(out)])
    assert result.exit_code == 2, result.output
    says("fuse_of_others", " ".join(result.output.split()), path=other.name, question="other")
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--run", "a"], fault("fuse_one_run")),
        (["--run", "a", "--run", "b", "--weight", "1"], fault("fuse_weights", got=1, want=2)),
        (
            ["--run", "a", "--run", "b", "--weight", "1", "--weight", "-1"],
            fault("fuse_weight", got="-1.0"),
        ),
        (["--run", "a", "--run", "b", "--weight", "0", "--weight", "0"], fault("fuse_nothing")),
        (["--run", "a", "--run", "b", "--by", "votes"], fault("flag_choice", flag="--by votes")),
        (
            ["--run", "a", "--run", "b", "--format", "csv"],
            fault("flag_choice", flag="--format csv"),
        ),
        (["--run", "a", "--run", "b", "--tag", "my run"], fault("run_tag", got="'my run'")),
        (["--run", "a", "--run", "b", "--tag", ""], fault("run_tag", got="''")),
    ],
)
def test_runs_that_cannot_be_fused_are_refused_in_words(
    flags: list[str], said: Fault, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["fuse", *flags, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    says(said, " ".join(result.output.split()))


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ([], ["1e308", "0.5", "-1e308"]),  # their distance is infinite
        (["--weight", "1e39", "--weight", "1"], ["2.0", "1.0", "0.0"]),
    ],
)
def test_scores_that_a_run_file_cannot_hold_are_refused(
    flags: list[str], scores: list[str], tmp_path: Path
) -> None:
    lines = [f"q Q0 {name} 1 {score} w\n" for name, score in zip("abc", scores, strict=True)]
    (tmp_path / "far.trec").write_text("".join(lines))
    _, _, *other = files(tmp_path)
    out = tmp_path / "out"
    out.write_text("an older one")
    words = ["fuse", "--run", str(tmp_path / "far.trec"), *other, *flags, "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    says("score_of_no_float32", " ".join(result.output.split()), question="q", passage="a")
    assert out.read_text() == "an older one"
