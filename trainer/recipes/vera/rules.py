"""Statements by rule where English leaves no choice: `--declarer rules`, tried before the question
converter.

Each rule gives up (None) unless the order of words alone decides, for a wrong statement is worse
than a missing one:
1. a yes/no "question" that is a statement, perhaps with a question mark: the mark goes;
2. a form of be, a modal, do or does behind which the end of the subject is certain: the two change
places, "do" goes.
   The end is certain behind a pronoun or "there", before a word that starts no noun ("be", "have",
   "more", "able"), and
   between two nouns with "a" or "an";
3. "... is what?" and stems that break off at a word that needs another ("is", "of", "because"): the
choice goes there.
Questions that start with what, who, where, when, why or how are never rearranged.
"""

from __future__ import annotations

import re
from itertools import pairwise

from trainer.recipes.vera.problem import YES


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BE = _words("is are was were")
_MODALS = _words("can could will would should must may might")
_DO = _words("do does did")
_AUXILIARIES = _BE | _MODALS | _DO | _words("has have had am")
_HAVE = {"does": "has", "did": "had"}
_NEGATED = re.compile(r"(?i)(?:\w+n['’]t|cannot)$")
_QUESTION_WORDS = _words("what who whom whose which where when why how")
_PRONOUNS = _words("i you he she it we they there")
# not so in statements
_ASKED_OF_NONE = _words("any anyone anybody anything anywhere ever either yet")
_TAGS = ("right", "correct", "yes or no", "true or false", "agree")
_PREPOSITIONS = _words(
    "of in on at with by for from about like under over into near during without than"
)
# A clause or a list inside the subject may hold a second verb: then its end is not certain.
_CLAUSES = (
    _words("that which who whom whose where when while if because to and or but than as")
    | _AUXILIARIES
)
_ENDS_BEFORE_VERB = _words("be have always never usually often sometimes also still")
_ENDS_AFTER_BE = _words(
    "always never usually often sometimes also still able unable capable more less shorter taller "
    "longer bigger smaller larger heavier lighter faster slower older younger better worse beside "
    "under above below behind"
)
_ARTICLES = frozenset(("a", "an"))
_OPENERS = _words("if when while before after as so because since unless")
_NO_ENDS = _words(
    "a an the this that these those some all no every each my your his her its our their not almost"
)
_OPEN_ENDS = _words(
    "is are was were be been a an the of to for by with from in on at as into than because "
    "called causes when"
)


def statement_by_rule(sentence: str, choice: str, before: str = "") -> str | None:
    """The statement that a last sentence and its choice make, perhaps without its full stop; None
    if a converter has to make it.

    before: the text in front of the sentence; after "Was Dr. " the rest is no sentence.
    """
    sentence = sentence.strip()
    words = sentence.rstrip("?").split()
    if not words or _is_torn(before):
        return None
    if choice != YES:
        # rule 3: the choice goes to the end
        lowered = [word.lower().strip(",") for word in words]
        if len(words) < 2 or lowered[0] in _AUXILIARIES or _QUESTION_WORDS & set(lowered[:-1]):
            return None
        if lowered[-1] == "what":
            return " ".join([*words[:-1], choice])
        is_open = lowered[-1] in _OPEN_ENDS and not words[-1].endswith(",")
        return " ".join([*words, choice]) if is_open else None
    first = words[0].lower().strip(",")
    if first in _AUXILIARIES:
        return _invert(first, words[1:])
    return " ".join(words) if sentence.endswith(".") or not _asks(words) else None


def _is_torn(before: str) -> bool:
    """Whether the full stop behind `before` is that of "Dr." or "J.", not of a sentence."""
    words = before.rstrip(" .").rpartition(". ")[2].split()
    if not words:
        return False
    return (
        len(words[-1]) < 3 or "." in words[-1] or words[0].lower() in _AUXILIARIES | _QUESTION_WORDS
    )


def _asks(words: list[str]) -> bool:
    """Whether words that start with no auxiliary are a question all the same, or may be one."""
    lowered = [word.lower() for word in words]
    if _NEGATED.match(lowered[0]) or _QUESTION_WORDS & set(lowered[:3]):
        return True
    if " ".join(lowered).rstrip(".,! ").endswith(_TAGS) or lowered[:2] == ["true", "or"]:
        return True
    pairs = list(pairwise(lowered))
    after = _PRONOUNS | _NO_ENDS if lowered[0] in _OPENERS else _PRONOUNS
    # "After losing can you win"
    is_turned = any(a in _AUXILIARIES and b in after for a, b in pairs)
    return is_turned or any(
        (a.endswith(",") or a == "then") and b in _AUXILIARIES for a, b in pairs
    )


def _invert(auxiliary: str, rest: list[str]) -> str | None:
    lowered = [word.lower().strip(",") for word in rest]
    end = None if _ASKED_OF_NONE & set(lowered) else _subject_end(auxiliary, lowered)
    if end is None or lowered[end] in _AUXILIARIES - {"have", "do"}:
        return None
    subject, predicate = rest[:end], rest[end:]
    if auxiliary == "do":
        verb: list[str] = []
    elif auxiliary in _DO:
        if lowered[end] != "have":
            return None
        verb, predicate = [_HAVE[auxiliary]], predicate[1:]
    else:
        verb = [auxiliary]
    text = " ".join([*subject, *verb, *predicate])
    return text[:1].upper() + text[1:]


def _subject_end(auxiliary: str, words: list[str]) -> int | None:
    """How many words the subject has, where that is certain and something follows it."""
    if len(words) < 2 or auxiliary in ("has", "have", "had", "am"):
        return None
    if words[0] in _PRONOUNS:
        return 1
    if auxiliary in _BE and "be" in words:
        return None
    ends = _ENDS_AFTER_BE if auxiliary in _BE else _ENDS_BEFORE_VERB
    for index, word in enumerate(words[1:], start=1):
        if word in ends and words[index - 1] not in _NO_ENDS | _PREPOSITIONS:
            return None if words[index - 1].endswith("ly") else index
        if auxiliary in _BE and words[0] in _ARTICLES and word in _ARTICLES and index == 2:
            return index
        if word in _CLAUSES:
            return None
    return None
