"""Label smoothing, z-loss and NEFTune against a training loop in plain torch: a stock model, padded
rows, F.cross_entropy, and noise that is computed number by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exp_configs import vary
from tests.facts import experiment, write_facts
from tests.numerics.plain_peft import padded, pieces
from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import tasks
from trainer.models.inputs.neftune import noise_fields, noise_of
from trainer.models.losses import Terms, token_cross_entropy
from trainer.protocol.task import DRAW, Places

SMOOTHING, Z_LOSS, ALPHA, STEPS, ROWS, SEED, LR = 0.1, 0.02, 5.0, 4, 8, 5, 0.01
TERMS: dict[str, Any] = {"label_smoothing": SMOOTHING, "z_loss": Z_LOSS, "neftune_alpha": ALPHA}
# Sums of a loss in another order, after four steps; in bf16 what each layer gives is rounded.
LOSSES = {"fp32": 2e-5, "bf16": 0.05}
Row = Mapping[str, Sequence[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


# In plain torch
# --------------------------------------------------------------------------------------------------

WORD, LONG = 2**32 - 1, 2**64 - 1


def mixed(word: int) -> int:
    """lowbias32."""
    word ^= word >> 16
    word = word * 0x7FEB352D & WORD
    word ^= word >> 15
    word = word * 0x846CA68B & WORD
    return word ^ word >> 16


def slow_noise(draw: int, place: int, length: int, width: int) -> list[float]:
    """The noise of one token."""
    state = draw + (place + 1) * 0x9E3779B97F4A7C15 & LONG
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & LONG
    key = ((state ^ state >> 27) * 0x94D049BB133111EB & LONG) >> 32
    columns = [mixed(column * 0x9E3779B9 & WORD) for column in range(1, width + 1)]
    most = ALPHA / math.sqrt(length * width)
    return [((mixed(key + word & WORD) >> 8) / 2**23 - 1) * most for word in columns]


def drawn(step: int, number: int) -> int:
    """The draw of a row (trainer/data/order.py)."""
    words = np.random.SeedSequence([SEED, step, number]).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def noisy(embedding: nn.Module, ids: Tensor, mask: Tensor, draws: Sequence[int] | None) -> Tensor:
    """(B, T, D) embeddings, with the noise of each row at its real tokens."""
    hidden = embedding(ids)
    if draws is None:
        return hidden
    noise = torch.zeros_like(hidden)
    for row, draw in enumerate(draws):
        length = int(mask[row].sum())
        for place in range(length):
            noise[row, place] = torch.tensor(slow_noise(draw, place, length, hidden.shape[2]))
    return hidden + noise


def summed(logits: Tensor, labels: Tensor, *, is_training: bool) -> tuple[Tensor, int]:
    """The sum of the losses of labelled positions, and how many there are."""
    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    logits, labels = logits[labels != -100], labels[labels != -100]
    if not is_training:
        return F.cross_entropy(logits, labels, reduction="sum"), len(labels)
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
    return loss + Z_LOSS * (logits.exp().sum(-1).log() ** 2).sum(), len(labels)


def of_causal_lm(model: Any, rows: Sequence[Row], draws: Any) -> tuple[Tensor, int]:
    ids, mask = padded([row["ids"] for row in rows])
    hidden = noisy(model.get_input_embeddings(), ids, mask, draws)
    logits = model(inputs_embeds=hidden, attention_mask=mask).logits[:, :-1]
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    return summed(logits, labels, is_training=draws is not None)


def of_summariser(model: Any, rows: Sequence[Row], draws: Any) -> tuple[Tensor, int]:
    ids, mask = padded([row["source"] for row in rows])
    targets, real = padded([pieces(row, "targets", "targets_lengths")[0] for row in rows])
    labels = targets.masked_fill(real == 0, -100)
    hidden = noisy(model.shared, ids, mask, draws)
    made = model(inputs_embeds=hidden, attention_mask=mask, labels=labels)
    return summed(made.logits, labels, is_training=draws is not None)


def of_fid(model: Any, rows: Sequence[Row], draws: Any) -> tuple[Tensor, int]:
    """The noise of a question is that of one row: the tokens of all its passages."""
    total, count = torch.zeros(()), 0
    for number, row in enumerate(rows):
        passages = pieces(row, "passages", "passages_lengths") or [[]]
        texts = [[*map(int, row["question"]), *map(int, passage)][:64] for passage in passages]
        ids = torch.tensor([[token for text in texts for token in text]])
        own = None if draws is None else [draws[number]]
        hidden = noisy(model.shared, ids, torch.ones_like(ids), own)
        states = [
            model.encoder(inputs_embeds=part).last_hidden_state
            for part in hidden.split([len(text) for text in texts], dim=1)
        ]
        labels = torch.tensor([[int(t) for t in pieces(row, "targets", "targets_lengths")[0]]])
        made = model(encoder_outputs=(torch.cat(states, dim=1),), labels=labels)
        loss, units = summed(made.logits, labels, is_training=draws is not None)
        total, count = total + loss, count + units
    return total, count


LOOPS: dict[str, Callable[..., tuple[Tensor, int]]] = {
    "causal_lm": of_causal_lm,
    "summariser": of_summariser,
    "fid": of_fid,
}


def values_of(name: str, folder: Path, precision: str = "fp32") -> dict[str, Any]:
    train = {"steps": STEPS, "eval_every": STEPS, "save_every": STEPS, "order": "as_given"}
    train |= {"precision": precision, **TERMS}
    values: Any = experiment(name, folder, train=train, schedule={"shape": "constant"})
    del values["schedule"]["warmup_steps"]
    return vary(values, data={"sample_targets": False}) if name == "fid" else values


def loaded(values: dict[str, Any], folder: Path) -> Any:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder / "runs"))


def by_torch(name: str, folder: Path) -> tuple[list[float], float]:
    """The loss of every step, and the validation loss at the end."""
    task = loaded(values_of(name, folder), folder)
    model = next(iter(task.model().children())).train()
    rows = [task.encode(row) for row in task.rows("train")]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=LR), []
    for step in range(STEPS):
        numbers = range(step * ROWS, (step + 1) * ROWS)
        draws = [drawn(step, number) for number in numbers]
        total, count = LOOPS[name](model, [rows[number] for number in numbers], draws)
        (total / count).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    valid = [task.encode(row) for row in task.rows("valid")]
    with torch.no_grad():
        total, count = LOOPS[name](model.eval(), valid, None)
    return losses, float(total) / count


# By Lathe
# --------------------------------------------------------------------------------------------------


def _trained(name: str, folder: Path, savedir: Path, stage: int, precision: str) -> Any:
    from tests.contract.runs import losses, train

    values = values_of(name, folder, precision)
    _, lines = train(values, folder, savedir, stage)
    return losses(lines), next(line["valid/loss"] for line in lines if "valid/loss" in line)


SHORT = [("causal_lm", 2, 3, "fp32"), ("causal_lm", 1, 2, "bf16"), ("fid", 1, 0, "fp32")]
SHORT += [("summariser", 1, 1, "fp32")]
EVERY = [
    (name, world, stage, precision)
    for name in LOOPS
    for world in (1, 2)
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16")
]


@pytest.mark.parametrize(
    ("name", "world", "stage", "precision"),
    [
        pytest.param(
            *case, marks=[] if case in SHORT else pytest.mark.long, id="-".join(map(str, case))
        )
        for case in EVERY
    ],
)
def test_the_losses_are_those_of_plain_torch(
    name: str, world: int, stage: int, precision: str, folder: Path, tmp_path: Path
) -> None:
    """At every stage, on one rank and two: neither divides a row's noise or the loss otherwise."""
    wanted, wanted_valid = by_torch(name, folder)
    assert abs(wanted[0] - wanted[-1]) > 0.1, "something trains"
    got, valid = run_on_ranks(world, _trained, name, folder, tmp_path, stage, precision)[0]
    assert got == pytest.approx(wanted, abs=LOSSES[precision])
    assert valid == pytest.approx(wanted_valid, abs=LOSSES[precision]), "the plain loss"


