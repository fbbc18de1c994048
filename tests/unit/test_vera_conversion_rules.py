"""Statements by rule: those that are certain, and those that are left to a converter."""

from __future__ import annotations

import pytest

from trainer.recipes.vera.rules import statement_by_rule


@pytest.mark.parametrize(
    ("question", "want"),
    [
        ("Cotton candy is made of cotton?", "Cotton candy is made of cotton"),
        ("One is a number that comes before zero.", "One is a number that comes before zero."),
        ("Can you see the moon by day?", "You can see the moon by day"),
        ("Is it true that bears cannot fly?", "It is true that bears cannot fly"),
        ("Are there windows without glass?", "There are windows without glass"),
        ("Is a cup shorter than an apartment?", "A cup is shorter than an apartment"),
        ("is a whale a mammal?", "A whale is a mammal"),
        ("Can mail be delivered on Sunday?", "Mail can be delivered on Sunday"),
        ("Do onions have a form?", "Onions have a form"),
        ("Does horseradish have a fetlock?", "Horseradish has a fetlock"),
        ("Did Eric Clapton have similar taste?", "Eric Clapton had similar taste"),
    ],
)
def test_a_question_whose_order_of_words_decides_becomes_a_statement(
    question: str, want: str
) -> None:
    assert statement_by_rule(question, "yes") == want


@pytest.mark.parametrize(
    "question",
    [
        "Is Pearl Harbor the home of a goddess?",  # where the subject ends is for a reader to know
        "Does any tree grow larger than an oak?",  # "any" of questions is "some" of statements
        "Did mercenaries fight for England?",  # the form of the verb
        "Can people who want to be rich be happy?",  # the first "be" is not the one
        "Was Oscar Wilde's treatment be considered fair?",  # not English to begin with
        "If it rains, is the ground wet?",
        "After losing can you win?",
        "The lung is the same size as the heart, true or false?",
        "Don't cats like milk?",
        "Why is the sky blue?",
        "In which country do cats talk?",
        "Are Leopard cats in less dire straits than apes?",
        "Is a wolf's den almost always here?",
    ],
)
def test_a_question_that_is_not_certain_is_left_to_a_converter(question: str) -> None:
    assert statement_by_rule(question, "yes") is None


def test_what_is_left_of_a_name_with_a_full_stop_is_no_sentence() -> None:
    assert statement_by_rule("Seuss a liar?", "yes", "Was Dr. ") is None
    assert statement_by_rule("Rowling is rich?", "yes", "J.K. ") is None
    assert statement_by_rule("It is cold.", "yes", "Ice is frozen water. ") == "It is cold."


@pytest.mark.parametrize(
    ("stem", "choice", "want"),
    [
        ("The opposite of hot is what?", "cold", "The opposite of hot is cold"),
        ("Plants get energy from", "the sun", "Plants get energy from the sun"),
        ("Remove ink stains", "Use milk", None),
        ("What do plants get energy from", "the sun", None),
        ("He wondered why it is what?", "cold", None),
        ("What is ice?", "water", None),
    ],
)
def test_a_choice_completes_a_stem_only_where_nothing_else_can(
    stem: str, choice: str, want: str | None
) -> None:
    assert statement_by_rule(stem, choice) == want
