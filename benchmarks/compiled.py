"""How many kernels a micro-batch launches on a GPU, as it is and with compiled blocks, by counting:
no GPU needed.

    python benchmarks/compiled.py [--shape NAME ...]

Forward and backward of one micro-batch of a published shape. What is not compiled is counted on the
memory plan's fake device, operator by operator. What is, on the CPU, of the same model made narrow:
every node that Inductor's scheduler has left after fusion (its C++ backend; Triton's fuses by the
same rules, but may split a long sum into two kernels).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

import torch

from benchmarks.roofline import DEFAULT, NAMED, Counting, batch_of, counted

_NARROW = {"n_inner": 64, "n_positions": 256, "vocab_size": 2048, "d_model": 32, "d_kv": 8}
_NARROW |= {"d_ff": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}


class Outside(Counting):
    """Counts what runs outside of the functions that would be compiled. Backward too: a node of
    autograd belongs to where it was made, which its number tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = [False]
        self._made_inside: list[range] = []
        self._since = 0
        self.names: Counter[str] = Counter()

    def prepare(self, model: Any) -> None:
        from trainer.models import fused
        from trainer.models.packed import stream_kernels

        fused.compile_blocks(model)
        for name, launches in (("forward", 1), ("backward", 2)):
            launch = getattr(stream_kernels, name)
            setattr(stream_kernels, name, functools.partial(self._launched, launch, launches))

    def _launched(self, launch: Any, launches: int, *given: Any) -> Any:
        self.work.kernels += launches
        return launch(*given)

    def marked(self, function: Any, *, is_inside: bool) -> Any:
        """The function, which knows that it is compiled, or not."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._is_inside.append(is_inside)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._is_inside.pop()

        run.get_compiler_config = None  # type: ignore[attr-defined]
        return run

    def _turn(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if self._is_inside[-1]:
            self._made_inside.append(range(self._since, number))
        self._since = number

    def _add(self, *call: Any) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            is_inside = self._is_inside[-1]
        else:
            number = node._sequence_nr()
            is_inside = any(number in made for made in self._made_inside)
        if not is_inside:
            super()._add(*call)
            self.names[call[0]] += 1


def outside(name: str) -> dict[str, int]:
    """Kernels of one micro-batch outside of compiled blocks; in a process of its own."""
    import transformers.modeling_utils  # noqa: F401 (before its decorators are others)

    counting = Outside()
    torch.compiler.disable = functools.partial(counting.marked, is_inside=False)  # type: ignore
    torch.compile = lambda function, **_: counting.marked(function, is_inside=True)  # type: ignore
    counted(name, None, counting)
    return {"(kernels)": counting.work.kernels, **counting.names}


def inside(name: str) -> dict[str, int]:
    """Kernels of the compiled graphs of one micro-batch; in a process of its own."""
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.scheduler import Scheduler

    config.force_disable_caches = True
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    codegen, make, call = Scheduler.codegen, CompiledFxGraph.__init__, CompiledFxGraph.__call__

    def seen_by(scheduler: Any) -> Any:
        seen.update(type(node).__name__ for node in scheduler.nodes)
        return codegen(scheduler)

    def made(graph: Any, *args: Any, **kwargs: Any) -> None:
        make(graph, *args, **kwargs)
        products = seen.pop("ExternKernelSchedulerNode", 0)
        seen.pop("NopKernelSchedulerNode", None)
        graph.num_kernels = {"products": products, "fused": seen.total()}
        seen.clear()

    def run(graph: Any, inputs: Any) -> Any:
        total.update(graph.num_kernels)
        return call(graph, inputs)

    Scheduler.codegen, CompiledFxGraph.__init__, CompiledFxGraph.__call__ = seen_by, made, run
    task, model, batch = _narrow(name)
    for _ in range(2):
        total.clear()
        for loss in task.losses(model, [batch]):
            loss.backward()
    return {"(kernels)": total.total(), **total}


def _narrow(name: str) -> tuple[Any, Any, Any]:
    from trainer import tasks
    from trainer.models import fused
    from trainer.models.base_model import DTYPES
    from trainer.protocol.task import Places

    shape = NAMED[name]
    values = shape.experiment(is_rehearsed=True)
    config = shape.config | {key: n for key, n in _NARROW.items() if key in shape.config}
    if "n_head" in config:
        config["n_embd"] = 8 * config["n_head"]
    values["base"]["config"] = config
    values |= {key: shape.blocks[key] for key in ("layers",) if key in shape.blocks}
    cfg = tasks.parse(values)
    with tempfile.TemporaryDirectory() as folder:
        task = tasks.load(cfg, Places(None, Path(folder), Path(folder)))
        model: Any = task.model().to(DTYPES[cfg.train.precision])
        batch = batch_of(task, 2)
    model.train()
    fused.compile_blocks(model)
    return task, model, batch


def _apart(part: str, name: str) -> dict[str, int]:
    argv = [sys.executable, "-W", "ignore", __file__, part, name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


_PARTS = {
    "eager": lambda name: {"(kernels)": counted(name, None)["kernels"]},
    "outside": outside,
    "inside": inside,
}


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in _PARTS:  # a process of its own
        print(json.dumps(_PARTS[sys.argv[1]](sys.argv[2])), flush=True)
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=list(DEFAULT), choices=list(NAMED))
    for name in parser.parse_args().shape:
        found = {part: _apart(part, name) for part in _PARTS}
        kernels = {part: counts.pop("(kernels)") for part, counts in found.items()}
        both = kernels["outside"] + kernels["inside"]
        print(f"{name}: {kernels['eager']} kernels as it is, {both} with compiled blocks")
        print(f"  in graphs: {found['inside']}")
        rest = Counter(found["outside"]).most_common(12)
        print(f"  outside: {kernels['outside']}: {dict(rest)}", flush=True)


if __name__ == "__main__":
    main()
