"""The verifier's vectorised losses against slow, obvious twins that look at one statement after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_close
from trainer.tasks.vera.losses import (
    ContrastiveType,
    CrossEntropyNorm,
    Keys,
    LossName,
    Original,
    Share,
    Statements,
    Weighted,
    anchor_weights,
    bce,
    contrastive,
    corrected_sums,
    cross_entropy,
    cross_entropy_count,
    keys_by_column,
    keys_by_label,
    margin,
    original,
)

# D width, G groups, S statements

WIDTH, TEMPERATURE, COEFFICIENT = 5, 0.7, 0.1
TYPES: tuple[Any, ...] = get_args(ContrastiveType)
ON: tuple[Any, ...] = TYPES[1:]
NORMS: tuple[Any, ...] = get_args(CrossEntropyNorm)
LOSS_NAMES: tuple[Any, ...] = get_args(LossName)

TRUE, FALSE = "true", "false"
# A group is the number of its options, or the label of its only statement; one has lost its only
# distractor.
BATCHES: dict[str, list[int | str]] = {
    "mixed": [2, TRUE, 4, FALSE, 1, FALSE, 3],
    "choices": [3, 2, 4],
    "booleans": [TRUE, FALSE, FALSE, TRUE],
    "one choice": [3],
    "one pair": [2],
    "one truth": [TRUE],
    "one falsehood": [FALSE],
    "true and false": [TRUE, FALSE],
}

# As tests/tolerance.py means them, in fp64: a product and two norms over the width, and a sum over
# statements, of numbers of about 1; a gradient goes there and back.
DEPTH = 3 * WIDTH + 13
TERMS = {"what": "terms", "depth": DEPTH, "margin": 2.0}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 3.0}
LOSS_OF_BF16 = {"what": "loss of states in bf16", "depth": DEPTH, "margin": 0.06}

every_batch = pytest.mark.parametrize("batch", BATCHES)
every_type = pytest.mark.parametrize("contrastive_type", ON)
every_norm = pytest.mark.parametrize("ce_norm", NORMS)
every_loss_fn = pytest.mark.parametrize("loss_fn", LOSS_NAMES)


def statements_of(groups: Sequence[int | str], seed: int = 0) -> Statements:
    """Random fp64 logits and states, with gradients, in groups of such a shape."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [group if isinstance(group, int) else 1 for group in groups]
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    columns = [column for size in sizes for column in range(size)]
    golds = [
        groups[number] != FALSE and column == 0
        for number, column in zip(numbers, columns, strict=True)
    ]
    return Statements(
        logits_S=torch.randn(
            len(numbers), generator=generator, dtype=torch.float64
        ).requires_grad_(),
        hidden_SD=torch.randn(
            len(numbers), WIDTH, generator=generator, dtype=torch.float64
        ).requires_grad_(),
        group_S=torch.tensor(numbers),
        column_S=torch.tensor(columns),
        is_gold_S=torch.tensor(golds),
        is_multiple_choice_G=torch.tensor([isinstance(group, int) for group in groups]),
    )


def mixed(batch: str = "mixed") -> Statements:
    return statements_of(BATCHES[batch])


def gradients(value: Tensor, statements: Statements) -> list[Tensor]:
    inputs = [statements.logits_S, statements.hidden_SD]
    found = torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]


def at_least_1(values: Tensor) -> float:
    """What a value near 0 is a difference of: numbers of about 1."""
    finite = values.detach()[values.isfinite()]
    return torch.cat([finite.abs().flatten(), torch.ones(1)]).max().item()


def assert_values(got: Tensor, want: Tensor) -> None:
    assert_close(got, want, scale=at_least_1(want), **TERMS)


def assert_same(got: Tensor, want: Tensor, statements: Statements) -> None:
    """Equal values, and equal gradients of a sum that weighs each element differently."""
    assert_values(got, want)
    weights = torch.linspace(1, 2, got.numel(), dtype=torch.float64).view(got.shape)
    connected = 0 * statements.logits_S.sum()  # a constant has no gradient to ask for
    ours, theirs = (
        gradients((value * weights).sum() + connected, statements) for value in (got, want)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, scale=at_least_1(other), **GRADIENTS)


# The twins
# --------------------------------------------------------------------------------------------------


