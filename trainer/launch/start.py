"""PreparedRun -> ReadyRun: builds the engine, reads the newest state into it, makes the session."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import deepspeed_config
from trainer.config.identity import digest
from trainer.config.userfile import placed
from trainer.data.mixed.store import sources_in
from trainer.launch import doctor, late, memory, run_folder
from trainer.models import base_model, base_source, recomputation
from trainer.models.frozen.freezing import trainable_report
from trainer.models.fused import compile_blocks
from trainer.models.optimizers.rates import freeze_whole
from trainer.models.weights import unsound
from trainer.protocol.abilities import ComparesWithStart, LearnsFromTeacher
from trainer.runtime import distributed, rng
from trainer.runtime.beside import Beside
from trainer.runtime.deepspeed_optimizers import keep_frozen_whole
from trainer.runtime.distributed import on_main
from trainer.survival import lifeline, mirror
from trainer.survival.mirror import Mirror
from trainer.telemetry.chain import StepChain
from trainer.telemetry.meter import Meter
from trainer.telemetry.source_losses import SourceSums
from trainer.training import bad_steps, checkpoint, engine
from trainer.training.choice.budget import Budget
from trainer.training.engine import Engine
from trainer.training.session import Cadence, Progress, Session

if TYPE_CHECKING:
    from torch import nn

    from trainer.config.schema import Train
    from trainer.files.held_lock import HeldLock
    from trainer.launch.prepare import PreparedRun
    from trainer.runtime.preemption import Preemption
    from trainer.telemetry.goodput import Goodput
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.checkpoint import SavedState
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadyRun:
    """A run that is ready for its next step."""

    session: Session
    progress: Progress
    # writes the present weights into the folder of this name; a collective
    export: Callable[[str], None]
    saves: Beside  # the checkpoint that is being written, if any
    mirror: Mirror | None  # the copies in memory of a run with --survive
    checkpoints: Path
    around_steps: AbstractContextManager[None]  # the memory plan is enforced inside

    def tidy(self) -> None:
        """Remove old checkpoints at the end of a run. An earlier process may have been killed after
        its last save, before it removed them. Rank 0 only.
        """
        best = {self.progress.best_step} - {0}
        keep_last = self.session.cfg.train.keep_last
        checkpoint.tidy(self.checkpoints, self.progress.step, keep_last, best)

    def tell_costs(self) -> None:
        """Log the seconds of the steps beside their prediction, and what mirroring cost."""
        late.tell(self.session.meter, self.session.record)
        if self.mirror is not None:
            logger.info("%s", self.mirror.told())


@dataclass(frozen=True)
class Footing:
    """What a run stands on.

    is_planned: memory is planned, and FLOPs are counted: the run has its model to itself.
    engine_of: as engine_of() here. saves: who writes its checkpoints.
    """

    is_planned: bool
    engine_of: Callable[[PreparedRun, Callable[[str], None]], tuple[Engine, Progress]]
    saves: Beside


@dataclass(frozen=True)
class Saver:
    """What the loop has a run keep: checkpoints, exports, and steps in memory."""

    prepared: PreparedRun
    live: Engine
    meter: Meter
    goodput: Goodput
    lock: HeldLock
    chain: StepChain
    saves: Beside
    mirror: Mirror | None
    waits: bool  # until a checkpoint is written, before the next step
    sums: SourceSums

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, beside the next steps unless `waits`. A collective."""
        with self.meter.pause("saving"):
            on_main(self.lock.check)
            progress.links, progress.by_source = self.chain.links(), self.sums.settle()
            plan, identity = self.prepared.plan, self.prepared.identity
            write = snapshot(plan, self.live, progress, identity)
            self.saves.start(lambda: self._written(write))
            if self.waits:
                self.saves.wait()

    def _written(self, write: Callable[[], Path]) -> None:
        with self.goodput.timing("saving"):
            write()

    def export(self, name: str) -> None:
        """Write the present weights, or their average, into the folder of this name. A
        collective.
        """
        on_main(self.lock.check)
        with self.goodput.timing("export"), self.live.averaged():
            run_folder.export(self.prepared.plan, self.prepared.task, self.live, name)

    def mirror_step(self, live: Engine, progress: Progress) -> None:
        """Keep a step in memory, for ranks that go on without a lost one (--survive)."""
        if self.mirror is not None:
            self.mirror.keep(live, progress, self.chain, self.sums)
            steps = self.prepared.plan.cfg.train.steps
            lifeline.moved(progress.step, is_stepping=progress.step < steps)


