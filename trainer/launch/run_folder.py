"""The folder of a run: one process holds it, and it belongs to one dictionary and its data."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.config.identity import digest
from trainer.config.userfile import kind
from trainer.data import left_out
from trainer.data.content import content_of, content_of_rows, rows_of
from trainer.data.mixed.store import sources_in
from trainer.data.stream.store import is_streamed
from trainer.errors import ConfigError, DataError, LatheError, ResumeError, StorageError
from trainer.exports import card, record
from trainer.files.atomic import read_json, refusals, refuse_link_out, write_json
from trainer.files.held_lock import HeldLock
from trainer.metrics import own
from trainer.models import base_source
from trainer.protocol.abilities import ArrangesRows, LearnsFromTeacher
from trainer.runtime import distributed
from trainer.runtime.distributed import is_gpu, on_main
from trainer.survival import groups, lifeline
from trainer.switches import (
    CPU_KERNELS,
    KERNELS,
    LIGER,
    uses_cpu_kernels,
    uses_liger,
    with_cpu_kernels_of,
)
from trainer.telemetry.console_file import kept_console
from trainer.telemetry.run_record import RunRecord
from trainer.telemetry.trackers import tracked_runs, tracker_names
from trainer.training import checkpoint

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Places, Task
    from trainer.telemetry.console_file import ConsoleFile
    from trainer.telemetry.run_record import Sink
    from trainer.training.checkpoint import SavedState
    from trainer.training.engine import Engine
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)

# The files that the process which trains a run replaces again and again.
WRITTEN_AGAIN = (
    "score_list.json",
    "score_list.pkl",
    "status.json",
    "data.json",
    "memory_plan.json",
)
_TEACHER = "teacher"  # the key of its digest in data.json
_TOPICS = "topics of data.batches"  # the key of their digest in data.json
_OF_RUN = "weights of the run before"  # the key of their digest in data.json
_NEW_SHARES = (
    " The rule of data.valid_share is another one than before 2026-11-26 (CHANGELOG.md): a run "
    "that began before starts over."
)


@contextlib.contextmanager
def open_record(plan: RunPlan, options: Options) -> Iterator[RunRecord]:
    """The record of a run, open while the block lasts: on the console, in the run folder, in wandb
    and in other trackers. It keeps the error that the block ends with.

    Raises PeerLost for an error that comes of the loss of another rank.
    """
    lifeline.tell("begun", id=plan.id, folder=str(plan.folder.absolute()))
    consoles: list[ConsoleFile] = []

    def others() -> list[Sink]:
        consoles.extend(kept_console(plan.folder, plan.cfg.train.steps))
        trackers = tracked_runs(
            tracker_names(options.trackers),
            plan.folder,
            name=plan.name,
            exp_id=plan.id,
            values=plan.values,
        )
        return [*consoles, *trackers]

    run_record = RunRecord(
        plan.folder,
        total=plan.cfg.train.steps,
        wandb=options.wandb(plan.values),
        name=plan.name,
        began_at=options.began_at,
        others=others,
    )
    try:
        yield run_record
    except BaseException as error:
        if isinstance(error, Exception) and groups.is_peer_lost(error):
            run_record.status("running")  # goodput goes on from what is known now
            raise lifeline.PeerLost from error
        for console in consoles:
            console.tell(error)
        with contextlib.suppress(StorageError):  # a full disk must not hide what went wrong
            run_record.fail(error)
        raise
    finally:
        run_record.close()


@contextlib.contextmanager
def claim_folder(plan: RunPlan, options: Options) -> Iterator[HeldLock]:
    """Make the run folder if it is missing, and lock it for this run while the block lasts."""
    lock = HeldLock(options.savedir_base / f".{plan.id}.lock", what=str(plan.folder))
    try:
        on_main(lambda: _claim(plan, options, lock))
        yield lock
    finally:
        lock.release()


def _claim(plan: RunPlan, options: Options, lock: HeldLock) -> None:
    base = options.savedir_base
    for path in (base, *base.parents):
        if path.exists() and not path.is_dir():
            raise StorageError(
                f"--savedir_base {base}: {path} is a file. Give a folder, which is made if need be."
            )
    with refusals(base):
        base.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    if options.resets(plan.id) and plan.folder.exists():
        aside = plan.folder.with_name(f"{plan.id}.bak-{time.strftime('%Y%m%d-%H%M%S')}")
        os.replace(plan.folder, aside)
        logger.info("reset: the old folder is now %s", aside)
    refuse_link_out(plan.folder)
    plan.folder.mkdir(exist_ok=True)
    lock.hold(plan.folder)
    for name in WRITTEN_AGAIN:  # temporary files of a killed process
        for leftover in plan.folder.glob(f".{name}.*.tmp"):
            leftover.unlink(missing_ok=True)
    # exp_dict.json is made again when resolved.json is of this very experiment; data.json from a
    # checkpoint, if there is one (check_identity); score_list.json from metrics.jsonl, and
    # status.json with the next line (RunRecord)
    problems: list[str] = []
    problem = _problem(plan.folder / "exp_dict.json", lambda value: isinstance(value, dict))
    if problem and _is_resolved(plan):
        logger.warning("%s: it is made again, for resolved.json is of this experiment", problem)
        os.replace(plan.folder / "exp_dict.json", plan.folder / "exp_dict.json.damaged")
    elif problem:
        problems.append(f"{problem}; want the dictionary of this experiment.")
    problem = _problem(plan.folder / "data.json", _is_identity)
    if problem and not any((plan.folder / "checkpoints").glob("step-*")):
        problems.append(f"{problem}; want which data and base the run began with.")
    if problems:
        raise ResumeError("\n".join([*problems, MEND]))
    _check_dictionary(plan)
    write_json(plan.folder / "exp_dict.json", plan.values)
    write_json(plan.folder / "resolved.json", plan.cfg.model_dump(mode="json"))
    write_json(plan.folder / "ds_config.json", plan.ds)
    own.keep(plan.cfg.own_metrics, plan.folder)


MEND = (
    "Put it back from a copy, or remove it when nothing has changed since the run began: it is "
    "written anew. Or start over with -r 1 (the old folder is moved aside)."
)


def _problem(path: Path, is_ours: Callable[[Any], bool]) -> str:
    """What is wrong with a file of the run folder; "" if nothing is, or if it does not exist."""
    try:
        value = _read(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"{path}: got what cannot be read ({error})"
    return "" if is_ours(value) else f"{path}: got {kind(value)} that no run writes there"


def _is_identity(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("identity"), dict)


def _is_resolved(plan: RunPlan) -> bool:
    """Whether every key in resolved.json has the value that this experiment gives it."""
    try:
        earlier = _read(plan.folder / "resolved.json")
    except (OSError, ValueError):
        return False
    return bool(earlier) and _agrees(earlier, plan.cfg.model_dump(mode="json"))


def _agrees(stored: Any, now: Any) -> bool:
    if not isinstance(stored, dict) or not isinstance(now, dict):
        return stored == now
    return all(key in now and _agrees(stored[key], now[key]) for key in stored)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def recorded_recomputation(folder: Path) -> bool | int | None:
    """The value of train.gradient_checkpointing in the last start of a run; None if its folder
    does not say it.
    """
    try:
        how = _read(folder / "resolved.json")["train"]["gradient_checkpointing"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return how if isinstance(how, int) else None


def recorded_chunk_tokens(folder: Path) -> int | None:
    """The value of loss.chunk_tokens in the last start of a run; None if its folder does not say
    it.
    """
    try:
        tokens = _read(folder / "resolved.json")["loss"]["chunk_tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokens if isinstance(tokens, int) else None


def _check_dictionary(plan: RunPlan) -> None:
    """ResumeError if the folder belongs to another dictionary. The ids of two dictionaries can
    collide (md5 of joined text); their digests cannot.
    """
    path = plan.folder / "exp_dict.json"
    if not path.exists():
        return
    earlier = _read(path)
    if digest(earlier) == digest(plan.values):
        return
    differing = sorted(
        key for key in {*earlier, *plan.values} if earlier.get(key) != plan.values.get(key)
    )
    raise ResumeError(
        f"{path} is of another experiment: {', '.join(differing)} differ(s).\n"
        "Start over with -r 1 (the old folder is moved aside), or use another --savedir_base."
    )


def identity_of(
    plan: RunPlan, task: Task, stores: Mapping[str, TokenStore], places: Places
) -> dict[str, str]:
    """The digests of the base, of the teacher, if any, of the rows of each split, and of the run
    that the base is of.
    """
    base = task.fingerprint()
    if not base and any(one.is_whole for one in plan.cfg.train.freeze):
        base = base_source.fingerprint(plan.cfg.base, places)
    now = {"base": base, **{split: store.digest for split, store in stores.items()}}
    teacher = task.teacher_fingerprint() if isinstance(task, LearnsFromTeacher) else None
    if teacher is not None:
        now[_TEACHER] = teacher
    if isinstance(task, ArrangesRows) and "train" in stores:
        arrangement = task.arrangement(stores["train"], sources_in(stores["train"]))
        if arrangement is not None and arrangement.digest is not None:
            now[_TOPICS] = arrangement.digest
    of_run = base_source.begun_with(plan.cfg.base, places)
    return now if of_run is None else {**now, _OF_RUN: of_run}


def check_identity(
    plan: RunPlan,
    task: Task,
    stores: dict[str, TokenStore],
    newest: SavedState | None,
    *,
    places: Places,
) -> dict[str, str]:
    """Check that data and base model are those that the run began with. Returns their digests. A
    collective.

    newest: the checkpoint to resume from. It has the digests too, in case data.json is damaged.
    """
    facts = {split: store.summary() for split, store in stores.items()}

    def check() -> dict[str, str]:
        now = identity_of(plan, task, stores, places)
        path = plan.folder / "data.json"
        began = _beginning(path, newest)
        changed = [
            f"{key} (was {began.get(key)!r}, is {now[key]!r}{_grown(path, key, facts)})"
            for key in now
            if began
            and began.get(key) != now[key]
            and not (key == _OF_RUN and key not in began)  # of a run of an earlier version
            and not (key in stores and _is_of_earlier_version(task, key, began.get(key)))
        ]
        if changed:
            is_shared = plan.values.get("data", {}).get("valid_share")
            changed += _changed_sources(
                _read(path).get("splits", {}) if path.exists() else {}, facts
            )
            raise ResumeError(
                f"{plan.folder}: cannot resume, these changed since the run began: "
                f"{'; '.join(changed)}.{_NEW_SHARES if is_shared else ''}\n"
                "Put them back, or start over with -r 1 (the old folder is moved aside)."
            )
        digests = own.digests(plan.cfg.own_metrics, plan.folder)
        of_metrics = {"metrics": digests} if digests else {}
        has_begun = bool(checkpoint.candidates(plan.checkpoints))
        kernels = _of_kernels(path, has_begun=has_begun)
        write_json(path, {"identity": now, "splits": facts, **of_metrics, **kernels})
        return now

    return on_main(check)


def _of_kernels(path: Path, *, has_begun: bool) -> dict[str, bool]:
    """What data.json (`path`) says of the kernels that a run computes by: nothing of those that are
    off. ResumeError when the run began with others, whose losses have other last bits.

    has_begun: whether the run has a saved step to go on with.
    """
    is_there = path.exists() and not _problem(path, _is_identity)
    record = _read(path) if is_there else None
    if not is_there and (has_begun or path.exists()):
        logger.warning("%s does not say by which kernels the run began; those of now count", path)
    used: dict[str, bool] = {}
    for switch, key in KERNELS.items():
        began = None if record is None else bool(record.get(key, False))
        # the kernels of the other kind of device stay as they are, for when the run is there again
        now = _uses(switch) if is_gpu() == (switch == LIGER) else bool(began)
        if began not in (None, now):
            raise ResumeError(
                f"{path.parent}: cannot resume, the run began with {switch}={int(began)} and here "
                f"it is {int(now)}: losses would have other last bits.\nSet {switch}="
                f"{int(began)}, or start over with -r 1 (the old folder is moved aside)."
            )
        if now:
            used[key] = True
    return used


def _uses(switch: str) -> bool:
    return uses_liger(os.environ) if switch == LIGER else uses_cpu_kernels(os.environ)


@contextlib.contextmanager
def kernels_of(plans: Sequence[RunPlan], options: Options) -> Iterator[None]:
    """Inside, a processor computes by the kernels that the first of these runs began with that has
    begun, unless the environment says which: then check_identity refuses others. A collective.
    """

    def began() -> bool | None:
        for plan in plans:
            path = plan.folder / "data.json"
            if path.exists() and not options.resets(plan.id) and not _problem(path, _is_identity):
                return bool(_read(path).get(KERNELS[CPU_KERNELS], False))
        return None

    with with_cpu_kernels_of(on_main(began)):
        yield


def _changed_sources(began: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Of a mix, the sources whose rows are others than those that the run began with, with how many
    they were and are.
    """
    for split, facts in now.items():
        before = began.get(split, {}).get("sources", {})
        for name, source in facts.get("sources", {}).items():
            was = before.get(name)
            if was is not None and was["digest"] != source["digest"]:
                had, has = was["rows"], source["rows"]
                counts = f"had {had:,} rows, has {has:,}" if had != has else f"{has:,} other rows"
                yield f"{name!r} of {split} ({counts})"


