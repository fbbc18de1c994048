"""What the service costs: answers over finished runs, memory, cold starts.

    python benchmarks/service.py [--runs 1000] [--asks 300] [--pages 50 --minutes 10 [--trained]]

The run folders are made up, with the files that a job through the service leaves. --pages: so many
pages (their streams) are open at once, beside 10 runs that log a line a second (--trained: that are
trainings: ten processes of `trainval.py`, at a lower priority than the server on the same cores);
and, where there is a Chromium, how long one page takes to show all runs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.record.paths import BaseFolder  # noqa: E402
from jobs.record.times import now  # noqa: E402
from jobs.serve import offers  # noqa: E402
from jobs.serve.tickets import FILE, JOB, ServiceFolder, Ticket, new_id  # noqa: E402
from trainer.config.identity import digest, exp_id  # noqa: E402
from trainer.files.atomic import write_json  # noqa: E402
from trainer.runtime.process import facts  # noqa: E402

STEPS = 60


def finished(folder: ServiceFolder, offer: offers.Offer) -> str:
    """Make a job of an offer that has succeeded; returns its id."""
    job_id = new_id(JOB)
    request = offers.TuningRequest(num_rows=160, kind="chat", seed=1, label=job_id)
    values = offers.fill(offer, request).experiment
    name = exp_id(values)
    folder.create(
        Ticket(
            id=job_id,
            created_at=now(),
            owner="local",
            model="tiny-chat",
            exp_id=name,
            experiment=values,
            request_digest="0" * 64,
            kind="chat",
            num_rows=160,
            seed=1,
            epochs=3,
            batch=8,
            lr_factor=1.0,
            training_file=new_id(FILE),
            metadata={"team": "lathe"},
        )
    )
    (folder.tickets / job_id / "checked.json").write_text(json.dumps({"at": now()}))
    run(folder.base.run(name).path, values)
    return job_id


def run(path: Path, values: dict[str, Any]) -> None:
    """Make the folder of a run that has succeeded."""
    attempt = path / "attempts" / "1"
    attempt.mkdir(parents=True)
    at = now()
    created = {"event": "created", "exp_id": path.name, "digest": digest(values)}
    created |= {"group": "service", "nonce": "abcdef"}
    token = f"ft_{path.name[:12]}_abcdef_1"
    intent = {"event": "intent", "attempt": 1, "token": token, "name": token}
    intent |= {"index": None, "backend": "local", "by": "bench:1"}
    sent = {"event": "submitted", "attempt": 1, "id": f"host:q:{token}", "adopted": False}
    ended = {"event": "observed", "attempt": 1, "state": "succeeded", "reason": None}
    events = [{"at": at, **event} for event in (created, intent, sent, {**ended, "host": "h"})]
    files = {
        "exp_dict.json": json.dumps(values),
        "job.jsonl": "".join(json.dumps(event) + "\n" for event in events),
        "status.json": json.dumps({"state": "succeeded", "step": STEPS, "total": STEPS}),
        "metrics.jsonl": "".join(
            json.dumps({"step": step, "loss": 5 / step, "lr": 1e-3, "tokens": 900 * step}) + "\n"
            for step in range(1, STEPS + 1)
        ),
        "attempts/1/spec.json": json.dumps({"job": {}}),
        "attempts/1/started-1.json": json.dumps({"at": at, "host": "h", "pid": 1}),
        "attempts/1/exit.json": json.dumps({"at": at, "code": 0, "kind": "succeeded", "start": 1}),
    }
    for name, text in files.items():
        (path / name).write_text(text)


class Server:
    """The server as a process. config: laid over SERVICE of service.py."""

    def __init__(self, base: Path, config: Mapping[str, Any] | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        argv = [sys.executable, "-m", "jobs.serve.app", "-sb", str(base), "--allow-dirty"]
        file = base.parent / "service.py"  # one client asks as much as a hundred
        file.write_text(
            "from service import SERVICE as OURS\n"
            f"SERVICE = {{**OURS, 'requests_per_minute': 10**6, **{dict(config or {})!r}}}\n"
        )
        argv += ["--service_config", str(file)]
        self.began = time.monotonic()
        self.process = subprocess.Popen([*argv, "--port", str(self.port)], cwd=ROOT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str) -> Any:
        """What it answers."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def until_it_knows(self, count: int) -> tuple[float, float]:
        """(seconds to the first answer, seconds until its index holds so many runs)."""
        first_s = None
        while True:
            try:
                rows = self.ask("/lathe/v1/status")
            except OSError:
                time.sleep(0.02)
                continue
            first_s = first_s or time.monotonic() - self.began
            if len(rows) >= count:
                return first_s, time.monotonic() - self.began
            time.sleep(0.5)

    def p95_ms(self, paths: list[str]) -> float:
        """Of the times that the answers take, one after the other."""
        times: list[float] = []
        for path in paths:
            began = time.perf_counter()
            self.ask(path)
            times.append(1000 * (time.perf_counter() - began))
        return statistics.quantiles(times, n=20)[-1]

    def resident_mb(self) -> float:
        """Its resident memory, 10^6 bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1.024e-3 * int(text.partition("VmRSS:")[2].split()[0])

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def has_torch(self) -> bool:
        """Whether torch's libraries are in its memory."""
        return "libtorch" in Path(f"/proc/{self.process.pid}/maps").read_text()

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--asks", type=int, default=300)
    parser.add_argument("--pages", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trained", action="store_true", help="the live runs train for real")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lathe-service-"))
    os.environ["LATHE_QUEUE"] = str(folder / "queue")
    try:
        service = ServiceFolder(BaseFolder(folder / "base"))
        service.make()
        offer = offers.read(None).models["tiny-chat"]
        ids = [finished(service, offer) for _ in range(asked.runs)]
        if asked.pages:
            show_pages(folder / "base", asked.pages, asked.minutes * 60, is_trained=asked.trained)
        else:
            show(folder / "base", ids, asked.asks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(base: Path, ids: list[str], asks: int) -> None:
    """Print the figures."""
    for kind in ("without an index", "with one"):
        server = Server(base)
        atexit.register(server.stop)
        first_s, whole_s = server.until_it_knows(len(ids))
        print(
            f"cold start {kind}: answers after {first_s:.1f} s, whole after {whole_s:.1f} s, "
            f"{server.cpu_s():.1f} CPU seconds"
        )
        if kind == "without an index":
            server.stop()
    jobs, some = "/v1/fine_tuning/jobs", [ids[17 * k % len(ids)] for k in range(asks)]
    kinds = {
        "list of 20 jobs": [f"{jobs}?limit=20&after={name}" for name in some],
        "list of 100 jobs": [f"{jobs}?limit=100&after={name}" for name in some],
        "retrieve": [f"{jobs}/{name}" for name in some],
        "20 events": [f"{jobs}/{name}/events" for name in some],
        "checkpoints": [f"{jobs}/{name}/checkpoints" for name in some],
        "models, all of them": ["/v1/models"] * 40,
        "status, all of them": ["/lathe/v1/status"] * 40,
    }
    for kind, paths in kinds.items():
        print(f"p95 of {kind}: {server.p95_ms(paths):.1f} ms")
    print(f"resident: {server.resident_mb():.0f} MB; torch in it: {server.has_torch()}")
    server.stop()


NUM_LIVE = 10


class MadeUp(threading.Thread):
    """Runs that were started by hand, of this process, and log a line a second each."""

    def __init__(self, base: Path) -> None:
        super().__init__(daemon=True)
        self.folders: list[Path] = []
        self.is_over = False
        for seed in range(NUM_LIVE):
            values = {"task": "causal_lm", "label": "live", "train": {"steps": 9999, "seed": seed}}
            folder = base / exp_id(values)
            folder.mkdir()
            (folder / "exp_dict.json").write_text(json.dumps(values))
            self.folders.append(folder)

    def run(self) -> None:
        step = 0
        while not self.is_over:
            step += 1
            for folder in self.folders:
                line = {"step": step, "loss": 5 / step, "at": now()}
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                status = {"state": "running", "step": step, "total": 9999, "host": "here"}
                status |= {"updated_at": now(), "process": facts()}
                write_json(folder / "status.json", status, is_durable=False)
            time.sleep(1)

    def stop(self) -> None:
        """Write no more."""
        self.is_over = True


class Trained:
    """Runs that train: tiny language models, each a `trainval.py` started by hand."""

    def __init__(self, base: Path) -> None:
        configs = base.parent / "live.py"
        configs.write_text(
            "from exp_configs import CAUSAL_LM_TINY, vary\n"
            "EXP_GROUPS = {\n"
            "    f'live_{seed}': [vary(CAUSAL_LM_TINY, train={'steps': 10**6, 'seed': seed,\n"
            "        'log_every': 2, 'eval_every': 1000, 'save_every': 1000})]\n"
            f"    for seed in range({NUM_LIVE})\n"
            "}\n"
        )
        argv = ["nice", "-n", "10", sys.executable, str(ROOT / "trainval.py")]
        argv += ["--exp_configs", str(configs)]
        before = set(BaseFolder(base).runs())
        self.log = (base.parent / "live.log").open("w")
        self.processes = [
            subprocess.Popen(
                [*argv, "-e", f"live_{seed}", "-sb", str(base)],
                cwd=ROOT,
                stdout=self.log,
                stderr=self.log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for seed in range(NUM_LIVE)
        ]
        atexit.register(self.stop)
        self._base, self._before = base, before

    @property
    def folders(self) -> list[Path]:
        """Their run folders."""
        return [run.path for run in BaseFolder(self._base).runs() if run not in self._before]

    def start(self) -> None:
        """Wait until each has logged a line."""
        while len(self.folders) < NUM_LIVE or not all(
            (folder / "metrics.jsonl").exists() for folder in self.folders
        ):
            if any(process.poll() is not None for process in self.processes):
                sys.exit(Path(self.log.name).read_text()[-2000:])
            time.sleep(1)

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


class Watcher(threading.Thread):
    """Notes when each line of the live runs' metrics stands in its file."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(daemon=True)
        self.files = {folder.name: (folder / "metrics.jsonl").open() for folder in folders}
        self.written: dict[tuple[str, int], float] = {}

    def run(self) -> None:
        while True:
            for name, file in self.files.items():
                text = file.read()
                for line in text.splitlines():
                    step = line.partition('"step": ')[2].partition(",")[0]
                    self.written.setdefault((name, int(step or -1)), time.time())
            time.sleep(0.02)


class Reader(threading.Thread):
    """A page that is open: its stream, read as it comes, watching one run."""

    def __init__(self, server: Server, run: Path) -> None:
        super().__init__(daemon=True)
        place = server.ask(f"/lathe/v1/runs/{run.name}/curves")["place"]
        path = f"/lathe/v1/stream?since=-1&watch={run.name}:{place}"
        self.answer = urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60)
        self.num_bytes, self.error, self.name_of_run = 0, "", run.name
        self.came: list[tuple[int, float]] = []  # step, and when

    def run(self) -> None:
        try:
            for line in self.answer:
                self.num_bytes += len(line)
                if line.startswith(b'data: {"id"'):
                    at = time.time()
                    self.came += [(one["step"], at) for one in json.loads(line[6:])["lines"]]
        except (OSError, ValueError) as error:
            self.error = repr(error)


def show_pages(base: Path, count: int, seconds: float, *, is_trained: bool) -> None:
    """Print what open pages cost, and how far behind they are."""
    live = Trained(base) if is_trained else MadeUp(base)
    live.start()
    server = Server(base)
    atexit.register(server.stop)
    runs = len(list(BaseFolder(base).runs()))
    server.until_it_knows(runs)
    before_s = server.cpu_s()
    time.sleep(10)
    print(f"CPU of the server without a page: {10 * (server.cpu_s() - before_s):.0f} %")
    folders = live.folders
    watcher = Watcher(folders)
    watcher.start()
    time.sleep(1)
    readers = [Reader(server, folders[number % NUM_LIVE]) for number in range(count)]
    for reader in readers:
        reader.start()
    time.sleep(5)  # every page has its first, whole board by then
    before_s, began, told = server.cpu_s(), time.monotonic(), sum(r.num_bytes for r in readers)
    kinds = ["/v1/fine_tuning/jobs?limit=20", "/lathe/v1/me"]
    asked_ms: list[float] = []
    while time.monotonic() - began < seconds:
        asked_ms.append(server.p95_ms(kinds * 5))
        time.sleep(2)
    spent_s = time.monotonic() - began
    lags: list[float] = []
    for reader in readers:
        for step, at in reader.came:
            written_at = watcher.written.get((reader.name_of_run, step))
            lags += [] if written_at is None else [at - written_at]
    share = 100 * (server.cpu_s() - before_s) / spent_s
    rate = (sum(reader.num_bytes for reader in readers) - told) / spent_s / count
    print(
        f"{count} pages, {NUM_LIVE} live runs ({type(live).__name__}), {runs} in all, "
        f"{spent_s:.0f} s: CPU {share:.0f} %, {rate / 1000:.1f} kB/s a page, "
        f"resident {server.resident_mb():.0f} MB, pages that lost their stream: "
        f"{sum(bool(reader.error) for reader in readers)}"
    )
    print(
        f"a line of metrics is on the page after {statistics.median(lags):.2f} s (median), "
        f"{statistics.quantiles(lags, n=20)[-1]:.2f} s (p95); "
        f"other requests: p95 {statistics.median(asked_ms):.0f} ms; {len(lags)} lines came"
    )
    show_browser(server, runs)
    live.stop()
    server.stop()


def show_browser(server: Server, runs: int) -> None:
    """Print how long a page takes to show all runs, to find one, and to sort."""
    from tests.serve.browser import browsing, missing

    if missing() is not None:
        print(missing())
        return
    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder)) as browser:
        for _ in range(3):
            browser.open("about:blank")
            began = time.monotonic()
            browser.open(f"http://127.0.0.1:{server.port}/live")
            text = f"{runs} of {runs} runs"
            browser.until("return document.body.innerText.includes(args[0])", text)
            shown_s = time.monotonic() - began
        script = (
            "const began = performance.now(); const it = document.getElementById(args[0]);"
            "it.value = args[1]; it.dispatchEvent(new Event(args[2])); document.body.offsetHeight;"
            "return performance.now() - began"
        )
        sorted_ms = browser.run(script, "sort", "loss", "change")
        found_ms = browser.run(script, "search", "tiny", "input")
        browser.run(script, "search", "", "input")
        all_ms = browser.run(
            "const began = performance.now();"
            "const all = [...document.querySelectorAll('button')];"
            "all.find(one => one.innerText.startsWith('Show all'))?.click();"
            "document.body.offsetHeight; return performance.now() - began"
        )
        print(
            f"a page shows {runs} runs after {shown_s:.2f} s; sorts in {sorted_ms:.0f} ms, "
            f"searches in {found_ms:.0f} ms, draws every row in {all_ms:.0f} ms"
        )


if __name__ == "__main__":
    main()
