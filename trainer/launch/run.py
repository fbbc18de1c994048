"""One experiment from its dictionary to exported weights, on every rank of a launcher or alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer import tasks
from trainer.config import auto, deepspeed_config
from trainer.config.identity import digest
from trainer.data.content import Content, content_of
from trainer.data.order import sizes_of
from trainer.data.token_store import TokenStore, store_of
from trainer.errors import EXIT_OK, EXIT_PREEMPTED, StorageError
from trainer.launch import choose as planning
from trainer.launch import doctor, late, preflight
from trainer.models.frozen.freezing import trainable_report
from trainer.models.fused import compile_blocks
from trainer.plan.time.fastest import ways
from trainer.runtime import device_defaults, distributed, rng
from trainer.runtime.beside import Beside
from trainer.runtime.deepspeed_optimizers import keep_frozen_whole
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Preemption, Stopped
from trainer.statistics.opening import opening_line
from trainer.survival import lifeline, mirror
from trainer.survival.groups import is_peer_lost
from trainer.survival.lifeline import PeerLost
from trainer.survival.mirror import Kept
from trainer.telemetry.chain import StepChain
from trainer.telemetry.meter import Meter
from trainer.telemetry.run_record import RunRecord
from trainer.telemetry.trackers import tracked_runs, tracker_names
from trainer.training import bad_steps, checkpoint, engine, run_folder
from trainer.training.bad_steps import RolledBack
from trainer.training.engine import Engine
from trainer.training.loop import Cadence, Progress, Session, fit, refuse_unknown_best
from trainer.training.options import Options
from trainer.training.run_folder import check_hub, check_identity, claimed, push
from trainer.training.run_plan import RunPlan, is_finished, say_padding
from trainer.training.schedule import DEFAULT_EVERY, log_interval
from trainer.training.scoring import first_questions

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.schema import Train
    from trainer.files.held_lock import HeldLock
    from trainer.protocol.task import Task

logger = logging.getLogger(__name__)


def run(plan: RunPlan, options: Options, preemption: Preemption) -> int:
    """Train one experiment to its end, from its newest good checkpoint. Returns the exit code: 0,
    or 75 if preempted.

    Every rank calls it. Raises LatheError (and records it in status.json) when the run cannot go
    on; PeerLost when another rank is gone, of a run that survives that.
    """
    logger.info("experiment %s", f"{plan.name}, {plan.id}" if plan.name else plan.id)
    device_defaults.settle(
        plan.cfg.train.precision,
        optimizer=plan.cfg.optim.name,
        compiles=plan.cfg.train.compile,
    )
    for settle in (_micro_batch_settled, _recomputation_settled, _frozen_settled):
        plan = settle(plan, options)  # what "auto" leaves open
    with claimed(plan, options) as lock:
        lifeline.tell("begun", id=plan.id, folder=str(plan.folder.absolute()))
        telemetry = RunRecord(
            plan.folder,
            total=plan.cfg.train.steps,
            wandb=options.wandb(plan.values),
            name=plan.name,
            others=lambda: tracked_runs(
                tracker_names(options.trackers),
                plan.folder,
                name=plan.name,
                exp_id=plan.id,
                values=plan.values,
            ),
        )
        try:
            finished = _train_or_stop(plan, options, telemetry, preemption, lock)
            telemetry.status("succeeded" if finished else "preempted")
            logger.info(
                "%s: %s", "finished" if finished else "stopped, to be run again", plan.folder
            )
        except BaseException as error:
            if isinstance(error, Exception) and is_peer_lost(error):
                telemetry.status("running")  # goodput goes on from what is known now
                raise PeerLost from error
            with contextlib.suppress(StorageError):  # a full disk must not hide what went wrong
                telemetry.fail(error)
            raise
        finally:
            telemetry.close()
        return EXIT_OK if finished else EXIT_PREEMPTED


def _train_or_stop(
    plan: RunPlan, options: Options, telemetry: RunRecord, preemption: Preemption, lock: HeldLock
) -> bool:
    """True when all steps are done, False when a signal came: before the first step, or later."""
    while True:
        has_kept = mirror.newest(options.memory, plan.id) is not None
        try:
            # what ranks have kept beyond the last checkpoint is saved after the step that follows
            with contextlib.nullcontext() if has_kept else preemption.nothing_to_save():
                made_ready = ready(plan, options, telemetry, preemption, lock)
        except Stopped:
            # the others may be anywhere: they were asked as well, or fail
            distributed.leave_alone()
            return False
        with contextlib.suppress(RolledBack):  # then the run is made ready again, as at a resume
            return _train(plan, options, made_ready)


def run_group(plans: Sequence[RunPlan], options: Options) -> int:
    """Train every experiment in order, leaving out finished ones; stops at the first that does not
    finish.

    A signal between two experiments counts as well. Returns the exit code of the last one that ran.
    """
    preemption = Preemption()
    try:
        return run_each(plans, options, preemption)
    finally:
        preemption.close()


def run_each(plans: Sequence[RunPlan], options: Options, preemption: Preemption) -> int:
    """As run_group, with somebody else's look-out for signals."""
    for planned in plans:
        if not options.resets(planned.id) and on_main(functools.partial(is_finished, planned)):
            logger.info("%s is finished; -r 1 starts it over", planned.folder)
            continue
        has_kept = mirror.newest(options.memory, planned.id) is not None
        if not has_kept and int(distributed.total(torch.tensor(int(preemption.requested)))):
            return EXIT_PREEMPTED
        code = run(planned, options, preemption)
        if code != EXIT_OK:
            return code
    return EXIT_OK


