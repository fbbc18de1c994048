"""One experiment from its dictionary to exported weights, on every rank of a launcher or alone."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer import errors, tasks
from trainer.config import Experiment, deepspeed_config, digest, exp_id
from trainer.data.order import Sharding, Sizes, padding_share, sizes_of
from trainer.data.token_store import TokenStore, open_store
from trainer.errors import (
    EXIT_OK,
    EXIT_PREEMPTED,
    ConfigError,
    LatheError,
    ResumeError,
    StorageError,
)
from trainer.evaluation.scoring import first_questions
from trainer.files.atomic import refusals, write_json
from trainer.files.held_lock import HeldLock
from trainer.memory import launch as planning
from trainer.models.freezing import trainable_report
from trainer.runtime import distributed, rng
from trainer.runtime.preemption import Preemption
from trainer.statistics.ledger import refuse_lost_labels
from trainer.tasks.protocol import Places, Task
from trainer.telemetry.meter import Meter
from trainer.telemetry.run_record import RunRecord
from trainer.telemetry.wandb_run import WandbSettings
from trainer.training import checkpoint, engine
from trainer.training.engine import Engine
from trainer.training.loop import Cadence, Progress, Session, fit

logger = logging.getLogger(__name__)

_PADDING_STEPS = 20  # whose padding is counted and told at the start
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The flags of trainval.py that are no part of an experiment's identity."""

    savedir_base: Path
    data_path: Path | None = None
    cache_dir: Path = Path("tmp-cache")
    reset: bool = False
    log_every: int = 1000
    deepspeed: str | None = None
    extra_evals: int = 0  # rows that are answered by generation at each evaluation; 0: none
    wandb_entity: str | None = None
    wandb_project: str | None = None
    wandb_run_name: str | None = None
    log_gradients: bool = False
    push_to_hub: bool = False
    device: str | None = None  # that memory is planned for; None: the GPU of this process
    force: bool = False  # run what does not fit by the plan

    def wandb(self, values: dict[str, Any]) -> WandbSettings | None:
        """Where the run of an experiment appears in wandb; None: nowhere."""
        given = self.wandb_entity, self.wandb_project
        if None in given:
            if any(given):
                raise ConfigError(
                    "--wandb_entity_name and --wandb_project_name: got one, want both (wandb on) "
                    "or neither."
                )
            return None
        name = exp_id(values)
        return WandbSettings(*given, name=self.wandb_run_name or name, id=name, config=values)

    @property
    def places(self) -> Places:
        return Places(self.data_path, self.cache_dir, self.savedir_base)


@dataclass(frozen=True)
class Plan:
    """What will run: everything known before a weight is read."""

    values: dict[str, Any]
    cfg: Experiment
    id: str
    folder: Path
    ds: dict[str, Any]  # the complete DeepSpeed dictionary
    sharding: Sharding


def plan(values: dict[str, Any], options: Options, *, world: int, rank: int) -> Plan:
    """Check an experiment against its schema, its DeepSpeed file and the world size. Touches no
    disk but to read.
    """
    name = exp_id(values)
    cfg = tasks.parse(values, source=f"experiment {name}")
    if cfg.train.micro_batch == 0:  # "auto": `run` chooses
        cfg = planning.with_micro_batch(cfg, 1)
    train = cfg.train
    sharding = Sharding(
        train.global_batch,
        train.micro_batch,
        world,
        rank,
        micro_tokens=train.micro_tokens,
        bucket_steps=train.bucket_steps,
    )
    file = planning.placeholder(options.deepspeed or cfg.deepspeed, cfg)
    ds = deepspeed_config.build(
        deepspeed_config.read(file),
        train=train,
        optim=cfg.optim,
        world=world,
        source=f"DeepSpeed file {file!r} with experiment {name}",
    )
    return Plan(values, cfg, name, options.savedir_base / name, ds, sharding)


