"""A loop of the Tinker SDK against `lathe serve`, undisturbed and under kills: are all bits equal?

    python benchmarks/driven_kills.py [--seed 1] [--kills 40] [--steps 200] [--folder DIR]

The client is tests/clients/programs/tinker_loop.py with the SDK from the index in an environment of
its own. The run is trained on two ranks at ZeRO-2. At operations and moments drawn from the seed,
`kill -9` goes to the server, to the worker (launcher and both ranks), to one of the two ranks, or
to the client; each is started again, the worker by the server. Losses, log-probabilities, samples,
weights and the chain of operations of both loops are compared, and the log is counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.clients.environments import environment  # noqa: E402
from trainer.operations.operation_log import FOLDER, LOG, Operation, OperationReader  # noqa: E402
from trainer.operations.records import RecordFiles, RecordPlace  # noqa: E402
from trainer.operations.results import RESULTS, OperationResult, OperationResults  # noqa: E402

T = TypeVar("T")
PROGRAM = ROOT / "tests" / "clients" / "programs" / "tinker_loop.py"
MODEL = "tiny-chat"
VICTIMS = ("server", "worker", "rank", "client")
MOST_DELAY_S = 0.5  # between the result of an operation and the kill
WITHIN_S = 1800.0  # the longest silence of a loop
SERVICE = """
from service import TINY_CHAT

