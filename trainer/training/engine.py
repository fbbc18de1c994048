"""The only importer of deepspeed: a ZeRO engine that is driven by summed losses and saved as plain
named tensors.

DeepSpeed 0.19.8 is used for partitioning, reduction and the optimizer step. Its own checkpoints are
not used: they are pickles, hold the trainable weights twice and fit one stage and one world size
only. Here every trainable parameter is gathered by name, so a checkpoint loads at any ZeRO stage
and any world size.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
# torch 2.13 warns at every ZeRO-3 step about collectives that DeepSpeed 0.19.8 still calls by their
# old names.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch\.distributed)")

from trainer.runtime import deepspeed_optimizers as mended  # noqa: E402

with mended.without_mlflow():
    import deepspeed

from deepspeed.runtime import compiler  # noqa: E402
from deepspeed.runtime.activation_checkpointing import offload_activations  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402

from trainer.errors import CheckpointError, ConfigError  # noqa: E402
from trainer.files.saved_tensors import piece_name  # noqa: E402
from trainer.models.optimizers.rates import (  # noqa: E402
    frozen_by_name,
    param_groups,
    places,
    shape_of,
)
from trainer.models.optimizers.standstill import Standstill  # noqa: E402
from trainer.runtime import distributed  # noqa: E402
from trainer.runtime.beside import StateCopy  # noqa: E402
from trainer.runtime.host_memory import give_back_excess, returned_at_once  # noqa: E402
from trainer.runtime.preemption import Stopped  # noqa: E402
from trainer.training.average.ema import Average  # noqa: E402
from trainer.training.optimizer_state import (  # noqa: E402
    OptimizerState,
    build_optimizer,
    dtype_of,
    local_part,
)

if TYPE_CHECKING:
    from trainer.config.optimizer.freeze import Freeze
    from trainer.config.schema import Optim

with mended.compiled_when_called(compiler):
    import deepspeed.runtime.zero.muon.original_muon

logger = logging.getLogger(__name__)

Watch = Callable[[Iterator[tuple[str, Tensor]]], None]
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

if not torch.cuda.is_available():
    # On the CPU every initialize() compiles deepspeed_shm_comm (31 s, and a killed build leaves a
    # lock that hangs the next one), which only inference_all_reduce uses. deepspeed 0.19.8,
    # comm/torch.py build_shm_op reads this table (versions before 0.19 by []).
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # pyright: ignore[reportAttributeAccessIssue]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in the model's order; a shared parameter appears once."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Full shapes of the trainable parameters by name, partitioned (ZeRO-3) or not."""
    return {name: shape_of(parameter) for name, parameter in trainable(model).items()}


@contextmanager
def partitioned_loading(ds: Mapping[str, Any]) -> Iterator[None]:
    """Inside, transformers partitions weights as it reads them (ZeRO-3 only).

    Its from_pretrained and from_config do.
    """
    if ds["zero_optimization"]["stage"] != 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # deepspeed 0.19.8: until its own communication is up, zero.Init takes the world for one rank
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    distributed.give_every_group_the_timeout()
    distributed.wait_for_all()  # the first weight is an exchange
    keep_alive = HfDeepSpeedConfig(dict(ds))
    try:
        with returned_at_once():
            yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the trainable parameters, partitioned (ZeRO-3) or not: each rank
    reads what it keeps.

    CheckpointError when the names or shapes differ from the model's trainable parameters.
    """
    parameters = trainable(model)
    if parameters.keys() != weights.keys():
        missing, extra = (
            sorted(parameters.keys() - weights.keys()),
            sorted(weights.keys() - parameters.keys()),
        )
        raise CheckpointError(
            f"checkpoint does not fit the model: missing {missing[:5]}, unexpected {extra[:5]}"
        )
    for name, parameter in parameters.items():
        got, want = tuple(weights[name].shape), tuple(shape_of(parameter))
        if got != want:
            raise CheckpointError(
                f"checkpoint does not fit the model: {name} has shape {got}, wanted {want}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if hasattr(parameter, "ds_tensor"):
                parameter.ds_tensor.copy_(local_part(parameter, weights, name))  # pyright: ignore
            else:
                parameter.copy_(weights[name])


def _initialize(
    model: nn.Module, optimizer: Any, parameters: Mapping[str, nn.Parameter], ds: Mapping[str, Any]
) -> Any:
    """DeepSpeed's engine around a model and the optimizer of its trained parameters."""
    # a rank that loads for long must not abort the others' first exchange
    distributed.wait_for_all()
    # bf16 at stage 1 prints 15 lines of memory, whatever the log level
    with redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=list(parameters.values()),  # pyright: ignore[reportArgumentType]
            config=dict(ds),
            dist_init_required=False,
        )
    distributed.give_every_group_the_timeout()
    return engine