def run(plan: Plan, options: Options, preemption: Preemption) -> int:
    """Train one experiment to its end, from its newest good checkpoint. Returns the exit code: 0,
    or 75 if preempted.

    Every rank calls it. Raises LatheError (and records it in status.json) when the run cannot go
    on.
    """
    plan = _settled(plan, options)
    with _claimed(plan, options) as lock:
        telemetry = RunRecord(
            plan.folder, total=plan.cfg.train.steps, wandb=options.wandb(plan.values)
        )
        try:
            finished = _train(plan, options, telemetry, preemption, lock)
            telemetry.status("succeeded" if finished else "preempted")
            logger.info(
                "%s: %s", "finished" if finished else "stopped, to be run again", plan.folder
            )
        except BaseException as error:
            with contextlib.suppress(StorageError):  # a full disk must not hide what went wrong
                telemetry.status("failed", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            telemetry.close()
        return EXIT_OK if finished else EXIT_PREEMPTED


def run_group(plans: Sequence[Plan], options: Options) -> int:
    """Train every experiment in order, leaving out finished ones; stops at the first that does not
    finish.

    A signal between two experiments counts as well. Returns the exit code of the last one that ran.
    """
    preemption = Preemption()
    try:
        for planned in plans:
            if not options.reset and on_main(functools.partial(is_finished, planned)):
                logger.info("%s is finished; -r 1 starts it over", planned.folder)
                continue
            if int(distributed.total(torch.tensor(int(preemption.requested)))):
                return EXIT_PREEMPTED
            code = run(planned, options, preemption)
            if code != EXIT_OK:
                return code
        return EXIT_OK
    finally:
        preemption.close()


def is_finished(plan: Plan) -> bool:
    """True when an earlier run of the same dictionary reached its end."""
    try:
        return json.loads((plan.folder / "status.json").read_text())["state"] == "succeeded"
    except (OSError, ValueError, KeyError):
        return False


def _settled(plan: Plan, options: Options) -> Plan:
    """The plan with what "auto" leaves open chosen by memory: the micro-batch, the DeepSpeed file.
    A collective.
    """
    asked = options.deepspeed or plan.cfg.deepspeed
    if planning.AUTO not in (asked, plan.values["train"]["micro_batch"]):
        return plan

    def choose() -> list[Any]:
        task = tasks.load(plan.cfg, options.places)
        return list(
            planning.chosen(_launch(plan, options, task, answers=False), asked, name=options.device)
        )

    preset, rows = on_main(choose)
    cfg = planning.with_micro_batch(plan.cfg, rows)
    ds = planning.rebuilt(cfg, preset, world=plan.sharding.world)
    return replace(plan, cfg=cfg, ds=ds, sharding=replace(plan.sharding, micro_batch=rows))


def _launch(plan: Plan, options: Options, task: Task, *, answers: bool) -> planning.Launch:
    stores = {split: store_of(task, split, options) for split in ("train", "valid")}
    return planning.Launch(
        plan.values, plan.cfg, plan.ds, plan.sharding, task, options.places, stores, answers
    )


def _train(
    plan: Plan, options: Options, telemetry: RunRecord, preemption: Preemption, lock: HeldLock
) -> bool:
    cfg = plan.cfg
    if options.push_to_hub:
        on_main(_check_hub)
    rng.seed_everything(cfg.train.seed, distributed.rank())
    task = tasks.load(cfg, options.places)
    questions = first_questions(task, cfg.train.answers or options.extra_evals)
    launch = _launch(plan, options, task, answers=bool(questions))
    stores = launch.stores
    found = _newest_checkpoint(plan)
    _check_identity(plan, task, stores)
    _say_padding(plan, sizes_of(stores["train"], task))
    for store in stores.values():
        refuse_lost_labels(store, most=cfg.train.max_lost_labels)
    memory = on_main(
        lambda: planning.before_launch(
            launch, plan.folder, name=options.device, is_forced=options.force
        )
    )
    ds = deepspeed_config.for_engine(plan.ds)
    with engine.partitioned_loading(ds):
        model = task.model()
    logger.info("run folder %s", plan.folder)
    logger.info("%s", trainable_report(model))
    progress = Progress()
    if found is not None:
        engine.load_weights(model, dict(checkpoint.read_tensors(found, "weights")))
    live = Engine(model, ds, cfg.optim)
    if found is not None:
        progress = _restore(live, found, seed=cfg.train.seed)
    telemetry.resume(progress.step)
    telemetry.status("running", step=progress.step)
    cadence = Cadence(
        *(
            every or options.log_every
            for every in (cfg.train.log_every, cfg.train.eval_every, cfg.train.save_every)
        )
    )
    meter = Meter()

    def save(progress: Progress) -> None:
        with meter.paused():
            on_main(lock.check)
            _save(plan, live, progress)

    def export(name: str) -> None:
        on_main(lock.check)
        _export(plan, task, live, name)

    session = Session(
        cfg=cfg,
        task=task,
        engine=live,
        train=stores["train"],
        valid=stores["valid"],
        sharding=plan.sharding,
        cadence=cadence,
        run=telemetry,
        meter=meter,
        preemption=preemption,
        save=save,
        export_best=lambda: export("best"),
        log_gradients=options.log_gradients,
        questions=questions,
    )
    try:
        with planning.obeyed(memory, live, launch, plan.folder):
            finished = fit(session, progress)
        if finished:
            export("final")
            if options.push_to_hub:
                on_main(lambda: _push(plan))
        return finished
    finally:
        live.destroy()


# The run folder
# ---------------------------------------------------------------------------------------------------


def on_main(action: Callable[[], T]) -> T:
    """`action()` on rank 0 only; every rank gets its (JSON-able) result, or raises its error. A
    collective.

    Whatever goes wrong becomes a LatheError on all ranks: one that left alone would leave the
    others waiting.
    """
    outcome: dict[str, Any] = {}
    cause: LatheError | None = None
    if distributed.is_main():
        try:
            with refusals(Path(".")):
                outcome = {"result": action()}
        except LatheError as error:
            cause = error
        # any: see above. safetensors and tokenizers have no error of their own for the disk
        except Exception as error:
            is_disk = "os error" in str(error).lower() or "i/o error" in str(error).lower()
            cause = (StorageError if is_disk else LatheError)(f"{type(error).__name__}: {error}")
            cause.__cause__ = error
        if cause is not None:
            outcome = {"error": type(cause).__name__, "text": str(cause)}
    outcome = distributed.broadcast(outcome)
    if cause is not None:
        raise cause
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["text"])
    return outcome["result"]