def start(
    run: PreparedRun,
    options: Options,
    record: RunRecord,
    preemption: Preemption,
    lock: HeldLock,
    footing: Footing | None = None,
) -> ReadyRun:
    """Plan memory, examine DeepSpeed if this machine has not done so yet, build the engine, read
    the newest state into it, and make the session. Nothing is saved yet. A collective.

    footing: of a run that trains with others; None: it trains alone.

    DoesNotFitError if the plan says that the run does not fit its device.
    """
    plan, cfg = run.plan, run.plan.cfg
    on = footing or Footing(True, engine_of, Beside())
    memory_plan = memory.plan_before_start(run, options) if on.is_planned else None
    doctor.before_first_use(run.zero_stage, options.cache_dir)
    record.startup.lap("checks")
    live, progress = on.engine_of(run, record.startup.lap)
    progress.refuse_past(options.until)
    record.resume(progress.step, progress.bad.steps)
    record.use_data(run.identity, options.data_path)
    record.status("running", step=progress.step)
    meter = Meter(record.goodput, counts_flops=on.is_planned and not cfg.train.compile)
    meter.prediction = late.of_plan(memory_plan, plan.folder / memory.FILE)
    chain, saves = StepChain.of(progress.links), on.saves
    own_mirror = mirror.of_this_rank(
        options.memory, plan.id, live, step=progress.step, every=options.mirror_every
    )

    waits = not options.saves_behind
    rows = run.stores["train"]
    epochs = plan.sharding.epochs(len(rows), cfg.train.seed, sources_in(rows))
    sums = SourceSums(plan.sharding.mix.labels if plan.sharding.mix else (), progress.by_source)
    saver = Saver(run, live, meter, record.goodput, lock, chain, saves, own_mirror, waits, sums)

    session = Session(
        cfg=cfg,
        task=run.task,
        engine=live,
        train=run.stores["train"],
        valid=run.stores["valid"],
        sharding=plan.sharding,
        cadence=Cadence.of(cfg.train, epochs.steps, otherwise=options.log_every),
        record=record,
        meter=meter,
        preemption=preemption,
        save=saver.save,
        export_best=lambda: saver.export("best"),
        log_gradients=options.wandb_log_gradients,
        until=options.until,
        questions=run.questions,
        valid_sets=run.valid_sets(),
        own_metrics=run.own_metrics,
        chain=chain,
        sums=sums,
        rolled_back=bad_steps.rolled_back(plan.folder),
        roll_back=functools.partial(bad_steps.roll_back, plan.folder),
        budget=Budget.of(cfg.train, record.goodput),
        after_step=saver.mirror_step,
        refuse_unsound_base=functools.partial(_refuse_unsound_base, run),
        report=lambda event: lifeline.moved(event.step, is_stepping=event.is_stepping),
    )
    enforced = memory.enforce_plan(memory_plan, live, run)
    return ReadyRun(session, progress, saver.export, saves, own_mirror, plan.checkpoints, enforced)


def _refuse_unsound_base(run: PreparedRun) -> None:
    """ConfigError when weights that the run began with are not finite. A collective."""
    cfg = run.plan.cfg
    init_from = getattr(cfg, "init_from", None)
    begun_with = [base_source.resolve(cfg.base, run.places), init_from and placed(init_from)]
    folders = [source for source in begun_with if isinstance(source, str)]
    dtype = base_model.DTYPES[cfg.train.precision]
    happened = "The loss is not finite before any update of what the run began with"
    on_main(lambda: unsound.refuse(folders, dtype, happened=happened))


def engine_of(run: PreparedRun, lap: Callable[[str], None]) -> tuple[Engine, Progress]:
    """The task's model under DeepSpeed, in the state to resume from. A collective."""
    plan, newest = run.plan, run.newest
    _read_teacher(run, lap)
    ds = deepspeed_config.for_engine(plan.ds)
    model = _model_of(run, ds)
    lap("model")
    if newest is not None:
        _read_start(run, lambda: run.task.model().to(distributed.device()).eval())
        engine.load_weights(model, newest.weights(engine.shapes(model)))
    plus = plan.cfg.lora.plus if plan.cfg.lora is not None else 1.0
    live = Engine(model, ds, plan.cfg.optim, plus=plus, freeze=plan.cfg.train.freeze)
    if plan.cfg.train.ema is not None:
        live.keep_average(plan.cfg.train.ema)
    if plan.cfg.train.frozen == "replicate":
        keep_frozen_whole(model)
    lap("engine")
    if newest is None:
        live.eval()
        _read_start(run, lambda: live.model)
        return live, Progress()
    progress = restore(live, newest, seed=plan.cfg.train.seed)
    lifeline.tell("resumed", step=progress.step, source=str(newest))
    lap("checkpoint")
    return live, progress