def _micro_batch_settled(plan: RunPlan, options: Options) -> RunPlan:
    """The plan with the micro-batch and the DeepSpeed file chosen, where they are "auto"."""
    asked = options.deepspeed or plan.cfg.deepspeed
    if auto.AUTO not in (asked, plan.values["train"]["micro_batch"]):
        return plan

    def choose() -> list[Any]:
        launch = _before_the_claim(plan, options)
        return list(planning.chosen(launch, asked, options.device, ways))

    preset, rows = on_main(choose)
    cfg = auto.with_micro_batch(plan.cfg, rows)
    ds = auto.rebuilt(cfg, preset, world=plan.sharding.world)
    return replace(plan, cfg=cfg, ds=ds, sharding=replace(plan.sharding, micro_batch=rows))


def _recomputation_settled(plan: RunPlan, options: Options) -> RunPlan:
    """The plan with train.gradient_checkpointing as the run began, else chosen by memory."""
    if plan.cfg.train.gradient_checkpointing != auto.AUTO:
        return plan

    def choose() -> bool | int:
        launch = _before_the_claim(plan, options)
        in_memory = mirror.newest(options.memory, plan.id) is not None
        goes_on = in_memory or (preflight.has_begun(plan) and not options.resets(plan.id))
        recorded = run_folder.recorded_recomputation(plan.folder) if goes_on else None
        return planning.recomputed(launch, name=options.device, recorded=recorded)

    return replace(plan, cfg=auto.with_recomputation(plan.cfg, on_main(choose)))


def _frozen_settled(plan: RunPlan, options: Options) -> RunPlan:
    """The plan with train.frozen chosen by memory."""
    if plan.cfg.train.frozen != auto.AUTO:
        return plan

    def choose() -> str:
        launch = _before_the_claim(plan, options)
        return planning.frozen(launch, name=options.device)

    return replace(plan, cfg=auto.with_frozen(plan.cfg, on_main(choose)))


def _before_the_claim(plan: RunPlan, options: Options) -> planning.UpcomingRun:
    """The run as it is planned for while its folder is not touched yet."""
    task = tasks.load(plan.cfg, options.places)
    stores = _stores(options, task, content_of)
    return _launch(plan, options, task, stores, answers=False)


def _launch(
    plan: RunPlan, options: Options, task: Task, stores: dict[str, TokenStore], *, answers: bool
) -> planning.UpcomingRun:
    return planning.UpcomingRun(
        plan.values, plan.cfg, plan.ds, plan.sharding, task, options.places, stores, answers
    )


def _stores(
    options: Options, task: Task, content: Callable[[Task, str, Path], Content]
) -> dict[str, TokenStore]:
    # the smaller one first, so that what is wrong with its rows is said before the other is encoded
    return {
        split: store_of(
            task,
            split,
            options.cache_dir,
            num_proc=options.num_proc,
            content=content(task, split, options.cache_dir),
        )
        for split in ("valid", "train")
    }


