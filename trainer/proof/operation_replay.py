"""Runs some operations of a driven run again, beside its folder, and compares their results."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.driven.states import AFTER, DRIVEN, SAMPLER, SAVED
from trainer.errors import ConfigError
from trainer.files.atomic import write_json
from trainer.files.held_lock import HeldLock
from trainer.launch.choose import Chosen
from trainer.launch.driving.drive import drive
from trainer.operations.operation_log import FOLDER, LOG, Operation, OperationReader
from trainer.operations.records import RecordFiles, encode_record
from trainer.operations.results import LAYOUTS, OperationResult, OperationResults
from trainer.proof.replay import as_it_computed
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Preemption
from trainer.telemetry.run_record import RunRecord
from trainer.training import checkpoint

if TYPE_CHECKING:
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

IDLE_S = 1e-3  # after which the replay ends
ADAPTERS = "adapter_model.safetensors"


@dataclass(frozen=True)
class OperationReplay:
    """How the repeated operations compare with those of the run."""

    first: int
    last: int
    agreed: list[int]
    differing: list[list[Any]]  # [operation, its kind, what differs] of the others, in order
    then: dict[str, str]  # what the state was made with
    now: dict[str, str]


def starts(run: Path, *, world: int) -> dict[int, int]:
    """The steps of the states from which a replay on `world` ranks may begin, and the operations
    behind which they stand: 0 is the beginning. The operations behind each are in the log.
    """
    found = {0: -1}
    for step, folder in checkpoint.candidates(run / "checkpoints"):
        # step 0 is the beginning, which needs no state; one may stand behind later operations
        if step > 0 and checkpoint.saved_world(folder) == world:
            found[step] = int(checkpoint.read_state(folder)[DRIVEN][AFTER])
    segments = RecordFiles(run / FOLDER, LOG)
    first = next((int(one.header["seq"]) for one in segments.scan()), 0)
    return {step: after for step, after in found.items() if after + 1 >= first}


def replay(
    plan: RunPlan, options: Options, scratch: Path, *, start: int, after: int, count: int
) -> OperationReplay:
    """Run `count` operations behind `after` again in `scratch`, from the state of step `start`, and
    compare their results and what they save.

    plan: with the DeepSpeed dictionary of the run. Nothing is written to plan.folder. A collective.
    ConfigError when an operation loads a state that is gone.
    """
    last = on_main(lambda: _lay_out(plan.folder, scratch, start, after, count))
    data: Any = getattr(plan.cfg, "data")  # noqa: B009 (of the task)
    cfg = plan.cfg.model_copy(update={"data": data.model_copy(update={"put_aside_s": IDLE_S})})
    of_scratch = replace(plan, folder=scratch, cfg=cfg)
    record = RunRecord(scratch, total=cfg.train.steps)
    lock, preemption = HeldLock(scratch / ".lock", what=str(scratch)), Preemption()
    on_main(lock.acquire)
    try:
        with as_it_computed(plan, options):
            drive(Chosen(of_scratch), options, record, preemption, lock)
    finally:
        record.close()
        preemption.close()
        lock.release()
    agreed, differing, then = on_main(
        lambda: _comparison(plan.folder, scratch, start, range(after + 1, last + 1))
    )
    return OperationReplay(after + 1, last, agreed, differing, then, checkpoint.made_with())


def _lay_out(run: Path, scratch: Path, start: int, after: int, count: int) -> int:
    """Put what the replay begins with into `scratch`: data.json, the state, the operations, and the
    saved states that they load. Returns the number of the last operation.
    """
    if (run / "data.json").exists():
        shutil.copyfile(run / "data.json", scratch / "data.json")
    if start:
        name = f"checkpoints/step-{start}"
        shutil.copytree(run / name, scratch / name)
    reader, operations = OperationReader(run / FOLDER, after=after), []
    results = OperationResults(run / FOLDER)
    results.follow()
    while len(operations) < count and (operation := reader.next()):
        if operation.seq > results.last_seq:
            break  # it has no result yet
        operations.append(operation)
    if not operations:
        raise ConfigError(
            f"{run}: no operation behind {after} has a result, so there is nothing to run again. "
            "Give --from an earlier state, or 0."
        )
    _lay_saved(run, scratch, operations, results)
    content = [
        encode_record({k: v for k, v in vars(one).items() if k != "payload"}, one.payload)
        for one in operations
    ]
    files = RecordFiles(scratch / FOLDER, LOG)
    files.folder.mkdir()
    files.path(1).write_bytes(b"".join(content))
    layouts = {one.seq: getattr(results.get(one.seq), "layout", None) for one in operations}
    write_json(files.folder / LAYOUTS, {str(seq): one for seq, one in layouts.items() if one})
    return operations[-1].seq


def _lay_saved(
    run: Path, scratch: Path, operations: Sequence[Operation], results: OperationResults
) -> None:
    """Copy the states that operations load, unless they save them before."""
    saving: set[str] = set()
    for one in operations:
        result = results.get(one.seq)
        if one.kind == "save_state":
            saving.add(f"{SAVED}/{one.fields.get('name')}")
        if one.kind != "load_state" or result is None or result.error is not None:
            continue
        folder = str(one.fields["folder"])
        if folder in saving or (Path(folder).is_absolute() and Path(folder).is_dir()):
            continue
        source, first = run / folder, operations[0].seq
        behind = [
            int(checkpoint.read_state(place)[DRIVEN][AFTER])
            for _, place in checkpoint.candidates(source)
        ]
        if not behind or max(behind) >= first:
            raise ConfigError(
                f"{run}: operation {one.seq} loads {folder}, which was deleted or replaced since. "
                f"Give --from a state behind operation {one.seq}, or a smaller --replay."
            )
        shutil.copytree(source, scratch / folder, dirs_exist_ok=True)


def _comparison(run: Path, scratch: Path, start: int, numbers: range) -> list[Any]:
    """Operations whose results agree; [number, kind, what differs] of the others; and what the
    state was made with.
    """
    ours, theirs = OperationResults(scratch / FOLDER), OperationResults(run / FOLDER)
    ours.follow()
    theirs.follow()
    reader = OperationReader(scratch / FOLDER, after=numbers.start - 1)
    agreed: list[int] = []
    differing: list[list[Any]] = []
    newest: dict[str, int] = {}  # of the exported names, the operation that wrote them last
    while operation := reader.next():
        seq = operation.seq
        was, now = theirs.get(seq), ours.get(seq)
        if was is None or now is None:
            differing.append([seq, operation.kind, "its result is not there"])
        elif text := _difference(was, now):
            differing.append([seq, operation.kind, text])
        else:
            agreed.append(seq)
        if operation.kind == "save_for_sampler" and was is not None and was.error is None:
            newest[str(was.fields["folder"])] = seq
    for folder, seq in newest.items():
        if _is_written_later(run, folder, numbers.stop):
            continue
        files = [root / folder / ADAPTERS for root in (run, scratch)]
        if files[0].exists() and files[0].read_bytes() != files[1].read_bytes():
            agreed.remove(seq)
            differing.append([seq, "save_for_sampler", f"{folder}/{ADAPTERS} has other bytes"])
    state = scratch / "checkpoints" / f"step-{start}"
    then = checkpoint.read_state(state).get("made_with", {}) if start else {}
    return [agreed, sorted(differing), then]


def _difference(was: OperationResult, now: OperationResult) -> str | None:
    """What differs between two results of an operation; None when nothing does."""
    if was.error is not None and (now.error is not None or was.fields["category"] == "server"):
        return None  # refused then and now; or by a disk, which does not refuse now
    if was.digest == now.digest:
        return None
    old, new = ({**one.fields, "bytes": None} for one in (was, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    texts = [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys]
    if was.payload != now.payload:
        texts.append("its tensors have other bytes")
    return "; ".join(texts) or None


def _is_written_later(run: Path, folder: str, first: int) -> bool:
    reader = OperationReader(run / FOLDER, after=first - 1)
    while operation := reader.next():
        name = f"{SAMPLER}/{operation.fields.get('name')}"
        if operation.kind == "save_for_sampler" and folder == name:
            return True
    return False
