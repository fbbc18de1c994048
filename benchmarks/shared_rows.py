"""What sharing a row among ranks saves: the memory and the seconds of a step on one long row, on
one process and on several that share it.

    python benchmarks/shared_rows.py [--tokens N] [--ranks P ...] [--recompute]

Every number of ranks is a step of a small Llama with full fine-tuning in fp32 over gloo, each rank
with one thread in a process of its own. Of each rank: how much its resident memory grew at most
from before the step (MiB), and the seconds of the processor and of the clock. The losses are
printed, for they must be equal but for rounding.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.models.decoder.streams import reader_of
from trainer.models.packed.layout import pack_labelled
from trainer.models.stretches.stretch import stretch_of
from trainer.protocol.abilities import RankPlace
from trainer.runtime import distributed
from trainer.tasks.causal_lm.task import CausalLM

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 1 << 20,
}


def _rank(rank: int, ranks: int, store: str, tokens: int, every: int | None, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    distributed.make_neighbours(ranks)
    torch.manual_seed(1)
    base: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    model = CausalLM(base, reader_of(base.model, recompute_every=every)).train()
    ids = torch.randint(2, SHAPE["vocab_size"], (tokens,)).tolist()
    batch = pack_labelled([ids], [[1] * tokens])
    units = len(batch["scored"])
    if ranks > 1:
        batch = stretch_of(batch, RankPlace(rank, ranks))
    dist.barrier()
    before, wall, cpu = _peak_mib(), time.perf_counter(), time.process_time()
    loss = model(**batch)["loss"] / units
    loss.backward()
    took = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    total = distributed.total(loss.detach())
    found = {"mib": _peak_mib() - before, **took, "loss": float(total)}
    Path(out, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(ranks: int, *, tokens: int, every: int | None) -> list[dict[str, float]]:
    """What each of so many ranks that share one row measured, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, str(Path(folder, "store")), tokens, every, folder)
        mp.spawn(_rank, given, nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def main() -> None:
    options = argparse.ArgumentParser(description="Memory and seconds of one long row.")
    options.add_argument("--tokens", type=int, default=16_384)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument(
        "--recompute", action="store_true", help="compute blocks again in backward"
    )
    given = options.parse_args()
    for ranks in given.ranks:
        every = 1 if given.recompute else None
        for rank, one in enumerate(measured(ranks, tokens=given.tokens, every=every)):
            print(
                f"{ranks} rank(s), rank {rank}: {one['mib']:7.0f} MiB  {one['cpu_s']:6.1f} CPU s  "
                f"{one['s']:6.1f} s  loss {one['loss']:.7f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