def columns_of(statements: Statements) -> list[list[int]]:
    """The statements of each group, by column."""
    groups: list[list[int]] = []
    for group in range(statements.num_groups):
        own = [s for s in range(len(statements.group_S)) if statements.group_S[s] == group]
        groups.append(sorted(own, key=lambda s: int(statements.column_S[s])))
    return groups


def slow_margin(statements: Statements) -> Tensor:
    z, terms = statements.logits_S, []
    for first, *others in columns_of(statements):
        terms.append(sum(((1 - (z[first] - z[o])).clamp(min=0) for o in others), z.new_zeros(())))
    return torch.stack(terms)


def slow_bce(statements: Statements) -> Tensor:
    z, terms = statements.logits_S, []
    for first, *others in columns_of(statements):
        own = z[first].sigmoid()
        term = -own.log() if statements.is_gold_S[first] else -(1 - own).log()
        if others:
            term = term + sum((-(1 - z[o].sigmoid()).log() for o in others), z.new_zeros(())) / len(
                others
            )
        terms.append(term)
    return torch.stack(terms)


def slow_cross_entropy(statements: Statements) -> Tensor:
    z, terms = statements.logits_S, []
    for group, own in enumerate(columns_of(statements)):
        is_scored = bool(statements.is_multiple_choice_G[group])
        share = z[own[0]].exp() / sum((z[s].exp() for s in own), z.new_zeros(()))
        terms.append(-share.log() if is_scored else z.new_zeros(()))
    return torch.stack(terms)


def slow_similarity(one: Tensor, other: Tensor, contrastive_type: int) -> Tensor:
    product = (one * other).sum()
    return product if contrastive_type in (1, 2) else product / (one.norm() * other.norm())


def slow_contrastive(
    hidden_AD: Tensor, keys: Keys, contrastive_type: int, *, infinite: bool = False
) -> tuple[list[Tensor], list[int]]:
    """Terms and weights; `infinite`: as published, where an anchor without positives counts, and is
    infinite.
    """
    terms, weights = [], []
    for anchor, own in enumerate(keys.own_A.tolist()):
        same = [
            k for k in range(len(keys.class_K)) if k != own and keys.class_K[k] == keys.class_K[own]
        ]
        opposite = [k for k in range(len(keys.class_K)) if keys.class_K[k] != keys.class_K[own]]
        positives = [own] if contrastive_type in (1, 3) else same
        candidates = [own, *opposite] if contrastive_type in (1, 3) else [*same, *opposite]
        has_something_to_learn = bool(opposite) if contrastive_type in (1, 3) else bool(same)
        if not (positives if infinite else has_something_to_learn):
            terms.append(hidden_AD.new_tensor(math.inf if infinite else 0.0))
            weights.append(int(infinite))
            continue
        powers = {
            k: (
                slow_similarity(hidden_AD[anchor], keys.hidden_KD[k], contrastive_type)
                / TEMPERATURE
            ).exp()
            for k in candidates
        }
        zero = hidden_AD.new_zeros(())
        terms.append(
            -(sum((powers[k] for k in positives), zero) / sum(powers.values(), zero)).log()
        )
        weights.append(1)
    return terms, weights


# Terms
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fast", "slow"),
    [(margin, slow_margin), (bce, slow_bce), (cross_entropy, slow_cross_entropy)],
    ids=["margin", "bce", "cross_entropy"],
)
@every_batch
def test_a_scoring_term_equals_its_slow_twin(
    batch: str, fast: Callable[[Statements], Tensor], slow: Callable[[Statements], Tensor]
) -> None:
    statements = mixed(batch)
    assert_same(fast(statements), slow(statements), statements)


def test_groups_that_are_not_multiple_choice_have_no_cross_entropy() -> None:
    statements = replace(mixed("choices"), is_multiple_choice_G=torch.tensor([False, True, False]))
    assert cross_entropy(statements).bool().tolist() == [False, True, False]


def compared(statements: Statements, contrastive_type: Any, keys: Keys | None = None) -> Weighted:
    keys = keys or keys_by_label(statements)
    return contrastive(
        statements.hidden_SD, keys=keys, contrastive_type=contrastive_type, temperature=TEMPERATURE
    )


