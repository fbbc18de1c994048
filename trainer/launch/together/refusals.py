"""Which groups --together trains, and which it refuses by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.driven.together.shared_base import refuse_unsharable
from trainer.errors import ConfigError
from trainer.models import base_model
from trainer.operations.sharing import OWN_OF_EXPERIMENTS, differences

if TYPE_CHECKING:
    from trainer.config.schema import Experiment
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

KEY = "--together"
# Flags that belong to one run, or that would need the whole model of one.
_FLAGS = (
    "test",
    "do_extra_evals",
    "push_to_hub",
    "device",
    "trackers",
    "wandb_project_name",
    "wandb_log_gradients",
)
# Keys of `train` that change the base, or what a run is beside its steps, at any value but this.
_TRAIN: dict[str, Any] = {
    "compile": False,
    "freeze": (),
    "hours": None,
    "neftune_alpha": None,
    "answers": None,
    "base_bits": None,
    "activation_offload": False,
    "ema": None,
}
_BLOCKS = ("teacher", "judge", "metrics", "continues", "init_from")


def refuse(plans: Sequence[RunPlan], options: Options) -> None:
    """ConfigError for a group whose experiments cannot share a base, with every reason."""
    problems = [
        f"--{name}: want it left out, for it belongs to one run"
        for name in _FLAGS
        if getattr(options, name)
    ]
    problems += [f"{plan.id}: {problem}" for plan in plans for problem in _of_run(plan)]
    first, *others = plans
    for plan in others:
        keys = differences(first.cfg, plan.cfg, OWN_OF_EXPERIMENTS)
        if keys:
            problems.append(
                f"{plan.id}: want the base of {first.id}, got another {', '.join(keys)}"
            )
    if problems:
        lines = "\n".join(problems)
        raise ConfigError(
            f"{KEY}: these experiments cannot be trained on one base.\n{lines}\nChange these, or "
            f"leave {KEY} out: then each is trained alone (docs/together.md)."
        )
    task: Any = tasks.load(first.cfg, options.places)
    base = base_model.skeleton(first.cfg.base, options.places, kind=task.kind)
    refuse_unsharable(base, key=KEY)


def _of_run(plan: RunPlan) -> Iterator[str]:
    cfg, stage = plan.cfg, plan.ds["zero_optimization"]["stage"]
    if cfg.task != "causal_lm":
        yield f"got task={cfg.task!r}, want 'causal_lm'"
        return
    data: Any = getattr(cfg, "data")  # noqa: B009 (of the task)
    if cfg.is_driven:
        yield "got data.source='client', whose runs share a base by data.together"
    for key in ("stream", "mix"):
        if getattr(data, key, None):
            yield f"got data.{key}, want rows of one source that are encoded before the first step"
    yield from _of_adapters(cfg)
    yield from _of_train(plan)
    for key in _BLOCKS:
        if getattr(cfg, key) is not None:
            yield f"got {key}, want none: it needs a model of its own"
    if stage == 3:
        yield "got ZeRO-3, want stage 0, 1 or 2: the base is whole on every rank"
    if plan.sharding.sharing > 1:
        size = plan.sharding.sharing
        yield f"got sequence_parallel_size={size}, want ranks with rows of their own"


def _of_adapters(cfg: Experiment) -> Iterator[str]:
    lora = cfg.lora
    if lora is None:
        yield 'got no lora, want adapters beside a frozen base ("lora": {})'
        return
    changes = {"dora": lora.dora, "tokens": lora.tokens, "bias": lora.bias != "none"}
    changes["init"] = lora.init.startswith("pissa")
    changes["modules_to_save"] = lora.modules_to_save
    for key, does_change in changes.items():
        if does_change:
            value = getattr(lora, key)
            yield f"got lora.{key}={value!r}, want adapters that leave the base as it is"


def _of_train(plan: RunPlan) -> Iterator[str]:
    train = plan.cfg.train
    for key, want in _TRAIN.items():
        got = getattr(train, key)
        if got != want:
            yield f"got train.{key}={got!r}, want it left out"
    if train.precision == "fp16":
        yield "got train.precision='fp16', want 'bf16' or 'fp32'"
    if train.on_bad_step == "rollback":
        yield "got train.on_bad_step='rollback', want 'stop' or 'skip'"
    autos = {
        "train.micro_batch": plan.values["train"]["micro_batch"],
        "train.gradient_checkpointing": train.gradient_checkpointing,
        "train.frozen": train.frozen,
        "deepspeed": plan.cfg.deepspeed,
    }
    for key, value in autos.items():
        if value == "auto":
            yield f"got {key}='auto', want a value, for memory is planned for one run"