class Engine:
    """A model under ZeRO.

    `engine.model(**batch)` runs it; backward() accumulates; step() applies one update.
    """

    def __init__(
        self,
        model: nn.Module,
        ds: Mapping[str, Any],
        optim: Optim,
        *,
        plus: float = 1.0,
        freeze: Sequence[Freeze] = (),
    ) -> None:
        """`ds` is the dictionary of deepspeed_config.for_engine; `optim` the experiment's optimizer
        block; plus: lora.plus; freeze: train.freeze, of which weights that never train are frozen
        already (rates.freeze_whole).

        Source of the accumulation scheme: managed_gradient_accumulation=false, one step() per
        window.
        """
        self.stage: int = ds["zero_optimization"]["stage"]
        self.clip = optim.clip
        self._parameters = trainable(model)
        if not self._parameters:
            raise ConfigError(
                "the model has no trainable parameter: nothing to do. Unfreeze or insert layers."
            )
        where = places(model, optim, plus=plus, freeze=freeze)
        self._standstill = Standstill(self._parameters, where)
        groups = param_groups(model, where, optim)
        numbers = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        # made before stdout is redirected: building it may compile a kernel, and says so
        optimizer = build_optimizer(groups, ds, optim)
        engine: Any = _initialize(model, optimizer, self._parameters, ds)
        self.model: Any = engine
        self._frozen = frozen_by_name(model)
        self.optimizer = OptimizerState(
            engine,
            stage=self.stage,
            parameters=self._parameters,
            optim=optim,
            group_numbers=numbers,
        )
        self._own_clip = self.stage == 0 and dtype_of(self._parameters) == torch.float32
        self._norm: Tensor | float | None = None
        self._is_skipped = False
        self.average: Average | None = None  # of the weights: keep_average()
        self.state_copy = StateCopy()  # step() waits for it before weights and moments change
        # True: fp32 at stage 0, too, leaves out an update that is not finite, as DeepSpeed does in
        # all other cases. To know it, the host waits for the device.
        self.leaves_out_unsound = False
        self._world = distributed.world()
        if self.stage == 0:
            # step() below reduces once per window, and not at all alone
            engine.enable_backward_allreduce = False
            # deepspeed 0.19.8, FP16_UnfusedOptimizer.initialize_optimizer_states: runs a real AdamW
            # step on zero gradients while it is built, which would count one step too many (the
            # weights are safe: our groups start at lr 0)
            self.optimizer.inner().state.clear()
        scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            # deepspeed 0.19.8, DynamicLossScaler.update_scale: raises a bare Exception there. The
            # loop counts skips.
            scaler.raise_error_at_min_scale = False
        if self._standstill:
            self.optimizer.make_empty()  # moments of what stands still are saved, too
            self._standstill.attach(self.optimizer.inner())
        mended.forget_old_orders(engine)
        mended.check_agreement(engine, ds)
        if distributed.is_gpu():
            offload = ds["zero_optimization"].get("offload_optimizer") or {}
            is_offloaded = offload.get("device", "none") != "none"
            mended.wait_less(engine.optimizer, stage=self.stage, is_offloaded=is_offloaded)

    def keep_average(self, decay: float) -> Average:
        """Average the weights over all steps from here on, beginning with the present ones."""
        masters = self.optimizer.masters()
        how: Any = {"stage": self.stage, "zero": self.model.optimizer}
        self.average = Average(decay, self._parameters, masters, **how)
        return self.average

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has its averaged weights, in a run that keeps an average. No step may
        be taken there. A collective.
        """
        if self.average is None:
            yield
            return
        self.state_copy.wait()  # of weights that are now replaced
        self.average.show()
        try:
            yield
        except Stopped:  # on all ranks; after an error a run ends, and other ranks may not come
            self.average.hide()
            raise
        self.average.hide()

    def begin(self, step: int) -> None:
        """Let those weights stand still that train.freeze names for this step; the first is 1."""
        self._standstill.begin(step, self.model.optimizer)

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss` x world.

        DeepSpeed averages over ranks, and a summed loss wants the sum.
        """
        self.model.backward(loss * self._world, scale_wrt_gas=False)

    def step(self, lr: float, watch: Watch | None = None) -> None:
        """Reduce, clip, and update every trainable weight once with learning rate `lr`.

        watch: given (name, full fp32 gradient) of every trainable parameter, reduced over ranks and
        not clipped yet; it must consume them all on every rank, since each one is gathered.
        """
        self._is_skipped = False
        for group in self.model.optimizer.param_groups:
            group["lr"] = lr * group["share"]
        if self.stage == 0 and self._world > 1:
            self.model.buffered_allreduce_fallback()
        if watch is not None and self.stage == 0:
            watch(self._gradients())
        if self._own_clip:
            weights = self._parameters.values()
            if self.clip > 0:
                self._norm = nn.utils.clip_grad_norm_(weights, self.clip)
            else:
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                self._norm = nn.utils.get_total_norm(gradients)
            if self.leaves_out_unsound and not torch.isfinite(self._norm):
                return self.leave_out()
        self.state_copy.wait()
        with ExitStack() as stack:
            stack.enter_context(mended.NumbersMadeThere())
            if watch is not None and self.stage > 0:
                view = mended.before_its_step(self.model, lambda: watch(self._gradients()))
                stack.enter_context(view)
            self.model.step()
        self._standstill.end()
        if self.average is not None and not self.step_was_skipped():
            self.average.update()
        give_back_excess()

    def leave_out(self) -> None:
        """Drop the gradient of this window: nothing is updated, and step_was_skipped() says so.

        All ranks call it instead of step(). DeepSpeed is made to find an overflow, because only
        DeepSpeed knows where its gradients are; the loss scale does not change.
        """
        self.state_copy.wait()
        with mended.every_gradient_refused(self.model.optimizer):
            self.model.step()
        self._standstill.end()
        self._is_skipped = True

    def grad_norm(self) -> float:
        """Global L2 norm of the last step's gradient, before clipping; nan if not finite."""
        norm = float(self.norm())
        return float("nan") if norm < 0 else norm

    def norm(self) -> Tensor | float:
        """The number that grad_norm() reads, on its device: the host does not wait. nan if there is
        none; from DeepSpeed 0.19.8, -1 if it is not finite.
        """
        norm = self._norm if self._own_clip else self.model.get_global_grad_norm()
        return float("nan") if norm is None else norm

    def has_finite_gradient(self) -> Tensor:
        """() bool on this device: whether the last step's gradient norm is finite.

        Does not wait for the device.
        """
        norm = self.norm()
        if not torch.is_tensor(norm):
            norm = torch.full((), norm, device=distributed.device())
        is_finite = torch.isfinite(norm) & (norm >= 0)
        return is_finite.to(distributed.device(), non_blocking=True)

    def step_was_skipped(self) -> bool:
        """True when DeepSpeed left the last update out: the gradient was not finite. The same on
        all ranks.

        It does so in every precision, but for fp32 at stage 0; leave_out() does it in all.
        """
        return self._is_skipped or not self.model.was_step_applied()

    def loss_scale(self) -> tuple[float, float] | None:
        """The loss scale of fp16 and its least value; None in another precision."""
        scaler = self.model.optimizer.loss_scaler if self.model.fp16_enabled() else None
        return scaler and (
            float(scaler.cur_scale),
            float(getattr(scaler, "min_scale", scaler.cur_scale)),
        )

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes on this device of weights, their gradients and the optimizer's state, as far as
        they can be told.
        """
        parameters = list(self.model.module.parameters())
        states = [
            t
            for state in self.optimizer.inner().state.values()
            for t in state.values()
            if torch.is_tensor(t)
        ]
        masters = [p for group in self.optimizer.inner().param_groups for p in group["params"]]
        if self.stage == 0 and dtype_of(self._parameters) == torch.float32:
            masters = []  # the weights themselves
        averages = [] if self.average is None else self.average.tensors()
        groups = {
            "weights": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [*states, *masters, *averages],
        }
        return {
            name: sum(tensor.nbytes for tensor in tensors if tensor.device == distributed.device())
            for name, tensors in groups.items()
        }

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        scale = self.model.optimizer.loss_scaler.cur_scale if self.model.fp16_enabled() else 1.0
        for name, parameter in self._parameters.items():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, gradient.detach().float() / scale

    def destroy(self) -> None:
        """Release hooks, buffers and the process groups that the engine made."""
        self.model.destroy()

    # Saving and restoring
    # ---------------------------------------------------------------------------------------

    def weights(
        self, keep: Callable[[int], bool], *, with_frozen: bool = False
    ) -> dict[str, Tensor]:
        """Full trainable weights (CPU, training dtype) of the parameters k with keep(k). A
        collective: all ranks call.

        keep: says which parameters this rank holds on to; the others are gathered and dropped one
        by one. with_frozen: also those that would train but for train.freeze.
        """
        copies: dict[str, Tensor] = {}
        every = {**self._parameters, **(self._frozen if with_frozen else {})}
        for k, (name, parameter) in enumerate(every.items()):
            with deepspeed.zero.GatheredParameters([parameter]):
                if keep(k):
                    copies[name] = parameter.detach().to("cpu", copy=True).contiguous()
        return copies

    def own_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and optimizer tensors that a checkpoint takes from this rank, where they are: to
        be copied before the next step. A collective only where NVMe holds them.
        """
        world, rank = distributed.world(), distributed.rank()
        on_nvme = ("swap_optimizer", "params_in_nvme_and_cpu")
        if any(getattr(self.model.optimizer, flag, False) for flag in on_nvme):
            # what is there lies in memory for a moment only
            return self.weights(lambda k: k % world == rank), self.optimizer.tensors(
                lambda k: k % world == rank
            )
        weights: dict[str, Tensor] = {}
        for k, (name, parameter) in enumerate(self._parameters.items()):
            if hasattr(parameter, "ds_tensor"):
                shard: Tensor = parameter.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
                shape, start = shape_of(parameter), rank * shard.numel()
                count = max(min(shape.numel() - start, shard.numel()), 0)
                if count:
                    weights[piece_name(name, start, shape)] = shard.detach().reshape(-1)[:count]
            elif k % world == rank:
                weights[name] = parameter.detach()
        return weights, self.optimizer.own_tensors()


