"""Votes of people: which files hold them, that none is torn or counted twice, what they add up to."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.facts import write_facts
from tests.forked import TRAINVAL, run
from tests.unit.test_checkpoint import KILLED, die_at, in_child
from tests.unit.test_preference_rows import CHAT, SAID, USER, task_of
from tests.wording import refused
from trainer.config.identity import exp_id
from trainer.data.control_tokens import controls_of
from trainer.judging.votes import (
    ANSWERS,
    OTHERS,
    VOTES,
    AnswerPair,
    Vote,
    add_vote,
    choices_of,
    read_pairs,
    read_votes,
)
from trainer.metrics.win_rate import Preferred, majority, wilson, win_rate
from trainer.verdict.opinions import OneVerdict, agreement, model_says, people_say

PAIR = AnswerPair(3, [USER], ["In the cellar."], "In the attic.", "In the cellar.")


def vote(better: Preferred, voter: str = "anna", *, pair: AnswerPair = PAIR, at: str = "1") -> Vote:
    return Vote(pair.row, pair.digest, voter, better, pair.left_of(voter), at)


def rows(folder: Path, name: str = VOTES) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_second_vote_of_the_same_person_replaces_the_first(tmp_path: Path) -> None:
    add_vote(tmp_path, PAIR, vote("before", at="1"))
    add_vote(tmp_path, PAIR, vote("before", "ben", at="2"))
    add_vote(tmp_path, PAIR, vote("after", at="3"))
    assert [(row["voter"], row["chosen"]) for row in rows(tmp_path)] == [
        ("ben", "In the attic."),
        ("anna", "In the cellar."),
    ]
    assert {row["rejected"] for row in rows(tmp_path)} == {"In the attic.", "In the cellar."}
    assert choices_of(read_votes(tmp_path, [PAIR])) == {PAIR.digest: ["before", "after"]}


def test_an_equal_vote_is_kept_and_is_no_row_of_preferences(tmp_path: Path) -> None:
    add_vote(tmp_path, PAIR, vote("after", at="1"))
    add_vote(tmp_path, PAIR, vote("equal", at="2"))
    assert (rows(tmp_path), len(rows(tmp_path, OTHERS))) == ([], 1)
    assert [one.better for one in read_votes(tmp_path, [PAIR])] == ["equal"]
    add_vote(tmp_path, PAIR, vote("before", at="3"))
    assert (len(rows(tmp_path)), rows(tmp_path, OTHERS)) == (1, [])


def test_a_blank_answer_counts_and_is_no_row_to_learn_from(tmp_path: Path) -> None:
    pair = replace(PAIR, before=" \n")
    add_vote(tmp_path, pair, vote("after", pair=pair))
    assert (rows(tmp_path), len(rows(tmp_path, OTHERS))) == ([], 1)
    assert [one.better for one in read_votes(tmp_path, [pair])] == ["after"]


def test_votes_on_other_answers_of_the_row_do_not_count_and_stay(tmp_path: Path) -> None:
    other = replace(PAIR, after="In the tower.")
    add_vote(tmp_path, PAIR, vote("after"))
    add_vote(tmp_path, other, vote("before", pair=other))
    assert len(rows(tmp_path)) == 2
    assert [one.pair for one in read_votes(tmp_path, [other])] == [other.digest]


def test_rows_that_a_person_wrote_into_the_file_stay(tmp_path: Path) -> None:
    own = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (tmp_path / VOTES).write_text(own.rstrip())
    add_vote(tmp_path, PAIR, vote("after"))
    assert (tmp_path / VOTES).read_text().startswith(own)
    assert len(rows(tmp_path)) == 2


def test_votes_of_many_people_at_once_are_all_kept(tmp_path: Path) -> None:
    voters = [f"voter-{n}" for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        done = pool.map(lambda name: add_vote(tmp_path, PAIR, vote("after", name)), voters)
        assert list(done) == [None] * len(voters)
    assert sorted(row["voter"] for row in rows(tmp_path)) == sorted(voters)


def test_a_vote_killed_at_any_file_boundary_leaves_whole_lines_and_the_old_or_the_new_vote(
    tmp_path: Path,
) -> None:
    boundary, code, seen = 0, KILLED, set[str]()
    while code == KILLED:
        boundary += 1
        folder = tmp_path / str(boundary)
        folder.mkdir()
        add_vote(folder, PAIR, vote("after", at="1"))
        add_vote(folder, PAIR, vote("before", "ben", at="1"))

        def killed(folder: Path = folder, boundary: int = boundary) -> None:
            die_at(boundary)
            add_vote(folder, PAIR, vote("equal", at="2"))

        code = in_child(killed)
        by_voter = {one.voter: one.better for one in read_votes(folder, [PAIR])}
        seen.add(by_voter["anna"])
        assert by_voter == {"ben": "before", "anna": "equal" if code == 0 else by_voter["anna"]}
        assert len(rows(folder)) in (1, 2)  # whole: each is JSON
        add_vote(folder, PAIR, vote("equal", at="3"))  # sent again
        assert [row["voter"] for row in rows(folder)] == ["ben"]
        assert [row["voter"] for row in rows(folder, OTHERS)] == ["anna"]
    assert (code, seen) == (0, {"after", "equal"})
    assert boundary > 4


# Pairs
# --------------------------------------------------------------------------------------------------


def write_answers(folder: Path, num: int = 6) -> list[dict[str, Any]]:
    """judge_answers.jsonl, the last row with equal answers."""
    values = [
        {
            "row": n + 1,
            "prompt": f"{n}?",
            "references": [],
            "before": f"no {n}",
            "after": f"yes {n}",
        }
        for n in range(num)
    ]
    values[-1]["after"] = values[-1]["before"] + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANSWERS).write_text("".join(json.dumps(one) + "\n" for one in values))
    return values


def test_pairs_come_in_one_order_that_is_not_the_files_and_leave_out_equal_answers(
    tmp_path: Path,
) -> None:
    write_answers(tmp_path, 40)
    numbers = [pair.row for pair in read_pairs(tmp_path / ANSWERS, most=None)]
    assert sorted(numbers) == list(range(1, 40))
    assert numbers != sorted(numbers)
    assert [pair.row for pair in read_pairs(tmp_path / ANSWERS, most=7)] == numbers[:7]
    assert read_pairs(tmp_path / "none") == []


def test_whose_answer_stands_on_the_left_is_chance_and_stays(tmp_path: Path) -> None:
    write_answers(tmp_path, 400)
    pairs = read_pairs(tmp_path / ANSWERS)
    of_anna, of_ben = ([one.left_of(who) for one in pairs] for who in ("anna", "ben"))
    assert 150 < of_anna.count("after") < 250
    assert 150 < sum(one == other for one, other in zip(of_anna, of_ben, strict=True)) < 250
    assert of_anna == [one.left_of("anna") for one in read_pairs(tmp_path / ANSWERS)]


def test_a_line_that_is_no_pair_is_refused_with_its_place(tmp_path: Path) -> None:
    write_answers(tmp_path)
    with (tmp_path / ANSWERS).open("a") as file:
        file.write('{"row": 7, "prompt": "x", "references": [], "before": 1, "after": "a"}\n')
    with refused("answers_malformed", at=f"{ANSWERS}, line 7"):
        read_pairs(tmp_path / ANSWERS)


# Numbers
# --------------------------------------------------------------------------------------------------


def test_wilsons_interval_is_that_of_the_tables() -> None:
    """7 of 10, and 0 of 5: R's binom::binom.confint(x, n, methods="wilson")."""
    assert wilson(0.7, 10) == pytest.approx((0.3967781, 0.8922087), abs=1e-6)
    assert wilson(0.0, 5) == pytest.approx((0.0, 0.4344825), abs=1e-6)


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    """Exactly, over all results of 40 rows, on average over true shares."""
    covered: list[float] = []
    for share in (n / 50 for n in range(5, 46)):
        held = [wilson(k / 40, 40) for k in range(41)]
        chances = [math.comb(40, k) * share**k * (1 - share) ** (40 - k) for k in range(41)]
        inside = zip(chances, held, strict=True)
        covered.append(sum(chance for chance, (low, high) in inside if low <= share <= high))
    assert 0.94 < sum(covered) / len(covered) < 0.97
    assert min(covered) > 0.91


