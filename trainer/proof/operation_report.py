"""What `lathe verify` says of a driven run: its operations, their results and its states."""

from __future__ import annotations

import functools
import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, ProofError
from trainer.operations.operation_log import FOLDER
from trainer.operations.results import OperationResults
from trainer.proof import operation_replay, operations
from trainer.proof.operations import is_driven
from trainer.proof.replay import as_it_ran
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.training.checkpoint import made_otherwise
from trainer.training.run_plan import plan

if TYPE_CHECKING:
    from trainer.training.options import Options

__all__ = ["examine", "is_driven", "replay"]

logger = logging.getLogger(__name__)


def examine(run: Path) -> list[str]:
    """Say what the folder of a driven run holds; its problems, each with its operation."""
    facts = operations.examine(run)
    dropped = f" ({facts.first} is the oldest whose content is there)" if facts.first > 0 else ""
    logger.info("operations 0 to %d%s, chain %s", facts.last, dropped, facts.chain[:16])
    if facts.last_result >= 0:
        logger.info("results of operations %d to %d", facts.first_result, facts.last_result)
    for after, folder in sorted(facts.states):
        logger.info("a state behind operation %d: %s", after, folder)
    return facts.problems


def replay(
    folder: Path,
    values: dict[str, Any],
    run_options: Options,
    *,
    count: int,
    start: int | None,
) -> None:
    """Run `count` operations again from the state of step `start`, and say how they compare.
    ProofError if one differs; ConfigError when a replay cannot begin there.

    values: the run's dictionary. start: None, the newest state with operations behind it.
    """
    distributed.init()
    world = distributed.world()
    possible = {int(s): a for s, a in on_main(lambda: _starts(folder, world)).items()}
    if start not in possible and (start is not None or not possible):
        steps = ", ".join(map(str, sorted(possible))) or "none"
        raise ConfigError(
            f"{folder}: no replay on {world} rank(s) behind step {start}. Got states of {world} "
            f"rank(s) with all operations behind them at the steps: {steps}. Give --from one of "
            "these, under torchrun --nproc-per-node RANKS -m trainer verify."
        )
    if start is None:
        behind = [step for step, after in possible.items() if after < _last_result(folder)]
        start = max(behind or possible)
    run_plan = as_it_ran(plan(values, run_options, world=world, rank=distributed.rank()))
    with tempfile.TemporaryDirectory(prefix="verify-") as own:
        scratch = Path(on_main(functools.partial(str, own)))
        how = {"start": start, "after": possible[start], "count": count}
        result = operation_replay.replay(run_plan, run_options, scratch, **how)
        with suppress(RuntimeError):
            distributed.barrier()  # before rank 0 removes it
    _tell(folder, result)


def _starts(folder: Path, world: int) -> dict[str, int]:
    return {
        str(step): after for step, after in operation_replay.starts(folder, world=world).items()
    }


def _last_result(folder: Path) -> int:
    def look() -> int:
        results = OperationResults(folder / FOLDER)
        results.follow()
        return results.last_seq

    return on_main(look)


def _tell(folder: Path, result: Any) -> None:
    """Say how a replay compares. ProofError if an operation differs."""
    logger.info(
        "replayed operations %d to %d: %d result(s) agree",
        result.first,
        result.last,
        len(result.agreed),
    )
    if not result.differing:
        return
    seq, kind, text = result.differing[0]
    changed = made_otherwise(result.then, result.now)
    known = "; ".join(changed) or (
        "versions and device are those of the state"
        if result.then
        else "what it was made with is not known, for no state is at the start"
    )
    raise ProofError(
        f"{folder}: operation {seq} ({kind}) comes out otherwise: {text}.\nKnown: {known}. On a "
        "GPU, kernels that add in any order differ in the last bits."
    )
