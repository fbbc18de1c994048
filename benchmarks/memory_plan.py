"""How right the memory plan is: bytes predicted by a fake step, against those that the CPU's
allocator handed out.

    python benchmarks/memory_plan.py [--only NAME ...] [--json]

Every case is two real training steps of a plain transformers model on the CPU, recorded by
torch.profiler, and the same two steps on the plan's fake device, each in a process of its own.
Exits 1 when one is predicted more than 1.5% wrong. Then it prints what a plan costs: the seconds of
the processor and of the clock for a fake training step of published T5 shapes. About six minutes on
two cores, and 7 GiB of memory for t5-base.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest.mock import patch

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.plan.memory.fake_device import FAKE_GPU, fake_device
from trainer.plan.memory.subject import T5_SHAPES

TOLERANCE = 0.015
STEPS = 2
PATIENCE_S = 0.003  # the thread lets go some microseconds after it is done
TARGETS_S = {"t5-base": 5.0, "t5-v1_1-xxl": 20.0}
Precision = Literal[
    "fp32", "master", "autocast"
]  # master: bf16 weights, and fp32 ones that the optimizer updates

TINY = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1024}
BIGCODE = {
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "n_inner": 1024,
    "vocab_size": 2048,
    "n_positions": 1024,
}


@dataclass(frozen=True)
class Case:
    """One training step."""

    model: str
    source: int
    target: int = 64
    batch: int = 1
    precision: Precision = "fp32"
    attention: str = "eager"
    recompute: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.model,
            f"{self.source}/{self.target}",
            f"b{self.batch}",
            self.precision,
            self.attention,
        ]
        return " ".join([*parts, *(["ckpt"] if self.recompute else [])])

    def model_on(self, device: str) -> nn.Module:
        """The model in training; on "meta", without storage."""
        import transformers

        kind, shape = transformers.T5Config, T5_SHAPES.get(self.model, TINY)
        build: Any = transformers.T5ForConditionalGeneration
        if self.model == "bigcode":
            kind, shape, build = (
                transformers.GPTBigCodeConfig,
                BIGCODE,
                transformers.GPTBigCodeForCausalLM,
            )
        config = kind(**shape, attn_implementation=self.attention)
        if self.model != "bigcode":
            config.decoder_start_token_id = 0
        with torch.device(device):
            model = build(config)
        if self.recompute:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return (model.bfloat16() if self.precision == "master" else model).train()

    def rows(self) -> dict[str, Tensor]:
        """Token ids without meaning; the last row is shorter, as rows are."""
        ids = torch.ones(self.batch, self.source, dtype=torch.int64)
        mask = torch.ones_like(ids)
        mask[-1, -self.source // 8 :] = 0
        labels = ids.clone() if self.model == "bigcode" else ids[:, : self.target].clone()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss


CASES = [
    Case("t5-tiny", 256, batch=2),
    Case("t5-small", 512),
    Case("t5-small", 512, batch=2),
    Case("t5-small", 1024),
    Case("t5-small", 512, batch=4, attention="sdpa"),
    Case("t5-small", 512, batch=4, recompute=True),
    Case("t5-small", 512, batch=2, precision="master"),
    Case("t5-small", 512, batch=4, precision="autocast"),
    Case("bigcode", 512, batch=4),
    Case("bigcode", 512, batch=4, attention="sdpa"),
    Case("t5-base", 512),
]


class Step(Protocol):
    """What is trained, and on which batch."""

    @property
    def precision(self) -> Precision: ...

    def model_on(self, device: str) -> nn.Module:
        """The model in training; on "meta", without storage."""
        ...

    def rows(self) -> dict[str, Tensor]:
        """The batch of every step."""
        ...

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor: ...


class Training:
    """Steps of AdamW over a model that is real or fake. foreach, as on a GPU: it takes memory of
    its own.
    """

    def __init__(self, case: Step, model: nn.Module, device: str) -> None:
        self.model, self._case, self._device = model, case, device
        self._own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = self._own
        if case.precision == "master":
            self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._own]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, foreach=True)

    def step(self, batch: dict[str, Tensor]) -> None:
        is_autocast = self._case.precision == "autocast"
        with (
            torch.autocast(self._device, torch.bfloat16)
            if is_autocast
            else contextlib.nullcontext()
        ):
            loss = self._case.loss(self.model, batch)
        loss.backward()
        del loss
        if self._case.precision == "master":
            for own, master in zip(self._own, self._masters, strict=True):
                master.grad, own.grad = own.grad.float(), None  # pyright: ignore[reportOptionalMemberAccess]
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._case.precision == "master":
            with torch.no_grad():
                for own, master in zip(self._own, self._masters, strict=True):
                    own.copy_(master)


def real_bytes(case: Step) -> int:
    """The most that the CPU's allocator had handed out at once, weights and buffers included."""
    model = case.model_on("cpu")
    resident = {
        tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]
    }
    with recorded() as profiler:
        batch = {name: tensor.clone() for name, tensor in case.rows().items()}
        training = Training(case, model, "cpu")
        for _ in range(STEPS):
            training.step(batch)
    return max(live for _, live in live_bytes(profiler, resident))


