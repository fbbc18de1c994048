"""The state of a job, read from its Job or JobSet and its pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jobs.backends.k8s.manifest import CONTAINER, RANK
from jobs.job_state import JobState, Observed

if TYPE_CHECKING:
    from jobs.backends.k8s.client import Object

NEEDS_A_PERSON = {
    "ErrImagePull": "Check job.image and the cluster's rights to pull it.",
    "ImagePullBackOff": "Check job.image and the cluster's rights to pull it.",
    "InvalidImageName": "Correct job.image.",
    "CreateContainerConfigError": "Check that the Secret of job.wandb_key_secret exists in this "
    "namespace.",
}


def observe(item: Object, pods: Sequence[Object]) -> Observed:
    """The state of a job, from its Job or JobSet and its pods."""
    conditions = {
        c["type"]: c
        for c in item.get("status", {}).get("conditions", [])
        if c.get("status") == "True"
    }
    newest = sorted((pod for pod in pods if rank_of(pod) == "0"), key=creation_time)
    restarts = item.get("status", {}).get("restarts", max(len(newest) - 1, 0))
    if "Complete" in conditions or "Completed" in conditions:
        return Observed("succeeded", restarts=restarts)
    if "Failed" in conditions:
        return _failure(conditions["Failed"], pods, restarts)
    if item["metadata"].get("deletionTimestamp"):
        return Observed("running", "is being deleted", host=_host(newest), restarts=restarts)
    if item.get("spec", {}).get("suspend"):
        if "kueue.x-k8s.io/queue-name" in item["metadata"].get("labels", {}):
            return Observed("queued", "waits for Kueue to admit it", restarts=restarts)
        text = "suspended by somebody; set spec.suspend to false"
        return Observed("held", text, restarts=restarts)
    if not newest:
        return Observed("queued", "no pod yet", restarts=restarts)
    pod = newest[-1]  # of the first node
    status = pod.get("status", {})
    phase = status.get("phase")
    if phase == "Running":
        return Observed("running", host=_host([pod]), restarts=restarts)
    if phase in ("Failed", "Succeeded"):
        text = f"its pod has ended ({status.get('reason') or phase})"
        return Observed("queued", text, restarts=restarts, will_rerun=phase == "Failed")
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in NEEDS_A_PERSON:
            cure = NEEDS_A_PERSON[waiting["reason"]]
            return Observed(
                "held",
                f"{waiting['reason']}: {waiting.get('message', '')} {cure}",
                restarts=restarts,
            )
    why = [
        c.get("message") for c in status.get("conditions", []) if c.get("reason") == "Unschedulable"
    ]
    return Observed("queued", why[0] if why else None, restarts=restarts)


def _failure(condition: Object, pods: Sequence[Object], restarts: int) -> Observed:
    """A job that failed for good. The reason comes from the container that failed last."""
    reason = ": ".join(text for key in ("reason", "message") if (text := condition.get(key)))
    ends: list[Object] = []
    for pod in sorted(pods, key=creation_time):
        for container in pod.get("status", {}).get("containerStatuses", []):
            end = container.get("state", {}).get("terminated")
            if container.get("name") == CONTAINER and end and end.get("exitCode") != 0:
                ends.append(end)
    is_late = condition.get("reason") == "DeadlineExceeded" or any(
        pod.get("status", {}).get("reason") == "DeadlineExceeded" for pod in pods
    )
    if is_late:
        return Observed("timeout", reason, host=_host(pods), restarts=restarts)
    state: JobState = "oom" if any(end.get("reason") == "OOMKilled" for end in ends) else "failed"
    code = ends[-1].get("exitCode") if ends else None
    return Observed(state, reason, host=_host(pods), exit_code=code, restarts=restarts)


def rank_of(pod: Object) -> str:
    """The rank of the node that a pod stands for; "0" for a job of one node."""
    return pod["metadata"].get("annotations", {}).get(RANK, "0")


def creation_time(pod: Object) -> str:
    """When a pod was made, as the API server writes it."""
    return pod["metadata"].get("creationTimestamp", "")


def _host(pods: Sequence[Object]) -> str | None:
    return pods[-1].get("spec", {}).get("nodeName") if pods else None
