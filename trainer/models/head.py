"""The layers on top of a base: its own output layer, and a new head. The head's weights have a file
of their own beside the base's, so that others can load the base alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.models import losses
from trainer.models.distillation import DistillationTerms, Lesson, likeliest
from trainer.models.families import family_of
from trainer.models.lean.adapter import lowered
from trainer.models.losses import (
    PLAIN,
    Scorer,
    Scoring,
    Terms,
    chunked_cross_entropy,
    positions_of_chunk,
    target_losses,
)
from trainer.models.packed.replaced import replaced
from trainer.models.weights.weight_files import find_file

HEAD_FILE = "head.safetensors"


class Head(nn.Linear):
    """A new linear layer on the states of a base. Its weights are drawn as torch draws them, under
    a seed of their own, so that every rank has the same ones.

    It computes in fp32 whatever the dtype of its weights: bf16 has 128 values between two powers of
    2, so that many scores would be equal.
    """

    def __init__(self, base: Any, outputs: int = 1, *, seed: int, has_bias: bool = True) -> None:
        """base: a model of transformers, whose width and dtype are taken."""
        width = base.config.hidden_size
        super().__init__(width, outputs, bias=has_bias, dtype=next(base.parameters()).dtype)
        generator, bound = torch.Generator().manual_seed(seed), 1 / math.sqrt(width)
        if self.weight.device.type != "meta":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(
                        torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                    )

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias  # torch says that it is there
        return F.linear(input.float(), self.weight.float(), None if bias is None else bias.float())


class OutputLayer:
    """A base's output layer, which scores the vocabulary, with the scaling that its family applies
    to the states before it and to the logits after it.

    T5 v1.0 scales the states. Gemma caps its logits, Granite divides and Cohere multiplies them.
    Source: transformers 5.23.
    """

    def __init__(self, base: Any, layer: Any = None) -> None:
        """base: a model of transformers with an output layer, which may hold adapters. layer: what
        is called in its place.
        """
        self._layer, config = layer or base.get_output_embeddings(), base.config
        self._scale_of_states = config.d_model**-0.5 if scales_states(config) else 1.0
        config = getattr(config, "decoder", config)  # a T5Gemma's
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        scale: float = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        self._scale = scale

    @property
    def chunk(self) -> int:
        """How many positions have their logits at once (losses.positions_of_chunk)."""
        return positions_of_chunk(_plain(self._layer).out_features)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., D) decoder states -> (..., V) logits."""
        return self._finish(self._layer(self._apply_scale(hidden)))

    def sums(
        self, hidden_ND: Tensor, targets_N: Tensor, terms: Terms | None, lesson: Lesson | None
    ) -> dict[str, Tensor]:
        """{"loss": () fp32}, summed over the targets: in training as the experiment states it, with
        its terms and its teacher. In evaluation (terms None) it is the plain cross-entropy, and
        where a teacher has read the targets, "divergence" from it stands beside it.
        """
        if terms is not None:
            return {"loss": self.loss(hidden_ND, targets_N, terms, lesson)}
        of_labels = {"loss": self.loss(hidden_ND, targets_N)}
        if lesson is None:
            return of_labels
        scaled = self.loss(hidden_ND, targets_N, lesson=lesson.alone())
        return {**of_labels, "divergence": scaled / lesson.how.temperature**2}

    def loss(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        terms: Terms = PLAIN,
        lesson: Lesson | None = None,
    ) -> Tensor:
        """() fp32: losses.token_cross_entropy of the logits, with a teacher
        losses.student_loss, in chunks where there are many.

        Under ZeRO-3 a call of a layer gathers it, and every rank must make the same calls: each
        layer is called once, however many positions there are.
        """
        return self._scored(
            hidden_ND, Scoring(targets_N, self.chunk, self._finishing, terms, lesson=lesson)
        )

    def losses(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """(N,) fp32: losses.target_losses of the logits, in chunks where there are many. The same
        holds under ZeRO-3.
        """
        return self._scored(
            hidden_ND, Scoring(targets_N, self.chunk, self._finishing, by_target=True)
        )

    @torch.no_grad()
    def likeliest(
        self, hidden_ND: Tensor, how: DistillationTerms, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """distillation.likeliest of the logits, in chunks where there are many: (N, k) int32 ids,
        (N, k) fp32 log-probabilities, (N,) fp32 of all other tokens together. Not under ZeRO-3.
        """
        count, chunk = len(hidden_ND), self.chunk
        ids_NK = hidden_ND.new_empty(count, k, dtype=torch.int32)
        logps_NK = hidden_ND.new_empty(count, k, dtype=torch.float32)
        rest_N = hidden_ND.new_empty(count, dtype=torch.float32)
        for rows in losses.chunks_of(max(1, count), chunk):
            ids_NK[rows], logps_NK[rows], rest_N[rows] = likeliest(self(hidden_ND[rows]), how, k)
        return ids_NK, logps_NK, rest_N

    def _scored(self, hidden_ND: Tensor, scoring: Scoring) -> Tensor:
        if _has_adapters(self._layer):
            return _loss_with_adapters(self._layer, self._apply_scale(hidden_ND), scoring)
        targets_N = scoring.targets_N
        is_shorter = scoring.is_plain and torch.is_grad_enabled() and losses.is_narrow(hidden_ND)
        is_long = len(targets_N) > scoring.chunk
        if (is_long or is_shorter) and isinstance(self._layer, nn.Linear):
            return _loss(self._layer, self._apply_scale(hidden_ND), scoring)
        if scoring.by_target:
            return target_losses(self(hidden_ND), targets_N)
        plain = replace(scoring, finish=None)  # the call of this layer has finished them
        return plain.loss(self(hidden_ND), slice(None))

    @property
    def _finishing(self) -> Callable[[Tensor], Tensor] | None:
        return None if self._scale == 1.0 and self._cap is None else self._finish

    def _apply_scale(self, hidden: Tensor) -> Tensor:
        return hidden if self._scale_of_states == 1.0 else hidden * self._scale_of_states

    def _finish(self, logits: Tensor) -> Tensor:
        logits = logits if self._scale == 1.0 else logits * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


def _plain(layer: Any) -> Any:
    """The base's own linear layer, also if adapters wrap it."""
    return layer.get_base_layer() if hasattr(layer, "lora_A") else layer


def _has_adapters(layer: Any) -> bool:
    """Whether low-rank adapters add to the layer's logits. DoRA (in peft 0.21 a lora_variant) also
    scales the weight, so it does not count.
    """
    is_adapted = hasattr(layer, "lora_A") and not layer.disable_adapters
    return is_adapted and not layer.lora_variant


def _loss(layer: Any, hidden_ND: Tensor, scoring: Scoring) -> Tensor:
    """The loss, or the losses by target, computed inside a call of the layer, where ZeRO-3 has
    gathered its weight.
    """

    def of_states(hidden_ND: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden_ND, Scorer(layer.weight, layer.bias), scoring)

    with _doing(layer, of_states):
        return layer(hidden_ND)


def _loss_with_adapters(layer: Any, hidden_ND: Tensor, scoring: Scoring) -> Tensor:
    """The same with adapters: computed inside calls of all three layers, made in peft's order."""
    (name,) = layer.active_adapters
    plain, down, up = layer.get_base_layer(), layer.lora_A[name], layer.lora_B[name]

    def of_states(hidden_ND: Tensor) -> Tensor:
        low_NR = lowered(down, layer.lora_dropout[name], hidden_ND) * layer.scaling[name]

        def of_low(low_NR: Tensor) -> Tensor:
            scorer = Scorer(plain.weight, plain.bias, low_NR, up.weight)
            return chunked_cross_entropy(hidden_ND, scorer, scoring)

        with _doing(up, of_low):
            return up(low_NR)

    with _doing(plain, of_states):
        return plain(hidden_ND)


def _doing(module: nn.Module, function: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Inside, a call of the module runs `function` instead of its forward; its hooks still run."""
    return replaced(module, "forward", function)


def scales_states(config: Any) -> bool:
    """Whether a model with T5's decoder multiplies its states by d_model**-0.5 before its head.

    T5 v1.0 and umT5 do, T5 v1.1 and mT5 do not. Source: transformers 5.23.
    """
    key = family_of(config).scale_key
    return key is not None and getattr(config, key)


def write_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Add a head's weights, by their names within it, to the folder of its base."""
    safetensors_file.write_tensors(folder, HEAD_FILE, head)


@torch.no_grad()
def load_head(head: nn.Module, source: str) -> bool:
    """Fill a head from a folder or Hub id of ours; False when it has none. ConfigError when it does
    not fit.
    """
    from safetensors.torch import load_file

    file = find_file(source, HEAD_FILE)
    if file is None:
        return False
    tensors = load_file(file)
    for name, parameter in head.named_parameters():
        if name not in tensors or tensors[name].shape != parameter.shape:
            got = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ConfigError(
                f"{file}: {name} is {got}, want {tuple(parameter.shape)}. Export it again."
            )
        parameter.copy_(tensors[name])
    return True