@contextlib.contextmanager
def recorded() -> Iterator[Any]:
    """A profiler that records what the CPU's allocator does in this thread.

    It does not see what another thread frees. A tensor that gloo's thread is the last to hold would
    count until something else lies in its place, perhaps to the end; so whoever waits for a
    collective goes on a little later.
    """
    of_cpu = [torch.profiler.ProfilerActivity.CPU]
    wait = dist.Work.wait

    def patient(work: dist.Work, *how: Any) -> bool:
        done = wait(work, *how)
        time.sleep(PATIENCE_S)
        return done

    profile = torch.profiler.profile(activities=of_cpu, profile_memory=True)
    with patch.object(dist.Work, "wait", patient), profile as profiler:
        yield profiler


def events_of(profiler: Any) -> Iterator[Any]:
    """Everything that was recorded, in no order."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


def live_bytes(profiler: Any, resident: dict[int, int]) -> Iterator[tuple[int, int]]:
    """(time, bytes alive) after everything that was allocated or freed; what was neither resident
    nor allocated within the record is left out of it.
    """
    live, total = dict(resident), sum(resident.values())
    allocations = [
        e for e in events_of(profiler) if e.tag == torch._C._profiler._EventType.Allocation
    ]
    for event in sorted(allocations, key=lambda event: event.start_time_ns):
        place, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            # another thread freed what was there before: the record sees one thread alone
            total += size - live.get(place, 0)
            live[place] = size
        else:
            total -= live.pop(place, 0)
        yield event.start_time_ns, total


def predicted_bytes(case: Step, device: Literal["fakegpu", "cpu"] = "cpu") -> int:
    """The most that is alive at once on a fake device, weights and buffers included."""
    model, rows = case.model_on("meta"), case.rows()
    with fake_device(device) as fake:
        fake.place(model)
        resident = sum(fake.tracker.live.values())
        fake.tracker.restart()
        batch, training = fake.copy_of(rows), Training(case, model, device)
        for _ in range(STEPS):
            training.step(batch)
        return resident + max(moment.total for moment in fake.tracker.moments)


def seconds_of_a_plan(model: str) -> dict[str, float]:
    """How long one fake training step of a published T5 takes: on the clock, and of the
    processor.
    """
    case = Case(model, 512, 128, precision="master", attention="sdpa")
    skeleton, rows = case.model_on("meta"), case.rows()
    wall, cpu = time.perf_counter(), time.process_time()
    with fake_device(FAKE_GPU) as fake:
        fake.place(skeleton)
        fake.tracker.watch(skeleton)
        skeleton(**fake.copy_of(rows)).loss.backward()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


# The command
# --------------------------------------------------------------------------------------------------


def in_new_process(what: str, name: str) -> Any:
    """`what` of one case or model by this command in a process of its own: memory and devices are
    of a process.
    """
    command = [sys.executable, "-W", "ignore", __file__, "--measure", what, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(what: str, name: str) -> Any:
    if what == "seconds":
        return seconds_of_a_plan(name)
    case = next(case for case in CASES if case.name == name)
    return real_bytes(case) if what == "real" else predicted_bytes(case)


def main() -> None:
    options = parser().parse_args()
    if options.measure:
        warnings.filterwarnings("ignore")
        print(json.dumps(measured(*options.measure)))
        return
    found: dict[str, Any] = {"cases": [], "seconds": {}}
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    for case in chosen:
        real, predicted = in_new_process("real", case.name), in_new_process("predicted", case.name)
        error = predicted / real - 1
        found["cases"].append(
            {"case": case.name, "real": real, "predicted": predicted, "error": error}
        )
        if not options.json:
            print(
                f"{case.name:42s} {real / 2**30:8.4f} {predicted / 2**30:8.4f} GiB {error:+8.2%}",
                flush=True,
            )
    for model, target in {} if options.only else TARGETS_S.items():
        found["seconds"][model] = took = in_new_process("seconds", model)
        if not options.json:
            print(
                f"a plan of {model}: {took['cpu_s']:.1f} s of the processor, "
                f"{took['wall_s']:.1f} s, target {target}"
            )
    if options.json:
        print(json.dumps(found, indent=1))
    if any(abs(case["error"]) > TOLERANCE for case in found["cases"]):
        raise SystemExit(f"more than {TOLERANCE:.1%} wrong")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Predicted memory against the CPU allocator's own record."
    )
    made.add_argument("--only", nargs="+", metavar="NAME", help="these cases only, by their names")
    made.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    made.add_argument("--measure", nargs=2, metavar=("WHAT", "NAME"), help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    main()
