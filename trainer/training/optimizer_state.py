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
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.config.schema import Optim

MASTER = "master"


def build_optimizer(parameters: Any, ds: Mapping[str, Any], optim: Optim) -> torch.optim.Optimizer:
    """The optimizer with decay where `optim` says so, at lr 0.

    DeepSpeed's own AdamW where its state is offloaded; ConfigError when that cannot be compiled.
    """
    parameters = list(parameters)
    fewest_axes = 2 if optim.decay == "matrices" else 0
    groups = [
        {
            "params": [p for p in parameters if len(shape_of(p)) >= fewest_axes],
            "weight_decay": optim.weight_decay,
        },
        {"params": [p for p in parameters if len(shape_of(p)) < fewest_axes], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
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
        self, engine: Any, *, stage: int, parameters: Mapping[str, nn.Parameter], optim: Optim
    ) -> None:
        """engine: DeepSpeed's; parameters: every trainable one by name."""
        self._engine, self._stage = engine, stage
        self._parameters, self._optim = parameters, optim

    def tensors(self, keep: Callable[[int], bool]) -> dict[str, Tensor]:
        """Full optimizer tensors (CPU, fp32), named <parameter>|exp_avg, |exp_avg_sq and, below
        fp32, |master.

        Of Adafactor |row_var and |col_var, or |variance.
        """
        if self._stage > 0 and not self.inner().state:
            self._make_empty_state()  # before the first step: DeepSpeed creates the moments lazily
        self._link_states()
        kept: dict[str, Tensor] = {}
        for k, (name, parameter) in enumerate(self._parameters.items()):
            for key, shape in self._state_shapes(parameter).items():
                value = self._get(parameter, key)
                if keep(k):
                    kept[f"{name}|{key}"] = (
                        value.detach().to("cpu", copy=True).reshape(shape).contiguous()
                    )
        return kept

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
                elif self._stage == 3:
                    size = parameter.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
                    start = rank * size
                    count = max(min(shape_of(parameter).numel() - start, size), 0)
                    yield name, key, start, _local(parameter, key)[:count]
                elif parameter._hp_mapping is not None:  # pyright: ignore[reportAttributeAccessIssue]
                    held = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
                    part = held.get_hp_fragment(None if key == MASTER else key)
                    yield name, key, held.lp_fragment_address.start, part

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
                held = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
                yield name, held.lp_fragment_address.start, held.get_hp_fragment().detach()

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint takes from this rank, where it is: views, to be copied before the next
        step. Named as SavedTensors reads them.
        """
        if self._stage > 0 and not self.inner().state:
            self._make_empty_state()  # before the first step: DeepSpeed creates the moments lazily
        found: dict[str, Tensor] = {}
        for name, key, start, part in self.pieces():
            shapes = self._state_shapes(self._parameters[name])
            if key not in shapes:
                continue  # in fp32 the weights are the master copy
            whole, place = part.numel() == shapes[key].numel(), f"{name}|{key}"
            if whole:
                found[place] = part.detach().reshape(shapes[key])
            elif part.numel():
                found[piece_name(place, start, shapes[key])] = part.detach().reshape(-1)
        return found

    def shapes(self) -> dict[str, torch.Size]:
        """The names and shapes of what tensors() gives."""
        return {
            f"{name}|{key}": shape
            for name, weight in self._parameters.items()
            for key, shape in self._state_shapes(weight).items()
        }

    def scalars(self) -> dict[str, float | int]:
        """What else an exact resume needs: the count of optimizer steps and, in fp16, the loss
        scaler's counters.
        """
        inner = self.inner()
        steps = [int(state["step"]) for state in inner.state.values() if "step" in state]
        found: dict[str, float | int] = {"optimizer_step": max(steps, default=0)}
        for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if self._engine.fp16_enabled() and hasattr(self._engine.optimizer.loss_scaler, key):
                found[f"scaler.{key}"] = getattr(self._engine.optimizer.loss_scaler, key)
        return found

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float | int]) -> None:
        """Put back what tensors() and scalars() gave.

        The weights were loaded before the engine was made.
        """
        wanted = set(self.shapes())
        if wanted != tensors.keys():
            missing, extra = sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted)
            raise CheckpointError(
                f"optimizer state does not fit: missing {missing[:3]}, unexpected {extra[:3]}"
            )
        self._make_empty_state()
        self._link_states()
        for name, parameter in self._parameters.items():
            for key in self._state_shapes(parameter):
                self._set(parameter, key, tensors, f"{name}|{key}")
        for state in self.inner().state.values():
            old = state["step"]
            count = int(scalars["optimizer_step"])
            state["step"] = torch.full_like(old, count) if torch.is_tensor(old) else count
        for key, value in scalars.items():
            if key.startswith("scaler."):
                setattr(self._engine.optimizer.loss_scaler, key.removeprefix("scaler."), value)

    def _state_shapes(self, parameter: nn.Parameter) -> dict[str, torch.Size]:
        """Everything that a checkpoint holds of a parameter besides its weights."""
        shape = shape_of(parameter)
        master = {} if dtype_of(self._parameters) == torch.float32 else {MASTER: shape}
        return master | optimizers.state_shapes(self._optim, shape)

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

    def _get(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self._stage == 0:
            master = self._unsharded_master(parameter)
            if key == MASTER:
                return master
            state = self.inner().state.get(master)
            return state[key] if state else master.new_zeros(self._state_shapes(parameter)[key])
        value = (
            safe_get_full_fp32_param(parameter)
            if key == MASTER
            else safe_get_full_optimizer_state(parameter, key)
        )
        assert value is not None, "stages 1-3 map every trainable parameter"
        return value

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
            held = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
            if held is not None:
                at = held.lp_fragment_address
                target = held.get_hp_fragment(None if key == MASTER else key)
                target.data.copy_(part_of(tensors, name, at.start, at.numel))

    @torch.no_grad()
    def _make_empty_state(self) -> None:
        """Let the optimizer create its moments.

        One step at learning rate 0 with zero gradients changes no weight.
        """
        inner = self.inner()
        for group in inner.param_groups:
            group["lr"] = 0.0
        if self._stage == 3:
            zero = self._engine.optimizer
            for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
                gradient, flat.grad = flat.grad, torch.zeros_like(flat)
                zero._optimizer_step(index)  # steps `inner` over this one sub-group
                flat.grad = gradient
            return
        owned = [parameter for group in inner.param_groups for parameter in group["params"]]
        before = [parameter.grad for parameter in owned]
        for parameter in owned:
            parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for parameter, gradient in zip(owned, before, strict=True):
            parameter.grad = gradient

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


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The full shape of a parameter, also while it is partitioned (ZeRO-3)."""
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape  # pyright: ignore


def _local(parameter: nn.Parameter, key: str) -> Tensor:
    value = (
        safe_get_local_fp32_param(parameter)
        if key == MASTER
        else safe_get_local_optimizer_state(parameter, key)
    )
    assert value is not None, "ZeRO-3 maps every trainable parameter"
    return value


def local_part(parameter: nn.Parameter, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """This rank's piece of a tensor under ZeRO-3, zero-padded to DeepSpeed's equal pieces.

    deepspeed 0.19.8: the safe_set_full_* twins read past the end when the size does not divide by
    the world size.
    """
    size = parameter.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
    piece = part_of(tensors, name, distributed.rank() * size, size).to(distributed.device())
    return nn.functional.pad(piece, (0, size - piece.numel()))