@contextlib.contextmanager
def _claimed(plan: Plan, options: Options) -> Iterator[HeldLock]:
    """The run folder, made if need be and held by this run alone while the block lasts."""
    lock = HeldLock(options.savedir_base / f".{plan.id}.lock", what=str(plan.folder))
    try:
        on_main(lambda: _claim(plan, options, lock))
        yield lock
    finally:
        lock.release()


def _claim(plan: Plan, options: Options, lock: HeldLock) -> None:
    options.savedir_base.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    if options.reset and plan.folder.exists():
        aside = plan.folder.with_name(f"{plan.id}.bak-{time.strftime('%Y%m%d-%H%M%S')}")
        os.replace(plan.folder, aside)
        logger.info("reset: the old folder is now %s", aside)
    plan.folder.mkdir(exist_ok=True)
    _check_dictionary(plan)
    write_json(plan.folder / "exp_dict.json", plan.values)
    write_json(plan.folder / "resolved.json", plan.cfg.model_dump(mode="json"))
    write_json(plan.folder / "ds_config.json", plan.ds)


def _check_dictionary(plan: Plan) -> None:
    """A folder belongs to one dictionary; ids are md5 of joined text and can collide, the digest
    cannot.
    """
    path = plan.folder / "exp_dict.json"
    if not path.exists():
        return
    stored = json.loads(path.read_text())
    if digest(stored) == digest(plan.values):
        return
    differing = sorted(
        key for key in {*stored, *plan.values} if stored.get(key) != plan.values.get(key)
    )
    raise ResumeError(
        f"{path} is of another experiment: {', '.join(differing)} differ(s).\n"
        "Start over with -r 1 (the old folder is moved aside), or use another --savedir_base."
    )


def _check_identity(plan: Plan, task: Task, stores: dict[str, TokenStore]) -> None:
    """Data and base model must be those that the run began with."""
    facts = {split: store.summary() for split, store in stores.items()}

    def check() -> None:
        now = {
            "base": task.fingerprint(),
            **{split: store.digest for split, store in stores.items()},
        }
        path = plan.folder / "data.json"
        if path.exists():
            began = json.loads(path.read_text())["identity"]
            changed = [
                f"{key} (was {began.get(key)!r}, is {now[key]!r})"
                for key in now
                if began.get(key) != now[key]
            ]
            if changed:
                raise ResumeError(
                    f"{plan.folder}: cannot resume, these changed since the run began: "
                    f"{'; '.join(changed)}.\n"
                    "Put them back, or start over with -r 1 (the old folder is moved aside)."
                )
        write_json(path, {"identity": now, "splits": facts})

    on_main(check)


