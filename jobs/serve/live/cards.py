"""Cards: the few facts of a run or a job that the overview shows. A thousand are sent at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from jobs.record.row import Row
    from jobs.report.scores import Score

MOST_METRICS = 40  # of one run
LONGEST_REASON = 300  # letters


def run_card(
    row: Row, scores: Mapping[str, Score], experiment: Mapping[str, Any]
) -> dict[str, Any]:
    """The card of a run. scores: metric -> [best value, whether smaller is better]."""
    metrics = {name: float(f"{value:.6g}") for name, value in row.metrics.items()}
    return {
        "id": row.exp_id,
        "name": row.name,
        "group": row.group,
        "task": str(experiment.get("task", "")),
        "state": row.state,
        "reason": (row.reason or "")[:LONGEST_REASON],
        "unseen": row.unseen_reason if row.unseen_since else None,
        "step": row.step,
        "total": row.total,
        "eta_s": None if row.eta_s is None else round(row.eta_s),
        "metrics": dict(list(metrics.items())[:MOST_METRICS]),
        "scores": {
            name: [score.best, score.is_least_best]
            for name, score in list(scores.items())[:MOST_METRICS]
        },
        "attempts": row.attempts,
        "gpu_hours": round(row.gpu_hours, 2),
        "recoveries": len(row.recoveries),
        "host": row.host,
        "backend": row.backend,
        "backend_id": row.job_id,
        "by_hand": row.by_hand,
        "is_driven": is_driven(experiment),
        "created": row.created_at,
        "submitted": row.submitted_at,
        "started": row.started_at,
        "ended": row.ended_at,
    }


def is_driven(experiment: Mapping[str, Any]) -> bool:
    """Whether a client sends the rows and steps of an experiment."""
    data = experiment.get("data")
    return isinstance(data, dict) and cast("dict[str, Any]", data).get("source") == "client"


def job_card(body: Mapping[str, Any]) -> dict[str, Any]:
    """The card of a client's job. body: the job in the format of the OpenAI API."""
    ours = cast("dict[str, Any]", body["lathe"])
    used = cast("dict[str, Any]", body["hyperparameters"])
    numbers = (
        f"{used['n_epochs']} epochs, batch {used['batch_size']}, "
        f"lr ×{used['learning_rate_multiplier']:g}, seed {body['seed']}"
    )
    driven_by = ours.get("driven_by")
    if driven_by is not None:
        numbers = f"driven by {driven_by}"
    error = cast("dict[str, Any]", body["error"] or {})
    return {
        "id": body["id"],
        "run": ours["exp_id"],
        "model": body["model"],
        "tuned": body["fine_tuned_model"],
        "suffix": ours["suffix"],
        "numbers": numbers,  # the values of the request, which distinguish the jobs of a model
        "status": body["status"],
        "is_paused": ours["is_paused"],
        "is_driven": driven_by is not None,
        "is_deleted": ours.get("is_deleted", False),
        "owner": ours["owner"],
        "created": body["created_at"],
        "error": str(error.get("message", ""))[:LONGEST_REASON],
    }
