"""Counts the bytes that are allocated on a device, by category, and the operators that run there.
From these it finds the moments at which most memory is allocated.

Weak references tell when a storage is freed. Sizes are counted in blocks of 512 bytes, as the CUDA
allocator hands them out. torch's MemTracker gives the same numbers, but it walks through all
modules at every operation and takes 54 s where this takes 2 s.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.plan.memory.fake_values import tensors_in
from trainer.plan.memory.measure import Moment
from trainer.plan.operators import Operator, operator_of
from trainer.plan.time.blocks import Part, Stacks, parts_of_whole, storage_of, whole

BLOCK = 512
LARGEST = 3  # tensors that are named
SMALL = 100_000  # numbers of a weight that ZeRO-3 leaves whole everywhere: DeepSpeed's own default


@dataclass
class _Storage:
    nbytes: int
    category: str
    name: str
    reference: Any = field(repr=False)


@dataclass(frozen=True)
class _Change:
    """The event of memory that is allocated (nbytes > 0) or freed (nbytes < 0)."""

    nbytes: int
    category: str


@dataclass(frozen=True)
class _Read:
    """The event of the first read of a large weight in a run of the model."""


class _Weights(dict[str, Any]):
    """The weights of a module. Calls `note` when one is read, by the module itself or by another
    module, for which ZeRO-3 gathers it too (deepspeed's ZeROOrderedDict).
    """

    def __init__(self, weights: Mapping[str, Any], note: Callable[[Any], None]) -> None:
        super().__init__(weights)
        self._note = note

    def __getitem__(self, name: str) -> Any:
        weight = super().__getitem__(name)
        self._note(weight)
        return weight


class Forward:
    """The event of a forward pass of the whole model that begins."""


@dataclass(frozen=True)
class _Times:
    """The event from which on all work counts `count` times, until the next such event."""

    count: int


# Events of calls of the host. An operator while autograd records a graph (TRACKED) or does not
# (PLAIN); a module that runs forward or backward (VISIT); the whole model that runs (RUN).
TRACKED, PLAIN, VISIT, RUN = "tracked", "plain", "visits", "runs"


@dataclass(frozen=True)
class Ran:
    """Operators and calls of the host, each with how often it ran."""

    operators: Counter[Operator] = field(default_factory=Counter[Operator])
    calls: Counter[str] = field(default_factory=Counter[str])

    def __add__(self, other: Ran) -> Ran:
        return Ran(self.operators + other.operators, self.calls + other.calls)


class Tracker:
    """Counts the memory and the operators of one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._storages: dict[int, _Storage] = {}
        self._vocabularies: set[int] = set()
        # by module that is running, outermost first: the number of events before it began
        self._starts: list[int] = []
        self._large: set[nn.Parameter] = set()  # weights that ZeRO-3 divides
        self._unread: set[nn.Parameter] = set()  # of these, those that this run has not read yet
        self.live: dict[str, int] = dict.fromkeys(
            ("weights", "buffers", "gradients", "activations", "logits"), 0
        )
        self._before = dict(self.live)  # at restart()
        self._events: list[Any] = []  # since restart()
        self._stacks = whole()
        self._place: Any = None
        self.largest: list[tuple[str, int]] = []  # tensors at the memory peak

    def hold(self, tensor: Tensor, category: str) -> None:
        """Count a tensor that no operation made."""
        self._add(tensor, "placed", category)

    def watch(self, model: nn.Module, stacks: Stacks | None = None) -> None:
        """Count the gradients of the model's parameters and its logits apart from activations.

        stacks: the stacks of the model that were shortened to a few blocks.
        """
        # Only output layers give logits: there may also be as many positions as tokens in the
        # vocabulary.
        heads = [getattr(m, "get_output_embeddings", lambda: None)() for m in model.modules()]
        self._vocabularies = {m.out_features for m in heads if isinstance(m, nn.Linear)}
        self._stacks = stacks or self._stacks
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_gradient)
        self._large = {weight for weight in model.parameters() if weight.numel() > SMALL}
        self._unread = set(self._large)
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self._starts.append(len(self._events)))
            module.register_forward_hook(self._visit)
            if not self._large.isdisjoint(module.parameters(recurse=False)):
                module._parameters = _Weights(module._parameters, self._ask)

    def restart(self) -> None:
        """Forget the moments so far. Memory that is allocated stays counted."""
        self._events, self._before = [], dict(self.live)

    def begin_forward(self) -> None:
        """Note that the model begins to run (see forwards_in()). Under ZeRO-3 it may have to gather
        its weights again.
        """
        self._events.append(Forward())
        self._unread = set(self._large)

    @contextmanager
    def standing_for(self, count: int) -> Iterator[None]:
        """Inside, everything that runs counts `count` times."""
        self._events.append(_Times(count))
        try:
            yield
        finally:
            self._events.append(_Times(1))

    def parts(self) -> list[Part]:
        """All events since restart(), completed by the blocks that were removed.

        UnequalBlocksError when the blocks that ran do not tell what the others do.
        """
        return parts_of_whole(self._events, self._stacks)

    @property
    def moments(self) -> list[Moment]:
        """The moments since restart() that may be the memory peak: which one is, depends on what a
        gradient and the optimizer cost.
        """
        return self.highest()[0]

    def highest(self) -> tuple[list[Moment], Moment]:
        """The moments since restart() that may be the memory peak, and the highest moment of a run
        before its last large weight is read: until then, ZeRO-3 holds gathered weights twice.
        """
        return moments_of(self.parts(), self._before)

    def see(self, out: Any, func: Any, args: Any = (), kwargs: Any = None) -> None:
        """Count an operation, and the storages that it allocated for its results."""
        kwargs = kwargs or {}
        inputs = [x for x in tensors_in(args, kwargs) if x.device.type == self._device]
        outputs = [x for x in tensors_in(out) if x.device.type == self._device]
        for tensor in inputs if self._stacks.missing else ():
            # note the block whose weights are read, when it is not the block before
            place = self._stacks.place_of.get(storage_of(tensor))
            if place is not None and place != self._place:
                self._place = place
                self._events.append(place)
        for tensor in outputs:
            self._add(tensor, func)
        if inputs or outputs:
            self._events.append(TRACKED if torch.is_grad_enabled() else PLAIN)
            operator = operator_of(func, args, kwargs, out, inputs=inputs, outputs=outputs)
            if operator is not None:
                self._events.append(operator)

    def _visit(self, module: nn.Module, args: Any, out: Any) -> None:
        self._starts.pop()
        goes_back = any(tensor.requires_grad for tensor in tensors_in(out))
        self._events += [VISIT] * (1 + goes_back)

    def _ask(self, weight: Any) -> None:
        if weight in self._unread:
            self._unread.remove(weight)
            # ZeRO-3 gathers it when the module that reads it begins
            self._events.insert(self._starts[-1] if self._starts else len(self._events), _Read())

    def _add(self, tensor: Tensor, func: Any, category: str = "activations") -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
        is_as_wide = tensor.ndim > 1 and tensor.shape[-1] in self._vocabularies
        if category == "activations" and is_as_wide and tensor.is_floating_point():
            category = "logits"
        shape = "x".join(map(str, tensor.shape))
        name = (
            f"{str(func).removeprefix('aten.').partition('.')[0]} {shape} {str(tensor.dtype)[6:]}"
        )
        self._storages[key] = _Storage(
            nbytes, category, name, weakref.ref(storage, lambda _: self._drop(key))
        )
        self._change(nbytes, category)

    def _drop(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._change(-storage.nbytes, storage.category)

    def _is_gradient(self, parameter: Tensor) -> None:
        storage = self._storages[parameter.grad.untyped_storage()._cdata]  # pyright: ignore[reportOptionalMemberAccess]
        self._change(-storage.nbytes, storage.category)
        storage.category = "gradients"
        self._change(storage.nbytes, "gradients")

    def _change(self, nbytes: int, category: str) -> None:
        self.live[category] += nbytes
        self._events.append(_Change(nbytes, category))

    def name_largest(self) -> None:
        """Remember the largest activations and logits that are allocated now."""
        storages = [s for s in self._storages.values() if s.category in ("activations", "logits")]
        top = sorted(storages, key=lambda s: -s.nbytes)[:LARGEST]
        self.largest = [(storage.name, storage.nbytes) for storage in top]


def forwards_in(parts: Sequence[Part]) -> list[Ran]:
    """What runs before the first forward pass of the whole model, then from each forward pass up to
    the next one.
    """
    runs, times = [Ran()], 1
    for part in parts:
        for event in part.events:
            if isinstance(event, Forward):
                runs.append(Ran(calls=Counter({RUN: 1})))
            elif isinstance(event, _Times):
                times = event.count
            elif isinstance(event, Operator):
                runs[-1].operators[event] += times * part.times
            elif isinstance(event, str):
                runs[-1].calls[event] += times * part.times
    return runs


def moments_of(parts: Sequence[Part], before: Mapping[str, int]) -> tuple[list[Moment], Moment]:
    """The moments that may be the memory peak, whatever a gradient and the optimizer cost; and the
    highest moment of a run before its last large weight is read.

    before: allocated bytes by category when the first part began.
    """
    live, reading = dict(before), Moment(0, 0, 0)
    of_run = reading
    highest: dict[int, Moment] = {}  # by bytes of gradients

    def note() -> None:
        nonlocal of_run
        now = Moment(live["gradients"], live["activations"], live["logits"])
        highest_so_far = highest.get(now.gradients)
        if highest_so_far is None or now.total > highest_so_far.total:
            highest[now.gradients] = now
        of_run = max(of_run, now, key=_besides_gradients)

    note()
    for part in parts:
        changes = [event for event in part.events if isinstance(event, _Change | _Read | Forward)]
        for _ in range(part.times):
            for change in changes:
                if isinstance(change, _Read):
                    reading = max(reading, of_run, key=_besides_gradients)
                    continue
                if isinstance(change, Forward):
                    of_run = Moment(0, 0, 0)
                    note()
                    continue
                live[change.category] += change.nbytes
                if change.nbytes > 0:
                    note()
    front: list[Moment] = []
    for moment in sorted(highest.values(), key=lambda m: -m.gradients):
        if not front or _besides_gradients(moment) > _besides_gradients(front[-1]):
            front.append(moment)
    return front, reading


def _besides_gradients(moment: Moment) -> int:
    return moment.activations + moment.logits
