"""What finished runs cost: an idle server, its list of runs, `results`, at several numbers of them.

    python benchmarks/growth.py [--runs 1000 4000] [--idle_s 60] [--asks 40] [--rounds 3]

The folders are made up as those of benchmarks/service.py are: jobs of the service that succeeded,
with 60 lines of metrics and an evaluation each. CPU seconds are those of the process that is
measured, so they can be compared on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.service import STEPS, Server, finished  # noqa: E402
from jobs.record.paths import BaseFolder  # noqa: E402
from jobs.serve import offers  # noqa: E402
from jobs.serve.tickets import ServiceFolder  # noqa: E402

SETTLE_S = 5.0  # after the last run is in the index, until the server is taken to be idle


def main() -> None:
    """Print the figures, a line for each number of runs."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("--runs", type=int, nargs="+", default=[1000, 4000])
    flags.add_argument("--idle_s", type=float, default=60.0)
    flags.add_argument("--asks", type=int, default=40)
    flags.add_argument("--rounds", type=int, default=3)
    asked = flags.parse_args()
    for count in asked.runs:
        folder = Path(tempfile.mkdtemp(prefix="lathe-growth-"))
        os.environ["LATHE_QUEUE"] = str(folder / "queue")
        try:
            base = make(folder / "base", count)
            print(f"{count:,} finished runs (load {os.getloadavg()[0]:.1f})", flush=True)
            tell_results(base, asked.rounds)
            tell_server(base, count, asked.idle_s, asked.asks)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make(base: Path, count: int) -> Path:
    """A savedir_base with so many finished runs."""
    service = ServiceFolder(BaseFolder(base))
    service.make()
    offer = offers.read(None).models["tiny-chat"]
    for _ in range(count):
        finished(service, offer)
    scores = [{"step": STEPS, "valid/loss": 1.5, "valid/ppl": 4.5}]
    for run in service.base.runs():
        (run.path / "score_list.json").write_text(json.dumps(scores))
    return base


def tell_results(base: Path, rounds: int) -> None:
    """Print the CPU seconds of `results` and of `status`, the least of some rounds."""
    for name in ("results", "status"):
        argv = [sys.executable, "-m", "jobs.cli", name, "-sb", str(base), "--json"]
        seconds = [_cpu_s_of(argv) for _ in range(rounds)]
        print(f"  lathe-jobs {name} --json: {_listed(seconds)} CPU s", flush=True)


def tell_server(base: Path, count: int, idle_s: float, asks: int) -> None:
    """Print what a server takes that has nothing to do, and how long it takes to list the runs."""
    server = Server(base)
    try:
        _, whole_s = server.until_it_knows(count)
        print(f"  serve: whole after {whole_s:.1f} s, {server.cpu_s():.1f} CPU s", flush=True)
        time.sleep(SETTLE_S)
        before_s, began = server.cpu_s(), time.monotonic()
        time.sleep(idle_s)
        share = (server.cpu_s() - before_s) / (time.monotonic() - began)
        print(f"  idle: {100 * share:.2f} % of a core over {idle_s:.0f} s", flush=True)
        for path in ("/lathe/v1/status", "/lathe/v1/status?limit=20", "/v1/fine_tuning/jobs"):
            times: list[float] = []
            before_s = server.cpu_s()
            for _ in range(asks):
                start = time.perf_counter()
                server.ask(path)
                times.append(1000 * (time.perf_counter() - start))
            cpu_ms = 1000 * (server.cpu_s() - before_s) / asks
            print(f"  {path}: median {statistics.median(times):.1f} ms, {cpu_ms:.1f} CPU ms")
        print(f"  resident: {server.resident_mb():.0f} MB", flush=True)
    finally:
        server.stop()


def _cpu_s_of(argv: list[str]) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{one:.2f}" for one in sorted(seconds))


if __name__ == "__main__":
    main()