def _say_padding(plan: Plan, sizes: Sizes) -> None:
    if sizes.is_packed:
        return logger.info("micro-batches are packed: no padding, but inside attention")
    train = plan.cfg.train
    seed = train.seed if train.order == "shuffled" else None
    steps = min(train.steps, max(_PADDING_STEPS, train.bucket_steps))
    share = padding_share(sizes, plan.sharding, seed=seed, steps=steps)
    logger.info(
        "micro-batches of rows padded to their longest are %.1f%% padding (first %d steps)",
        100 * share,
        steps,
    )


def store_of(task: Task, split: str, options: Options) -> TokenStore:
    """The encoded rows of a split, from the cache or built."""
    return open_store(
        lambda: task.rows(split),
        task.encode,
        encoding_id=task.encoding_id(),
        split=split,
        cache_dir=options.cache_dir,
        length=task.length,
    )


def _newest_checkpoint(plan: Plan) -> Path | None:
    return checkpoint.resume_point(plan.folder / "checkpoints")


def _save(plan: Plan, live: Engine, progress: Progress) -> None:
    world, rank = distributed.world(), distributed.rank()

    def own(k: int) -> bool:
        return k % world == rank

    checkpoint.save(
        plan.folder / "checkpoints",
        progress.step,
        weights=live.weights(own),
        optimizer=live.optimizer.tensors(own),
        rng=rng.capture(),
        state={
            "progress": progress.state(),
            "engine": live.optimizer.scalars(),
            "world": world,
            "digest": digest(plan.values),
        },
        keep_last=plan.cfg.train.keep_last,
        keep={progress.best_step} if progress.best_step else set(),
    )


def _restore(live: Engine, folder: Path, *, seed: int) -> Progress:
    state = checkpoint.read_json(folder)
    live.optimizer.restore(dict(checkpoint.read_tensors(folder, "optimizer")), state["engine"])
    if checkpoint.saved_world(folder) == distributed.world():
        rng.restore(checkpoint.read_rng(folder, distributed.rank()))
    else:
        logger.warning(
            "%s was saved by %d rank(s), this run has %d: the same batches go on, but dropout "
            "draws anew",
            folder,
            checkpoint.saved_world(folder),
            distributed.world(),
        )
        rng.seed_everything(seed + state["progress"]["step"], distributed.rank())
    progress = Progress.of(state["progress"])
    logger.info("resumed from %s", folder)
    return progress


def _export(plan: Plan, task: Task, live: Engine, name: str) -> None:
    """The trained weights as <run>/<name>/, in the task's own layout; complete or not there
    at all.
    """
    weights = live.weights(lambda k: distributed.is_main())

    def write() -> None:
        target, temporary = plan.folder / name, plan.folder / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with refusals(target):
                task.export(weights, temporary)
                old = plan.folder / f".{name}.old"
                shutil.rmtree(old, ignore_errors=True)
                if target.exists():
                    os.replace(target, old)
                os.replace(temporary, target)
                shutil.rmtree(old, ignore_errors=True)
        finally:  # on a full disk, what was written so far is the room that is missing
            shutil.rmtree(temporary, ignore_errors=True)

    on_main(write)


@contextlib.contextmanager
def _hub_errors(advice: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (
        HfHubHTTPError,
        httpx.HTTPError,
        OSError,
        ValueError,
    ) as error:  # OSError: no token, or offline mode
        raise ConfigError(
            f"--push_to_hub: {str(error).strip().splitlines()[0]}\n{advice}"
        ) from error


def _check_hub() -> None:
    """ConfigError before anything is trained when nothing could be uploaded afterwards."""
    from huggingface_hub import HfApi

    with _hub_errors(
        "Log in with `hf auth login` on a machine that reaches the Hub, or leave --push_to_hub out."
    ):
        HfApi().whoami()


def _push(plan: Plan) -> None:
    from huggingface_hub import HfApi

    with _hub_errors(
        f"The model is safe in {plan.folder / 'final'}: push that folder by hand, or run this "
        "again."
    ):
        repository = HfApi().create_repo(plan.id, private=True, exist_ok=True).repo_id
        HfApi().upload_folder(repo_id=repository, folder_path=plan.folder / "final")