@every_type
@every_batch
def test_contrastive_terms_and_weights_equal_their_slow_twins(
    batch: str, contrastive_type: Any
) -> None:
    statements = mixed(batch)
    got = compared(statements, contrastive_type)
    terms, weights = slow_contrastive(
        statements.hidden_SD, keys_by_label(statements), contrastive_type
    )
    assert got.weights_A.tolist() == weights
    assert_same(got.terms_A, torch.stack(terms), statements)


@every_type
def test_contrastive_terms_against_more_keys_than_anchors_equal_their_slow_twins(
    contrastive_type: Any,
) -> None:
    statements, others = statements_of([TRUE, 2], seed=1), statements_of([3, FALSE], seed=2)
    hidden_KD = torch.cat([others.hidden_SD, statements.hidden_SD]).detach()
    keys = Keys(
        hidden_KD, torch.cat([others.is_gold_S, statements.is_gold_S]), torch.tensor([4, 5, 6])
    )
    got = compared(statements, contrastive_type, keys)
    terms, weights = slow_contrastive(statements.hidden_SD, keys, contrastive_type)
    assert got.weights_A.tolist() == weights
    assert_same(got.terms_A, torch.stack(terms), statements)


@every_type
@every_batch
def test_the_published_loss_equals_its_slow_twin_infinities_included(
    batch: str, contrastive_type: Any
) -> None:
    statements = mixed(batch)
    terms, _ = slow_contrastive(
        statements.hidden_SD, keys_by_column(statements), contrastive_type, infinite=True
    )
    num_choices = max(int(statements.is_multiple_choice_G.sum()), 1)
    scoring = slow_cross_entropy(statements).sum() / num_choices + slow_bce(statements).mean()
    ours = published(statements, contrastive_type)
    assert_same(ours.scoring, scoring, statements)
    assert_same(ours.loss, scoring + COEFFICIENT * torch.stack(terms).mean(), statements)


def published(statements: Statements, contrastive_type: Any, loss_fn: Any = "mce+bce") -> Original:
    return original(
        statements,
        loss_fn=loss_fn,
        contrastive_type=contrastive_type,
        temperature=TEMPERATURE,
        coefficient=COEFFICIENT,
    )


@pytest.mark.parametrize("term", [margin, bce, cross_entropy])
@every_batch
def test_gradients_of_scoring_terms_are_those_of_finite_differences(
    batch: str, term: Callable[[Statements], Tensor]
) -> None:
    statements = mixed(batch)
    assert torch.autograd.gradcheck(
        lambda z: term(replace(statements, logits_S=z)), statements.logits_S
    )


@every_type
@every_batch
def test_gradients_of_contrastive_terms_are_those_of_finite_differences(
    batch: str, contrastive_type: Any
) -> None:
    statements = mixed(batch)

    def terms(hidden_SD: Tensor) -> Tensor:
        return compared(replace(statements, hidden_SD=hidden_SD), contrastive_type).terms_A

    assert torch.autograd.gradcheck(terms, statements.hidden_SD)


# The loss to train with
# ---------------------------------------------------------------------------------------------


def sums(statements: Statements, contrastive_type: Any = 4, **changes: Any) -> dict[str, Share]:
    settings = {"loss_fn": "mce+bce", "ce_norm": "mc", "temperature": TEMPERATURE, **changes}
    return corrected_sums(statements, contrastive_type=contrastive_type, **settings)


def total(shares: dict[str, Share]) -> Tensor:
    means = {name: share.sum / share.count.clamp(min=1) for name, share in shares.items()}
    return sum(
        (mean * (COEFFICIENT if n == "contrastive" else 1) for n, mean in means.items()),
        torch.zeros(()),
    )


@every_loss_fn
@every_batch
def test_sums_and_counts_are_those_of_the_slow_twins(batch: str, loss_fn: Any) -> None:
    statements = mixed(batch)
    for ce_norm, contrastive_type in product(NORMS, ON):
        _assert_those_of_the_slow_twins(statements, loss_fn, ce_norm, contrastive_type)