def _is_of_earlier_version(task: Task, split: str, recorded: Any) -> bool:
    """Whether an earlier version of Lathe gave the present rows of the split this digest; earlier
    versions had no streams.
    """
    if split == "train" and is_streamed(task):
        return False
    return any(
        content_of_rows(rows_of(task, split), encoding_id, split)[0] == recorded
        for encoding_id in task.earlier_encoding_ids()
    )


def _grown(path: Path, split: str, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """How many rows a split had when the run began, and has now; "" where they are as many, or
    nobody knows.
    """
    then = ((read_json(path) or {}).get("splits") or {}).get(split, {}).get("rows")
    now = facts.get(split, {}).get("rows")
    return "" if None in (then, now) or then == now else f": {then:,} rows then, {now:,} now"


def tell_changed_data(plan: RunPlan, options: Options) -> None:
    """Warn of a finished run whose data files hold other rows than those that it was trained on;
    DataError under --strict. Nothing is said where they cannot be read any more, are a data set
    of the Hub, or were streamed.
    """
    data = plan.values.get("data", {})
    blocks = [data, *(one for one in data.get("mix", {}).values() if isinstance(one, dict))]
    is_of_hub = any(block.get("dataset") or block.get("source") == "hub" for block in blocks)
    if is_of_hub or data.get("stream"):
        return
    changed: list[str] = []
    try:
        began = _beginning(plan.folder / "data.json", None) or {}
        task = tasks.load(plan.cfg, options.places)
        for split in set(began) - {"base", _OF_RUN, _TEACHER}:
            with left_out.gathering():
                digest_now = content_of(task, split, options.cache_dir)[0]
            is_same = digest_now == began[split]
            if not is_same and not _is_of_earlier_version(task, split, began[split]):
                changed.append(split)
    except LatheError as error:
        logger.info("%s: its data is not compared (%s)", plan.folder, str(error).splitlines()[0])
        return
    if not changed:
        return
    text = (
        f"{plan.folder} is finished, and its {' and '.join(sorted(changed))} rows are others than "
        "those that it was trained on: the files have changed since, or how they are read "
        "(CHANGELOG.md). Start over with -r 1 (the old folder is moved aside), or put them back."
    )
    if options.strict:
        raise DataError(f"--strict: {text}")
    logger.warning("%s", text)


def _beginning(path: Path, newest: SavedState | None) -> dict[str, Any] | None:
    """The digests that the run began with; None if it begins now."""
    problem = _problem(path, _is_identity)
    if not problem:
        return _read(path)["identity"] if path.exists() else None
    identity = newest.state().get("identity") if newest is not None else None
    if not identity:
        raise ResumeError(f"{problem}; want which data and base the run began with.\n{MEND}")
    logger.warning("%s: it is made again from %s", problem, newest)
    return identity


def export(plan: RunPlan, task: Task, live: Engine, name: str) -> None:
    """Write the trained weights to <run>/<name>/ in the task's layout, completely or not at all."""
    weights = live.weights(lambda k: distributed.is_main(), with_frozen=True)

    def write() -> None:
        target = plan.folder / name
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with refusals(target):
                target.parent.mkdir(exist_ok=True)
                task.export(weights, temporary)
                own = record.of_run(
                    temporary, values=plan.values, task=task, run_folder=plan.folder
                )
                record.write(temporary, own)
                card.write(temporary, own)
                old = target.with_name(f".{target.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                if target.exists():
                    os.replace(target, old)
                os.replace(temporary, target)
                shutil.rmtree(old, ignore_errors=True)
        finally:  # on a full disk these files take the room
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


def check_hub() -> None:
    """ConfigError, before training, if the trained model could not be uploaded afterwards."""
    from huggingface_hub import HfApi

    with _hub_errors(
        "Log in with `hf auth login` on a machine that reaches the Hub, or leave --push_to_hub out."
    ):
        HfApi().whoami()


def push(plan: RunPlan) -> None:
    from huggingface_hub import HfApi

    with _hub_errors(
        f"The model is safe in {plan.folder / 'final'}: push that folder by hand, or run this "
        "again."
    ):
        repository = HfApi().create_repo(plan.id, private=True, exist_ok=True).repo_id
        HfApi().upload_folder(repo_id=repository, folder_path=plan.folder / "final")
