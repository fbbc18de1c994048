"""Commands that check a run (verify) and the engine (doctor)."""

from __future__ import annotations

import functools
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.commands import options
from trainer.config.flags import CacheDir, DataPath
from trainer.errors import ConfigError, ProofError

if TYPE_CHECKING:
    from trainer.training.options import Options

Run = Annotated[Path, typer.Argument(help="Folder of the run: SAVEDIR_BASE/<exp_id>.")]
Steps = Annotated[
    int | None,
    typer.Option(
        "--replay",
        min=1,
        help="Run this many steps (of a driven run: operations) again, and compare them with the "
        "recorded ones.",
    ),
]
Start = Annotated[
    int | None,
    typer.Option(
        "--from", min=0, help="Replay from the checkpoint of this step; 0: from the beginning."
    ),
]
_NAMED = ("loss", "grad_norm", "lr")  # shown for a step that differs


@options.guard
def verify(
    run: Run,
    replay: Steps = None,
    start: Start = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
) -> None:
    """Check that metrics.jsonl is as the run wrote it, and that its steps give the same numbers
    when they are run again; of a driven run, its operations, their results and its states. Exit
    code 1, and the first step or operation that differs, if not. Run it under torchrun with as many
    ranks as the run had.
    """
    from trainer.training.options import Options

    module = _replays()
    recorded = module.read(run)
    lines, proofs = recorded.lines, recorded.proofs
    _say(f"{run}: {len(lines)} lines, {len(proofs)} with a proof")
    for first, last, ranks in module.worlds(proofs):
        _say(f"steps {first} to {last}: {ranks} rank(s)")
    driven = importlib.import_module("trainer.proof.operation_report")
    problems = driven.examine(run) if driven.is_driven(run) else []
    if replay is not None or start is not None:
        run_options = Options(run.resolve().parent, data_path=data_path, cache_dir=cache_dir)
        how: dict[str, Any] = {"start": start}
        if driven.is_driven(run):
            folder = run.resolve()
            values = options.experiment(None, folder.name, None, folder.parent, None)
            driven.replay(folder, values, run_options, count=replay or 1, **how)
        else:
            _replay(run.resolve(), recorded, run_options, steps=replay or 1, **how)
    if problems:
        raise ProofError(
            f"{run} is not as it was written: {'; '.join(problems)}. Put back a copy, or let the "
            "client go on from a state that is sound."
        )
    if recorded.problems:
        raise ProofError(
            f"{run / 'metrics.jsonl'} is not as the run wrote it: "
            + "; ".join(recorded.problems)
            + ". Where a copy has these lines, put it back; the weights do not depend on them."
        )
    _say("every line is as the run wrote it, behind those that it was written behind")


def _replay(
    folder: Path, recorded: Any, run_options: Options, *, steps: int, start: int | None
) -> None:
    from trainer.runtime import distributed
    from trainer.runtime.distributed import on_main
    from trainer.training.run_plan import plan

    replay = _replays()
    replay.refuse_together(folder)
    values = options.experiment(None, folder.name, None, folder.parent, None)
    distributed.init()
    world = distributed.world()
    stretches = [
        (first, last) for first, last, ranks in replay.worlds(recorded.proofs) if ranks == world
    ]
    possible = [
        at
        for at in replay.starts(folder, world=world)
        if any(first <= at + 1 <= last or (at == 0 and first == 1) for first, last in stretches)
    ]
    if not possible or (start is not None and start not in possible):
        raise ConfigError(
            f"{folder}: no replay on {world} rank(s) behind step {start}. Got checkpoints for a "
            f"replay behind {', '.join(map(str, possible)) or 'no step'}; the run had "
            f"{', '.join(sorted({str(r) for _, _, r in replay.worlds(recorded.proofs)}))} rank(s). "
            "Give --from one of these, under torchrun --nproc-per-node RANKS -m trainer verify."
        )
    begin = max(possible) if start is None else start
    end = max(last for first, last in stretches if first <= begin + 1)
    run_plan = replay.as_it_ran(plan(values, run_options, world=world, rank=distributed.rank()))
    with tempfile.TemporaryDirectory(prefix="verify-") as own:
        scratch = Path(on_main(functools.partial(str, own)))
        result = replay.replay(
            run_plan, run_options, scratch, start=begin, stop=min(begin + steps, end)
        )
        with suppress(RuntimeError):
            distributed.barrier()  # before rank 0 removes it
    _tell(folder, result)


def _replays() -> Any:
    """trainer/proof/replay.py, imported only when it is needed: it imports all of training."""
    return importlib.import_module("trainer.proof.replay")


def _tell(folder: Path, result: Any) -> None:
    """Print the result of a replay. ProofError if a step differs."""
    _say(f"replayed steps {result.start + 1} to {result.stop}: {len(result.agreed)} proof(s) agree")
    if not result.differing:
        if not result.agreed:
            _say("no line of these steps has a proof: give a larger --replay")
        return
    step, theirs, ours = result.differing[0]
    before = max((at for at in result.agreed if at < step), default=result.start)
    numbers = [
        f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}"
        for key in _NAMED
        if theirs.get(key) != ours.get(key)
    ]
    from trainer.training.checkpoint import made_otherwise

    changed = made_otherwise(result.then, result.now)
    circumstances = "; ".join(changed) or (
        "versions and device are those of the checkpoint"
        if result.then
        else "what it was made with is not known, for no checkpoint is at the start"
    )
    raise ProofError(
        f"{folder}: step {step} comes out otherwise ({before} is the last that does not). "
        f"{'; '.join(numbers) or 'The numbers shown agree: its rows or random state do not'}.\n"
        f"Known: {circumstances}. On a GPU, kernels that add in any order differ in the last bits."
    )


@options.guard
def doctor(
    savedir_base: Annotated[
        Path, typer.Option("--savedir_base", "-sb", help="A folder on the disk to examine.")
    ] = Path("results"),
) -> None:
    """Train small networks on two ranks at ZeRO 0 to 3 (accumulation, a module used twice, tied
    weights, a frozen base, GradCache, bf16 masters, clipping, uneven ranks) against plain torch,
    and examine the disk that runs are saved on. Exit code 1, and a list of problems, if there are
    any.
    """
    if "RANK" not in os.environ:
        raise typer.Exit(_on_two_ranks(savedir_base))
    from trainer.runtime import distributed

    distributed.init()
    place = importlib.import_module("trainer.proof.place")
    module = importlib.import_module("trainer.launch.doctor")
    facts, results = list(place.examine(savedir_base)), list(module.examine())
    if distributed.is_main():
        lines = [f"{fact.name:24}{fact.text}{'' if fact.is_sound else ': WRONG'}" for fact in facts]
        typer.echo("\n".join([*lines, *module.table(results)]))
    unfit = [f"{fact.name} {fact.text}" for fact in facts if not fact.is_sound]
    if unfit:
        raise ProofError(
            f"{savedir_base}: {'; '.join(unfit)}: not so. Save on another disk, or mend its clock."
        )
    wrong = module.named(results)
    if wrong:
        raise ProofError(
            f"DeepSpeed {module.version('deepspeed')} does not do what plain torch does: {wrong}.\n"
            "Do not train with these at these stages; install another version (constraints.txt "
            "names one that was examined)."
        )


def _on_two_ranks(savedir_base: Path) -> int:
    """Run this command as two ranks on the CPU, and return its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), os.getcwd()) if part)
    common = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer", "doctor", "--savedir_base", str(savedir_base)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    return max(rank.wait() for rank in ranks)


def _say(text: str) -> None:
    import logging

    logging.getLogger(__name__).info("%s", text)
