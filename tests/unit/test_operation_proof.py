"""The folder of a driven run that was meddled with: each operation, result and state is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.wording import refused
from trainer.operations.operation_log import (
    CONTENTS,
    FOLDER,
    LOG,
    OperationLog,
    content_digest,
    note_states,
)
from trainer.operations.records import LogRecord, RecordFiles, RecordPlace, encode_record
from trainer.operations.results import RESULTS, ResultWriter
from trainer.proof.operation_replay import starts
from trainer.proof.operations import examine, is_driven

COUNT = 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of eight operations with their results, in files of about two records."""
    log = OperationLog(tmp_path / FOLDER, segment_bytes=700)
    results = ResultWriter(tmp_path / FOLDER, segment_bytes=500)
    for seq in range(COUNT):
        log.append("forward" if seq else "create", seq, {"number": seq}, bytes([seq]) * 200)
        results.append(seq, {"metrics": {"loss:sum": seq / 3}}, bytes([seq]) * 100)
    log.close()
    results.close()
    return tmp_path


def records(run: Path, stem: str) -> list[LogRecord]:
    files = RecordFiles(run / FOLDER, stem)
    found: list[LogRecord] = []
    for segment in files.segments():
        place = RecordPlace(segment, 0)
        while record := files.read(place):
            found.append(record)
            place = RecordPlace(segment, record.end)
    return found


def rewrite(run: Path, stem: str, every: list[LogRecord]) -> None:
    """All records of a stem as one file, with checksums that fit."""
    files = RecordFiles(run / FOLDER, stem)
    for segment in files.segments():
        files.path(segment).unlink()
    content = b"".join(encode_record(one.header, one.payload) for one in every)
    files.path(1).write_bytes(content)


def flip(run: Path, stem: str, seq: int) -> None:
    """One bit of the payload of a record, as a disk loses it."""
    (record,) = (one for one in records(run, stem) if one.header["seq"] == seq)
    path = RecordFiles(run / FOLDER, stem).path(record.place.segment)
    content = bytearray(path.read_bytes())
    content[record.end - 5] ^= 4
    path.write_bytes(content)


def altered(run: Path, stem: str, seq: int, **changes: Any) -> None:
    """A record with other fields, and a checksum that fits."""
    every = records(run, stem)
    header = every[seq].header
    header["fields"] = {**header["fields"], **changes}
    rewrite(run, stem, every)


def replaced(run: Path) -> None:
    every = records(run, LOG)
    header = every[3].header
    header["fields"] = {"number": 33}
    header["content"] = content_digest(3, header["kind"], header["fields"], every[3].payload)
    rewrite(run, LOG, every)


def taken_out(run: Path) -> None:
    every = records(run, LOG)
    rewrite(run, LOG, [*every[:3], *every[4:]])


def shortened(run: Path) -> None:
    rewrite(run, LOG, records(run, LOG)[:5])


MEDDLED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit": (lambda run: flip(run, LOG, 3), "operation 3 is not what was written"),
    "a bit of the last": (lambda run: flip(run, LOG, 7), "operation 7 is not there, although"),
    "other fields": (lambda run: altered(run, LOG, 3, number=9), "operation 3 (forward): its con"),
    "replaced": (replaced, "operation 3 (forward), was replaced"),
    "taken out": (taken_out, "operation 3 is not there: 4 follows"),
    "cut": (shortened, "operation 5 is not there, although results go to 7"),
    "a bit of a result": (lambda run: flip(run, RESULTS, 2), "operation 2: its result is not what"),
    "another result": (
        lambda run: altered(run, RESULTS, 2, metrics={"loss:sum": 0.0}),
        "operation 2: its result is not what was computed",
    ),
}


@pytest.mark.parametrize("how", MEDDLED)
def test_what_was_meddled_with_is_named_by_its_operation(how: str, run: Path) -> None:
    facts = examine(run)
    assert is_driven(run)
    assert (facts.first, facts.last, facts.last_result, facts.problems) == (0, 7, 7, [])
    meddle, text = MEDDLED[how]
    meddle(run)
    (problem,) = examine(run).problems
    assert problem.startswith(text)


def test_the_chain_goes_through_operations_that_were_dropped(run: Path) -> None:
    chain = examine(run).chain
    note_states(run / FOLDER, [4, 6])
    log = OperationLog(run / FOLDER)
    log.compact()
    log.close()
    facts = examine(run)
    assert facts.first > 0
    assert (facts.last, facts.chain, facts.problems) == (7, chain, [])
    path = run / FOLDER / CONTENTS
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    (problem,) = examine(run).problems
    assert problem.startswith(f"operation {facts.first} (forward), or one of 0 to")


def test_a_state_is_named_by_the_operation_behind_which_it_stands(run: Path) -> None:
    folder = run / "checkpoints" / "step-2"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"driven": {"after_seq": 5}}))
    (problem,) = examine(run).problems
    assert problem.startswith("the state behind operation 5 (checkpoints/step-2): ")


def test_a_replay_from_step_0_begins_before_the_first_operation(run: Path) -> None:
    """A run that was put aside before its first step has a state of step 0, too."""
    for step, after in ((0, 2), (3, 5)):
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        state = {"driven": {"after_seq": after}, "world": 1}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "rng-0-of-1.safetensors").touch()
        (folder / "weights-0-of-1.safetensors").touch()
    assert starts(run, world=1) == {0: -1, 3: 5}


@pytest.mark.parametrize("stem", [LOG, RESULTS])
def test_a_writer_cuts_what_a_crash_tore_and_nothing_else(stem: str, run: Path) -> None:
    """A record whose bytes were lost while whole ones stand behind it is no torn tail."""
    writer = {LOG: OperationLog, RESULTS: ResultWriter}[stem]
    rewrite(run, stem, records(run, stem))
    path = RecordFiles(run / FOLDER, stem).path(1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:150])
    writer(run / FOLDER).close()
    assert path.read_bytes() == whole
    last = records(run, stem)[-2]
    for place in (last.place.offset + 3, last.place.offset + 60):  # its length; its header
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        with refused("records_altered"):
            writer(run / FOLDER)
        assert path.read_bytes() == content
