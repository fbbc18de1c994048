"""What is asked of schedulers, each within a time limit that holds whatever the other side does."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar, cast

from jobs.errors import Unreachable

KILLED_S = 5.0  # within which a program that was killed is gone, unless its disk hangs
MOST_GIVEN_UP = 8  # calls of one service that have not returned since

_given_up: Counter[str] = Counter()
_counting = threading.Lock()
T = TypeVar("T")


def run_program(
    argv: Sequence[str],
    *,
    content: bytes = b"",
    env: Mapping[str, str] | None = None,
    timeout_s: float,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, with `content` as its input. OSError when it cannot start.

    subprocess.TimeoutExpired when it takes longer: then it is killed, and with it all that it has
    started. subprocess.run kills the program alone and goes on waiting for those, because they hold
    its output open: a script around sbatch would hang for ever.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(content, timeout=timeout_s)
    except BaseException:  # Ctrl+C too, which a session of its own does not get
        _kill(process)
        raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and what it has started, and wait for KILLED_S at most."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=KILLED_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def within(limit_s: float, who: str, call: Callable[[], T]) -> T:
    """What `call` returns or raises, called in a thread of its own, which cannot be ended.

    who: of whom it asks something. Unreachable when it takes longer, and at once while
    MOST_GIVEN_UP earlier calls, which took longer, have not returned either.
    """
    replies: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    if _given_up[who] >= MOST_GIVEN_UP:
        raise Unreachable(f"{who} has not answered {MOST_GIVEN_UP} requests of this process")
    is_given_up = False

    def work() -> None:
        try:
            reply = (call(), None)
        except BaseException as error:  # handed to the caller's thread
            reply = (None, error)
        with _counting:
            replies.put(reply)
            _given_up[who] -= is_given_up

    threading.Thread(target=work, daemon=True).start()
    with suppress(queue.Empty):
        return _result(replies.get(timeout=limit_s))
    with _counting:
        is_given_up = replies.empty()
        _given_up[who] += is_given_up
    if is_given_up:
        raise Unreachable(f"{who} did not answer within {limit_s:.0f} s")
    return _result(replies.get())


def _result(reply: tuple[T | None, BaseException | None]) -> T:
    value, error = reply
    if error is not None:
        raise error
    return cast("T", value)
