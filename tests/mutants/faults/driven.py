"""Faults in driven runs and their log."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LOG, _RESULTS = "trainer/operations/operation_log.py", "trainer/operations/results.py"
_RECORDS, _TESTS = "trainer/operations/records.py", "tests/unit/test_operation_log.py"
_LOSSES, _PACKS = "trainer/driven/losses.py", "trainer/driven/packs.py"
_ROWS = "tests/unit/test_driven_rows.py"
_PAST = "tests/unit/test_past_of_driven_runs.py"
_PROOF = "tests/unit/test_operation_proof.py"

FAULTS = [
    Fault(
        _LOG,
        "if old.content != content:",
        "if old.seq != seq:",
        why="another operation under a number that was used is acknowledged and never run",
        tests=_TESTS,
    ),
    Fault(
        _LOG,
        "if seq != self.last_seq + 1:",
        "if seq < 0:",
        why="an operation that was lost on the way is passed over in silence",
        tests=_TESTS,
    ),
    Fault(
        _LOG,
        "sorted(states)[-2] + 1",
        "sorted(states)[-1] + 1",
        why="operations are dropped that a run needs when its newest state is damaged",
        tests=_TESTS,
    ),
    Fault(
        _RECORDS,
        "hashlib.sha256(body).digest() != prefix[_LENGTHS.size :]",
        "len(body) < header_size",
        why="half of an operation that a crash tore is run",
        tests=_TESTS,
    ),
    Fault(
        _RECORDS,
        "os.truncate(self.files.path(place.segment), place.offset)",
        "os.stat(self.files.path(place.segment))",
        why="an operation that was refused on a full disk is run all the same",
        tests=_TESTS,
    ),
    Fault(
        _RECORDS,
        "if self._is_followed(place) and not",
        "if not path.exists() and not",
        why="a worker waits for ever at a damaged operation with whole ones behind it",
        tests=_TESTS,
    ),
    Fault(
        _LOG,
        "write_at(descriptor, b",
        "os.pwrite(descriptor, b",
        why="digests of dropped operations are lost where a disk takes few bytes at once",
        tests=_TESTS,
    ),
    Fault(
        "trainer/driven/account.py",
        '("load_state", "end") and',
        '("load_state",) and',
        why="a run whose end a full disk refused never starts again",
        tests=_PAST,
    ),
    Fault(
        "trainer/driven/account.py",
        "        self.model.tell()\n",
        "",
        why="no step of a driven run stands in its metrics",
        tests=f"{_PAST} -k line_finds_no_room",
    ),
    Fault(
        "trainer/launch/driving/runs.py",
        'newest.work.get("kind") == "end"',
        'newest.work.get("kind") == "ended"',
        why="a run that was stopped behind its end waits for operations",
        tests=_PAST,
    ),
    Fault(
        _RESULTS,
        "if old is not None and old.digest != digest:",
        "if old is not None and old.seq != seq:",
        why="a replay that computes something else than the client was told goes on",
        tests=_TESTS,
    ),
    Fault(
        _LOSSES,
        "_ratio(logps_N.detach(), inputs)",
        "_ratio(logps_N, inputs)",
        why="CISPO's gradient passes its ratio, which its formula stops",
        tests=_ROWS,
    ),
    Fault(
        _PACKS,
        "rank = sums.index(min(sums))",
        "rank = 0",
        why="one rank computes all rows",
        tests=_ROWS,
    ),
    Fault(
        "trainer/runtime/deepspeed_optimizers.py",
        'replacements["step"] = drop',
        "pass",
        why="in bf16 at ZeRO-1 a step that was skipped is taken",
        tests="tests/numerics/test_dropped_gradient.py",
    ),
    Fault(
        _RECORDS,
        "st_size > end.offset and self.files.behind(end):",
        "st_size < end.offset and self.files.behind(end):",
        why="one bad bit in the newest file cuts all acknowledged operations behind it",
        tests=_PROOF,
    ),
    Fault(
        "trainer/proof/operations.py",
        "is_known and chain_digest(before, content) != header",
        "is_known and content == header",
        why="an operation that was replaced, digest and all, passes as the one that was sent",
        tests=_PROOF,
    ),
]