def test_a_pair_counts_once_however_many_people_looked_at_it() -> None:
    rate = win_rate({"a": ["after", "after", "before"], "b": ["equal"], "c": ["before", "after"]})
    assert rate is not None
    assert (rate.pairs, rate.wins, rate.losses, rate.equal) == (3, 1, 0, 2)
    assert rate.rate == pytest.approx((2 / 3 + 1 / 2 + 1 / 2) / 3)
    assert (rate.low, rate.high) == wilson(rate.rate, 3)
    assert win_rate({}) is None


@pytest.mark.parametrize(
    ("wins", "what"),
    [(18, "the trained model"), (10, "no preference shown"), (2, "the other model")],
)
def test_the_words_say_what_is_shown(wins: int, what: str) -> None:
    choices: dict[str, list[Preferred]] = {
        str(n): ["after" if n < wins else "before"] for n in range(20)
    }
    rate = win_rate(choices)
    assert rate is not None
    assert what in rate.words
    assert f"{5 * wins:.1f}% of 20 pairs" in rate.words


def test_kappa_is_cohens() -> None:
    """The example of Cohen 1960 in two kinds: 20 + 15 of 50 agree, kappa .4."""
    one: dict[str, Preferred] = {str(n): "after" if n < 25 else "before" for n in range(50)}
    other: dict[str, Preferred] = {
        str(n): "after" if n < 20 or 25 <= n < 35 else "before" for n in range(50)
    }
    agreed = agreement(one, other)
    assert agreed is not None
    assert (agreed.pairs, agreed.share) == (50, 0.7)
    assert agreed.kappa == pytest.approx(0.4)
    assert agreement(one, {}) is None
    same = agreement({"a": "after"}, {"a": "after", "b": "before"})
    assert same is not None
    assert (same.share, same.kappa) == (1.0, None)


