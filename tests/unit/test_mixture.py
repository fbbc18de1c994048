"""The rows of a mix: each source by its weight, every row of a source once in each of its epochs, and
a step that depends on no other one.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.config.mix import labels_of
from trainer.data.mixed.by_source import source_of_labels
from trainer.data.mixed.mixture import Mix, Mixture
from trainer.data.order import Sharding, Sizes, bucketed_step_rows, window_rows
from trainer.models.losses import IGNORED, keeping_losses, token_cross_entropy
from trainer.models.packed.layout import pack_labelled, pack_targets
from trainer.telemetry.source_losses import SourceSums

SEEDS = st.one_of(st.none(), st.integers(0, 2**31))
NAMES = ("a", "b", "c", "d")
BATCH = 6


def mix_of(weights: list[int] | None = None, **more: Any) -> Mix:
    """A mix with these weights from the first step on; None: by its rows."""
    phases = () if weights is None else ((0, shares(weights)),)
    count = 3 if weights is None else len(weights)
    return Mix(NAMES[:count], phases, labels=NAMES[:count], **more)


def shares(weights: list[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    count = draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(BATCH, 40)) for _ in range(count))
    phases = [(0, shares([draw(st.integers(1, 9)) for _ in range(count)]))]
    for after in sorted(draw(st.sets(st.integers(1, 30), max_size=2))):
        later = [draw(st.integers(0, 9)) for _ in range(count)]
        phases.append((after, shares([*later[:-1], later[-1] + 1])))
    mix = Mix(NAMES[:count], tuple(phases), labels=NAMES[:count])
    return Mixture(mix, sizes, BATCH, draw(SEEDS))


@settings(max_examples=15)
@given(mixture=mixtures())
def test_a_source_is_read_row_by_row_epoch_by_epoch_and_no_step_has_a_row_twice(
    mixture: Mixture,
) -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for step in range(45):
        rows = mixture.rows(step)
        assert len(set(rows.tolist())) == len(rows) == BATCH
        taken.update(zip(rows.tolist(), mixture.epochs_of(step, rows).tolist(), strict=True))
    assert set(taken.values()) == {1}
    first = 0
    for size, count in zip(mixture.sizes, mixture.taken(45), strict=True):
        of_source = {(row, epoch) for row, epoch in taken if first <= row < first + size}
        whole = {(first + row, epoch) for row in range(size) for epoch in range(count // size)}
        assert len(of_source) == count
        assert whole <= of_source
        first += size


@settings(max_examples=15)
@given(mixture=mixtures(), steps=st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_a_step_depends_on_no_earlier_one(mixture: Mixture, steps: list[int]) -> None:
    again = {step: mixture.rows(step).tolist() for step in sorted(steps)}
    for step in steps:
        fresh = Mixture(mixture.mix, mixture.sizes, BATCH, mixture.seed)
        assert fresh.rows(step).tolist() == again[step]


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), steps=st.integers(1, 500))
def test_each_source_has_its_share_to_a_row_or_two(weights: list[int], steps: int) -> None:
    mixture = Mixture(mix_of(weights), (50,) * len(weights), BATCH, 1)
    for weight, count in zip(weights, mixture.taken(steps), strict=True):
        assert abs(count - steps * BATCH * weight / sum(weights)) < 2


@given(sizes=st.tuples(*[st.integers(BATCH, 30)] * 3), epochs=st.integers(1, 4))
def test_by_size_an_epoch_of_the_mix_is_one_of_each_source(
    sizes: tuple[int, int, int], epochs: int
) -> None:
    mixture = Mixture(mix_of(), sizes, sum(sizes), 3)
    assert mixture.count(epochs) == epochs
    assert mixture.taken(epochs) == tuple(epochs * size for size in sizes)


def test_weights_change_at_their_step() -> None:
    phases = ((0, shares([1, 1])), (10, shares([0, 1])), (20, shares([1, 0])))
    mixture = Mixture(Mix(("a", "b"), phases, labels=("a", "b")), (40, 40), BATCH, 1)
    counts = [mixture.taken(step) for step in range(31)]
    of_steps = [tuple(np.subtract(later, one).tolist()) for one, later in pairwise(counts)]
    assert of_steps == [(3, 3)] * 10 + [(0, 6)] * 10 + [(6, 0)] * 10


def test_no_bucket_has_steps_before_and_after_a_change_of_weights() -> None:
    phases = ((0, shares([1, 0])), (10, shares([0, 1])))
    mixture = Mixture(Mix(("a", "b"), phases, labels=("a", "b")), (400, 400), BATCH, 1)
    lengths = np.arange(800) % 7
    for step in range(20):
        rows = bucketed_step_rows(step, lengths, epochs=mixture, bucket_steps=4)
        assert (rows >= 400).all() if step >= 10 else (rows < 400).all(), step


def test_a_temperature_makes_sources_more_alike() -> None:
    sizes = (900, 100, 25)
    by_rows, flatter = (mix_of(temperature=t).phases_of(sizes)[0][1] for t in (1.0, 2.0))
    assert by_rows == (Fraction(36, 41), Fraction(4, 41), Fraction(1, 41))
    assert [float(weight) for weight in flatter] == pytest.approx([6 / 9, 2 / 9, 1 / 9], abs=0.002)


@settings(max_examples=10)
@given(mixture=mixtures(), bucket=st.integers(2, 5))
def test_buckets_change_no_epoch(mixture: Mixture, bucket: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 9, sum(mixture.sizes))
    plain: Counter[tuple[int, int]] = Counter()
    bucketed: Counter[tuple[int, int]] = Counter()
    steps = next(step for step in range(30, 2000) if mixture.span(step).start == step)
    for step in range(steps):
        for rows, counter in (
            (mixture.rows(step), plain),
            (
                bucketed_step_rows(step, lengths, epochs=mixture, bucket_steps=bucket),
                bucketed,
            ),
        ):
            counter.update(zip(rows.tolist(), mixture.epochs_of(step, rows).tolist(), strict=True))
    assert bucketed == plain


@pytest.mark.parametrize("micro_tokens", [None, 12])
def test_the_rows_of_a_step_are_the_same_on_any_number_of_ranks(micro_tokens: int | None) -> None:
    sources = (13, 17, 23)
    lengths = np.random.default_rng(2).integers(1, 9, sum(sources))[:, None]
    sizes = Sizes(lengths, np.zeros(sum(sources), np.int32), sources=sources)
    how: dict[str, Any] = {"micro_tokens": micro_tokens, "mix": mix_of([5, 3, 2])}

    def rows_of(step: int, world: int) -> list[int]:
        shards = [Sharding(BATCH, 1, world, rank, **how) for rank in range(world)]
        of_ranks = [window_rows(step, lengths=sizes, sharding=one, seed=4) for one in shards]
        return sorted(row for rows in of_ranks for part in rows for row in part.tolist())

    for step in range(40):
        assert rows_of(step, 1) == rows_of(step, 2) == rows_of(step, 3)


def test_a_run_may_end_where_a_source_ends() -> None:
    mixture = Mixture(mix_of([1, 1], stops=True), (30, 11), BATCH, 1)
    steps = mixture.steps_of(100)
    assert mixture.taken(steps)[1] <= 11 < mixture.taken(steps + 1)[1]
    assert mixture.steps_of(2) == 2
    assert Mixture(mix_of([1, 1]), (30, 11), BATCH, 1).steps_of(100) == 100


def test_a_step_of_more_rows_than_a_source_has_is_refused() -> None:
    Mixture(mix_of([1, 1]), (30, 3), BATCH, 1)
    with refused("mix_too_small", name="b", size=2, most=3):
        Mixture(mix_of([1, 1]), (30, 2), BATCH, 1)


def values_of(mix: Any, **data: Any) -> dict[str, Any]:
    return {
        "task": "causal_lm",
        "base": "x",
        "data": {"source": "files", "mix": mix, **data},
        "train": {"steps": 20, "global_batch": 8, "micro_batch": 2},
        "optim": {"lr": 1e-3},
    }


WRONG: list[tuple[Fault, dict[str, Any]]] = [
    (fault("mix_sum", total="1.1"), {"mix": {"a": 0.7, "b": 0.4}}),
    (fault("mix_some_weights", name="b"), {"mix": {"a": 0.7, "b": None}}),
    (fault("mix_weight", weight="0.7"), {"mix": {"a": {"weight": "0.7"}}}),
    (fault("mix_has_train"), {"mix": {"a": 1.0}, "files": {"train": "c.jsonl"}}),
    (fault("mix_unknown_key", key="max_tokens"), {"mix": {"a": {"weight": 1.0, "max_tokens": 3}}}),
    (fault("mix_temperature"), {"mix": {"a": 1.0}, "mixing": {"temperature": 2.0}}),
    (fault("mix_missing"), {"mixing": {"ends": "stop"}}),
    (
        fault("mix_change_sum", place=0, total="0.5"),
        {"mix": {"a": 1.0}, "mixing": {"changes": [{"after": 3, "weights": {"a": 0.5}}]}},
    ),
    (
        fault("mix_change_unknown", name="b"),
        {"mix": {"a": 1.0}, "mixing": {"changes": [{"after": 3, "weights": {"a": 0, "b": 1}}]}},
    ),
    (fault("mix_of_part", name="a"), {"mix": {"a": {"weight": 1.0, "columns": {"txt": "x"}}}}),
]


@pytest.mark.parametrize(("wrong", "data"), WRONG)
def test_a_mix_that_makes_no_sense_is_refused(wrong: Fault, data: dict[str, Any]) -> None:
    with refused(wrong):
        tasks.parse(values_of(**{"mix": {}, **data}))


def test_thirds_are_taken_for_a_whole() -> None:
    cfg: Any = tasks.parse(values_of({"a": 0.3333333, "b": 0.3333333, "c": 0.3333334}))
    mix = Mix.of(cfg.data)
    assert mix is not None
    assert sum(mix.phases[0][1]) == 1


def test_the_order_of_the_dictionary_changes_neither_id_nor_rows() -> None:
    one, other = values_of({"a": 0.7, "b": 0.3}), values_of({"b": 0.3, "a": 0.7})
    assert exp_id(one) == exp_id(other)
    cfgs: list[Any] = [tasks.parse(values) for values in (one, other)]
    assert Mix.of(cfgs[0].data) == Mix.of(cfgs[1].data)


def test_the_block_of_a_source_says_how_its_rows_are_read() -> None:
    mix = {"a.jsonl": 0.5, "chats": {"weight": 0.3, "source": "chat"}, "lookup": 0.2}
    cfg: Any = tasks.parse(values_of(mix, columns={"text": "body"}, max_tokens=77))
    plain, chats, lookup = (cfg.data.part(name) for name in mix)
    assert (plain.files.train, plain.columns) == ("a.jsonl", {"text": "body"})
    assert (chats.files.train, chats.source, chats.columns) == ("chats", "chat", {})
    assert (lookup.source, lookup.max_tokens, lookup.mix) == ("lookup", 77, {})


def test_the_names_of_sources_may_hold_dots_and_count_for_the_id() -> None:
    one, other = values_of({"a.jsonl": 0.5, "b.jsonl": 0.5}), values_of({"a": 0.5, "b": 0.5})
    assert exp_id(one) != exp_id(other)
    with refused("key_with_dot", key="a.b"):
        exp_id({"data": {"a.b": 1}})
    with refused("key_with_dot", key="a.b"):
        exp_id({"mix": {"a.b": 1}})


def test_a_source_is_called_by_its_file_or_by_all_of_its_name() -> None:
    assert labels_of(["data/a.jsonl", "b.csv.gz[:10]", "c"]) == {
        "data/a.jsonl": "a",
        "b.csv.gz[:10]": "b",
        "c": "c",
    }
    assert labels_of(["x/a.jsonl", "y/a.jsonl"]) == {
        "x/a.jsonl": ":x:a.jsonl",
        "y/a.jsonl": ":y:a.jsonl",
    }


def test_losses_of_labels_are_told_by_source() -> None:
    source_B = torch.tensor([1, 0, 1])
    rows, flags = [[5, 6, 7], [5, 6], [5, 6, 7, 8]], [[0, 1, 1], [1, 1], [1, 0, 0, 1]]
    packed = source_of_labels(pack_labelled(rows, flags), source_B, torch.tensor(4))
    assert packed.tolist() == [1, 1, 0, 1]  # no model predicts a first token
    padded = source_of_labels(pack_targets(rows), source_B, torch.tensor(9))
    assert padded.tolist() == [1] * 3 + [0] * 2 + [1] * 4
    of_rows = source_of_labels({"counts": torch.ones(3)}, source_B, torch.tensor(3))
    assert of_rows.tolist() == source_B.tolist()
    of_pairs = pack_labelled([*rows, *rows], [*flags, *flags])  # a row has two answers
    assert source_of_labels(of_pairs, source_B, torch.tensor(3)).tolist() == source_B.tolist()

    sums = SourceSums(["a", "b"])
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 3, 6, 1])
    a, b, c, d = (float(token_cross_entropy(logits[[i]], targets[[i]])) for i in range(4))
    with sums.adding([packed[:2], packed[2:]]):
        for half in (slice(0, 2), slice(2, 4)):
            token_cross_entropy(logits[half], targets[half])
    sums.count()
    with sums.adding([packed]):  # of a step whose update is left out
        token_cross_entropy(torch.full_like(logits, torch.nan), targets)
    assert sums.own() == [pytest.approx([c, 1]), pytest.approx([a + b + d, 3])]
    kept = SourceSums(["a", "b"], sums.settle())  # as a run that goes on from a checkpoint
    assert kept.read() == pytest.approx({"loss_a": c, "loss_b": (a + b + d) / 3})
    assert kept.read() == {}


def test_losses_are_kept_by_label_and_sum_up_to_the_loss() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.tensor([0, 3, IGNORED, 6, 1])
    plain = token_cross_entropy(logits, targets, smoothing=0.1)
    (wanted,) = torch.autograd.grad(plain, logits)
    with keeping_losses() as kept:
        loss = token_cross_entropy(logits, targets, smoothing=0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(gradient, wanted)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert kept[0].sum().item() == pytest.approx(plain.item(), rel=1e-6)
    with keeping_losses(False) as kept:
        token_cross_entropy(logits, targets)
    assert kept == []
