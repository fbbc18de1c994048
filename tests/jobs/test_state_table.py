"""Every combination of evidence, and what the tables of jobs/record/state_table.py make of it.

The expectations below were printed from the three sets of conditions that the tables replaced, and
agreed with the tables over 735,696 verdicts, 299,522 decisions and 3,528 ends.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from jobs.job_state import STATES
from jobs.record.state_table import (
    DECISIONS,
    ENDS,
    EXIT_FILES,
    VERDICTS,
    Evidence,
    Life,
    Record,
    Situation,
    Symptoms,
    end_of,
    first_rule,
)

BOOLEANS = (False, True)

# What a scheduler can say of a job: state, exit code, will_rerun, never_ran. In the order of the
# columns of EXPECTED_STATES.
WORDS: list[tuple[str, int | None, bool, bool]] = [
    ("unseen", None, False, False),
    ("unknown", None, False, False),
    ("queued", None, False, False),
    ("running", None, False, False),
    ("held", None, False, False),
    ("submitted", None, False, False),
    ("succeeded", None, False, False),
    ("failed", None, False, False),
    ("failed", 75, False, False),
    ("failed", 76, False, False),
    ("failed", None, True, False),
    ("failed", None, False, True),
    ("preempted", None, False, False),
    ("preempted", None, True, False),
    ("cancelled", None, False, False),
    ("cancelled", None, False, True),
    ("timeout", None, False, False),
    ("timeout", None, True, False),
    ("oom", None, False, False),
    ("oom", None, False, True),
]
LETTERS = {
    "as recorded": ".",
    "pending": "P",
    "submitting": "I",
    "submitted": "S",
    "queued": "Q",
    "running": "R",
    "held": "H",
    "succeeded": "K",
    "failed": "F",
    "timeout": "T",
    "oom": "O",
    "preempted": "E",
    "cancelled": "C",
    "paused": "U",
    "as wished": "W",
    "lost": "L",
}
# A "*" stands for every value. Each situation is in one line, and each line has one letter for each
# of WORDS.
EXPECTED_STATES = """
exit       record   id    cancelled fresh life           unseen unknown queued running held submitted succeeded failed(-,75,76,rerun,never) preempted(-,rerun) cancelled(-,never) timeout(-,rerun) oom(-,never)
none       pending  *     *         *     *              P P P P P P P P P P P P P P P P P P P P
none       active   yes   no        no    never_started  . L Q R H . F F E L Q F E Q C C T Q O O
none       active   yes   no        yes   never_started  . . Q R H . F F E L Q F E Q C C T Q O O
none       active   yes   no        *     silent         . L Q R H . F F E L Q F E Q C C T Q O O
none       active   yes   no        *     alive          R R Q R H R F F E R Q R E Q C R T Q O R
none       active   yes   yes       no    never_started  . W Q R H . F W W L Q W W Q W W T Q O O
none       active   yes   yes       yes   never_started  . . Q R H . F W W L Q W W Q W W T Q O O
none       active   yes   yes       *     silent         . W Q R H . F W W L Q W W Q W W T Q O O
none       active   yes   yes       *     alive          R R Q R H R F W W R Q R W Q W R T Q O R
none       active   no    no        *     never_started  I I I I I I I I I I I I I I I I I I I I
none       active   no    yes       no    never_started  W W W W W W W W W W W W W W W W W W W W
none       active   no    yes       yes   never_started  I I I I I I I I I I I I I I I I I I I I
none       active   no    *         *     silent         L L L L L L L L L L L L L L L L L L L L
none       active   no    *         *     alive          R R R R R R R R R R R R R R R R R R R R
none       ended    yes   no        *     *              . . Q R H S F F E L Q F E Q C C T Q O O
none       ended    yes   yes       *     *              . . Q R H S F W W L Q W W Q W W T Q O O
none       ended    no    *         *     *              . . . . . . . . . . . . . . . . . . . .
succeeded  *        *     *         *     *              K K K K K K K K K K K K K K K K K K K K
preempted  pending  *     no        *     *              E E Q R H S E E E E Q E E Q C C T Q E E
preempted  pending  *     yes       *     *              W W Q R H S W W W W Q W W Q W W W Q W W
preempted  active   *     no        *     *              . E Q R H S E E E E Q E E Q C C T Q E E
preempted  active   *     yes       *     *              . W Q R H S W W W W Q W W Q W W W Q W W
preempted  ended    *     no        *     *              E E Q R H S E E E E Q E E Q C C T Q E E
preempted  ended    *     yes       *     *              W W Q R H S W W W W Q W W Q W W W Q W W
paused     *        *     no        *     *              U U U U U U U U U U U U U U U U U U U U
paused     *        *     yes       *     *              W W W W W W W W W W W W W W W W W W W W
bad_input  *        *     no        *     *              F F F F F F F F F F F F F F F F F F F F
bad_input  *        *     yes       *     *              W W W W W W W W W W W W W W W W W W W W
timeout    *        *     no        *     *              T T T T T T T T T T T T T T T T T T O O
timeout    *        *     yes       *     *              W W W W W W W W W W W W W W W W W W W W
oom        *        *     no        *     *              O O O O O O O O O O O O O O O O T T O O
oom        *        *     yes       *     *              W W W W W W W W W W W W W W W W W W W W
failed     *        *     no        *     *              F F F F F F F F F F F F F F F F T T O O
failed     *        *     yes       *     *              W W W W W W W W W W W W W W W W W W W W
"""


def words_of(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value).replace(" ", "_"))


def situations() -> list[tuple[Any, ...]]:
    """Every combination of what is known without the scheduler."""
    ends, records, lives = ("none", *EXIT_FILES), get_args(Record), get_args(Life)
    return list(itertools.product(ends, records, BOOLEANS, BOOLEANS, BOOLEANS, lives))


def test_every_combination_of_evidence_gives_the_state_that_is_written_down_for_it() -> None:
    lines = [line.split() for line in EXPECTED_STATES.strip().splitlines()[1:]]
    for situation in situations():
        texts = [words_of(value) for value in situation]
        matches = [
            line[6:]
            for line in lines
            if all(pattern in ("*", text) for pattern, text in zip(line, texts, strict=False))
        ]
        assert len(matches) == 1, f"{situation}: one line speaks of it, not {len(matches)}"
        for word, letter in zip(WORDS, matches[0], strict=True):
            rule = first_rule(VERDICTS, Evidence(*situation, *word))
            state = word[0] if rule.state == "as observed" else rule.state
            assert LETTERS[state] == letter, f"{situation} and the scheduler's {word}: {rule}"


def evidence() -> list[Evidence]:
    """Every combination of values, those too that no scheduler says."""
    observed = itertools.product(STATES, (None, 1, 75, 76), BOOLEANS, BOOLEANS)
    return [
        Evidence(*situation, *word)
        for situation, word in itertools.product(situations(), [*WORDS[:2], *observed])
    ]


def standings() -> list[Situation]:
    """Every combination in which a row can be; a run that succeeded and is not finished lacks its
    test.
    """
    return [Situation(*each) for each in itertools.product(STATES, *[BOOLEANS] * 7)]


def symptoms() -> list[Symptoms]:
    return [
        Symptoms(*each) for each in itertools.product((0, 1, 2, 10, 75, 76, -9), *[BOOLEANS] * 4)
    ]


@pytest.mark.parametrize(
    ("rules", "combinations"),
    [(ENDS, symptoms()), (VERDICTS, evidence()), (DECISIONS, standings())],
    ids=["ends", "verdicts", "decisions"],
)
def test_some_rule_decides_each_combination_and_no_rule_is_in_vain(
    rules: tuple[Any, ...], combinations: list[Any]
) -> None:
    deciding = {rules.index(first_rule(rules, each)) for each in combinations}
    assert deciding == set(range(len(rules)))


# Columns: it is finished, with and without an id; never sent; no answer to its submission; and with
# an id: no retry is allowed; one is allowed; one is allowed, later; the input was bad; asked for.
# S send, I settle the intent, - skip.
EXPECTED_ACTIONS = """
pending    - I S S S S S S S
submitting - I S I - - - - -
submitted  - I S I - - - - -
queued     - I S I - - - - -
running    - I S I - - - - -
held       - I S I - - - - -
succeeded  - I - I - - - - -
failed     - I S - - S - - S
timeout    - I S - - S - - S
oom        - I S - - S - - S
preempted  - I S - - S - S S
cancelled  - I S - - - - - S
paused     - I S - - - - - S
lost       - I S - - S - - S
"""


def test_every_state_has_the_decisions_that_are_written_down_for_it() -> None:
    columns: list[dict[str, bool]] = [
        {"is_finished": True},
        {"is_finished": True, "has_id": False},
        {"was_sent": False, "has_id": False},
        {"has_id": False},
        {},
        {"may_repeat": True},
        {"may_repeat": True, "is_due": False},
        {"may_repeat": True, "is_bad_input": True},
        {"is_requested": True},
    ]
    letters = {"send": "S", "settle": "I", "skip": "-"}
    lines = [line.split() for line in EXPECTED_ACTIONS.strip().splitlines()]
    assert [line[0] for line in lines] == list(STATES)
    for state, *expected in lines:
        plain = {
            "state": state,
            "is_finished": state == "succeeded",
            "was_sent": True,
            "has_id": True,
            "is_requested": False,
            "is_bad_input": False,
            "may_repeat": False,
            "is_due": True,
        }
        rules = [first_rule(DECISIONS, Situation(**{**plain, **column})) for column in columns]
        assert [letters[rule.action] for rule in rules] == expected, state


# Columns: neither timed out, out of memory nor stopped; stopped; out of memory; timed out.
EXPECTED_ENDS = """
0  outcome    succeeded succeeded succeeded succeeded
0  no_outcome succeeded succeeded succeeded succeeded
1  outcome    failed    failed    oom       timeout
1  no_outcome failed    preempted oom       timeout
2  outcome    bad_input bad_input oom       timeout
2  no_outcome bad_input bad_input oom       timeout
10 outcome    paused    paused    oom       timeout
10 no_outcome paused    paused    oom       timeout
75 outcome    preempted preempted oom       timeout
75 no_outcome preempted preempted oom       timeout
"""


def test_every_end_of_a_training_is_the_one_that_is_written_down_for_it() -> None:
    for line in EXPECTED_ENDS.strip().splitlines():
        code, outcome, *expected = line.split()
        for was_stopped, is_oom, has_timed_out in itertools.product(BOOLEANS, repeat=3):
            symptom = Symptoms(int(code), outcome == "outcome", has_timed_out, is_oom, was_stopped)
            column = 3 if has_timed_out else 2 if is_oom else 1 if was_stopped else 0
            end = first_rule(ENDS, symptom).end
            assert words_of(end) == expected[column], symptom


def test_what_the_wrapper_writes_of_an_end_is_read_as_the_same_end() -> None:
    for end, (code, kind) in EXIT_FILES.items():
        assert end_of(code, kind) == end
    assert end_of(137, "failed") == end_of(None) == "failed"