def _shared_content(task: Task, split: str, cache_dir: Path) -> Content:
    """content_of, read by rank 0 for all. A collective."""
    digest, count = on_main(lambda: content_of(task, split, cache_dir))
    return digest, count


@dataclass(frozen=True)
class Ready:
    """A run before its next step."""

    session: Session
    progress: Progress
    launch: planning.UpcomingRun
    memory: dict[str, Any] | None  # its plan
    export: Callable[[str], None]
    saves: Beside  # the checkpoint that is being written, if any


def ready(
    plan: RunPlan, options: Options, telemetry: RunRecord, preemption: Preemption, lock: HeldLock
) -> Ready:
    """Rows encoded, memory planned, the engine built and the newest checkpoint read. Nothing is
    saved yet. A collective.
    """
    cfg, lap = plan.cfg, telemetry.startup.lap
    lap("imports")
    if options.push_to_hub:
        on_main(check_hub)
    rng.seed_everything(cfg.train.seed, distributed.rank())
    task = tasks.load(cfg, options.places)
    on_main(lambda: preflight.refuse_early(plan, options, task))
    questions = first_questions(task, cfg.train.answers or options.extra_evals)
    stores = _stores(options, task, _shared_content)
    distributed.wait_for_all()
    distributed.make_side_group()  # here, for a rank that dies while it is made is noticed late
    lap("rows")
    launch = _launch(plan, options, task, stores, answers=bool(questions))
    newest = mirror.newest(options.memory, plan.id) or checkpoint.resume_point(plan.checkpoints)
    identity = check_identity(plan, task, stores, newest)
    say_padding(plan, sizes_of(stores["train"], task))
    for split in ("train", "valid"):
        logger.info("%s", opening_line(stores[split]))
    on_main(lambda: preflight.refuse_rows(task, stores, most_lost=cfg.train.max_lost_labels))
    memory = on_main(lambda: planning.before_launch(launch, plan.folder, options, late.predicted))
    doctor.before_first_use(plan.ds["zero_optimization"]["stage"], options.cache_dir)
    lap("checks")
    live, progress = _engine(plan, task, newest, lap)
    telemetry.resume(progress.step, progress.bad.steps)
    telemetry.status("running", step=progress.step)
    meter = Meter(telemetry.goodput, counts_flops=not cfg.train.compile)
    meter.prediction = late.of_plan(memory, plan.folder / planning.FILE)
    chain, saves = StepChain.of(progress.links), Beside()

    def save(progress: Progress) -> None:
        with meter.pause("saving"):
            on_main(lock.check)
            progress.links = chain.links()
            saves.start(snapshot(plan, live, progress, identity))
            if not options.saves_behind:
                saves.wait()

    def export(name: str) -> None:
        on_main(lock.check)
        run_folder.export(plan, task, live, name)

    session = Session(
        cfg=cfg,
        task=task,
        engine=live,
        train=stores["train"],
        valid=stores["valid"],
        sharding=plan.sharding,
        cadence=_cadence(cfg.train, options),
        run=telemetry,
        meter=meter,
        preemption=preemption,
        save=save,
        export_best=lambda: export("best"),
        log_gradients=options.wandb_log_gradients,
        questions=questions,
        chain=chain,
        left_out=bad_steps.left_out(plan.folder),
        roll_back=functools.partial(bad_steps.roll_back, plan.folder),
        mirror=mirror.of_this_rank(options, plan.id, live, step=progress.step),
    )
    return Ready(session, progress, launch, memory, export, saves)


def _train(plan: RunPlan, options: Options, ready: Ready) -> bool:
    """Every step that is left, and the export. False when a signal came before the last one."""
    live = ready.session.engine
    try:
        with planning.obeyed(ready.memory, live, ready.launch, plan.folder):
            refuse_unknown_best(ready.session)
            ready.session.run.goodput.begin_steps()
            finished = fit(ready.session, ready.progress)
            late.tell(ready.session.meter, ready.session.run)
        if ready.session.mirror is not None:
            logger.info("%s", ready.session.mirror.told())
        if finished:
            ready.export("final")
            if options.push_to_hub:
                on_main(lambda: push(plan))
        with ready.session.meter.pause("saving"):
            ready.saves.wait()
        if finished:  # a run killed behind its last save has not removed older ones yet
            where = plan.folder / "checkpoints", ready.progress.step, plan.cfg.train.keep_last
            on_main(lambda: checkpoint.tidy(*where, {ready.progress.best_step} - {0}))
        return finished
    except BaseException as error:
        ready.saves.leave(error)
        raise
    finally:
        live.destroy()