def _assert_those_of_the_slow_twins(
    statements: Statements, loss_fn: Any, ce_norm: Any, contrastive_type: Any
) -> None:
    got = sums(statements, contrastive_type, loss_fn=loss_fn, ce_norm=ce_norm)
    num_choices, num_groups = int(statements.is_multiple_choice_G.sum()), statements.num_groups
    ce = slow_cross_entropy(statements).sum()
    terms, weights = slow_contrastive(
        statements.hidden_SD, keys_by_label(statements), contrastive_type
    )
    want = {
        "margin": (slow_margin(statements).sum(), num_groups),
        "bce": (slow_bce(statements).sum(), num_groups),
        "cross_entropy": {
            "mc": (ce, num_choices),
            "all_problems": (ce, num_groups),
            "rank_mc": (ce / max(num_choices, 1), 1),
        }[ce_norm],
        "contrastive": (torch.stack(terms).sum(), sum(weights)),
    }
    parts = {
        "margin": ["margin"],
        "bce": ["bce"],
        "mce": ["cross_entropy"],
        "mce+bce": ["cross_entropy", "bce"],
    }
    assert list(got) == [*parts[loss_fn], "contrastive"]
    for name, share in got.items():
        assert share.count.dtype == torch.int64
        assert (name, int(share.count)) == (name, want[name][1])
        assert_values(share.sum, want[name][0])


def test_type_0_leaves_the_contrastive_loss_out() -> None:
    statements = mixed()
    assert "contrastive" not in sums(statements, 0)
    assert published(statements, 0).contrastive == 0
    found = compared(statements, 0)
    assert not any(values.any() for values in (found.terms_A, found.weights_A))


@every_norm
@every_type
def test_counts_are_known_before_the_forward_pass(contrastive_type: Any, ce_norm: Any) -> None:
    statements, keys = mixed(), keys_by_label(mixed())
    shares = sums(statements, contrastive_type, ce_norm=ce_norm)
    assert (
        cross_entropy_count(statements.is_multiple_choice_G, norm=ce_norm)
        == shares["cross_entropy"].count
    )
    weights = anchor_weights(keys.class_K, own_A=keys.own_A, contrastive_type=contrastive_type)
    assert torch.equal(weights, compared(statements, contrastive_type).weights_A)


@pytest.mark.parametrize("contrastive_type", TYPES)
def test_the_order_of_statements_and_of_groups_changes_nothing(contrastive_type: Any) -> None:
    statements = mixed()
    order_S = torch.randperm(len(statements.group_S), generator=torch.Generator().manual_seed(5))
    order_G = torch.randperm(statements.num_groups, generator=torch.Generator().manual_seed(6))
    shuffled = Statements(
        statements.logits_S[order_S],
        statements.hidden_SD[order_S],
        order_G.argsort()[statements.group_S[order_S]],
        statements.column_S[order_S],
        statements.is_gold_S[order_S],
        statements.is_multiple_choice_G[order_G],
    )
    assert_same(margin(shuffled), margin(statements)[order_G], statements)
    for loss_fn in LOSS_NAMES:
        before, after = (
            sums(each, contrastive_type, loss_fn=loss_fn) for each in (statements, shuffled)
        )
        assert {n: int(s.count) for n, s in before.items()} == {
            n: int(s.count) for n, s in after.items()
        }
        assert_same(total(after), total(before), statements)
        before, after = (
            published(each, contrastive_type, loss_fn).loss for each in (statements, shuffled)
        )
        assert_same(after, before, statements)


def pieces(
    statements: Statements, cuts: list[list[int]], keys: Keys | None
) -> list[tuple[Statements, Keys | None]]:
    """The groups of each cut as a batch of their own; `keys` whole, or each batch its own."""
    found = []
    for groups in cuts:
        where_S = torch.isin(statements.group_S, torch.tensor(groups)).nonzero()[:, 0]
        number_G = torch.full((statements.num_groups,), -1)
        number_G[groups] = torch.arange(len(groups))
        piece = Statements(
            statements.logits_S[where_S],
            statements.hidden_SD[where_S],
            number_G[statements.group_S[where_S]],
            statements.column_S[where_S],
            statements.is_gold_S[where_S],
            statements.is_multiple_choice_G[groups],
        )
        found.append((piece, keys and replace(keys, own_A=where_S)))
    return found


@pytest.mark.parametrize("ce_norm", ["mc", "all_problems"])
@every_loss_fn
@every_type
def test_a_batch_in_pieces_has_the_same_sums_when_the_keys_are_whole(
    contrastive_type: Any, loss_fn: Any, ce_norm: Any
) -> None:
    statements = mixed()
    settings = {"loss_fn": loss_fn, "ce_norm": ce_norm}
    whole = sums(statements, contrastive_type, **settings)
    cuts = [[4, 1], [0], [6, 2, 3, 5]]
    parts = [
        sums(piece, contrastive_type, keys=keys, **settings)
        for piece, keys in pieces(statements, cuts, keys_by_label(statements))
    ]
    for name, share in whole.items():
        assert share.count == sum(int(part[name].count) for part in parts)
        assert_same(torch.stack([part[name].sum for part in parts]).sum(), share.sum, statements)


