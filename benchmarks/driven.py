"""What driven runs cost: many on one base against each alone, fairness, and a step over the log.

    python benchmarks/driven.py [--runs 10] [--steps 10] [--width 256] [--layers 6] [--out FILE]

The base is made up, on whatever device there is. The clients' operations are in the logs before a
worker starts, so that workers never wait. Printed, and written as JSON to --out:

- seconds from the first result to the last one, and the peak memory of the process: of all runs
  together, and of each alone, one worker after another; the states that they save included.
- fairness: when small runs are done beside one whose operations are 20 times as large, and what
  each run was served until then, in tokens.
- a step (forward_backward, optim_step) of one short row, and of so many rows that it takes about a
  second: in the process, over the log, over the log of a worker that runs share, and by the SDK
  `tinker` from a process of its own over HTTP. Medians; the long one also as a share.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.service import Server  # noqa: E402
from jobs.serve import offers  # noqa: E402
from tests.clients.environments import environment  # noqa: E402
from trainer.config.identity import exp_id  # noqa: E402
from trainer.operations.guests import Guests  # noqa: E402
from trainer.operations.operation_log import FOLDER, OperationLog  # noqa: E402
from trainer.operations.results import OperationResult, OperationResults  # noqa: E402
from trainer.operations.rows import DrivenRow, rows_to_payload  # noqa: E402

ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ADAM |= {"weight_decay": 0.0, "grad_clip_norm": 0.0}
VOCABULARY, ROWS = 4096, (16, 64)  # tokens of a row, from and to
STEPS = {"short": (1, 60), "long": (48, 12)}  # rows of a step, and how many steps
WARM = 4  # steps
Values = dict[str, Any]


def values_of(number: int, together: int, tokenizer: Path, how: argparse.Namespace) -> Values:
    """The dictionary of a run."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": how.width,
        "intermediate_size": 4 * how.width,
        "num_hidden_layers": how.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    data: Values = {"source": "client", "max_tokens": 256, "put_aside_s": 1.0}
    data |= {"together": together} if together > 1 else {}
    train = {"steps": 10**6, "global_batch": 1, "micro_batch": 1, "micro_tokens": 1024}
    return {
        "task": "causal_lm",
        "base": {"config": config, "seed": 1},
        "tokenizer": str(tokenizer),
        "data": data,
        "lora": {"r": 8, "alpha": 16, "dropout": 0.0},
        "train": {**train, "precision": "fp32", "seed": number},
        "optim": {"lr": 1e-4},
    }


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer that no row needs, since clients send tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<eos>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    names = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def lengths(seed: int, count: int) -> list[int]:
    """The tokens of the rows of a pass."""
    return [int(one) for one in np.random.default_rng(seed).integers(*ROWS, count)]


def rows(seed: int, count: int) -> tuple[bytes, Values]:
    """The payload and the fields of a pass."""
    random = np.random.default_rng(seed + 1)
    every: list[DrivenRow] = []
    for length in lengths(seed, count):
        ids = random.integers(0, VOCABULARY - 2, length + 1)
        every.append(DrivenRow(ids[:-1].astype(np.int32), {"target_tokens": ids[1:]}))
    payload, inputs = rows_to_payload(every)
    return payload, {"loss_fn": "cross_entropy", "inputs": inputs}


def write_run(values: Values, savedir: Path, steps: int, rows_of_step: int) -> Path:
    """A run folder with its log."""
    run = savedir / exp_id(values)
    log = OperationLog(run / FOLDER)
    log.append("create", 0, {})
    for number in range(steps):
        payload, fields = rows(1000 * values["train"]["seed"] + number, rows_of_step)
        log.append("forward_backward", log.last_seq + 1, fields, payload)
        log.append("optim_step", log.last_seq + 1, ADAM)
    log.close()
    (run / "exp_dict.json").write_text(json.dumps(values))
    return run


