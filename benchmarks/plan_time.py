"""How right predicted time is: steps of real runs on this processor against their prediction.

    python benchmarks/plan_time.py [--device FILE ...] [--out FILE] [--only NAME ...] [--rounds 3]

Ten subjects over the six tasks, sizes, lengths and one and two ranks, each trained in every one of
seven ways: ZeRO stage, micro-batch, recomputation. A line for each with measured and predicted
seconds, then the median and the worst error, Kendall's tau over all, and what the way predicted to
be the fastest of a subject takes against the one that is. Lines go to --out as they come, and those
that are there are not measured again. --device: of calibrate-device on one rank, on two; those that
are not given are made first. --rounds: every way is run so often, one round after the other, and
of every step the quickest round counts, for others may use the machine. --clock cpu counts the
processor's seconds of rank 0; what ranks wait for each other is then not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for each rank

from benchmarks.gpu_shapes import Shape, Values, bigcode, t5, write_rows
from tests.ranks import run_on_ranks

STEPS, SETTLING = 10, 3
_BERT = {"model_type": "bert", "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 6}
_BERT |= {"num_attention_heads": 4, "intermediate_size": 1024, "pad_token_id": 1}
_LLAMA = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 6}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 768}
_LLAMA |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def _small(config: Values, vocabulary: int = 2048) -> Values:
    return config | {"vocab_size": vocabulary}


def _texts(tokens: int) -> Values:
    return {"data": {"source": "jsonl", "max_tokens": tokens}}


def _documents(source: int, target: int) -> Values:
    fields = {"source": "files", "document": "context", "summaries": ["answer"]}
    return {"data": fields | {"source_tokens": source, "target_tokens": target}}


def _questions(contexts: int, tokens: int) -> Values:
    data = {"source": "fid", "contexts": contexts, "passage_tokens": tokens, "answer_tokens": 20}
    return {"data": data}


_STATEMENTS = {"source": "groups", "train_tasks": ["choices"], "valid_tasks": ["choices"]}
_PAIRS = {
    "data": {
        "source": "tevatron",
        "files": {"train": "queries/train.jsonl", "valid": "queries/dev.jsonl"},
        "query_tokens": 32,
        "passage_tokens": 64,
        "passages": 4,
    },
    "encoder": {"pooling": "cls", "normalize": True, "temperature": 0.02},
}
_ADDED = {
    "layers": {"count": 2, "stride": 2, "initialisation": "published"},
    "data": {"source": "jsonl", "decoder_tokens": 64, "context_tokens": 128},
}
# (shape, ranks, a step's rows)
SUBJECTS = (
    (Shape("texts-llama", "causal_lm", _LLAMA, _texts(128)), 1, 8),
    (Shape("texts-bigcode", "causal_lm", _small(bigcode(384, 6, 6)), _texts(192)), 2, 8),
    (
        Shape("summaries-64", "summariser", _small(t5(256, 32, 1024, 4, 8)), _documents(64, 32)),
        1,
        16,
    ),
    (
        Shape("summaries-192", "summariser", _small(t5(256, 64, 1024, 6, 4)), _documents(192, 32)),
        2,
        8,
    ),
    (
        Shape(
            "statements",
            "vera",
            _small(t5(256, 64, 1024, 8, 4)),
            {"data": _STATEMENTS | {"max_tokens": 64}},
        ),
        1,
        8,
    ),
    (
        Shape(
            "statements-wide",
            "vera",
            _small(t5(384, 64, 1536, 6, 6)),
            {"data": _STATEMENTS | {"max_tokens": 64}},
        ),
        2,
        8,
    ),
    (Shape("pairs", "retriever", _BERT, _PAIRS), 1, 8),
    (Shape("answers", "fid", _small(t5(256, 64, 1024, 4, 4)), _questions(3, 64)), 1, 8),
    (Shape("answers-large", "fid", _small(t5(384, 64, 1536, 4, 6)), _questions(2, 96)), 2, 8),
    (Shape("contexts", "cross_attention", _small(bigcode(256, 8, 4)), _ADDED), 1, 8),
)
# (DeepSpeed file, micro-batches of a step on a rank, recomputation)
WAYS = (
    ("zero0", 1, False),
    ("zero0", 4, False),
    ("zero1", 2, False),
    ("zero2", 1, False),
    ("zero2", 1, True),
    ("zero3", 1, False),
    ("zero3", 4, False),
)


@dataclass(frozen=True)
class Case:
    """One run."""

    subject: str
    world: int
    preset: str
    values: Values = field(repr=False)

    @property
    def name(self) -> str:
        train = self.values["train"]
        again = " recomputed" if train["gradient_checkpointing"] else ""
        ranks = f" x{self.world}" if self.world > 1 else ""
        return f"{self.subject}{ranks} {self.preset} b{train['micro_batch']}{again}"


def cases() -> Iterator[Case]:
    """Every subject in every way."""
    for shape, world, rows in SUBJECTS:
        for preset, micro_batches, is_recomputed in WAYS:
            values = shape.experiment(
                is_rehearsed=False,
                steps=STEPS,
                global_batch=rows,
                micro_batch=rows // world // micro_batches,
                precision="fp32",
                gradient_checkpointing=is_recomputed,
                eval_every=STEPS,
                save_every=STEPS,
                log_every=STEPS,
            )
            values["optim"] |= {"clip": 1.0}
            yield Case(shape.name, world, preset, values | {"deepspeed": preset})


# Measuring, on every rank
# --------------------------------------------------------------------------------------------------


def steps_of_a_run(case: Case, folder: str, rows: str, clock: str) -> list[float]:
    """Seconds of every step of a whole run."""
    import trainer.training.loop as loop
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    now = time.process_time if clock == "cpu" else time.perf_counter
    seconds: list[float] = []
    take = loop.train_step

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = now()
        step = take(*args, **kwargs)
        seconds.append(now() - start)
        return step

    loop.train_step = timed
    distributed.init()
    options = Options(Path(folder) / "out", data_path=Path(rows), cache_dir=Path(folder) / "cache")
    planned = plan(case.values, options, world=case.world, rank=distributed.rank())
    assert run(planned, options, Preemption()) == 0
    return seconds


def measured_s(case: Case, rows: Path, clock: str) -> list[float]:
    """Seconds of every step that counts, of its slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_on_ranks(case.world, steps_of_a_run, case, folder, str(rows), clock)
    return [max(of_ranks) for of_ranks in zip(*ranks, strict=True)][SETTLING:]


