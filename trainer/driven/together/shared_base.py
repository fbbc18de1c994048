"""One frozen base for many runs: each part of a pack is read with the adapters of its own run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.driven.packs import TARGETS, batch_of
from trainer.driven.together.adapter_set import AdapterSet, LayerOfAdapters, draw
from trainer.errors import ConfigError
from trainer.models.head import OutputLayer
from trainer.models.lean.adapter import low_of
from trainer.models.lean.dropout import Draw, Dropped, DroppedAgain
from trainer.runtime.batch import name_batch_when_out_of_memory, to_device

if TYPE_CHECKING:
    from trainer.config.optimizer.lora import Lora
    from trainer.driven.passes import PassLayout
    from trainer.models.losses import Terms
    from trainer.operations.rows import DrivenRow

# M tokens of a pack, N targets, D width, O outputs of a layer, R rank


@dataclass(frozen=True)
class _SeededDraw(Draw):
    """The dropout of one layer, whose draw depends on the run alone, and is the same when a block
    is computed again.
    """

    device: torch.device
    rate: float
    seed: int

    def first(self, input: Tensor) -> Dropped:
        if not self.rate:
            return Dropped(input, ())
        stays = self._stays(input)
        # a processor draws slowly (models/lean/dropout.py)
        kept = (stays.to(torch.uint8),) if input.device.type == "cpu" else ()
        return Dropped(input * stays / (1 - self.rate), kept)

    def again(self, input: Tensor, of_values: Tensor | None, *kept: Tensor) -> DroppedAgain:
        if not self.rate:
            return DroppedAgain(input, of_values)
        stays = kept[0].to(input.dtype) if kept else self._stays(input)
        gradient = None if of_values is None else of_values.div_(1 - self.rate).mul_(stays)
        return DroppedAgain(stays.mul_(input).div_(1 - self.rate), gradient)

    def _stays(self, input: Tensor) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        stays = torch.empty_like(input, requires_grad=False)
        return stays.bernoulli_(1 - self.rate, generator=generator)


@dataclass(frozen=True)
class PackPart:
    """The rows of one run in a pack: `count` of them from row `start` on.

    seed: of its dropout; None: nothing is dropped.
    """

    adapters: AdapterSet
    start: int
    count: int
    seed: tuple[int, ...] | None
    leaves: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", self.adapters.leaves())

    def more(self, layer: LayerOfAdapters, input_MD: Tensor) -> Tensor:
        """(M, O) what the adapter of a layer adds to its output for (M, D)."""
        draw = self._draw(layer, input_MD.device)
        low_MR = low_of(input_MD, self.leaves[layer.down], draw)
        return F.linear(low_MR, self.leaves[layer.up]) * layer.scale

    def dropped(self, layer: LayerOfAdapters, input_MD: Tensor) -> Tensor:
        """The input of an adapter after its dropout."""
        return self._draw(layer, input_MD.device).first(input_MD).values

    def _draw(self, layer: LayerOfAdapters, device: torch.device) -> _SeededDraw:
        if self.seed is None or not layer.dropout:
            return _SeededDraw(device, 0.0, 0)
        sequence = np.random.SeedSequence((*self.seed, layer.number))
        seed = int(sequence.generate_state(1, np.uint64)[0]) >> 1
        return _SeededDraw(device, layer.dropout, seed)


@dataclass(frozen=True)
class LabelledPart:
    """The rows of one run in a pack of labelled rows, with so many labels. terms: of its loss in
    training; None: the plain cross-entropy of evaluations.
    """

    rows: PackPart
    num_labels: int
    terms: Terms | None


@dataclass(frozen=True)
class Stream:
    """The tokens of a pack in stretches. sizes: of each; parts: whose it is, None: nobody's."""

    sizes: list[int]
    parts: list[PackPart | None]

    def through(self, name: str, source: Tensor, output: Tensor) -> Tensor:
        """The output of a layer with what the adapters of each stretch add to it."""
        of_parts = [part and part.adapters.layers_by_name.get(name) for part in self.parts]
        if not any(of_parts):
            return output
        input_MD = source.reshape(-1, source.shape[-1])
        if len(input_MD) != sum(self.sizes):
            raise ConfigError(
                f"together: layer {name} of this base reads {len(input_MD)} tokens of a pack "
                f"of {sum(self.sizes)}, so that nobody knows whose they are. Leave together out."
            )
        pieces: list[Tensor] = []
        stretches = zip(
            self.parts,
            of_parts,
            input_MD.split(self.sizes),
            output.reshape(-1, output.shape[-1]).split(self.sizes),
            strict=True,
        )
        for part, layer, own_MD, output_MO in stretches:
            if part is not None and layer is not None:
                output_MO = output_MO + part.more(layer, own_MD).to(output_MO.dtype)
            pieces.append(output_MO)
        return torch.cat(pieces).view(output.shape)