def worker(values: Values, savedir: Path, *, measures: bool = False) -> Values:
    """Run a worker until it puts its run aside; its peak memory, and what it printed last."""
    command = [sys.executable, __file__, "--worker", json.dumps(values), str(savedir)]
    command += ["--measures"] if measures else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def be_worker(values: Values, savedir: Path, *, measures: bool) -> None:
    """The process of worker(). measures: the steps of overhead(), without a log."""
    import torch

    from trainer.driven.loop import DrivenLoop
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    distributed.init()
    report: Values = {}

    def inside(loop: Any) -> str:
        """A step without a log: what the model does, and nothing is written."""
        model = loop.account.model
        model.is_created, first = True, 0
        for name, (size, steps) in STEPS.items():
            report[name] = _steps_inside(model, size, steps, first)
            first += steps
        return "paused"

    if measures:
        DrivenLoop.follow = inside  # pyright: ignore[reportAttributeAccessIssue]
    options = Options(savedir, cache_dir=savedir / "cache", deepspeed="zero0")
    run(plan(values, options, world=1, rank=0), options, Preemption())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    report["host_mib"] = round(peak)
    if torch.cuda.is_available():
        report["device_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    print(json.dumps(report), flush=True)
    distributed.shutdown(0)


def _steps_inside(model: Any, size: int, steps: int, first: int) -> list[float]:
    from trainer.operations.operation_log import Operation

    payload, fields = rows(7, size)
    times: list[float] = []
    for number in range(first, first + steps):
        began = time.perf_counter()
        for seq, kind, own, content in (
            (2 * number + 1, "forward_backward", fields, payload),
            (2 * number + 2, "optim_step", ADAM, b""),
        ):
            model.do(Operation(seq, kind, own, content, 0.0, "", ""))  # pyright: ignore
        times.append(1000 * (time.perf_counter() - began))
    return times


def results_of(run: Path) -> list[OperationResult]:
    results = OperationResults(run / FOLDER)
    results.follow()
    return [one for seq in range(results.last_seq + 1) if (one := results.get(seq))]


def seconds(runs: Sequence[Path]) -> float:
    """From the first result to the last one."""
    times = [one.time for run in runs for one in results_of(run)]
    return max(times) - min(times)


def start_together(every: Sequence[Values], savedir: Path, sizes: Sequence[int], steps: int) -> Any:
    """The runs of one worker: their folders, and what it report."""
    pairs = zip(every, sizes, strict=True)
    runs = [write_run(values, savedir, steps, size) for values, size in pairs]
    for run in runs[1:]:
        Guests.of(runs[0]).ask(f"ft_{run.name}_1", run.name)
    return runs, worker(every[0], savedir)


def many_on_one_base(how: argparse.Namespace, folder: Path, tokenizer: Path) -> Values:
    every = [values_of(n, how.runs, tokenizer, how) for n in range(how.runs)]
    runs, report = start_together(every, folder / "together", [4] * how.runs, how.steps)
    alone, peaks = 0.0, []
    for number in range(how.runs):
        values = values_of(number, 1, tokenizer, how)
        run = write_run(values, folder / "alone", how.steps, 4)
        peaks.append(worker(values, folder / "alone"))
        alone += seconds([run])
    key = "device_mib" if "device_mib" in report else "host_mib"
    return {
        "together_s": round(seconds(runs), 2),
        "alone_s": round(alone, 2),
        "together_mib": report[key],
        "alone_mib_sum": sum(one[key] for one in peaks),
        "alone_mib_one": round(statistics.mean(one[key] for one in peaks)),
        "memory": key,
    }


def fairness(how: argparse.Namespace, folder: Path, tokenizer: Path) -> Values:
    """The last run sends operations that are 20 times as large."""
    times: dict[str, float] = {}
    for name, large in (("equal", 2), ("one_large", 40)):
        every = [values_of(n, how.runs, tokenizer, how) for n in range(how.runs)]
        sizes = [2] * (how.runs - 1) + [large]
        runs, _ = start_together(every, folder / name, sizes, how.steps)
        first = min(one.time for run in runs for one in results_of(run))
        ends = [results_of(run)[-1].time - first for run in runs]
        times[f"{name}_small_s"] = round(max(ends[:-1]), 2)
        times[f"{name}_small_first_s"] = round(min(ends[:-1]), 2)
        times[f"{name}_last_s"] = round(ends[-1], 2)
    return dict(times)


def overhead(folder: Path, tokenizer: Path, how: argparse.Namespace) -> Values:
    """Milliseconds of a step, medians, and what the SDK and the service add to a long one."""
    values = values_of(0, 1, tokenizer, how)
    ways = {"inside": worker(values, folder / "inside", measures=True)}
    for way, together in (("log", 1), ("shared_log", 8)):
        values = values_of(0, together, tokenizer, how)
        run = write_run(values, folder / way, 0, 1)
        command = [sys.executable, __file__, "--worker", json.dumps(values), str(folder / way)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        ways[way] = _steps_over_log(run)
        process.wait()
    ways["http"] = _steps_over_http(folder / "http", values_of(0, 1, tokenizer, how))
    report: Values = {
        f"{way}_{name}_ms": round(statistics.median(times[name][WARM:]), 2)
        for way, times in ways.items()
        for name in STEPS
    }
    added = report["http_long_ms"] - report["inside_long_ms"]
    return report | {"http_long_share": round(added / report["inside_long_ms"], 4)}


def _steps_over_log(run: Path) -> dict[str, list[float]]:
    """Each step is sent when the one before has its result, as a client does that awaits it."""
    log, results = OperationLog(run / FOLDER), OperationResults(run / FOLDER)
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for name, (size, steps) in STEPS.items():
        payload, fields = rows(7, size)
        for _ in range(steps):
            began, seq = time.perf_counter(), log.last_seq + 1
            log.append("forward_backward", seq, fields, payload)
            log.append("optim_step", seq + 1, ADAM)
            while results.last_seq < seq + 1:
                results.follow()
                time.sleep(0.0005)
            times[name].append(1000 * (time.perf_counter() - began))
    log.close()
    return times


def _steps_over_http(folder: Path, values: Values) -> dict[str, list[float]]:
    """The steps of an unmodified SDK, in an environment of its own, against `lathe serve`."""
    tiny = offers.read(None).models["tiny-chat"].experiment
    experiment = {**tiny, "base": values["base"], "tokenizer": values["tokenizer"]}
    train = {key: one for key, one in values["train"].items() if key not in ("steps", "seed")}
    driven = {"max_tokens": values["data"]["max_tokens"], "changes": {"train": train}}
    offer = {"experiment": experiment, "driven": {**driven, "put_aside_s": 60.0}}
    (folder / "base").mkdir(parents=True)
    os.environ["LATHE_QUEUE"] = str(folder / "queue")
    server = Server(folder / "base", {"models": {"made-up": offer}})
    try:
        server.until_it_knows(0)
        world = {"url": server.url, "model": "made-up", "rank": values["lora"]["r"]}
        world |= {"steps": [[lengths(7, size), steps] for size, steps in STEPS.values()]}
        program = Path(__file__).with_name("driven_client.py")
        python = environment("tinker") / "bin" / "python"
        command = [str(python), str(program), json.dumps({**world, "vocabulary": VOCABULARY - 2})]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        server.stop()
    return dict(zip(STEPS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measures", action="store_true", help=argparse.SUPPRESS)
    how = parser.parse_args()
    if how.worker:
        values, savedir = how.worker
        return be_worker(json.loads(values), Path(savedir), measures=how.measures)
    facts: Values = {"runs": how.runs, "steps": how.steps, "width": how.width}
    facts |= {"layers": how.layers, "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder / "tokenizer")
        facts |= many_on_one_base(how, folder / "many", tokenizer)
        facts |= fairness(how, folder / "fair", tokenizer)
        facts |= overhead(folder / "overhead", tokenizer, how)
    text = json.dumps(facts, indent=1)
    print(text)
    if how.out is not None:
        how.out.write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()