def _model_of(run: PreparedRun, ds: dict[str, Any]) -> nn.Module:
    """The task's model with what is frozen in it. ds: of the engine."""
    plan = run.plan
    settle_inputs(plan.cfg.train)
    with engine.partitioned_loading(ds):
        model = run.task.model()
        freeze_whole(model, plan.cfg.train.freeze)
    if plan.cfg.train.compile:
        logger.info("%d blocks are compiled", compile_blocks(model))
    logger.info("run folder %s", plan.folder)
    logger.info("%s", trainable_report(model))
    return model


def settle_inputs(train: Train) -> None:
    """Let blocks of this run that are computed again keep their inputs where the run says."""
    store = None
    if train.activation_offload and train.recompute_every is None:
        logger.info(
            'train.gradient_checkpointing="auto": no block is computed again, and '
            "train.activation_offload takes no input"
        )
    elif train.activation_offload and not distributed.is_gpu():
        logger.info("device: a processor, where train.activation_offload changes nothing")
    elif train.activation_offload:
        store = engine.PinnedInputs()
    recomputation.keep_inputs_in(store)


def _read_teacher(run: PreparedRun, lap: Callable[[str], None]) -> None:
    """Let the teacher of a task that has one read the rows, before any other weight is in memory. A
    collective.
    """
    task, train = run.task, run.plan.cfg.train
    if not isinstance(task, LearnsFromTeacher) or task.cfg.teacher is None:
        return
    before = rng.capture()
    task.read_teacher(run.stores, batch=train.eval_batch or train.micro_batch)
    rng.restore(before)
    lap("teacher")


def _read_start(run: PreparedRun, start: Callable[[], Any]) -> None:
    """Let a task that compares with the model that the run begins with, `start`, compute what it
    needs of it. A resumed run has it on its disk, or reads the base once more. A collective.
    """
    if not isinstance(run.task, ComparesWithStart):
        return
    train, before = run.plan.cfg.train, rng.capture()
    run.task.read_start(start, run.stores, batch=train.eval_batch or train.micro_batch)
    rng.restore(before)


def restore(live: Engine, saved: SavedState, *, seed: int) -> Progress:
    """Restore the optimizer and the random state of a run, and return its progress. A collective.

    seed: that of the run. It makes new random state if the number of ranks has changed.
    """
    state = saved.state()
    live.optimizer.restore(saved.optimizer(live.optimizer.shapes()), state["engine"])
    if live.average is not None:
        live.average.restore(saved.average(engine.shapes(live.model.module)))
    if saved.world == distributed.world():
        rng.restore(saved.random_state(distributed.rank()))
    else:
        text = "%s was saved by %d rank(s), this run has %d: the same batches, other dropout"
        logger.warning(text, saved, saved.world, distributed.world())
        rng.seed_everything(seed + state["progress"]["step"], distributed.rank())
    progress = Progress.of(state["progress"])
    changed = checkpoint.made_otherwise(state.get("made_with", {}), checkpoint.made_with())
    if changed:
        text = "%s: %s. The run goes on; losses from here on have other last bits than without that"
        logger.warning(text, saved, "; ".join(changed))
    logger.info("resumed from %s", saved)
    return progress


def snapshot(
    plan: RunPlan,
    live: Engine,
    progress: Progress,
    identity: Mapping[str, Any],
    *,
    root: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> Callable[[], Path]:
    """A function that writes the present state as a checkpoint. It is a collective for another
    thread, which first copies this rank's part of weights and moments (12 to 14 bytes per trainable
    parameter, divided by the world size).

    root: the folder of checkpoints; None: that of the run. more: further keys of state.json.
    """
    weights, optimizer = live.own_tensors()
    average = {} if live.average is None else live.average.own_tensors()
    averages = {f"{name}|average": tensor for name, tensor in average.items()}
    live.state_copy.of({**weights, **optimizer, **averages})
    rest: dict[str, Any] = {
        "step": progress.step,
        "rng": rng.capture(),
        "state": {
            "progress": copy.deepcopy(progress.state()),
            "engine": live.optimizer.scalars(),
            "world": distributed.world(),
            "digest": digest(plan.values),
            "identity": identity,
            "made_with": checkpoint.made_with(),
            **(more or {}),
        },
        "keep_last": plan.cfg.train.keep_last if root in (None, plan.checkpoints) else 1,
        "keep": {progress.best_step} - {0},
    }

    def write() -> Path:
        tensors = live.state_copy.copy()
        return checkpoint.save(
            root or plan.checkpoints,
            weights={name: tensors[name] for name in weights},
            optimizer={name: tensors[name] for name in optimizer},
            average=None
            if live.average is None
            else {name: tensors[f"{name}|average"] for name in average},
            **rest,
        )

    return write
