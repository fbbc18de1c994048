"""Changes to DeepSpeed's engine and optimizers (0.19.8) for which it has no option, and a check of
what it will do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.errors import ConfigError


@contextmanager
def every_gradient_refused(optimizer: Any) -> Iterator[None]:
    """Inside, DeepSpeed's optimizers treat every gradient as overflowed and drop it.

    deepspeed 0.19.8: stage_1_and_2.step asks check_overflow, stage3.step asks
    _overflow_check_and_loss_scale_update, FP16_UnfusedOptimizer.step skips by itself; at stage 0 in
    fp32 the optimizer is torch's. BF16_Optimizer.step (bf16 at stage 1) asks nobody: what it does
    with a norm that is not finite is done in its place.
    """

    def refuse(*_: Any, **__: Any) -> bool:
        optimizer.overflow = True
        return True

    def drop(*_: Any, **__: Any) -> None:
        refuse()
        optimizer._global_grad_norm = float("inf")
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()

    replacements = {
        "check_grad_overflow": True,
        "check_overflow": refuse,
        "_overflow_check_and_loss_scale_update": refuse,
        "_update_scale": lambda *_, **__: None,
    }
    if isinstance(optimizer, torch.optim.Optimizer):
        replacements = {"step": lambda *_, **__: None}
    elif hasattr(optimizer, "_skip_invalid_grad_norm"):  # also if step() is ours
        replacements["step"] = lambda *_, **__: optimizer._skip_invalid_grad_norm()
    elif hasattr(optimizer, "clear_hp_grads"):
        replacements["step"] = drop
    with ExitStack() as stack:
        for name, value in replacements.items():
            if hasattr(optimizer, name):
                stack.callback(setattr, optimizer, name, getattr(optimizer, name))
                setattr(optimizer, name, value)
        yield


class NumbersMadeThere(TorchFunctionMode):
    """Inside, torch.tensor(-1.0, device=GPU) fills a tensor on the GPU. Otherwise torch copies the
    number from the host and waits for the copy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], float) and kwargs.get("device") is not None:
            return torch.full((), args[0], **{"dtype": torch.get_default_dtype(), **kwargs})
        return func(*args, **kwargs)


def step_of_whole_weights(optimizer: Any, closure: None = None) -> bool:
    """FP16_UnfusedOptimizer.step for bf16 with the same arithmetic. It waits for the device only
    once, to learn whether the norm is finite. True when the update is left out.
    """
    squares: list[Tensor] = []
    for halves, wholes in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        gradients = [x.grad for x in halves if x.grad is not None]
        if gradients:
            norms = [gradient.float().norm(2.0) ** 2.0 for gradient in gradients]
            of_group = functools.reduce(torch.add, norms)
            squares.append((of_group.double() ** 0.5) ** 2.0)
        for half, whole in zip(halves, wholes, strict=True):
            whole.grad = torch.zeros_like(whole) if half.grad is None else half.grad.float()
    norm = functools.reduce(torch.add, squares).sqrt()
    optimizer.overflow = not bool(torch.isfinite(norm))
    optimizer._global_grad_norm = norm
    if optimizer.overflow:
        return optimizer._skip_invalid_grad_norm()
    optimizer._update_scale(False)
    if optimizer.clip_grad > 0:
        factor = 1.0 / torch.clamp((norm + 1e-6) / optimizer.clip_grad, min=1.0)
        for group in optimizer.fp32_groups:
            for whole in group:
                whole.grad.mul_(factor)
    optimizer.optimizer.step()
    for halves, wholes in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for half, whole in zip(halves, wholes, strict=True):
            whole.grad = None
            half.data.copy_(whole.data)
    return False


def unscale_and_clip(optimizer: Any, gradients: list[Tensor], norm: Tensor | None) -> None:
    """DeepSpeedZeroOptimizer.unscale_and_clip_grads for a norm that is known to be finite."""
    scale = optimizer.loss_scale
    if optimizer.clip_grad > 0:
        assert norm is not None, "DeepSpeed 0.19.8 computes the norm where it clips"
        clip = ((norm / optimizer.loss_scale) + 1e-6) / optimizer.clip_grad
        scale = torch.clamp(clip, min=1.0) * optimizer.loss_scale
    elif scale == 1.0:
        return
    for gradient in gradients:
        gradient.data.mul_(1.0 / scale)


