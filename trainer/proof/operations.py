"""The log, the results and the states of a driven run, examined without running anything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer.driven.states import AFTER, DRIVEN, SAVED, content_sha256
from trainer.operations.operation_log import (
    CONTENTS,
    FOLDER,
    LOG,
    chain_digest,
    content_digest,
)
from trainer.operations.records import LogRecord, RecordFiles, RecordPlace
from trainer.operations.results import RESULTS, result_digest
from trainer.training import checkpoint

DIGEST = hashlib.sha256().digest_size


@dataclass
class OperationFacts:
    """What the folder of a driven run holds. -1: none."""

    first: int = -1  # the oldest operation whose content is there
    last: int = -1
    chain: str = ""  # after the last one
    first_result: int = -1
    last_result: int = -1
    saved: dict[int, str] = field(default_factory=dict[int, str])  # sha256 by operation
    states: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])  # and folders
    problems: list[str] = field(default_factory=list[str])  # each names its operation


def is_driven(run: Path) -> bool:
    """Whether a run has a log of operations."""
    return bool(RecordFiles(run / FOLDER, LOG).segments())


def examine(run: Path) -> OperationFacts:
    """Follow the chain from the first operation on, and check the digest of every result and every
    file of a state.
    """
    facts = OperationFacts()
    _examine_log(run / FOLDER, facts)
    _examine_results(run / FOLDER, facts)
    roots = [run / "checkpoints", *sorted((run / SAVED).glob("*"))]
    for _, folder in (one for root in roots for one in checkpoint.candidates(root)):
        _examine_state(run, folder, facts)
    return facts


def _examine_log(folder: Path, facts: OperationFacts) -> None:
    contents = b""
    if (folder / CONTENTS).exists():
        contents = (folder / CONTENTS).read_bytes()
    is_known = True  # the chain before the next operation
    for record in _records(folder, LOG, facts):
        if record is None:
            facts.last, is_known = facts.last + 1, False
            continue
        header, before = record.header, facts.chain
        seq = int(header["seq"])
        if facts.first < 0:
            facts.first, facts.last = seq, seq - 1
            before = _chain_of(contents[: DIGEST * seq])
            if len(contents) < DIGEST * seq:
                number = len(contents) // DIGEST
                facts.problems.append(f"operation {number}: its digest is not in {CONTENTS}")
                is_known = False
        if seq != facts.last + 1:
            facts.problems.append(f"operation {facts.last + 1} is not there: {seq} follows")
            is_known = False
        content = content_digest(seq, header["kind"], header["fields"], record.payload)
        if content != header["content"]:
            facts.problems.append(
                f"operation {seq} ({header['kind']}): its content is not what was sent (sha256 "
                f"{content[:12]}, want {header['content'][:12]})"
            )
        elif is_known and chain_digest(before, content) != header["chain"]:
            is_behind_dropped = before and seq == facts.first
            others = f"or one of 0 to {seq - 1} ({CONTENTS}), " if is_behind_dropped else ""
            facts.problems.append(
                f"operation {seq} ({header['kind']}), {others}was replaced: it does not follow "
                "those before it"
            )
        facts.last, facts.chain, is_known = seq, str(header["chain"]), True


def _chain_of(contents: bytes) -> str:
    """The chain after operations of these content digests."""
    chain = ""
    for start in range(0, len(contents), DIGEST):
        chain = chain_digest(chain, contents[start : start + DIGEST].hex())
    return chain


def _examine_results(folder: Path, facts: OperationFacts) -> None:
    for record in _records(folder, RESULTS, facts):
        if record is None:
            facts.last_result += 1
            continue
        header = record.header
        seq = int(header["seq"])
        if facts.first_result < 0:
            facts.first_result, facts.last_result = seq, seq - 1
        if seq != facts.last_result + 1:
            facts.problems.append(f"operation {facts.last_result + 1}: its result is not there")
        if result_digest(seq, header["fields"], record.payload) != header["digest"]:
            facts.problems.append(f"operation {seq}: its result is not what was computed")
        if "sha256" in header["fields"]:
            facts.saved[seq] = str(header["fields"]["sha256"])
        facts.last_result = seq
    if facts.last_result > facts.last:
        facts.problems.append(
            f"operation {facts.last + 1} is not there, although results go to {facts.last_result}"
        )


def _examine_state(run: Path, folder: Path, facts: OperationFacts) -> None:
    name = folder.relative_to(run)
    try:
        after = int(checkpoint.read_state(folder)[DRIVEN][AFTER])
    except (OSError, ValueError, KeyError, TypeError):
        facts.problems.append(f"{name}: its state.json does not say behind which operation it is")
        return
    facts.states.append((after, str(name)))
    wrong = checkpoint.problems(folder)
    want = facts.saved.get(after) if name.parts[0] == SAVED else None
    if not wrong and want is not None and content_sha256(folder) != want:
        wrong = [f"sha256 {content_sha256(folder)}, want {want} as its result says"]
    if after > facts.last:
        wrong.append(f"the last operation is {facts.last}")
    if wrong:
        facts.problems.append(f"the state behind operation {after} ({name}): {'; '.join(wrong)}")


def _records(folder: Path, stem: str, facts: OperationFacts) -> Iterator[LogRecord | None]:
    """All records of a stem; None, and a problem, for one that is damaged. A crash may have torn
    the last one of all, behind which nothing stands: that one is left out.
    """
    files, last = RecordFiles(folder, stem), -1
    segments = files.segments()
    for segment in segments:
        place, size = RecordPlace(segment, 0), os.path.getsize(files.path(segment))
        while place.offset < size:
            record = files.read(place)
            if record is not None:
                last, place = int(record.header["seq"]), RecordPlace(segment, record.end)
                yield record
                continue
            behind = files.behind(place)
            if behind is None and segment == segments[-1]:
                return
            whose = ": its result" if stem == RESULTS else ""
            facts.problems.append(
                f"operation {last + 1}{whose} is not what was written "
                f"({files.path(segment).name}, byte {place.offset})"
            )
            last += 1
            yield None
            if behind is None:
                break
            place = behind
