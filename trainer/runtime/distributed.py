"""Rank, world, device, and collectives. Without a process group collectives do nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    HashStore,  # what torch.distributed.HashStore is, as type checkers see it
)

from trainer import errors
from trainer.errors import EXIT_OK, IN_ORDER, ConfigError, LatheError, StorageError
from trainer.files.atomic import refusals
from trainer.switches import words_of_a_run

T = TypeVar("T")

_leaves_alone = False
# How long a collective waits for a rank that does not come.
GROUP_TIMEOUT_S = 1800.0
# How long ranks wait for one that still loads: encoding a corpus may take hours.
PATIENCE_S = 24 * 3600.0
_timeout = timedelta(seconds=GROUP_TIMEOUT_S)  # of collectives; init() sets it
_side_group: dist.ProcessGroup | None = None
_neighbours: dict[int, dist.ProcessGroup] = {}  # by how many share rows: this rank's group
_thread = threading.local()
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def has_group() -> bool:
    """Whether init() was called; then the process must end by shutdown()."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process among all processes, 0 .. world()-1."""
    return dist.get_rank() if has_group() else 0


def world() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if has_group() else 1


def local_rank() -> int:
    """The number of this process on its machine, which is also the index of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world() -> int:
    """How many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device() -> torch.device:
    """The device of this process: its CUDA device, or the CPU where there is none."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def is_gpu() -> bool:
    """Whether this process computes on a CUDA device, which runs asynchronously to the host."""
    return torch.cuda.is_available()


def pin_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch in pinned memory; without a GPU the batch itself."""
    if not is_gpu():
        return dict(batch)
    return {name: tensor.pin_memory() for name, tensor in batch.items()}


def must_keep_step(model: nn.Module) -> bool:
    """Whether all ranks must make the same number of forwards, because each gathers weights
    (ZeRO-3).
    """
    return world() > 1 and any(hasattr(weight, "ds_id") for weight in model.parameters())


def is_main() -> bool:
    """Whether this is rank 0, which writes files and logs."""
    return rank() == 0


def init(timeout_s: float = GROUP_TIMEOUT_S, *, is_late: bool = False) -> None:
    """Join the process group: of the launcher (torchrun, deepspeed) when there is one, else a group
    of one.

    timeout_s: after this long a collective that not every rank has reached fails instead of
    waiting. Raises ConfigError when the launcher's variables are incomplete or name a device that
    does not exist, and on all ranks when their switches (switches.py) differ. is_late: each rank
    has computed by itself before, and its switches are not compared any more.
    """
    if has_group():
        return
    is_launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if is_launched and missing:
        raise ConfigError(
            f"environment: RANK or WORLD_SIZE is set, but {', '.join(missing)} is not. "
            "Start with torchrun or deepspeed, or unset RANK and WORLD_SIZE to train on one device."
        )
    os.environ.setdefault("LOCAL_RANK", "0")  # deepspeed asserts on it, also in a group of one
    global _timeout
    backend = _backend()
    timeout = _timeout = timedelta(seconds=timeout_s)
    if is_launched:
        dist.init_process_group(backend, timeout=timeout)
    else:  # no port, no host name: deepspeed would otherwise look for MPI
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    if not is_late:
        _refuse_other_switches()


def _refuse_other_switches() -> None:
    """ConfigError on all ranks where the environment of one says another word of a switch."""
    of_ranks = gather(words_of_a_run(os.environ))
    differing = [
        f"{name} is {word or 'not set'} on rank 0 and {other[name] or 'not set'} on rank {number}"
        for number, other in enumerate(of_ranks)
        for name, word in of_ranks[0].items()
        if other[name] != word
    ]
    if differing:
        error = ConfigError(
            f"environment: {'; '.join(differing)}. The ranks of a run compute alike: give all "
            "nodes the same words, or set these variables nowhere."
        )
        error.is_of_all_ranks = True
        raise error


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    count = torch.cuda.device_count()
    if local_rank() >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank()}, but this machine shows {count} CUDA device(s). "
            f"Start at most {count} process(es) per machine, or widen CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(local_rank())
    return "nccl"


def give_every_group_the_timeout() -> None:
    """Give the groups that DeepSpeed made the timeout of our group.

    deepspeed 0.19.8, utils/groups.py _clone_world_group: dist.new_group without a timeout, which
    is 10 minutes for NCCL.
    """
    c10d = torch.distributed.distributed_c10d
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(_timeout, group)


