"""The optimizer of a run, and what it remembers under ZeRO as full named tensors: the same at any
stage and world size.

Besides this module only training/engine.py and survival/groups.py import deepspeed. Here its
functions are used that read and write a rank's part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from trainer.errors import CheckpointError, ConfigError
from trainer.files.compilation import compiling
from trainer.files.saved_tensors import part_of, piece_name
from trainer.models import optimizers
from trainer.models.optimizers.adamw8bit import AdamW8bit
from trainer.models.optimizers.muon import Muon, Piece
from trainer.models.optimizers.rates import ADAMW, shape_of
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.config.schema import Optim

MASTER = "master"
STEP = "optimizer_step"
SCALE = "scale"  # of 8-bit moments: one for a block, saved for each of its elements


def build_optimizer(
    groups: list[dict[str, Any]], ds: Mapping[str, Any], optim: Optim
) -> torch.optim.Optimizer:
    """The optimizer of parameter groups (rates.param_groups), at lr 0.

    DeepSpeed's own AdamW where its state is offloaded; ConfigError when that cannot be compiled.
    """
    offload = ds["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        try:
            with compiling("cpu_adam", "DeepSpeed's CPU Adam, once, in about 4 minutes"):
                return DeepSpeedCPUAdam(
                    groups, lr=0.0, betas=optim.betas, eps=optim.eps, adamw_mode=True
                )
        except RuntimeError as error:  # its kernel is compiled on first use
            raise ConfigError(
                "offload_optimizer: DeepSpeed cannot build its CPU Adam "
                f"({str(error).splitlines()[0]}). "
                "Install g++ and ninja, or use zero2 or zero3 without offload."
            ) from error
    return optimizers.build(groups, optim)


class OptimizerState:
    """The optimizer's tensors of every trainable parameter.

    They are gathered from DeepSpeed and put back into it.
    """

    def __init__(
        self,
        engine: Any,
        *,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        optim: Optim,
        group_numbers: Mapping[int, int],
    ) -> None:
        """engine: DeepSpeed's; parameters: every trainable one by name; group_numbers: the group of
        each, by its id().
        """
        self._engine, self._stage = engine, stage
        self._parameters, self._optim = parameters, optim
        self._group_numbers = group_numbers
        inner = self.inner()
        if isinstance(inner, Muon) and stage > 0:
            inner.lay_out(self._matrices())

    def tensors(self, keep: Callable[[int], bool]) -> dict[str, Tensor]:
        """Full optimizer tensors (CPU; fp32, codes uint8), named <parameter>|exp_avg, |exp_avg_sq
        and, below fp32, |master.

        Of other optimizers what optimizers.state_shapes names.
        """
        if self._stage > 0 and not self.inner().state:
            self.make_empty()  # before the first step: DeepSpeed creates the moments lazily
        self._link_states()
        copies: dict[str, Tensor] = {}
        for k, (name, parameter) in enumerate(self._parameters.items()):
            for key, shape in self._state_shapes(parameter).items():
                value = self._get(parameter, key)
                if keep(k):
                    copies[f"{name}|{key}"] = (
                        value.detach().to("cpu", copy=True).reshape(shape).contiguous()
                    )
        return copies

    def pieces(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """(parameter, key, start, values) of what this rank holds of every master and moment, where
        it is: elements start, start + 1, ... of the full flat tensor. Over all ranks each element
        comes once; below ZeRO-1 each rank gives the parameters that a checkpoint takes from it.
        After the first step.
        """
        self._link_states()
        world, rank = distributed.world(), distributed.rank()
        for k, (name, parameter) in enumerate(self._parameters.items()):
            for key in {MASTER: None, **self._state_shapes(parameter)}:
                if self._stage == 0:
                    if k % world == rank:
                        yield name, key, 0, self._get(parameter, key)
                else:
                    start = self._start(parameter)
                    count = self._flat_part(parameter)[2]  # at stage 3 with padding
                    count = min(count, shape_of(parameter).numel() - start)
                    if count > 0:
                        yield name, key, start, self._local(parameter, key)[:count]

    def masters(self) -> Iterator[tuple[str, int, Tensor]]:
        """(parameter, start, values): the fp32 weights that this rank updates in place, as elements
        start, start + 1, ... of the flat parameter; below ZeRO-1 every parameter as it is.
        """
        zero = self._engine.optimizer
        for name, parameter in self._parameters.items():
            if self._stage == 0:
                yield name, 0, self._unsharded_master(parameter).detach()
            elif self._stage == 3:
                # not safe_get_local_fp32_param: of an offloaded optimizer it gives a copy
                group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                start = distributed.rank() * size
                count = max(min(shape_of(parameter).numel() - start, size), 0)
                flat = zero.fp32_partitioned_groups_flat[group].detach()
                yield name, start, flat.narrow(0, offset, count)
            elif parameter._hp_mapping is not None:  # pyright: ignore[reportAttributeAccessIssue]
                mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
                yield name, mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach()

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint takes from this rank, where it is: views, to be copied before the next
        step. Named as SavedTensors reads them.
        """
        if self._stage > 0 and not self.inner().state:
            self.make_empty()  # before the first step: DeepSpeed creates the moments lazily
        tensors: dict[str, Tensor] = {}
        for name, key, start, part in self.pieces():
            shapes = self._state_shapes(self._parameters[name])
            if key not in shapes:
                continue  # in fp32 the weights are the master copy
            whole, place = part.numel() == shapes[key].numel(), f"{name}|{key}"
            if whole:
                tensors[place] = part.detach().reshape(shapes[key])
            elif part.numel():
                tensors[piece_name(place, start, shapes[key])] = part.detach().reshape(-1)
        return tensors

    def shapes(self) -> dict[str, torch.Size]:
        """The names and shapes of what tensors() gives."""
        return {
            f"{name}|{key}": shape
            for name, weight in self._parameters.items()
            for key, shape in self._state_shapes(weight).items()
        }

    def scalars(self) -> dict[str, float | int]:
        """What else an exact resume needs: the count of optimizer steps, that of each parameter
        with another count and, in fp16, the counters of the loss scaler.
        """
        steps = [
            max((int(state["step"]) for state in states if "step" in state), default=None)
            for states in self._states_of_groups()
        ]
        most = max((count for count in steps if count is not None), default=0)
        values: dict[str, float | int] = {STEP: most}
        for name, parameter in self._parameters.items():
            count = steps[self._group_numbers[id(parameter)]]
            if count is not None and count != most:  # it stood still for a while (train.freeze)
                values[f"{STEP}|{name}"] = count
        for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if self._engine.fp16_enabled() and hasattr(self._engine.optimizer.loss_scaler, key):
                values[f"scaler.{key}"] = getattr(self._engine.optimizer.loss_scaler, key)
        return values

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float | int]) -> None:
        """Put back what tensors() and scalars() gave.

        The weights were loaded before the engine was made.
        """
        keys = set(self.shapes())
        if keys != tensors.keys():
            missing, extra = sorted(keys - tensors.keys()), sorted(tensors.keys() - keys)
            raise CheckpointError(
                f"optimizer state does not fit: missing {missing[:3]}, unexpected {extra[:3]}"
            )
        self.make_empty()
        self._link_states()
        for name, parameter in self._parameters.items():
            for key in self._state_shapes(parameter):
                if not key.startswith(SCALE):
                    self._set(parameter, key, tensors, f"{name}|{key}")
        self._set_scales(tensors)
        counts = {  # by group; a run that goes on with another one may have other groups
            self._group_numbers[id(parameter)]: int(scalars.get(f"{STEP}|{name}", scalars[STEP]))
            for name, parameter in self._parameters.items()
        }
        for number, states in enumerate(self._states_of_groups()):
            for state in states:
                _count(state, counts[number])
        for key, value in scalars.items():
            if key.startswith("scaler."):
                setattr(self._engine.optimizer.loss_scaler, key.removeprefix("scaler."), value)

    def _state_shapes(self, parameter: nn.Parameter) -> dict[str, torch.Size]:
        """Everything that a checkpoint holds of a parameter besides its weights."""
        shape = shape_of(parameter)
        master = {} if dtype_of(self._parameters) == torch.float32 else {MASTER: shape}
        rule = self.inner().param_groups[self._group_numbers[id(parameter)]]["rule"]
        return master | optimizers.state_shapes(self._optim, shape, rule=rule)

    def inner(self) -> torch.optim.Optimizer:
        """The optimizer inside DeepSpeed's wrapper; at stage 0 in fp32 there is no wrapper."""
        optimizer = self._engine.optimizer
        return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer

    def _unsharded_master(self, parameter: nn.Parameter) -> Tensor:
        """Stage 0: the tensor that the optimizer updates for `parameter`.

        It is the parameter itself, or its fp32 copy where it is below fp32.
        """
        wrapper = self._engine.optimizer
        if not hasattr(wrapper, "fp32_groups"):
            return parameter
        for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            for index, candidate in enumerate(low):
                if candidate is parameter:
                    return high[index]
        raise AssertionError("every trainable parameter is in exactly one group")

    def _flat_part(self, parameter: nn.Parameter) -> tuple[Tensor, int, int]:
        """(flat vector, start, count): where a rank keeps its part of a weight, from stage 1 on. At
        stage 3 the part has padding; below, a rank may have none.
        """
        if self._stage == 3:
            zero = self._engine.optimizer
            index, start, count = zero.grad_position[zero.get_param_id(parameter)]
            return zero.fp32_partitioned_groups_flat[index], start, count
        mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        (flat,) = self.inner().param_groups[self._group_numbers[id(parameter)]]["params"]
        at = mapping.hp_fragment_address if mapping is not None else None
        return flat, at.start if at else 0, at.numel if at else 0

    def _start(self, parameter: nn.Parameter) -> int:
        """The first element of a weight that this rank keeps, if it keeps any, from stage 1 on."""
        if self._stage == 3:
            return distributed.rank() * parameter.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
        mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        return mapping.lp_fragment_address.start if mapping is not None else 0

    def _matrices(self) -> dict[Tensor, list[tuple[Piece | None, torch.Size]]]:
        """The matrices that Muon steps, and this rank's pieces of them, by flat vector."""
        pieces: dict[Tensor, list[tuple[Piece | None, torch.Size]]] = {}
        for parameter in self._parameters.values():
            if self.inner().param_groups[self._group_numbers[id(parameter)]]["rule"] == ADAMW:
                continue
            flat, at, count = self._flat_part(parameter)
            shape, start = shape_of(parameter), self._start(parameter)
            count = min(count, shape.numel() - start)  # without padding
            piece = Piece(start, at, count) if count > 0 else None
            pieces.setdefault(flat, []).append((piece, shape))
        return pieces

    def _local(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's part of a tensor, from stage 1 on."""
        if key.startswith(SCALE):
            inner = self.inner()
            assert isinstance(inner, AdamW8bit), "no other optimizer has scales"
            flat, start, count = self._flat_part(parameter)
            return inner.scales(flat, key, start=start, count=count)
        if self._stage < 3:
            mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
            return mapping.get_hp_fragment(None if key == MASTER else key)
        value = (
            safe_get_local_fp32_param(parameter)
            if key == MASTER
            else safe_get_local_optimizer_state(parameter, key)
        )
        assert value is not None, "ZeRO-3 maps every trainable parameter"
        return value

    def _get(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self._stage == 0:
            master = self._unsharded_master(parameter)
            if key == MASTER:
                return master
            inner = self.inner()
            state = inner.state.get(master)
            if not state:
                is_code = key.startswith("code")
                dtype = torch.uint8 if is_code else torch.float32
                return master.new_zeros(self._state_shapes(parameter)[key], dtype=dtype)
            if key.startswith(SCALE):
                assert isinstance(inner, AdamW8bit)
                return inner.scales(master, key, start=0, count=master.numel())
            return state[key]
        if key.startswith((SCALE, "code")):
            return self._gather(parameter, key)
        value = (
            safe_get_full_fp32_param(parameter)
            if key == MASTER
            else safe_get_full_optimizer_state(parameter, key)
        )
        assert value is not None, "stages 1-3 map every trainable parameter"
        return value

    def _gather(self, parameter: nn.Parameter, key: str) -> Tensor:
        """A full tensor of 8-bit moments, which DeepSpeed's own functions take for fp32."""
        shape, start = shape_of(parameter), self._start(parameter)
        whole = torch.zeros(shape.numel(), device=distributed.device())
        if self._flat_part(parameter)[2]:
            part = self._local(parameter, key)[: max(shape.numel() - start, 0)]
            whole[start : start + part.numel()] = part.float()
        dtype = torch.uint8 if key.startswith("code") else torch.float32
        return distributed.total(whole).to(dtype)

    def _set(
        self, parameter: nn.Parameter, key: str, tensors: Mapping[str, Tensor], name: str
    ) -> None:
        # only what this rank keeps is read
        if self._stage == 0:
            master = self._unsharded_master(parameter)
            target = master.data if key == MASTER else self.inner().state[master][key]
            target.copy_(tensors[name].reshape(target.shape))
        elif self._stage == 3:
            piece = local_part(parameter, tensors, name)
            if key == MASTER:
                safe_set_local_fp32_param(parameter, piece)
            else:
                safe_set_local_optimizer_state(parameter, piece, key)
        else:
            mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
            if mapping is not None:
                at = mapping.lp_fragment_address
                target = mapping.get_hp_fragment(None if key == MASTER else key)
                target.data.copy_(part_of(tensors, name, at.start, at.numel))

    def _set_scales(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back the scales of 8-bit moments, whose codes are there already."""
        inner = self.inner()
        if not isinstance(inner, AdamW8bit):
            return
        for number in (1, 2):
            key = f"{SCALE}{number}"
            by_flat: dict[Tensor, Tensor] = {}
            for name, parameter in self._parameters.items():
                if key not in self._state_shapes(parameter):
                    continue
                place = f"{name}|{key}"
                if self._stage == 0:
                    flat = self._unsharded_master(parameter)
                    at, start, count = 0, 0, flat.numel()
                else:
                    (flat, at, count), start = self._flat_part(parameter), self._start(parameter)
                if flat not in by_flat:
                    by_flat[flat] = torch.full((flat.numel(),), torch.nan, device=flat.device)
                if count:
                    part = part_of(tensors, place, start, count)
                    by_flat[flat][at : at + part.numel()] = part.to(flat.device)
            for flat, scales in by_flat.items():
                inner.put(flat, number, scales)

    @torch.no_grad()
    def make_empty(self) -> None:
        """Let the optimizer create its moments, as before the first step.

        One step at learning rate 0 with zero gradients changes no weight. Without the decay, which
        SGD would take for a gradient.
        """
        inner = self.inner()
        decays = [group["weight_decay"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        if self._stage == 3:
            zero = self._engine.optimizer
            for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
                gradient, flat.grad = flat.grad, torch.zeros_like(flat)
                zero._optimizer_step(index)  # steps `inner` over this one sub-group
                flat.grad = gradient
        else:
            owned = [parameter for group in inner.param_groups for parameter in group["params"]]
            before = [parameter.grad for parameter in owned]
            for parameter in owned:
                parameter.grad = torch.zeros_like(parameter)
            inner.step()
            for parameter, gradient in zip(owned, before, strict=True):
                parameter.grad = gradient
        for group, decay in zip(inner.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for state in inner.state.values():
            _count(state, 0)

    def _states_of_groups(self) -> list[list[dict[str, Any]]]:
        """The states of the tensors of every group of parameters, as far as there are any."""
        inner = self.inner()
        owned = [list(group["params"]) for group in inner.param_groups]
        if self._stage == 3:
            zero = self._engine.optimizer
            owned = [[] for _ in owned]
            for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
                owned[zero.sub_group_to_group_id[index]].append(flat)
        return [[inner.state[one] for one in some if one in inner.state] for some in owned]

    def _link_states(self) -> None:
        """Tie every parameter to its slice of the moments.

        deepspeed 0.19.8, stage_1_and_2._optimizer_step: ties all groups once, when only the first
        has been stepped, so that with two groups (decay, no decay) the moments of the second are
        never found. So they are tied again here, when all have moments.
        """
        wrapper = self._engine.optimizer
        if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()


def dtype_of(parameters: Mapping[str, nn.Parameter]) -> torch.dtype:
    """The dtype that all parameters have: a model has one training precision."""
    return next(iter(parameters.values())).dtype


def _count(state: dict[str, Any], steps: int) -> None:
    """Set the count of steps in the state of a tensor, if it has one."""
    if "step" in state:
        old = state["step"]
        state["step"] = torch.full_like(old, steps) if torch.is_tensor(old) else steps


def local_part(parameter: nn.Parameter, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """This rank's piece of a tensor under ZeRO-3, zero-padded to DeepSpeed's equal pieces.

    deepspeed 0.19.8: the safe_set_full_* twins read past the end when the size does not divide by
    the world size.
    """
    size = parameter.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
    piece = part_of(tensors, name, distributed.rank() * size, size).to(distributed.device())
    return nn.functional.pad(piece, (0, size - piece.numel()))
