"""One model that operations act on: what each kind of operation does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.config.optimizer.lora import Lora
from trainer.driven import adam, passes
from trainer.driven.checks import adam_of, check_rows, loss_of
from trainer.driven.passes import PassLayout, PassResult, RowsPass
from trainer.driven.states import SAMPLER, States, check_name
from trainer.errors import ConfigError
from trainer.operations.rows import outputs_to_payload, rows_of
from trainer.runtime import distributed, rng

if TYPE_CHECKING:
    from trainer.operations.operation_log import Operation
    from trainer.training.engine import Engine
    from trainer.training.session import Progress

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
Outcome = tuple[dict[str, Any], bytes]  # the fields and the payload of a result


@dataclass
class Pending:
    """What was accumulated since the last optim_step. loss: the sum of its losses."""

    operations: int = 0
    rows: int = 0
    tokens: int = 0
    loss: float = 0.0


@dataclass
class DrivenModel:
    """The adapters of one run with their engine. Every method is a collective."""

    engine: Engine
    layout: PassLayout
    states: States
    progress: Progress
    lora: Lora
    vocabulary: int
    most_tokens: int  # of a row
    most_steps: int
    seed: int
    export: Callable[[str], None]  # writes the present weights into a folder of the run
    log: Callable[[int, dict[str, float]], None]  # a line of metrics.jsonl
    is_created: bool = False
    has_ended: bool = False
    pending: Pending = field(default_factory=Pending)
    line: dict[str, float] | None = None  # of the last step, until it is told

    def tell(self) -> None:
        """Write the line of a step to metrics.jsonl. StorageError when the disk refuses: the step
        was made all the same, so that this is no outcome of its operation.
        """
        line, self.line = self.line, None
        if line is not None:
            self.log(self.progress.step, line)

    def do(self, operation: Operation) -> Outcome:
        """Run one operation. A UserError says why it was refused: then nothing has changed."""
        self._refuse_out_of_turn(operation)
        action = getattr(self, f"_{operation.kind}", None)
        if action is None:
            raise ConfigError(f"{operation.kind!r} is no kind of operation.")
        rng.seed_everything(self.seed + ((operation.seq + 1) << 64), distributed.rank())
        return action(operation)

    def rows_pass(self, operation: Operation) -> RowsPass:
        """The rows of a forward or a forward_backward, checked, for whoever computes them. A
        UserError says why they were refused.
        """
        self._refuse_out_of_turn(operation)
        fields = operation.fields
        rows = rows_of(operation.payload, fields.get("inputs") or {})
        loss, config = loss_of(fields)
        limits: dict[str, Any] = {"vocabulary": self.vocabulary, "most_tokens": self.most_tokens}
        check_rows(rows, loss, name=fields["loss_fn"], **limits)
        return RowsPass(rows, loss, config, operation.kind == FORWARD_BACKWARD)

    def outcome_of_pass(self, of: RowsPass, result: PassResult) -> Outcome:
        """What a pass over rows gave whose gradient, if any, the engine has taken."""
        if of.with_backward:
            self.pending.operations += 1
            self.pending.rows += len(of.rows)
            self.pending.tokens += sum(len(row.tokens) for row in of.rows)
            self.pending.loss += result.loss
        trailing = list(result.logps[0].shape[1:])
        outputs = {"logprobs": {"trailing": trailing}}
        told = {"metrics": {"loss:sum": result.loss}, "outputs": outputs}
        return told, outputs_to_payload({"logprobs": result.logps})

    def _refuse_out_of_turn(self, operation: Operation) -> None:
        if operation.kind == "refused":  # the server found its content wrong before it wrote it
            raise ConfigError(str(operation.fields.get("error")))
        if self.has_ended:
            raise ConfigError(f"{operation.kind}: the run has ended. Create another one.")
        if not self.is_created and operation.kind != "create":
            raise ConfigError(f"{operation.kind}: the run was not created yet. Send create first.")

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for its optim_step; it is in no state."""
        return self.pending.operations > 0

    def _create(self, operation: Operation) -> Outcome:
        asked = operation.fields.get("lora") or {}
        own = {"rank": self.lora.r, "alpha": self.lora.alpha, "seed": self.seed}
        differing = [key for key, value in own.items() if asked.get(key, value) != value]
        if differing:
            raise ConfigError(
                f"create: lora {', '.join(f'{key}={asked[key]}' for key in differing)}, but the "
                f"dictionary of the run says "
                f"{', '.join(f'{key}={own[key]}' for key in differing)}. Make the run anew."
            )
        self.is_created = True
        return {}, b""

    def _forward(self, operation: Operation) -> Outcome:
        of = self.rows_pass(operation)
        return self.outcome_of_pass(of, passes.run(self.engine, of, self.layout))

    _forward_backward = _forward

    def _optim_step(self, operation: Operation) -> Outcome:
        how = adam_of(operation.fields)
        if not self.has_gradient:
            raise ConfigError(
                "optim_step: there is no gradient. Send a forward_backward first: each optim_step "
                "uses up what was accumulated."
            )
        if self.progress.step >= self.most_steps:
            raise ConfigError(
                f"optim_step: the run has done its {self.most_steps} steps (train.steps). Save, "
                "and go on in a new run."
            )
        pending, self.pending = self.pending, Pending()
        norm = adam.update(self.engine, how)
        if norm is None:
            raise ConfigError(
                "optim_step: the gradient is not finite. It was dropped, and no weight was "
                "changed. Look at the losses of the forward_backward before it."
            )
        self.progress.step += 1
        self.line = {
            "loss_sum": pending.loss,
            "grad_norm": norm,
            "lr": how.learning_rate,
            "rows": pending.rows,
            "tokens": pending.tokens,
            "operation": operation.seq,
        }
        return {"metrics": {"grad_norm": norm, "step": self.progress.step}}, b""

    def _save_state(self, operation: Operation) -> Outcome:
        name, overwrite = operation.fields.get("name"), bool(operation.fields.get("overwrite"))
        how: dict[str, Any] = {"name": name, "overwrite": overwrite}
        return self.states.save(self.progress, operation.seq, **how), b""

    def _save_for_sampler(self, operation: Operation) -> Outcome:
        folder = f"{SAMPLER}/{check_name(operation.fields.get('name'))}"
        self.states.saves.wait()
        self.export(folder)
        return {"folder": folder}, b""

    def _load_state(self, operation: Operation) -> Outcome:
        self.states.load(self.engine, operation.fields, has_gradient=self.has_gradient)
        self.pending = Pending()
        return loaded(operation), b""

    def _end(self, operation: Operation) -> Outcome:
        self.states.saves.wait()
        self.export("final")
        self.has_ended = True
        return {}, b""


def loaded(operation: Operation) -> dict[str, Any]:
    """The result of a load_state that was done."""
    return {"path": operation.fields.get("path")}