def make_side_group() -> None:
    """Make the gloo group for collectives of background threads, once. A collective."""
    global _side_group
    if world() > 1 and _side_group is None:
        group = dist.new_group(backend="gloo", timeout=_timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank belongs to it"
        _side_group = group


def make_neighbours(ranks: int) -> None:
    """Make the groups of so many neighbouring ranks that share rows, once. A collective.

    ranks: divides world().
    """
    if ranks == 1 or ranks in _neighbours:
        return
    for first in range(0, world(), ranks):
        group = dist.new_group(list(range(first, first + ranks)), timeout=_timeout)
        if first <= rank() < first + ranks:
            assert isinstance(group, dist.ProcessGroup), "this rank belongs to it"
            _neighbours[ranks] = group


def exchanged(parts: Tensor) -> Tensor:
    """(P, ...) contiguous, part p for the p-th of P neighbours that share rows -> (P, ...): the
    part that each of them had for this rank. A collective of the neighbours.
    """
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=_neighbours[len(parts)])
    return received


@contextlib.contextmanager
def on_side_group() -> Iterator[None]:
    """Inside, gather() and barrier() of this thread use the group of make_side_group()."""
    _thread.is_beside = True
    try:
        yield
    finally:
        _thread.is_beside = False


def _group() -> dist.ProcessGroup | None:
    return _side_group if getattr(_thread, "is_beside", False) else None


def barrier() -> None:
    """Wait until every rank is here."""
    if world() == 1:
        return
    if _group() is not None:
        dist.barrier(_group())
    elif dist.get_backend() == "nccl":
        # without it nccl guesses the device from the global rank
        dist.barrier(device_ids=[local_rank()])
    else:
        dist.barrier()


