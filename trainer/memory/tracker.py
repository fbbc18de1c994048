"""Every byte that is alive on a device, by category, and the moments at which most of them are.

Storages are followed by weak references and counted in the blocks of 512 bytes that the CUDA
allocator hands out. torch's MemTracker gives the same numbers, but looks at all modules again at
every operation: 54 s where this takes 2.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trainer.memory.measure import Moment

BLOCK = 512
LARGEST = 3  # tensors that are named


@dataclass
class _Storage:
    nbytes: int
    category: str
    name: str
    reference: Any = field(repr=False)


class Tracker:
    """Counts what is made on one device."""

    def __init__(self, device: str) -> None:
        self._device, self._label = device, "activations"
        self._storages: dict[int, _Storage] = {}
        self._vocabularies: set[int] = set()
        self.live: dict[str, int] = dict.fromkeys(
            ("weights", "buffers", "gradients", "activations", "logits"), 0
        )
        self._moments: dict[int, Moment] = {}  # by bytes of gradients
        self.largest: list[tuple[str, int]] = []  # tensors alive when most was alive

    @contextmanager
    def labelling(self, category: str) -> Iterator[None]:
        """Inside, what is made belongs to this category."""
        before, self._label = self._label, category
        try:
            yield
        finally:
            self._label = before

    def watch(self, model: nn.Module) -> None:
        """Tell the gradients of the model's parameters and its logits from other activations."""
        # A layer as wide as a vocabulary is no sign: there may be as many positions as it is wide.
        heads = [getattr(m, "get_output_embeddings", lambda: None)() for m in model.modules()]
        self._vocabularies = {m.out_features for m in heads if isinstance(m, nn.Linear)}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_gradient)

    def restart(self) -> None:
        """Forget the moments seen so far; what is alive stays alive."""
        self._moments = {}
        self._note()

    @property
    def moments(self) -> list[Moment]:
        """The moments since restart() that may be the highest, whatever a gradient and an optimizer
        cost.
        """
        kept: list[Moment] = []
        for moment in sorted(self._moments.values(), key=lambda m: -m.gradients):
            rest = moment.total - moment.gradients
            if not kept or rest > kept[-1].total - kept[-1].gradients:
                kept.append(moment)
        return kept

    def see(self, out: Any, func: Any) -> None:
        """Count the storages of an operation's results that were not there before."""
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                self._add(tensor, func)

    def _add(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
        category = self._label
        if category == "activations" and tensor.ndim > 1 and self._is_logits(tensor):
            category = "logits"
        shape = "x".join(map(str, tensor.shape))
        name = (
            f"{str(func).removeprefix('aten.').partition('.')[0]} {shape} {str(tensor.dtype)[6:]}"
        )
        self._storages[key] = _Storage(
            nbytes, category, name, weakref.ref(storage, lambda _: self._drop(key))
        )
        self.live[category] += nbytes
        self._note()

    def _is_logits(self, tensor: Tensor) -> bool:
        return tensor.shape[-1] in self._vocabularies and tensor.is_floating_point()

    def _drop(self, key: int) -> None:
        storage = self._storages.pop(key)
        self.live[storage.category] -= storage.nbytes

    def _is_gradient(self, parameter: Tensor) -> None:
        storage = self._storages[parameter.grad.untyped_storage()._cdata]  # pyright: ignore[reportOptionalMemberAccess]
        self.live[storage.category] -= storage.nbytes
        storage.category = "gradients"
        self.live["gradients"] += storage.nbytes
        self._note()

    def _note(self) -> None:
        live = self.live
        now = Moment(live["gradients"], live["activations"], live["logits"])
        known = self._moments.get(now.gradients)
        if known is None or now.total > known.total:
            self._moments[now.gradients] = now

    def name_largest(self) -> None:
        """Remember the largest tensors that are alive now, but for weights and gradients."""
        found = [s for s in self._storages.values() if s.category in ("activations", "logits")]
        top = sorted(found, key=lambda s: -s.nbytes)[:LARGEST]
        self.largest = [(storage.name, storage.nbytes) for storage in top]