# The parts
# --------------------------------------------------------------------------------------------------


def test_z_loss_is_its_definition_and_counts_no_position_without_a_label() -> None:
    logits = 5 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, -100, 3, 10, 0, -100, 5])
    squares = [math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()]
    wanted = float(token_cross_entropy(logits, targets))
    wanted += 0.3 * sum(x for x, target in zip(squares, targets, strict=True) if target >= 0)
    assert float(token_cross_entropy(logits, targets, z_loss=0.3)) == pytest.approx(
        wanted, rel=1e-6
    )


def test_noise_is_computed_number_by_number_in_32_bits() -> None:
    row = {DRAW: np.array([drawn(2, 17)])}
    fields = noise_fields([row], [3], ALPHA)
    found = noise_of(fields["noise_keys"], fields["noise_scales"], 6)
    wanted = torch.tensor([slow_noise(drawn(2, 17), place, 3, 6) for place in range(3)])
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)


def test_noise_is_uniform_and_scaled_by_the_length_of_the_row() -> None:
    rows = [{DRAW: np.array([drawn(0, number)])} for number in range(2)]
    fields = noise_fields(rows, [100, 400], ALPHA)
    short, long = noise_of(fields["noise_keys"], fields["noise_scales"], 64).split([100, 400])
    for noise, length in ((short, 100), (long, 400)):
        most = ALPHA / math.sqrt(length * 64)
        assert noise.abs().max() <= most
        share = (noise / most).flatten().sort().values
        even = torch.linspace(-1, 1, len(share))
        assert (share - even).abs().max() < 0.06, "Kolmogorov and Smirnov, at six deviations"
    assert torch.corrcoef(torch.stack([short.flatten(), long[:100].flatten()]))[0, 1].abs() < 0.06