def test_verdicts_that_turn_with_the_order_are_equal_and_are_told() -> None:
    verdicts = {
        "a": OneVerdict("after", "after"),
        "b": OneVerdict("before", "after"),  # the first one both times
        "c": OneVerdict("equal", "after"),
        "d": OneVerdict(None, "after"),
        "e": OneVerdict("before", "before"),
    }
    says = model_says("m", verdicts, {"a": ["after"], "b": ["after", "before"], "e": ["after"]})
    assert (says.pairs, says.unclear, says.reversals) == (5, 1, 2)
    assert says.reversal_share == 0.5
    assert says.rate is not None
    assert (says.rate.wins, says.rate.losses, says.rate.equal) == (1, 1, 2)
    # 8 verdicts are for one answer: a 1 of 2, b 2 of 2, c 1 of 1, d 1 of 1, e 1 of 2 are for the first
    assert says.first_share == pytest.approx(6 / 8)
    assert says.agreement is not None
    assert (says.agreement.pairs, says.agreement.share) == (3, pytest.approx(2 / 3))


def test_what_people_say_counts_votes_and_people() -> None:
    people = people_say({"a": ["after", "equal"], "b": ["after"]}, 2)
    assert people is not None
    assert (people.votes, people.voters, people.rate.pairs) == (3, 2, 2)
    assert people_say({}, 0) is None
    assert majority(["equal", "after", "before"]) == "equal"


# Learning from votes
# --------------------------------------------------------------------------------------------------


def test_votes_are_rows_of_preferences_as_they_are(tmp_path: Path) -> None:
    facts = write_facts(tmp_path / "facts", train=12, valid=2)
    for better, voter in (("after", "anna"), ("before", "ben"), ("equal", "carl")):
        add_vote(tmp_path, PAIR, vote(better, voter))
    task = task_of(facts, tmp_path, rows(tmp_path), CHAT)
    read = [[turns["messages"] for turns in row["answers"]] for row in task.rows("train")]
    assert [[turns[-1]["content"] for turns in row] for row in read] == [
        ["In the cellar.", "In the attic."],
        ["In the attic.", "In the cellar."],
    ]
    assert read[0][0][0]["content"] == USER["content"]
    assert controls_of(task) is not None  # what a run looks for in the texts of conversations
    text = replace(PAIR, prompt="Where? ", before="There.", after="Here.")
    add_vote(tmp_path / "facts", text, vote("after", pair=text))
    task = task_of(facts, tmp_path, rows(tmp_path / "facts"))
    (row,) = task.rows("train")
    assert [answer["text"] for answer in row["answers"]] == ["Where? Here.", "Where? There."]


@pytest.mark.long
def test_two_steps_are_trained_on_the_file_of_votes(tmp_path: Path) -> None:
    facts = write_facts(tmp_path / "facts", train=12, valid=2)
    runs = tmp_path / "runs"
    for number in range(12):
        turn = {**USER, "content": f"Where is key {number}?"}
        pair = replace(PAIR, row=number + 1, prompt=[turn], after=SAID["content"])
        add_vote(facts, pair, vote("after" if number % 3 else "before", pair=pair))
        add_vote(facts, pair, vote("equal", "ben", pair=pair))
    values = {
        **task_of(facts, tmp_path, [], CHAT).cfg.model_dump(mode="json", exclude_unset=True),
        "data": {**CHAT, "max_tokens": 64, "files": {"train": VOTES}, "valid_share": 0.2},
    }
    values["train"] = {**values["train"], "steps": 2, "eval_every": 1, "save_every": 2}
    path = tmp_path / "groups.py"
    path.write_text(f"EXP_GROUPS = {{'votes': [{values!r}]}}\n")
    places = ["--data_path", str(facts), "--cache_dir", str(tmp_path / "cache"), "-sb", str(runs)]
    done = run(*TRAINVAL, "--exp_configs", str(path), "-e", "votes", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (runs / exp_id(values) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("loss") for line in lines]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-4)  # DPO begins at the start
    assert len([one for one in losses if one is not None]) == 2
