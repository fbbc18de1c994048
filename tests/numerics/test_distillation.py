"""The loss of a student and its gradients are those of plain torch over the whole vocabulary; with
few tokens of the teacher they are those of the classes that are left.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config.origin.teacher import DivergenceName
from trainer.models import losses
from trainer.models.distillation import DistillationTerms, Lesson, divergences, likeliest
from trainer.models.head import OutputLayer
from trainer.models.losses import Terms, keeping_losses

WIDTH, VOCABULARY, POSITIONS, CHUNK = 16, 50, 45, 7
DIVERGENCES: list[DivergenceName] = ["forward", "reverse", "mixed"]


def logits(seed: int, width: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(POSITIONS, width, generator=generator)


def plain(name: DivergenceName, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """(N,) the divergence over all tokens, in fp64, from the formulas of the papers."""
    p = (teacher.double() / temperature).softmax(-1)
    q = (student.double() / temperature).softmax(-1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(-1)

    mean = (p + q) / 2
    of_name = {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "mixed": lambda: (kl(p, mean) + kl(q, mean)) / 2,
    }
    return of_name[name]()


def lesson(how: DistillationTerms, teacher: Tensor, k: int) -> Lesson:
    return Lesson(how, *likeliest(teacher, how, k))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_every_token_it_is_the_divergence_of_the_whole_vocabulary(
    name: DivergenceName, temperature: float
) -> None:
    teacher, student = logits(1), logits(2).requires_grad_()
    how = DistillationTerms(name, 1.0, temperature, VOCABULARY)
    got = divergences(student, lesson(how, teacher, VOCABULARY))
    (gradient,) = torch.autograd.grad(got.sum(), student)
    want = plain(name, teacher, student, temperature)
    (wanted,) = torch.autograd.grad(want.sum(), student)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_few_tokens_all_others_are_one_class_and_the_divergence_is_no_higher(
    name: DivergenceName,
) -> None:
    teacher, student = logits(1), logits(2)
    how = DistillationTerms(name, 1.0, 1.0, VOCABULARY)
    lower = torch.zeros(POSITIONS, dtype=torch.float64)
    for k in (1, 4, 20, VOCABULARY - 1, VOCABULARY):
        of_k = lesson(how, teacher, k)
        got = divergences(student, of_k).double()
        classes = []
        for one in (teacher, student):
            probabilities = one.double().softmax(-1)
            kept = probabilities.gather(1, of_k.ids_NK.long())
            rest = [] if k == VOCABULARY else [(1 - kept.sum(-1, keepdim=True)).clamp(min=1e-300)]
            classes.append(torch.cat([kept, *rest], dim=1).log())
        torch.testing.assert_close(got, plain(name, *classes, 1.0), rtol=1e-5, atol=1e-6)
        assert (got >= lower - 1e-6).all(), k
        lower = got
    torch.testing.assert_close(lower, plain(name, teacher, student, 1.0), rtol=1e-6, atol=1e-6)


def test_ids_behind_the_shared_ones_stand_for_no_token_and_are_left_out() -> None:
    """A vocabulary that is padded to another size."""
    teacher, student = logits(1, VOCABULARY + 14), logits(2, VOCABULARY + 6)
    how = DistillationTerms("reverse", 1.0, 1.0, VOCABULARY)
    got = divergences(student, lesson(how, teacher, VOCABULARY)).double()
    want = plain("reverse", teacher[:, :VOCABULARY], student[:, :VOCABULARY], 1.0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_rest_that_is_next_to_nothing_has_a_finite_gradient() -> None:
    teacher = torch.tensor([[90.0, 0.0, 0.0, 0.0]])
    student = torch.tensor([[0.0, 60.0, 0.0, -60.0]], requires_grad=True)
    for name in DIVERGENCES:
        how = DistillationTerms(name, 1.0, 1.0, 4)
        value = divergences(student, lesson(how, teacher, 2)).sum()
        (gradient,) = torch.autograd.grad(value, student)
        assert math.isfinite(float(value.detach()))
        assert gradient.isfinite().all()


# In chunks
# --------------------------------------------------------------------------------------------------


def step(
    weight: float, temperature: float, *, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """The loss of a small output layer, its gradients, and the losses of single targets."""
    torch.manual_seed(5)
    layer: Any = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,))
    model = SimpleNamespace(config=SimpleNamespace(), get_output_embeddings=lambda: layer)
    model.config.model_type = "any"
    how = DistillationTerms("mixed", weight, temperature, VOCABULARY)
    with monkeypatch.context() as patched:
        patched.setattr(losses, "CHUNK_BYTES", 0)
        patched.setattr(losses, "CHUNK_POSITIONS", CHUNK if chunked else POSITIONS)
        terms = Terms(0.1 if weight < 1 else 0.0, 0.01 if weight < 1 else 0.0)
        with keeping_losses() as single:
            of_teacher = lesson(how, logits(1), 9)
            loss = OutputLayer(model).loss(hidden, targets, terms, of_teacher)
    (loss * 0.37).backward()
    assert hidden.grad is not None
    return {
        "loss": loss.detach(),
        "single": torch.cat(single),
        "hidden": hidden.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
    }


@pytest.mark.parametrize(("weight", "temperature"), [(0.3, 2.0), (1.0, 1.0)])
def test_chunks_change_neither_loss_nor_gradients(
    weight: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = step(weight, temperature, chunked=False, monkeypatch=monkeypatch)
    got = step(weight, temperature, chunked=True, monkeypatch=monkeypatch)
    for name, one in want.items():
        torch.testing.assert_close(got[name], one, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(got["single"].sum(), got["loss"])


def test_the_loss_is_the_weighted_sum_of_both_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    of_both = step(0.3, 2.0, chunked=True, monkeypatch=monkeypatch)
    alone = step(1.0, 2.0, chunked=True, monkeypatch=monkeypatch)
    torch.manual_seed(5)
    layer = nn.Linear(WIDTH, VOCABULARY)
    hidden, targets = torch.randn(POSITIONS, WIDTH), torch.randint(0, VOCABULARY, (POSITIONS,))
    with torch.no_grad():
        labels = losses.token_cross_entropy(layer(hidden), targets, smoothing=0.1, z_loss=0.01)
    torch.testing.assert_close(of_both["loss"], 0.7 * labels + 0.3 * alone["loss"])
    how = DistillationTerms("mixed", 1.0, 2.0, VOCABULARY)
    scaled = 4 * divergences(layer(hidden), lesson(how, logits(1), 9)).sum()  # temperature^2
    torch.testing.assert_close(alone["loss"], scaled.detach())