def wait_less(optimizer: Any, *, stage: int, is_offloaded: bool) -> None:
    """Leave out waits for the GPU that DeepSpeed's optimizer makes without need: the host runs
    ahead of the GPU.
    """
    if stage == 0 and hasattr(optimizer, "fp32_groups"):
        # FP16_UnfusedOptimizer, which is bf16's, too: three waits for every weight
        optimizer.step = functools.partial(step_of_whole_weights, optimizer)
    elif stage in (1, 2) and hasattr(optimizer, "unscale_and_clip_grads"):
        # DeepSpeed's function asks for each group whether the norm is finite; step() has just asked
        # that
        optimizer.unscale_and_clip_grads = functools.partial(unscale_and_clip, optimizer)
    stream = getattr(optimizer, "reduce_and_partition_stream", None)
    if stream is not None and not is_offloaded:
        # stage 3 waits on the host for every micro-batch's reduction. What follows reads the sums
        # on the device; only an offloaded optimizer reads them on the host.
        stream.synchronize = lambda: torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def before_its_step(engine: Any, show: Callable[[], None]) -> Iterator[None]:
    """Inside, engine.step() calls `show` between reducing the gradients and taking the step.

    deepspeed 0.19.8 keeps gradients nowhere before step() and nowhere after it
    (managed_gradient_accumulation=false).
    """
    take_step = engine._take_model_step

    def show_then_step(*args: Any) -> None:
        show()
        take_step(*args)

    engine._take_model_step = show_then_step
    try:
        yield
    finally:
        engine._take_model_step = take_step


def check_agreement(engine: Any, ds: Mapping[str, Any]) -> None:
    """ConfigError when the engine will not do what `ds` says: DeepSpeed drops what it does not
    understand without a word.
    """
    pairs = {
        "zero_optimization.stage": (
            engine.zero_optimization_stage(),
            ds["zero_optimization"]["stage"],
        ),
        "gradient_clipping": (engine.gradient_clipping(), ds["gradient_clipping"]),
        "bf16.enabled": (engine.bfloat16_enabled(), ds["bf16"]["enabled"]),
        "fp16.enabled": (engine.fp16_enabled(), ds["fp16"]["enabled"]),
    }
    wrong = [
        f"{key}: DeepSpeed runs {got!r}, asked for {want!r}"
        for key, (got, want) in pairs.items()
        if got != want
    ]
    if wrong:
        raise ConfigError("DeepSpeed does not do what it was told: " + "; ".join(wrong))


def keep_frozen_whole(model: nn.Module) -> None:
    """Keep the frozen weights whole on every rank at ZeRO-3, once a forward has gathered them.
    Below ZeRO-3 all weights are whole.

    deepspeed 0.19.8, partitioned_param_coordinator.py: persistent weights are not released once the
    order of the modules is known; only trained weights are gathered again after a step.
    """
    for parameter in model.parameters():
        if hasattr(parameter, "ds_persist") and not parameter.requires_grad:
            vars(parameter)["ds_persist"] = True


def forget_old_orders(engine: Any) -> None:
    """Make ZeRO-3 decide again which weights it releases whenever the order of modules changes.

    deepspeed 0.19.8 keeps for ever what it decided for the first order that it saw (lru_cache of
    PartitionedParameterCoordinator.__params_to_release). GradCache begins with a forward alone;
    then every later backward would gather each weight again that its forward had gathered.
    """
    if not engine.zero_optimization_partition_weights():
        return
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    decide = vars(type(coordinator))["_PartitionedParameterCoordinator__params_to_release"]
    cells = (cell.cell_contents for cell in getattr(decide, "__closure__", None) or ())
    remembered = [function for function in (decide, *cells) if hasattr(function, "cache_clear")]
    invalidate = coordinator._invalidate_trace

    def forgetting() -> None:
        for function in remembered:  # a later version of DeepSpeed may have no cache
            function.cache_clear()
        invalidate()

    coordinator._invalidate_trace = forgetting


@contextmanager
def without_mlflow() -> Iterator[None]:
    """Inside, DeepSpeed is imported as where MLflow is not installed: 1.6 s, for its autotuner
    alone (deepspeed 0.19.8, deepspeed.autotuning). MLflow can be imported behind it.
    """
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


@contextmanager
def compiled_when_called(compiler: Any) -> Iterator[None]:
    """Inside, what DeepSpeed decorates by its `compiler` (deepspeed.runtime.compiler) is compiled
    when it is first called: torch.compile imports inductor, 3 s, for a Muon that every ZeRO
    optimizer of DeepSpeed 0.19.8 imports to ask whether it is one.
    """
    stock = compiler.compile
    compiler.compile = lambda: functools.partial(_compiled_when_called, stock)
    try:
        yield
    finally:
        compiler.compile = stock


def _compiled_when_called(
    compiler: Callable[[], Callable[..., Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    compiled = functools.cache(lambda: compiler()(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