# Inputs of blocks in host memory
# --------------------------------------------------------------------------------------------------


class PinnedInputs(offload_activations.CheckpointHiddenStatesOffload):
    """A store of inputs of blocks in pinned host memory (trainer/models/recomputation.py):
    DeepSpeed's (0.19.8), whose copies have a stream of their own, so that neither the host nor the
    computation waits for copies to the host.

    The newest input stays on the device, and the one before it until it is copied. DeepSpeed's pool
    of host memory is off: it fits tensors of equal shape alone, which packed rows hardly ever have;
    torch's own pool takes its place. DeepSpeed's context manager is not used: it waits for the
    device at both ends, and holds what has come back until then.
    """

    def __init__(self) -> None:
        super().__init__(max_cpu_buffer_pool_count=0)
        self._forgotten: deque[int] = deque()

    def offload_input(self, tensor: Tensor) -> int | None:
        """Take an input; its number, or None where it stays."""
        while self._forgotten:
            number = self._forgotten.popleft()
            for table in (self._keep_last, self._fwd_stash, self._tracker):
                table.pop(number, None)
        return super().offload_input(tensor)

    def forget_input(self, tensor_id: int) -> None:
        """No backward pass will ask for this input. It goes with the next one that comes, for this
        is called wherever Python drops a graph, in any thread.
        """
        self._forgotten.append(tensor_id)
