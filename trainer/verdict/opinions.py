"""What people and a language model say of two models' answers, and whether they agree.

Sources: Cohen 1960, A Coefficient of Agreement for Nominal Scales, Educ. Psychol. Meas. 20; Zheng
et al. 2023, Judging LLM-as-a-Judge (arXiv 2306.05685; asked twice, with the order swapped).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.metrics.win_rate import Preferred, WinRate, majority, win_rate

KINDS: tuple[Preferred, ...] = ("before", "after", "equal")


@dataclass(frozen=True)
class Agreement:
    """How far two judges of the same pairs agree."""

    pairs: int
    share: float  # of pairs on which both say the same
    kappa: float | None  # Cohen's: 0 as by chance, 1 always; None where chance alone agrees always


@dataclass(frozen=True)
class PeopleSay:
    """The votes of people."""

    votes: int
    voters: int
    rate: WinRate


@dataclass(frozen=True)
class OneVerdict:
    """What a language model said of a pair in the two orders; None: its answer was unclear."""

    trained_second: Preferred | None
    trained_first: Preferred | None


@dataclass(frozen=True)
class LanguageModelSays:
    """The verdicts of a language model."""

    model: str
    pairs: int  # each asked about in both orders
    unclear: int  # pairs of which an answer said neither A nor B nor equal: they do not count
    reversals: int  # pairs whose two verdicts differ, so that they count as equal
    first_share: float | None  # of all verdicts for one answer, those for the one that came first
    rate: WinRate | None
    agreement: Agreement | None  # with people

    @property
    def reversal_share(self) -> float:
        """Of the pairs that count, those whose verdict turned with the order."""
        return self.reversals / max(1, self.pairs - self.unclear)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "reversal_share": self.reversal_share}

    @property
    def words(self) -> str:
        """What it says, as one sentence."""
        parts = ["no pair has two clear verdicts" if self.rate is None else self.rate.words]
        parts.append(f"{100 * self.reversal_share:.1f}% turned with the order of the answers")
        if self.unclear:
            parts.append(f"{self.unclear} of {self.pairs} pairs unclear")
        if self.agreement is not None:
            parts.append(_agreement_in_words(self.agreement))
        return "; ".join(parts)


def agreement(one: Mapping[str, Preferred], other: Mapping[str, Preferred]) -> Agreement | None:
    """Of the pairs that both have judged. None where there are none."""
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    num = len(shared)
    share = sum(one[pair] == other[pair] for pair in shared) / num
    counts = [[judge[pair] for pair in shared] for judge in (one, other)]
    chance = sum(counts[0].count(kind) * counts[1].count(kind) for kind in KINDS) / num**2
    return Agreement(num, share, None if chance == 1 else (share - chance) / (1 - chance))


def people_say(choices: Mapping[str, Sequence[Preferred]], voters: int) -> PeopleSay | None:
    """What the votes of people say. choices: pair -> one or more. None without votes."""
    rate = win_rate(choices)
    return None if rate is None else PeopleSay(sum(map(len, choices.values())), voters, rate)


def model_says(
    model: str,
    verdicts: Mapping[str, OneVerdict],
    people: Mapping[str, Sequence[Preferred]],
) -> LanguageModelSays:
    """What a language model's verdicts say, by pair. A pair whose two verdicts differ is equal: the
    order of the answers decided, and not what they say.
    """
    choices: dict[str, Preferred] = {}
    reversals = 0
    firsts: list[bool] = []
    for pair, one in verdicts.items():
        for verdict, first in ((one.trained_second, "before"), (one.trained_first, "after")):
            if verdict in ("before", "after"):
                firsts.append(verdict == first)
        if one.trained_first is None or one.trained_second is None:
            continue
        is_reversal = one.trained_first != one.trained_second
        reversals += is_reversal
        choices[pair] = "equal" if is_reversal else one.trained_first
    return LanguageModelSays(
        model=model,
        pairs=len(verdicts),
        unclear=len(verdicts) - len(choices),
        reversals=reversals,
        first_share=sum(firsts) / len(firsts) if firsts else None,
        rate=win_rate({pair: [one] for pair, one in choices.items()}),
        agreement=agreement(choices, {pair: majority(of_pair) for pair, of_pair in people.items()}),
    )


# Parts of judge.md
# --------------------------------------------------------------------------------------------------


def people_lines(people: PeopleSay | None) -> Iterator[str]:
    """What people say, in Markdown."""
    if people is None:
        return
    yield from ("## Votes of people", "")
    whose = "1 person" if people.voters == 1 else f"{people.voters} people"
    yield f"{people.votes} votes of {whose}. The trained model's answer is preferred in "
    yield f"{people.rate.words}."
    yield ""


def model_lines(says: LanguageModelSays) -> Iterator[str]:
    """What a language model says, in Markdown."""
    yield from ("## A language model as judge", "")
    yield f"{says.model} was asked twice of {says.pairs} pairs, with the order swapped. It prefers "
    yield f"the trained model's answer in {says.words}."
    if says.first_share is not None:
        yield f"Of its verdicts for one answer {100 * says.first_share:.1f}% are for the first one."
    yield ""


def _agreement_in_words(one: Agreement) -> str:
    kappa = "" if one.kappa is None else f" (kappa {one.kappa:.2f})"
    return f"agrees with people on {100 * one.share:.1f}% of {one.pairs} pairs{kappa}"
