"""The two logs of one sampler: what was asked of it, and what was answered."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.serve.requests import Refusal
from jobs.serve.steps.bodies import AskSample
from trainer.errors import HeldError
from trainer.files.atomic import refusals
from trainer.operations.records import RecordFiles, RecordPlace, RecordWriter

MOST_BYTES = 256 << 20  # of each log; a request beyond that is refused
MOST_CLONES = 1_000_000


@dataclass(frozen=True)
class Completion:
    """A request that has ended. size: bytes of its answer."""

    seq: int
    size: int
    is_error: bool


class SampleLog:
    """The logs of one sampler, for the one server that answers it. Any thread may call it."""

    def __init__(self, folder: Path) -> None:
        """Open the logs, or begin them. Refusal (503) while another server answers this sampler."""
        self.folder = folder
        self._guard = threading.Lock()
        self._files = {stem: RecordFiles(folder, stem) for stem in ("requests", "answers")}
        self.requests: dict[int, tuple[str, RecordPlace]] = {}  # number -> digest, place
        self.answers: dict[int, RecordPlace] = {}
        self.order: list[Completion] = []  # as they ended
        self._received: set[int] = set()
        self._writers: dict[str, RecordWriter] = {}
        try:
            for stem, files in self._files.items():
                self._writers[stem] = RecordWriter(files)
                self._writers[stem].begin(self._read(stem, files))
        except HeldError:
            self.close()
            text = "Another server answers this sampler. Ask again."
            raise Refusal(503, text, code="overloaded", retry_after_s=2) from None
        except BaseException:  # the disk may take it the next time
            self.close()
            raise

    def _read(self, stem: str, files: RecordFiles) -> RecordPlace:
        end = RecordPlace((files.segments() or [1])[-1], 0)
        for record in files.scan():
            seq = int(record.header["seq"])
            if stem == "requests":
                self.requests[seq] = (str(record.header["digest"]), record.place)
            else:
                self.answers[seq] = record.place
                is_error = "error" in record.header["fields"]
                self.order.append(Completion(seq, int(record.header["size"]), is_error))
            end = RecordPlace(record.place.segment, record.end)
        return end

    def add(self, seq: int, asked: Mapping[str, Any], seed: int) -> bool:
        """Write a request durably, or find it; False where its number has another content. One that
        failed by a fault of the server is without an answer again. Refusal (507) when the log is
        full.

        seed: that is used; of a repeated request the first one counts.
        """
        content = json.dumps(asked, sort_keys=True).encode()
        digest = hashlib.sha256(content).hexdigest()
        with self._guard:
            before = self.requests.get(seq)
            if before is not None:
                if before[0] == digest and self._failed_here(seq):
                    del self.answers[seq]  # the newest answer of a number counts
                return before[0] == digest
            self._refuse_full(len(content))
            header = {"seq": seq, "digest": digest, "seed": seed, "time": time.time()}
            place = self._writers["requests"].append(header, content)
            self.requests[seq] = (digest, place)
        return True

    def _failed_here(self, seq: int) -> bool:
        """Whether the answer of a request is an error that was not its client's."""
        found = self.answer(seq) if seq in self.answers else None
        return found is not None and found[0].get("category") == "server"

    def _refuse_full(self, size: int) -> None:
        for stem, files in self._files.items():
            if files.size_bytes() + size > MOST_BYTES:
                text = f"The {stem} of this sampler have {MOST_BYTES} bytes, as many as may be kept"
                raise Refusal(507, f"{text}. Begin another sampler.", code="insufficient_storage")

    def request(self, seq: int) -> tuple[AskSample, int]:
        """A request that was logged, and its seed."""
        record = self._files["requests"].read(self.requests[seq][1])
        assert record is not None, "it is on the disk"
        return AskSample.model_validate_json(record.payload, strict=True), record.header["seed"]

    def write(self, seq: int, fields: Mapping[str, Any], payload: bytes) -> None:
        """Write the answer of a request durably, if it has none yet."""
        with self._guard:
            if seq in self.answers:
                return
            size = len(payload)
            header = {"seq": seq, "fields": dict(fields), "size": size, "time": time.time()}
            self.answers[seq] = self._writers["answers"].append(header, payload)
            self.order.append(Completion(seq, size, "error" in fields))

    def answer(self, seq: int) -> tuple[dict[str, Any], bytes] | None:
        """The fields and the bytes of an answer; None when they are kept no more, or it is being
        asked again.
        """
        place = self.answers.get(seq)
        record = place and self._files["answers"].read(place)
        return None if record is None else (record.header["fields"], record.payload)

    def forget(self, numbers: Collection[int]) -> None:
        """Note that answers were received."""
        self._received.update(numbers)

    def next_clone(self) -> int:
        """A number that no other client of this sampler has."""
        folder = self.folder / "clones"
        with refusals(folder):
            folder.mkdir(exist_ok=True)
            number = len(list(folder.iterdir())) + 1
            while number < MOST_CLONES:
                try:
                    (folder / str(number)).touch(exist_ok=False)
                    return number
                except FileExistsError:
                    number += 1
        raise Refusal(400, f"The sampler has {MOST_CLONES} clients. Begin another sampler.")

    def close(self) -> None:
        """Let another server answer the sampler."""
        for writer in self._writers.values():
            writer.close()