def wait_for_all(patience_s: float = PATIENCE_S) -> None:
    """Wait until every rank is here. It may take longer than a collective, because ranks load rows
    and weights at the speed of their disks.

    Raises a LatheError that names the ranks which did not come.
    """
    if world() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    own, began, pause_s = store.add(f"lathe/met/{rank()}", 1), time.monotonic(), 0.005
    while True:
        late = [other for other in range(world()) if store.add(f"lathe/met/{other}", 0) < own]
        if not late:
            return
        if time.monotonic() - began > patience_s:
            raise LatheError(
                f"rank {rank()} waited {patience_s:.0f} s for rank {', '.join(map(str, late))}, "
                "which did not come. Look at what it says; start again when it can load."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def total(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, same shape and device: integers and booleans in int64,
    floats in fp64.
    """
    exact = torch.float64 if tensor.is_floating_point() else torch.int64
    summed = tensor.detach().to(exact, copy=True)
    if world() == 1:
        return summed
    wire = summed.to(_wire_device())
    dist.all_reduce(wire)
    return wire.to(tensor.device)


def add_up(words: Tensor) -> None:
    """Replace int32 `words` by their sum over all ranks, in place."""
    if world() > 1:
        wire = words.to(_wire_device())
        dist.all_reduce(wire)
        words.copy_(wire)


def joined(tensor: Tensor) -> Tensor:
    """`tensor`, whose elements are each given by one rank and 0 on all others, filled in place."""
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank, on all ranks. For small JSON values (tuples become lists)."""
    text = json.dumps(value)
    if world() == 1:
        return [json.loads(text)]
    own = _bytes_on_wire(text)
    sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(world())]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=own.device), group=_group())
    lengths: list[int] = torch.cat(sizes).tolist()
    padded = torch.nn.functional.pad(own, (0, max(lengths) - own.numel()))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=_group())
    return [_from_wire(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def gather_rows(rows: Tensor) -> list[Tensor]:
    """(N, ...) of every rank, by rank, on all ranks; N may differ. No gradient passes."""
    if world() == 1:
        return [rows.detach()]
    wire = rows.detach().to(_wire_device()).contiguous()
    sizes = [torch.zeros(1, dtype=torch.int64, device=wire.device) for _ in range(world())]
    dist.all_gather(sizes, torch.tensor([len(wire)], device=wire.device))
    counts: list[int] = torch.cat(sizes).tolist()  # one wait for the GPU, not one for each rank
    padded = wire.new_zeros(max(counts), *wire.shape[1:])
    padded[: len(wire)] = wire
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return [part[:count].to(rows.device) for part, count in zip(parts, counts, strict=True)]


def broadcast(value: Any) -> Any:
    """The `value` of rank 0, on all ranks; other ranks' values are ignored. For small JSON."""
    text = json.dumps(value if is_main() else None)
    return json.loads(broadcast_bytes(text.encode()))


def broadcast_bytes(content: bytes) -> bytes:
    """The bytes of rank 0, on all ranks; those of other ranks are ignored. A collective."""
    if world() == 1:
        return content
    wire = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).to(_wire_device())
    size = torch.tensor([len(content)], device=wire.device)
    dist.broadcast(size, src=0)
    if not is_main():
        wire = wire.new_empty(max(1, int(size)))
    dist.broadcast(wire, src=0)
    return bytes(wire.cpu().numpy()[: int(size)])


def _wire_device() -> torch.device:
    return device() if dist.get_backend(_group()) == "nccl" else torch.device("cpu")


def _bytes_on_wire(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(_wire_device())


def _from_wire(wire: Tensor) -> Any:
    return json.loads(bytes(wire.cpu().numpy()).decode())


def abort(*, with_outgoing: bool = False) -> None:
    """Make collectives that wait for other ranks fail now. Any thread may call it.

    torch 2.13: gloo's abort() and shutdown() do not end a wait, and a group closes its connections
    only when the last reference to it is gone. So this function closes the connections which came
    in at a port on which this process listens. Of any two ranks, one has such a connection.

    with_outgoing: also close the connections to other machines, the store's included, because the
    other rank or its machine may be gone.
    """
    # another thread may just have left the group: torch 2.13 raises one of these two
    with contextlib.suppress(ValueError, AssertionError):
        if has_group() and dist.get_backend() == "nccl":
            torch.distributed.distributed_c10d._abort_process_group()
    opened = [_stream(int(name)) for name in os.listdir("/proc/self/fd")]
    streams = [stream for stream in opened if stream is not None]
    listening = {
        stream.getsockname()[1]
        for stream in streams
        if stream.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }
    for stream in streams:
        if not stream.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with contextlib.suppress(OSError):  # the other side has closed it
                is_incoming = stream.getsockname()[1] in listening
                if is_incoming or (with_outgoing and _is_away(stream.getpeername()[0])):
                    stream.shutdown(socket.SHUT_RDWR)
        stream.close()


def _stream(descriptor: int) -> socket.socket | None:
    """A duplicate of a file descriptor if it is a TCP socket, else None."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        stream = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # it was closed in the meantime
        return None
    if stream.type == socket.SOCK_STREAM and stream.family in (socket.AF_INET, socket.AF_INET6):
        return stream
    stream.close()
    return None


def _is_away(address: str) -> bool:
    """Whether an address may be that of another machine: it is not loopback."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return not (mapped or parsed).is_loopback


def leave_group() -> None:
    """Destroy every process group, although other ranks may be gone; init() may follow."""
    global _side_group
    _side_group = None
    _neighbours.clear()
    if has_group():
        abort()
    if has_group():  # nothing is left of an NCCL group by now
        dist.destroy_process_group()


def end_group() -> None:
    """Destroy the process groups of a process that goes on; init() may follow. For a group of one:
    no other rank waits, and no connection is closed.
    """
    global _side_group, _leaves_alone
    _side_group, _leaves_alone = None, False
    _neighbours.clear()
    if has_group():
        dist.destroy_process_group()


def leave_alone() -> None:
    """Let shutdown() end this process without waiting for other ranks."""
    global _leaves_alone
    _leaves_alone = True


def leaves_alone() -> bool:
    """Whether leave_alone() was called."""
    return _leaves_alone


def shutdown(exit_code: int = EXIT_OK) -> NoReturn:
    """End this process at once with `exit_code`; every rank calls it.

    The ranks of a run that ended in order (done, or stopped and saved) wait for each other. A
    rank that failed does not wait: its peers may never come, and they notice its closed sockets
    sooner. The interpreter's own exit is not used, because gloo's threads then abort finished ranks
    in up to half of the runs (torch 2.13: "terminate called without an active exception", exit code
    -6).
    """
    if exit_code in IN_ORDER and has_group() and not _leaves_alone:
        try:
            barrier()
            dist.destroy_process_group()
        except RuntimeError as error:
            logging.getLogger(__name__).warning("leaving without the other ranks: %s", error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def on_main(action: Callable[[], T]) -> T:
    """Run `action()` on rank 0. Every rank gets its result, which must be JSON, or raises its
    error. A collective.

    Any error of rank 0 becomes a LatheError on all ranks; otherwise the others would wait for it.
    """
    outcome: dict[str, Any] = {}
    cause: LatheError | None = None
    if is_main():
        try:
            with refusals(Path(".")):
                outcome = {"result": action()}
        except LatheError as error:
            cause = error
        # any: see above. safetensors and tokenizers have no error of their own for the disk
        except Exception as error:
            is_disk = "os error" in str(error).lower() or "i/o error" in str(error).lower()
            cause = (StorageError if is_disk else LatheError)(f"{type(error).__name__}: {error}")
            cause.__cause__ = error
        if cause is not None:
            outcome = {"error": type(cause).__name__, "text": str(cause)}
    outcome = broadcast(outcome)
    if cause is None and "error" in outcome:
        cause = getattr(errors, outcome["error"], errors.LatheError)(outcome["text"])
    if cause is not None:
        cause.is_of_all_ranks = True
        raise cause
    return outcome["result"]
