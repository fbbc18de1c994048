"""A folder of shards, which ranks write and a killed command goes on with.

plan.json          what is being written, stated before the first shard
vectors-00003.npy  a shard, for example
vectors-00003.json its record, with name, size and SHA-256: written when the shard is whole
meta.json          every shard's record: written last, so a folder without it is not finished

Each file is written under a hidden name, fsynced and renamed. Shards are cut where the plan says,
whatever the number of ranks: a restart writes those without a record and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from trainer.errors import ConfigError, DataError, LatheError, StorageError, UserError
from trainer.files.atomic import aside, refusals, size_of, write_json
from trainer.files.safetensors_file import Block, WrittenFile, write_blocks
from trainer.runtime import distributed
from trainer.switches import CPU_KERNELS, uses_cpu_kernels, with_cpu_kernels_of

T = TypeVar("T")
Values = dict[str, Any]  # a JSON object

FORMAT = 1
PLAN, META = "plan.json", "meta.json"


@dataclass(frozen=True)
class ShardFolder:
    """The files of one folder."""

    path: Path
    content: str  # what the shards hold: the first word of their names
    suffix: str  # of the shards
    command: str  # that writes the folder
    refusal: type[UserError]  # raised when the plan can be neither read nor written
    flag: str = "--out"  # what names the folder
    # whether the plan says with which kernels of a processor (decision 41) the shards are made
    notes_kernels: bool = False

    @property
    def is_begun(self) -> bool:
        return (self.path / PLAN).is_file()

    @property
    def is_finished(self) -> bool:
        return (self.path / META).is_file()

    def shard(self, number: int) -> Path:
        """The file of a shard."""
        return self.path / f"{self.content}-{number:05d}{self.suffix}"

    def record(self, number: int) -> Values | None:
        """What a shard's record says; None when the shard is not whole."""
        path = self.shard(number)
        try:
            record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            return record if path.stat().st_size == record["size"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def read(self, name: str, convert: Callable[[Values], T]) -> T:
        """`convert` of the object in plan.json or meta.json, without its format and its kernels.

        DataError when it cannot be read, or `convert` misses or does not know a key.
        """

        def without_kernels(values: Values) -> T:
            values.pop(CPU_KERNELS, None)  # of the environment, and no key of a plan
            return convert(values)

        return self._read(name, without_kernels)

    def _read(self, name: str, convert: Callable[[Values], T]) -> T:
        path = self.path / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format", FORMAT) != FORMAT:  # the plans of vectors have none
                raise ValueError(f"its format is not {FORMAT}")
            return convert(values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}). Delete {self.path} and {self.command} anew."
            ) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other command writes here, unless all is written already, and the folder goes
        on `as_begun`. A collective. ConfigError at once when another command writes; a process that
        is killed lets go of its lock, whose file stays until the folder is whole or gone.
        """
        path = self.path.resolve()
        lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
        distributed.on_main(lambda: self._claim(lock))
        try:
            with self.as_begun():
                yield
        finally:
            if lock.is_locked and (self.is_finished or not self.path.exists()):
                path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
            lock.release()

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Inside, a processor computes by the kernels that the folder was begun with, unless the
        environment says which: then `begin` refuses others. A collective.
        """
        with with_cpu_kernels_of(distributed.on_main(self._began_with_kernels)):
            yield

    def _began_with_kernels(self) -> bool | None:
        """None for a folder that is new, and for one whose plan `begin` will refuse."""
        try:
            plan = json.loads((self.path / PLAN).read_text(encoding="utf-8"))
            return plan.get(CPU_KERNELS, "0") == "1"
        except (OSError, ValueError, AttributeError):
            return None

    def _claim(self, lock: FileLock) -> None:
        if self.is_finished and self.is_whole(self.read(META, lambda meta: len(meta["shards"]))):
            return
        with refusals(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{self.path}: another process is writing it. Wait for it, or name another "
                f"{self.flag}."
            ) from None

    def begin(self, plan: Values, *, choice: str, usual: Values | None = None) -> Values:
        """The plan that the folder was begun with, which is `plan` for a new one. A collective.

        choice: the one key that may differ; the folder's value of it counts. usual: what holds
        where a plan does not say a key. ConfigError when another key differs, or the kernels of a
        processor; a GPU has none, and leaves what the plan says of them.
        """
        usual = {**(usual or {}), CPU_KERNELS: "0"}
        began = distributed.on_main(self._began_with_kernels) if distributed.is_gpu() else None
        has_kernels = bool(began) if distributed.is_gpu() else uses_cpu_kernels(os.environ)
        stated = {**plan, CPU_KERNELS: "1"} if self.notes_kernels and has_kernels else plan
        try:
            begun = {**usual, **distributed.on_main(lambda: self._begun(stated))}
        except UserError as error:
            raise self.refusal(str(error)) from error
        now = json.loads(json.dumps({**usual, **stated}))
        differing = [
            name
            for name, value in now.items()
            if name not in (choice, "format") and begun.get(name) != value
        ]
        if differing:
            differences = (f"{key} was {begun.get(key)!r}, is {now[key]!r}" for key in differing)
            as_begun = f"Unset {CPU_KERNELS}: then it goes on as it was begun. Or name"
            raise ConfigError(
                f"{self.path} was begun with something else ({'; '.join(differences)}). "
                f"{as_begun if differing == [CPU_KERNELS] else 'Name'} a new {self.flag}, or "
                "delete this folder."
            )
        del begun[CPU_KERNELS]
        return begun

    def _begun(self, plan: Values) -> Values:
        with refusals(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # a command that is killed while it writes the plan leaves such a file behind
            files = [path for path in self.path.iterdir() if not path.match(f".{PLAN}.*.tmp")]
            if not files:
                write_json(self.path / PLAN, plan)
        if not self.is_begun:
            raise ConfigError(
                f"{self.path} holds other files and no {self.content} of ours. Name a new folder."
            )
        return self._read(PLAN, dict)

    def missing(self, count: int) -> list[int]:
        """Those of `count` shards that are not whole."""
        return [number for number in range(count) if self.record(number) is None]

    def is_whole(self, count: int) -> bool:
        """Whether all of `count` shards are there, and the list of them."""
        return self.is_finished and not self.missing(count)

    def own_missing(self, count: int) -> list[int]:
        """Those that this rank is to write: every r-th of all that are missing. A collective."""
        return distributed.broadcast(self.missing(count))[distributed.rank() :: distributed.world()]

    def write_shard(self, number: int, blocks: Iterable[Block], **facts: Any) -> None:
        """Write a shard, then its record: a shard without a record is made again.

        facts: what the record says besides.
        """
        path = self.shard(number)
        with aside(path, is_durable=False) as temporary:
            record = write_blocks(temporary, blocks)
        write_json(path.with_suffix(".json"), {**asdict(record), "name": path.name, **facts})

    def refuse_small_disk(self, needed: int, what: str, advice: str) -> None:
        """StorageError when the disk has no room for `needed` bytes that are still to be
        written.
        """
        with refusals(self.path):
            free = shutil.disk_usage(self.path).free
        if needed > free:
            raise StorageError(
                f"{self.path}: {size_of(needed)} of {what} are still to be written, "
                f"{size_of(free)} are free. {advice}"
            )

    def finish(self, count: int, facts: Callable[[list[Values]], Values] = lambda _: {}) -> None:
        """Write meta.json, when every shard is whole. A collective.

        facts: what it says besides the shards, of their records. LatheError when a shard was lost.
        """
        distributed.barrier()
        distributed.on_main(lambda: self._finish(count, facts))

    def _finish(self, count: int, facts: Callable[[list[Values]], Values]) -> None:
        lost = self.missing(count)
        if lost:
            raise LatheError(
                f"{self.path}: shards {lost} are not whole. Run the same command again."
            )
        for torn in self.path.glob(".*.tmp"):  # of processes that were killed
            torn.unlink(missing_ok=True)
        records = [self.record(number) or {} for number in range(count)]
        names = [field.name for field in fields(WrittenFile)]
        shards = [{name: record[name] for name in names} for record in records]
        write_json(self.path / META, {"format": FORMAT, **facts(records), "shards": shards})