@pytest.mark.parametrize("name", ["causal_lm", "summariser", "fid", "cross_attention"])
def test_a_row_has_the_same_noise_whatever_stands_beside_it(name: str, folder: Path) -> None:
    task = loaded(values_of(name, folder) if name in LOOPS else _of_layers(folder), folder)
    rows = [
        {**{key: np.array(ids) for key, ids in task.encode(row).items()}, DRAW: np.array([n + 7])}
        for n, (row, _) in enumerate(zip(task.rows("train"), range(3), strict=False))
    ]
    alone = [task.collate([row]) for row in rows]
    together = task.collate(rows)
    for field in ("noise_keys", "noise_scales"):
        assert torch.equal(together[field], torch.cat([batch[field] for batch in alone]))
    assert len(set(together["noise_keys"].tolist())) == together["noise_keys"].numel()
    without = [{key: ids for key, ids in row.items() if key != DRAW} for row in rows]
    assert "noise_keys" not in task.collate(without), "rows of an evaluation have no draw"


def test_padded_rows_have_the_noise_of_packed_ones() -> None:
    rows = [{DRAW: np.array([drawn(1, number)])} for number in range(3)]
    packed, wide = (
        noise_fields(rows, [2, 5, 1], ALPHA),
        noise_fields(rows, [2, 5, 1], ALPHA, width=8),
    )
    is_real = torch.arange(8) < torch.tensor([[2], [5], [1]])
    for field, values in packed.items():
        assert torch.equal(wide[field][is_real], values)
        assert not wide[field][~is_real].any()


def _of_layers(folder: Path) -> dict[str, Any]:
    values: Any = experiment("cross_attention", folder, train=TERMS)
    return values


@pytest.mark.parametrize("is_packed", [True, False])
def test_added_layers_read_noisy_text_and_the_context_as_it_is(
    is_packed: bool, folder: Path
) -> None:
    task = loaded(vary(_of_layers(folder), data={"packed": is_packed}), folder)
    rows = [
        {**{key: np.array(ids) for key, ids in task.encode(row).items()}, DRAW: np.array([n + 7])}
        for n, (row, _) in enumerate(zip(task.rows("train"), range(3), strict=False))
    ]
    batch, model = task.collate(rows), task.model().train()
    (got,) = task.losses(model, [batch])
    embedding, width = model.base.get_input_embeddings(), 32
    plain_batch = {k: v for k, v in batch.items() if not k.startswith("noise")}
    (without,) = task.losses(model, [plain_batch])
    assert abs(float(got - without)) > 0.01
    noise = torch.zeros(*(batch["tokens"] if is_packed else batch["input_ids"]).shape, width)
    lengths = [len(row["decoder"]) for row in rows]
    for number, length in enumerate(lengths):
        own = torch.tensor(
            [slow_noise(number + 7, place, length, width) for place in range(length)]
        )
        start = sum(lengths[:number])
        place = slice(start, start + length) if is_packed else (number, slice(0, length))
        noise[place] = own
    ids = batch["tokens"][None] if is_packed else batch["input_ids"]

    def add(_: nn.Module, given: Any, hidden: Tensor) -> Tensor:
        is_decoder = given[0].shape == ids.shape and torch.equal(given[0], ids)
        return hidden + noise.view(hidden.shape) if is_decoder else hidden

    embedding.register_forward_hook(add)
    (wanted,) = task.losses(model, [plain_batch])
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)
    model.terms = Terms()
    (without_terms,) = task.losses(model, [plain_batch])
    assert float(wanted - without_terms) > 1.0, "z-loss and smoothing are in it"


# Refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vera", "retriever"])
@pytest.mark.parametrize("key", TERMS)
def test_a_loss_without_a_vocabulary_has_none_of_them(name: str, key: str, folder: Path) -> None:
    with refused("terms_without_vocabulary", key=key, task=name):
        tasks.parse(experiment(name, folder, train={key: TERMS[key]}))


def test_all_of_them_are_named_at_once(folder: Path) -> None:
    with refused(
        "terms_without_vocabulary", key="label_smoothing, train.z_loss, train.neftune_alpha"
    ):
        tasks.parse(experiment("vera", folder, train=TERMS))


def test_the_older_place_of_label_smoothing_is_read(folder: Path) -> None:
    values: Any = experiment("summariser", folder)
    cfg = tasks.parse({**values, "label_smoothing": 0.2})
    assert cfg.train.label_smoothing == 0.2
    assert cfg == tasks.parse(vary(values, train={"label_smoothing": 0.2}))
