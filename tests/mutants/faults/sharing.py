"""Faults of runs that share a worker: rows that get the adapters of others, and runs that wait."""

from __future__ import annotations

from tests.mutants.fault import Fault

BASE = "tests/numerics/test_shared_base.py"
ROUNDS = "tests/unit/test_rounds_of_runs.py"
SERVICE = "tests/serve/test_shared_workers.py"
FAULTS = [
    Fault(
        "trainer/driven/together/shared_base.py",
        "sequence = np.random.SeedSequence((*self.seed, layer.number))",
        "sequence = np.random.SeedSequence()",
        why="a run that is computed again has other bits than those that its client was told",
        tests=f"{BASE} -k bits_of_a_run",
    ),
    Fault(
        "trainer/driven/together/shared_base.py",
        "stretches.append((sum(sizes[end : part.start]), None))",
        "pass",
        why="a row that is computed again gets no adapters, or those of its neighbour",
        tests=f"{BASE} -k bits_of_a_run",
    ),
    Fault(
        "trainer/driven/together/rounds.py",
        "run = min(left, key=lambda one: (tokens_of[one], one))",
        "run = min(left)",
        why="one run with many rows keeps all others waiting",
        tests=f"{ROUNDS} -k served_alike",
    ),
    Fault(
        "jobs/serve/steps/upkeep/hosts.py",
        "if num_runs < _most_runs(other):",
        "if True:",
        why="every run of an offer waits for the one worker that is full",
        tests=f"{SERVICE} -k share_workers",
    ),
    Fault(
        "jobs/serve/steps/upkeep/hosts.py",
        "if kernels_differ(host, guest):",
        "if False:",
        why="a driven run is sent to a worker of other kernels again and again",
        tests="tests/serve/test_hosts_of_driven_runs.py",
    ),
    Fault(
        "trainer/launch/driving/shared_worker.py",
        "except HeldError as error:",
        "except LatheError as error:",
        why="a driven run that its folder keeps from starting comes again without end",
        tests="tests/unit/test_guest_door.py",
    ),
    Fault(
        "jobs/backends/beside.py",
        'gone = None if stay.state == "out" else _why_gone(host)',
        "gone = None",
        why="the guests of a host that has ended wait for ever",
        tests=f"{SERVICE} -k share_workers",
    ),
]