def predicted(case: Case, rows: Path, device: Path, cache: Path) -> dict[str, float]:
    """Seconds of a step by part, of its own prediction."""
    from trainer.commands.plan import subject_for
    from trainer.plan.time.run_time import run_time
    from trainer.plan.time.target import target_of
    from trainer.training.options import Options

    options = Options(cache / "out", data_path=rows, cache_dir=cache)
    target = target_of(str(device), world=case.world)
    assert target.rates is not None
    time = run_time(subject_for(case.values, options, case.world), target.rates, target.cluster)
    return asdict(time.step)


# What it comes to
# --------------------------------------------------------------------------------------------------


def kendall(lines: list[Values]) -> float:
    """Pairs in the same order less those in the other, of all."""
    signs = [
        (one["measured"] - two["measured"]) * (one["predicted"] - two["predicted"])
        for one, two in combinations(lines, 2)
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / max(1, len(signs))


def first_choices(lines: list[Values]) -> dict[str, float]:
    """By subject: what the way predicted to be the fastest takes, over the fastest."""
    found: dict[str, float] = {}
    ordered = sorted(lines, key=lambda line: line["subject"])
    for subject, group in groupby(ordered, key=lambda line: line["subject"]):
        several = list(group)
        choice = min(several, key=lambda line: line["predicted"])
        found[subject] = choice["measured"] / min(line["measured"] for line in several) - 1
    return found


def shown(line: Values) -> str:
    error = line["predicted"] / line["measured"] - 1
    return (
        f"{line['name']:44s}{line['measured'] * 1000:9.1f} {line['predicted'] * 1000:9.1f} ms "
        f"{error:+7.1%}{line['spread']:8.1%} between rounds"
    )


def devices(given: list[Path], out: Path, worlds: set[int]) -> dict[int, Path]:
    """A calibration's file by the number of its ranks; those that are missing are made."""
    found = {json.loads(file.read_text())["machine"]["ranks"]: file for file in given}
    for world in sorted(worlds - set(found)):
        found[world] = out.with_suffix(f".device{world}.json")
        if not found[world].is_file():
            argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
            argv += ["-m", "trainer", "calibrate-device", "--out", str(found[world])]
            subprocess.run(argv, check=True)
    return found


def measure_all(asked: list[Case], out: Path, rows: Path, *, rounds: int, clock: str) -> None:
    """Append to `out` what is not there yet."""
    known = Counter(line["name"] for line in read(out))
    for number in range(rounds):
        for case in asked:
            if known[case.name] <= number:
                took = measured_s(case, rows, clock)
                line = {"name": case.name, "subject": case.subject, "steps": took}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def read(out: Path) -> list[Values]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []


def quickest(lines: list[Values]) -> dict[str, Values]:
    """By name: the median over the steps of the quickest round of each, and how much slower the
    median of the slowest round was. Every round takes the same steps.
    """
    found: dict[str, Values] = {}
    for name, group in groupby(sorted(lines, key=itemgetter("name")), key=itemgetter("name")):
        several = list(group)
        rounds = [line["steps"] for line in several]
        measured = statistics.median(min(of_rounds) for of_rounds in zip(*rounds, strict=True))
        slowest = max(statistics.median(steps) for steps in rounds)
        line = {"name": name, "subject": several[0]["subject"], "measured": measured}
        found[name] = {**line, "spread": slowest / measured - 1}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=Path("plan_time.jsonl"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="subjects, or beginnings of ways")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    given = parser.parse_args()
    beginnings = tuple(given.only or [""])
    asked = [case for case in cases() if case.name.startswith(beginnings)]
    files = devices(given.device, given.out, {case.world for case in asked})
    lines: list[Values] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "rows", is_rehearsed=True)
        measure_all(asked, given.out, rows, rounds=given.rounds, clock=given.clock)
        measured = quickest(read(given.out))
        from trainer.plan.memory.measure import measuring

        with measuring():
            for case in asked:
                line = measured[case.name]
                line["parts"] = predicted(case, rows, files[case.world], Path(folder) / "cache")
                line["predicted"] = sum(line["parts"].values())
                lines.append(line)
                print(shown(line), flush=True)
    errors = sorted(abs(line["predicted"] / line["measured"] - 1) for line in lines)
    print(
        f"{len(lines)} cases: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}"
        f", Kendall's tau {kendall(lines):.2f}; between rounds of the same case "
        f"{statistics.median(line['spread'] for line in lines):.1%} (median)"
    )
    choices = first_choices(lines)
    near = sum(excess <= 0.05 for excess in choices.values())
    print(f"first choices within 5% of the best: {near} of {len(choices)}")
    for subject, excess in choices.items():
        print(f"  {subject:20s} +{excess:.1%}")


if __name__ == "__main__":
    main()