class _Weight(nn.Module):
    """A linear layer whose weight is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, source: Tensor) -> Tensor:
        return F.linear(source, self.weight)


class SharedBase:
    """The model of a task without adapters, frozen, that adds to its layers what the adapters of
    each stretch of a pack say.
    """

    def __init__(
        self, model: Any, base_name: str, layout: PassLayout, *, key: str = "data.together"
    ) -> None:
        """model: a CausalLM on its device. ConfigError for a base that rows of several runs cannot
        share; key: what asked for it.
        """
        self._model, self._name, self._layout = model.requires_grad_(False), base_name, layout
        self.base: Any = model.get_submodule(base_name)
        refuse_unsharable(self.base, key=key)
        output = self.base.get_output_embeddings()
        names = {id(module): name for name, module in self.base.named_modules()}
        self._output = names[id(output)]
        self._hooked: set[str] = {self._output}  # its adapters go with the loss
        self._stream: Stream | None = None

    def draw(self, how: Lora, *, seed: int) -> AdapterSet:
        """New adapters for a run, as `adapter_set.draw`."""
        adapters = draw(self.base, how, seed=seed, prefix=self._name)
        for name in adapters.layers_by_name.keys() - self._hooked:
            hook = functools.partial(self._add, name)
            self.base.get_submodule(name).register_forward_hook(hook)
            self._hooked.add(name)
        return adapters

    def _add(
        self, name: str, layer: nn.Module, arguments: Sequence[Tensor], output: Tensor
    ) -> Tensor:
        return output if self._stream is None else self._stream.through(name, arguments[0], output)

    def logps(
        self, rows: Sequence[DrivenRow], parts: Sequence[PackPart], *, with_backward: bool
    ) -> list[Tensor]:
        """(N,) fp32 for each part: the log-probabilities of the targets of its rows. Rows that are
        in no part are read and not scored. parts: in their order; with_backward: with a graph.
        """
        batch = batch_of(rows, is_packed=self._layout.is_packed, pad=self._layout.pad)
        width = None if self._layout.is_packed else batch["input_ids"].shape[1]
        sizes = [len(row.tokens) if width is None else width for row in rows]
        counts = [sum(_targets(row) for row in _rows(part, rows)) for part in parts]
        targets_N = batch.pop("targets")
        how: Any = {"sizes": sizes, "with_backward": with_backward}
        pieces = self._pieces(batch, parts, counts, **how)
        targets = to_device({"targets": targets_N})["targets"].split(counts)
        return self._finished(self._scored, parts, pieces, targets, with_backward=with_backward)

    def losses(
        self,
        batch: Mapping[str, Tensor],
        parts: Sequence[LabelledPart],
        *,
        sizes: Sequence[int],
        with_backward: bool,
    ) -> list[Tensor]:
        """() fp32 for each part: the sum of the losses of its labels, as the model of its run alone
        gives it.

        batch: rows as CausalLM reads them, with labels; those that are in no part have none. sizes:
        the tokens of each row.
        """
        batch = dict(batch)
        after = batch["scored"] + 1
        targets_N = batch.pop("labels").flatten().index_select(0, after)
        counts = [part.num_labels for part in parts]
        how: Any = {"sizes": sizes, "with_backward": with_backward}
        pieces = self._pieces(batch, [part.rows for part in parts], counts, **how)
        targets = to_device({"targets": targets_N})["targets"].split(counts)
        return self._finished(self._loss, parts, pieces, targets, with_backward=with_backward)

    def _pieces(
        self,
        batch: Mapping[str, Tensor],
        parts: Sequence[PackPart],
        counts: Sequence[int],
        *,
        sizes: Sequence[int],
        with_backward: bool,
    ) -> Sequence[Tensor]:
        """(N, D) for each part: the states of its scored tokens, `counts` of them. With
        with_backward the pack is the present one until gradients() was called.
        """
        batch = to_device(batch)
        self._stream = _stream(sizes, parts)
        self._model.train(with_backward)
        try:
            with torch.set_grad_enabled(with_backward), name_batch_when_out_of_memory([batch]):
                return self._model.scored_states(**batch).split(list(counts))
        except BaseException:
            self._stream = None
            raise
        finally:
            if not with_backward:
                self._stream = None

    def _finished(
        self,
        finish: Callable[[Any, Tensor, Tensor], Tensor],
        parts: Sequence[Any],
        pieces: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        with_backward: bool,
    ) -> list[Tensor]:
        """What `finish` makes of each part, its states and its targets."""
        try:
            with torch.set_grad_enabled(with_backward):
                every = zip(parts, pieces, targets, strict=True)
                return [finish(part, states, of) for part, states, of in every]
        except BaseException:
            self._stream = None
            raise

    def gradients(self, losses: Sequence[Tensor], parts: Sequence[PackPart]) -> list[list[Tensor]]:
        """For each part the gradients of its loss, of its adapters in their order. losses: () each,
        of the log-probabilities that logps() has just given.
        """
        leaves = [leaf for part in parts for leaf in part.leaves.values()]
        try:
            partials = torch.autograd.grad(losses, leaves, allow_unused=True)
        finally:
            self._stream = None
        whole = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for gradient, leaf in zip(partials, leaves, strict=True)
        ]
        ends = np.cumsum([len(part.leaves) for part in parts])
        return [whole[end - len(part.leaves) : end] for end, part in zip(ends, parts, strict=True)]

    def _scored(self, part: PackPart, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """(N,) the log-probabilities of one run: its bits are those of its own states alone."""
        return -self._output_layer(part).losses(hidden_ND, targets_N)

    def _loss(self, part: LabelledPart, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """() the summed loss of one run."""
        if not len(targets_N):  # rows that were cut before their first label
            return hidden_ND.float().sum()
        return self._output_layer(part.rows).sums(hidden_ND, targets_N, part.terms, None)["loss"]

    def _output_layer(self, part: PackPart) -> OutputLayer:
        layer = part.adapters.layers_by_name.get(self._output)
        return OutputLayer(self.base, None if layer is None else self._proxy(part, layer))

    def _proxy(self, part: PackPart, layer: LayerOfAdapters) -> Any:
        """The output layer with the adapters of a run, with the attributes that peft's has."""
        return SimpleNamespace(
            active_adapters=("default",),
            get_base_layer=self.base.get_output_embeddings,
            lora_A={"default": _Weight(part.leaves[layer.down])},
            lora_B={"default": _Weight(part.leaves[layer.up])},
            lora_dropout={"default": functools.partial(part.dropped, layer)},
            scaling={"default": layer.scale},
            lora_variant={},
            disable_adapters=False,
        )


