"""gate.json of a run: which weights were judged at its end, and whether they may become final/. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from trainer.files.atomic import read_json, write_json
from trainer.metrics.test_record import weights_of

FILE = "gate.json"
CANDIDATE = "candidate"  # the export that waits for the gate of its run


def judged_model(run_folder: Path, *, is_gated: bool) -> str:
    """The export that is judged at the end of a run: best/ where there is one; else final/, or
    under a gate the one that waits for it.
    """
    if (run_folder / "best").is_dir():
        return "best"
    has_candidate = is_gated and (run_folder / CANDIDATE).is_dir()
    return CANDIDATE if has_candidate else "final"


def record(run_folder: Path, model: str, refusals: Sequence[str]) -> None:
    """Write that the weights of this export were judged."""
    weights = weights_of(run_folder / model)
    write_json(run_folder / FILE, {"model": model, "weights": weights, "refusals": list(refusals)})


def is_judged(run_folder: Path, model: str) -> bool:
    """Whether the weights that this export has now were judged."""
    weights = _record(run_folder).get("weights")
    return weights is not None and weights == weights_of(run_folder / model)


def refusals_of(run_folder: Path) -> list[str]:
    """Why the gate of a run keeps its model back, as sentences; [] where it does not."""
    return [str(one) for one in _record(run_folder).get("refusals") or []]


def why_refused(run_folder: Path) -> str | None:
    """For lists of runs: that a gate keeps the model of this one back, and why. None where it does
    not.
    """
    reasons = "; ".join(refusals_of(run_folder))
    return f"its gate refused the model, there is no final/: {reasons}" if reasons else None


def _record(run_folder: Path) -> dict[str, Any]:
    record: Any = read_json(run_folder / FILE)
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}