def _engine(
    plan: RunPlan, task: Task, newest: Kept | Path | None, lap: Callable[[str], None]
) -> tuple[Engine, Progress]:
    """The task's model under DeepSpeed, with the newest good checkpoint, or what ranks kept in
    memory. A collective.
    """
    ds = deepspeed_config.for_engine(plan.ds)
    with engine.partitioned_loading(ds):
        model = task.model()
    if plan.cfg.train.compile:
        logger.info("%d blocks are compiled", compile_blocks(model))
    lap("model")
    logger.info("run folder %s", plan.folder)
    logger.info("%s", trainable_report(model))
    if newest is None:
        live = _made(plan, model, ds)
        lap("engine")
        return live, Progress()
    if isinstance(newest, Kept):
        engine.load_weights(model, newest.weights(engine.shapes(model)))
    else:
        engine.load_weights(model, checkpoint.read_tensors(newest, "weights"))
    live = _made(plan, model, ds)
    lap("engine")
    progress = _restore(live, newest, seed=plan.cfg.train.seed)
    lifeline.tell("resumed", step=progress.step, source=str(newest))
    lap("checkpoint")
    return live, progress


def _made(plan: RunPlan, model: Any, ds: dict[str, Any]) -> Engine:
    live = Engine(model, ds, plan.cfg.optim)
    if plan.cfg.train.frozen == "replicate":
        keep_frozen_whole(model)
    return live


def _cadence(train: Train, options: Options) -> Cadence:
    """What the dictionary says, else the flag --log_every, else a default. Lines are logged a
    hundred times in a run, and never more than DEFAULT_EVERY steps apart.
    """
    given, otherwise = train.log_every or options.log_every, options.log_every or DEFAULT_EVERY
    return Cadence(
        log=given or log_interval(train.steps),
        evaluate=train.eval_every or otherwise,
        save=train.save_every or otherwise,
        is_first_logged=given is None,
    )


def snapshot(
    plan: RunPlan, live: Engine, progress: Progress, identity: Mapping[str, Any]
) -> Callable[[], Path]:
    """The present state as a checkpoint that is still to be written, in another thread; of weights
    and moments this rank's own part, 12 to 14 bytes / world of a trainable parameter, which are
    copied there as well. What it returns is a collective.
    """
    weights, optimizer = live.own_tensors()
    live.state_copy.of({**weights, **optimizer})
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
        },
        "keep_last": plan.cfg.train.keep_last,
        "keep": {progress.best_step} - {0},
    }

    def write() -> Path:
        made = live.state_copy.copy()
        return checkpoint.save(
            plan.folder / "checkpoints",
            weights={name: made[name] for name in weights},
            optimizer={name: made[name] for name in optimizer},
            **rest,
        )

    return write


def _restore(live: Engine, saved: Kept | Path, *, seed: int) -> Progress:
    if isinstance(saved, Kept):
        state, world, random = saved.state(), saved.world, saved.random_state
        tensors: Mapping[str, Tensor] = saved.optimizer(live.optimizer.shapes())
    else:
        state, world = checkpoint.read_json(saved), checkpoint.saved_world(saved)
        random = functools.partial(checkpoint.read_rng, saved)
        tensors = checkpoint.read_tensors(saved, "optimizer")
    live.optimizer.restore(tensors, state["engine"])
    if world == distributed.world():
        rng.restore(random(distributed.rank()))
    else:
        text = "%s was saved by %d rank(s), this run has %d: the same batches, other dropout"
        logger.warning(text, saved, world, distributed.world())
        rng.seed_everything(seed + state["progress"]["step"], distributed.rank())
    progress = Progress.of(state["progress"])
    logger.info("resumed from %s", saved)
    return progress