CHANGES = {"deepspeed": "zero2", "train": {"global_batch": 16}}  # of two ranks
DRIVEN = {"max_tokens": 64, "changes": CHANGES}
SERVICE = {"models": {"tiny-chat": {"experiment": TINY_CHAT, "driven": DRIVEN}}}
"""


@dataclass(frozen=True)
class KillPoint:
    """A kill: delay_s after the result of an operation was there. draw: picks among ranks."""

    operation: int
    delay_s: float
    victim: str
    draw: float


def drawn(seed: int, count: int, num_operations: int) -> list[KillPoint]:
    """So many kills over the operations of a loop, in order."""
    draw = random.Random(seed)
    points = [
        KillPoint(
            draw.randrange(1, num_operations - 1),
            draw.uniform(0, MOST_DELAY_S),
            draw.choice(VICTIMS),
            draw.random(),
        )
        for _ in range(count)
    ]
    return sorted(points, key=lambda point: point.operation)


@dataclass
class DisturbedLoop:
    """A server with its worker, and a client that drives it. folder: of everything they write."""

    folder: Path
    steps: int
    program: Path = PROGRAM
    server: subprocess.Popen[bytes] | None = None
    client: subprocess.Popen[bytes] | None = None
    killed: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "offers.py").write_text(SERVICE)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def lines(self) -> list[dict[str, Any]]:
        """What the client has learnt so far."""
        if not self.journal.exists():
            return []
        whole = self.journal.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def run(self) -> Path:
        """The folder of the run, once it is there."""
        found = until(lambda: sorted((self.folder / "base").glob("*/exp_dict.json")))
        return found[0].parent

    def start_server(self) -> None:
        """Start `lathe serve`; its workers are two ranks."""
        ranks = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"
        words = ["-sb", str(self.folder / "base"), "--port", str(self.port), "--every_s", "0.2"]
        words += ["--service_config", str(self.folder / "offers.py"), "--python_binary", ranks]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        own |= {"LATHE_QUEUE": str(self.folder / "queue"), "LATHE_QUEUE_CPUS": "4"}
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "jobs.serve.app", *words, "--allow-dirty"],
                cwd=ROOT,
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
            )

    def start_client(self) -> None:
        """Start the loop, which goes on from its journal."""
        world = {"url": self.url, "model": MODEL, "steps": self.steps}
        world["journal"] = str(self.journal)
        python = environment("tinker") / "bin" / "python"
        with (self.folder / "client.log").open("ab") as log:
            self.client = subprocess.Popen(
                [
                    str(python),
                    str(self.program),
                    json.dumps(world),
                ],
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
                stdout=log,
                stderr=log,
            )

    def drive(self, points: list[KillPoint]) -> None:
        """Let the client come to its end, with a kill at each point."""
        (self.folder / "base").mkdir()
        self.start_server()
        self.start_client()
        assert self.client is not None, "it was started"
        results, before = None, -1  # the last result when a worker was killed last
        moved, last = time.monotonic(), -1
        while (code := self.client.poll()) is None:
            time.sleep(0.005)
            if results is None:
                if self.lines():
                    results = OperationResults(self.run() / FOLDER)
                continue
            results.follow()
            if results.last_seq != last:
                moved, last = time.monotonic(), results.last_seq
            if time.monotonic() - moved > WITHIN_S:
                raise SystemExit(f"no result behind operation {last} for {WITHIN_S:.0f} s")
            if not points or last < points[0].operation:
                continue
            is_of_worker = points[0].victim in ("worker", "rank")
            if is_of_worker and last <= before:
                continue  # three starts in vain would end the run, as the page says
            point = points.pop(0)
            time.sleep(point.delay_s)
            before = last if is_of_worker else before
            self.kill(point)
        if code:
            raise SystemExit(f"the client failed: {self.folder / 'client.log'}")

    def kill(self, point: KillPoint) -> None:
        """kill -9 the victim of a point, and start again what the server does not."""
        if point.victim == "server":
            assert self.server is not None, "it was started"
            self.server.kill()
            self.server.wait()
            self.start_server()
        elif point.victim == "client":
            assert self.client is not None, "it was started"
            if self.client.poll() is None:
                self.client.kill()
                self.client.wait()
                self.start_client()
        else:
            # the launcher is the process without a rank; one that is starting may have none yet
            found = until(lambda: self.processes(with_launcher=point.victim == "worker"))
            pids = found if point.victim == "worker" else [found[int(point.draw * len(found))]]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.killed[point.victim] += 1
        print(f"{point.victim} killed behind operation {point.operation}", flush=True)

    def processes(self, *, with_launcher: bool) -> list[int]:
        """The ranks of this run's worker, and the process that launched them."""
        pids: list[int] = []
        for pid, words in self.started():
            if b"trainval.py" in words and b"jobs.node" not in words:
                with suppress(OSError):
                    has_rank = b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
                    if has_rank or (with_launcher and b"torch.distributed.run" in words):
                        pids.append(pid)
        return sorted(pids)

    def started(self) -> list[tuple[int, bytes]]:
        """Every process that names a file of this folder, and its command line."""
        found: list[tuple[int, bytes]] = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (place / "cmdline").read_bytes()
                if f"{self.folder}/".encode() in words and int(place.name) != os.getpid():
                    found.append((int(place.name), words))
        return found

    def end(self) -> None:
        """End the run, wait for its last weights, and stop the server."""
        body = json.dumps({"model_id": self.lines()[0]["run"], "type": "unload_model"}).encode()
        headers = {"content-type": "application/json", "x-api-key": "tml-none"}
        request = urllib.request.Request(f"{self.url}/api/v1/unload_model", body, headers)
        with urllib.request.urlopen(request, timeout=60):
            pass
        until(lambda: json.loads((self.run() / "status.json").read_text())["state"] == "succeeded")
        self.stop()

    def stop(self) -> None:
        """Stop what was started here and still runs."""
        for process in (self.client, self.server):
            if process is not None and process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
        for pid, _ in self.started():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(look: Callable[[], T], *, within_s: float = 600.0) -> T:
    """The first look that is true. SystemExit when there is none in time."""
    end = time.monotonic() + within_s
    while True:
        with suppress(OSError, ValueError):
            if value := look():
                return value
        if time.monotonic() > end:
            raise SystemExit("it did not come about in time")
        time.sleep(0.05)


def operations_of(run: Path) -> list[Operation]:
    """All operations of a run."""
    reader, found = OperationReader(run / FOLDER), []
    while operation := reader.next():
        found.append(operation)
    return found