def test_rank_mc_is_the_mean_over_batches_of_their_means_over_choices() -> None:
    statements = mixed()
    batches = [piece for piece, _ in pieces(statements, [[0, 1, 2], [3, 5], [4, 6]], None)]
    shares = [sums(batch, ce_norm="rank_mc")["cross_entropy"] for batch in batches]
    got = torch.stack([share.sum for share in shares]).sum() / sum(
        int(share.count) for share in shares
    )
    terms_G = cross_entropy(statements)
    want = ((terms_G[0] + terms_G[2]) / 2 + 0 + (terms_G[4] + terms_G[6]) / 2) / 3
    assert_values(got, want)


# What is corrected
# --------------------------------------------------------------------------------------------------


def test_a_true_and_a_false_boolean_do_not_attract_each_other_by_label() -> None:
    statements = mixed("true and false")
    found = compared(statements, 4)
    assert found.weights_A.tolist() == [0, 0]
    assert not gradients(found.terms_A.sum(), statements)[1].any()


def test_a_true_and_a_false_boolean_attract_each_other_by_column() -> None:
    alone = statements_of([TRUE, FALSE])
    assert published(alone, 4).contrastive == 0  # each is all that the other is compared with
    beside = statements_of([TRUE, FALSE, 2])
    by_column, by_label = (
        -gradients(compared(beside, 4, keys).terms_A[0], beside)[1][1]
        for keys in (keys_by_column(beside), keys_by_label(beside))
    )
    towards = beside.hidden_SD[
        0
    ].detach()  # but for a part that turns nothing: gradients of cosines are tangents
    assert by_column @ towards > 0  # descent turns the false one to the true one
    assert by_label @ towards < 0


@pytest.mark.parametrize("contrastive_type", TYPES)
@pytest.mark.parametrize("batch", [name for name, groups in BATCHES.items() if len(groups) < 3])
def test_a_batch_of_one_or_two_groups_is_finite_with_finite_gradients(
    batch: str, contrastive_type: Any
) -> None:
    assert_finite(mixed(batch), contrastive_type)


def assert_finite(statements: Statements, contrastive_type: Any) -> None:
    value = total(sums(statements, contrastive_type))
    assert math.isfinite(value.item())
    assert all(gradient.isfinite().all() for gradient in gradients(value, statements))


@pytest.mark.parametrize("contrastive_type", [2, 4])
def test_the_published_loss_of_one_group_is_infinite_with_the_gradient_of_its_other_terms(
    contrastive_type: Any,
) -> None:
    statements = mixed("one pair")
    ours = published(statements, contrastive_type)
    assert ours.loss == math.inf
    want = gradients(published(statements, 0).loss, statements)
    assert all(map(torch.equal, gradients(ours.loss, statements), want))


@pytest.mark.parametrize("contrastive_type", TYPES)
def test_states_of_zero_and_huge_logits_have_finite_losses_and_gradients(
    contrastive_type: Any,
) -> None:
    statements = mixed()
    is_zero_S1 = torch.arange(len(statements.group_S))[:, None] < 4
    states_SD = (
        torch.where(is_zero_S1, 0.0, 1e3 * statements.hidden_SD).detach().float().requires_grad_()
    )
    logits_S = (1e4 * statements.logits_S).detach().float().requires_grad_()
    assert_finite(replace(statements, logits_S=logits_S, hidden_SD=states_SD), contrastive_type)


def test_bf16_states_are_compared_in_fp32() -> None:
    statements = mixed()
    halved = replace(
        statements,
        logits_S=statements.logits_S.bfloat16(),
        hidden_SD=statements.hidden_SD.bfloat16(),
    )
    exact = replace(
        statements, logits_S=halved.logits_S.double(), hidden_SD=halved.hidden_SD.double()
    )
    got, want = total(sums(halved)), total(sums(exact))
    assert got.dtype == torch.float32
    assert_close(got, want, **LOSS_OF_BF16)