def _stream(sizes: Sequence[int], parts: Sequence[PackPart]) -> Stream:
    stretches: list[tuple[int, PackPart | None]] = []
    end = 0
    for part in parts:
        stretches.append((sum(sizes[end : part.start]), None))
        end = part.start + part.count
        stretches.append((sum(sizes[part.start : end]), part))
    stretches.append((sum(sizes[end:]), None))
    real = [stretch for stretch in stretches if stretch[0]]
    return Stream([size for size, _ in real], [part for _, part in real])


def _rows(part: PackPart, rows: Sequence[DrivenRow]) -> Sequence[DrivenRow]:
    return rows[part.start : part.start + part.count]


def _targets(row: DrivenRow) -> int:
    return int(row.inputs[TARGETS].size)


def refuse_unsharable(base: Any, *, key: str) -> None:
    """ConfigError for a base in which a row changes what another row of its pack gives. base: a
    model of transformers, which may be on the meta device; key: what asked for it.
    """
    config = base.config.get_text_config()
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    reasons = [f"{key}={getattr(config, key)}" for key in experts if getattr(config, key, None)]
    drawn = [name for name, m in base.named_modules() if isinstance(m, nn.Dropout) and m.p]
    reasons += drawn[:1]
    reasons += ["attention_dropout"] if getattr(config, "attention_dropout", 0.0) else []
    if reasons:
        raise ConfigError(
            f"{key}: this base has {', '.join(reasons)}. Experts read as many tokens as "
            "are sent to them, and a dropout of the base is drawn over a whole pack, so that the "
            f"rows of one run would change the bits of another. Leave {key} out."
        )