def results_of(run: Path) -> list[OperationResult]:
    """All results of a run."""
    results = OperationResults(run / FOLDER)
    results.follow()
    every = [results.get(seq) for seq in range(results.last_seq + 1)]
    return [one for one in every if one is not None]


def records_of(run: Path, stem: str) -> list[int]:
    """The number of every record of a file, as they stand there."""
    files, numbers = RecordFiles(run / FOLDER, stem), []
    for segment in files.segments():
        place = RecordPlace(segment, 0)
        while record := files.read(place):
            numbers.append(int(record.header["seq"]))
            place = RecordPlace(segment, record.end)
    return numbers


def weights_of(run: Path) -> dict[str, str]:
    """Every file of weights and moments that the loop has saved, by its sha256."""
    parts = [path for name in ("final", "saved", "sampler") for path in (run / name).rglob("*")]
    files = [path for path in parts if path.suffix == ".safetensors" and "rng-" not in path.name]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def steps_of(run: Path) -> list[tuple[Any, ...]]:
    """Step, loss and norm of each line of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss_sum"], line["grad_norm"]) for line in lines if "lr" in line]


def differences(quiet: DisturbedLoop, killed: DisturbedLoop) -> list[str]:
    """What is not the same in both loops, or stands twice or not at all in a log."""
    wrong: list[str] = []
    runs = quiet.run(), killed.run()
    count = len(operations_of(runs[0]))
    for stem in (LOG, RESULTS):
        numbers = records_of(runs[1], stem)
        if numbers != list(range(count)):
            twice = [seq for seq, times in Counter(numbers).items() if times > 1]
            lost = sorted(set(range(count)) - set(numbers))
            wrong.append(f"{stem}: twice {twice}, lost {lost}, of {count}")
    both: dict[str, list[Any]] = {
        "chain of operations": [[one.chain for one in operations_of(run)] for run in runs],
        "results": [
            [[one.seq, {**one.fields, "bytes": 0}, one.payload] for one in results_of(run)]
            for run in runs
        ],
        "weights": [weights_of(run) for run in runs],
        "metrics.jsonl": [steps_of(run) for run in runs],
        "what the client was told": [one.lines()[1:] for one in (quiet, killed)],
    }
    wrong += [f"{what} differ" for what, (one, other) in both.items() if one != other]
    failed = [one.seq for one in results_of(runs[1]) if one.error is not None]
    return [*wrong, *[f"operation {seq} failed" for seq in failed]]


def main() -> int:
    """Drive both loops and compare them; 1 if anything differs."""
    flags = argparse.ArgumentParser(description="A loop of the SDK under kills.")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--kills", type=int, default=40)
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--folder", type=Path, help="Kept afterwards; a new one.")
    given = flags.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="driven-kills-"))).absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wrong = compare(folder, seed=given.seed, kills=given.kills, steps=given.steps)
    print("\n".join(wrong) or "everything is the same, each operation once", flush=True)
    print(folder)
    return bool(wrong)


def compare(folder: Path, *, seed: int, kills: int, steps: int) -> list[str]:
    """Drive a quiet loop and one under kills in `folder`; what differs."""
    quiet, killed = (DisturbedLoop(folder / name, steps) for name in ("quiet", "killed"))
    points: list[KillPoint] = []
    for loop in (quiet, killed):
        started = time.monotonic()
        try:
            loop.drive(points)
            loop.end()
        finally:
            loop.stop()
        seconds, count = time.monotonic() - started, len(operations_of(loop.run()))
        print(f"{loop.folder.name}: {count} operations, {seconds:.0f} s, {dict(loop.killed)}")
        points = drawn(seed, kills, count)
    files = len(weights_of(killed.run()))
    print(f"compared: {len(killed.lines())} lines, {files} files of weights", flush=True)
    reached = killed.killed.total()  # a client may end before the last points come
    if reached < kills:
        print(f"{reached} of {kills} points were reached before the client ended", flush=True)
    assert reached >= 0.9 * kills, "nearly all points were reached"
    return differences(quiet, killed)


if __name__ == "__main__":
    sys.exit(main())
