"""The k8s backend's requests, by the real client to a loopback server, and what it makes of the
answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("kubernetes") is None:  # importing it takes seconds, which few tests need
    pytest.skip("the extra `k8s` is not installed", allow_module_level=True)

from jobs.backends.k8s import checks, manifest
from jobs.backends.k8s.backend import K8s
from jobs.backends.k8s.observed import observe
from jobs.errors import Refused, Unreachable
from jobs.protocol import JobSpec
from tests.jobs import kubernetes_standin
from tests.jobs.hostile import TOKEN, make
from tests.wording import refused

JOB: dict[str, Any] = {
    "image": "registry.example/lathe:1",
    "volumes": ["data:/shared"],
    "namespace": "team",
}
NAME = TOKEN.replace("_", "-")
ID = f"team/job/{NAME}"
GANG_ID = f"team/jobset/{NAME}"


def spec(**job: Any) -> JobSpec:
    return make({**JOB, **job})


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[kubernetes_standin.Cluster]:
    with kubernetes_standin.running() as found:
        config = tmp_path / "kubeconfig"
        config.write_text(found.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found


def submit(of: JobSpec | None = None) -> str:
    return K8s().submit(K8s().render(of or spec()))


def test_a_submission_is_found_by_its_token(cluster: kubernetes_standin.Cluster) -> None:
    assert submit() == ID
    assert K8s().find(TOKEN) == [ID]
    assert K8s().find("ft_other_1") == []
    assert any("fieldValidation=Strict" in line for line in cluster.requests)


def test_a_submission_of_several_nodes_is_a_jobset(cluster: kubernetes_standin.Cluster) -> None:
    assert submit(spec(nodes=2)) == GANG_ID
    assert K8s().find(TOKEN) == [GANG_ID]


def test_submitting_twice_makes_one_object(cluster: kubernetes_standin.Cluster) -> None:
    assert submit() == submit() == ID
    assert len(cluster.objects) == 1


def test_an_object_of_somebody_else_is_not_adopted(cluster: kubernetes_standin.Cluster) -> None:
    cluster.objects["jobs", "team", NAME] = {"metadata": {"name": NAME, "namespace": "team"}}
    with refused("object_not_ours"):
        submit()


def test_a_lost_reply_is_unreachable_and_the_object_is_found_after_it(
    cluster: kubernetes_standin.Cluster,
) -> None:
    cluster.loses_reply = True
    with pytest.raises(Unreachable):
        submit()
    assert K8s().find(TOKEN) == [ID]
    cluster.loses_reply = False
    assert submit() == ID
    assert len(cluster.objects) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_what_the_server_refuses_is_refused_in_its_words(
    cluster: kubernetes_standin.Cluster, status: int
) -> None:
    cluster.fail = (status, "")
    with refused("scheduler_says", words="the server says no"):
        submit()
    assert not cluster.objects


@pytest.mark.parametrize(
    ("status", "reason"), [(401, ""), (409, "Conflict"), (429, ""), (500, ""), (503, "")]
)
def test_any_other_answer_says_nothing_of_the_job(
    cluster: kubernetes_standin.Cluster, status: int, reason: str
) -> None:
    cluster.fail = (
        status,
        reason,
    )  # 409 Conflict: the quota changed meanwhile, not that the object exists
    with pytest.raises(Unreachable):
        submit()


def test_a_cluster_without_jobset_says_what_is_missing(cluster: kubernetes_standin.Cluster) -> None:
    cluster.has_jobset = False
    with refused("jobset_wanted"):
        submit(spec(nodes=2))
    assert submit() == ID
    assert K8s().find(TOKEN) == [ID]


def test_a_server_that_is_down_is_unreachable(
    cluster: kubernetes_standin.Cluster, tmp_path: Path
) -> None:
    (tmp_path / "kubeconfig").write_text(
        cluster.kubeconfig().replace(cluster.url, "http://127.0.0.1:9")
    )
    for ask in (
        submit,
        lambda: K8s().find(TOKEN),
        lambda: K8s().query([ID]),
        lambda: K8s().cancel(ID),
    ):
        with pytest.raises(Unreachable):
            ask()
    assert [finding.is_good for finding in K8s().check()] == [True, False]


def test_no_configuration_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with refused("cluster_not_configured"):
        submit()


def test_a_rehearsal_makes_nothing(cluster: kubernetes_standin.Cluster) -> None:
    assert ID in (K8s().rehearse(K8s().render(spec())) or "")
    assert not cluster.objects
    cluster.fail = (422, "")
    with pytest.raises(Refused):
        K8s().rehearse(K8s().render(spec()))


def test_who_may_not_see_all_namespaces_looks_in_their_own(
    cluster: kubernetes_standin.Cluster,
) -> None:
    cluster.sees_all_namespaces = False
    submit()
    assert K8s("team").find(TOKEN) == [ID]


def test_cancelling_deletes_and_a_second_time_is_fine(cluster: kubernetes_standin.Cluster) -> None:
    submit()
    K8s().cancel(ID)
    K8s().cancel(ID)
    assert K8s().query([ID]) == {}


def test_a_query_leaves_out_what_the_cluster_does_not_know(
    cluster: kubernetes_standin.Cluster,
) -> None:
    submit()
    cluster.pods = [pod(phase="Running")]
    other = ID.replace("a1b2c3", "ffffff")
    assert {job_id: seen.state for job_id, seen in K8s().query([other, ID]).items()} == {
        ID: "running"
    }
    assert K8s().query([ID])[ID].host == "node-a"


def test_many_ids_are_asked_for_together(cluster: kubernetes_standin.Cluster) -> None:
    tokens = [f"ft_{index}_1" for index in range(50)]
    ids = [f"team/job/{checks.name_of(token)}" for token in tokens]
    for token in tokens:
        item = job(name=checks.name_of(token), labels={manifest.TOKEN: token})
        cluster.objects["jobs", "team", item["metadata"]["name"]] = item
    assert len(K8s().query(ids)) == 50
    assert len(cluster.requests) == 4  # objects and pods, 40 at a time


def test_the_log_is_the_newest_pods_of_the_first_node(cluster: kubernetes_standin.Cluster) -> None:
    submit()
    cluster.pods = [
        pod("old", born="1"),
        pod("new", born="2"),
        pod("second-node", born="3", rank="1"),
    ]
    assert list(K8s().logs(ID, follow=False)) == []
    cluster.logs = {"old": "no\n", "new": "step 1\nstep 2", "second-node": "no\n"}
    assert list(K8s().logs(ID, follow=False)) == ["step 1", "step 2"]
    assert list(K8s().logs(ID, follow=True)) == ["step 1", "step 2"]


def test_check_says_what_the_cluster_has(cluster: kubernetes_standin.Cluster) -> None:
    cluster.has_jobset = False
    assert [(finding.name, finding.is_good) for finding in K8s().check()][1:] == [
        ("jobs", True),
        ("jobsets", True),
    ]


@pytest.mark.parametrize("job_id", ["", "x", "a/b/c", "a/job/"])
def test_an_id_that_is_not_ours_is_refused(job_id: str) -> None:
    with refused("k8s_id"):
        K8s().cancel(job_id)


def pod(
    name: str = "p", *, phase: str = "Pending", born: str = "1", rank: str = "0", **status: Any
) -> dict[str, Any]:
    meta = {"name": name, "labels": {manifest.TOKEN: TOKEN}, "annotations": {manifest.RANK: rank}}
    meta["creationTimestamp"] = born
    return {"metadata": meta, "spec": {"nodeName": "node-a"}, "status": {"phase": phase, **status}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return pod(phase="Failed", containerStatuses=[{"name": "wrapper", "state": state}])


def job(*conditions: tuple[str, str], suspend: bool = False, **meta: Any) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": "True", "reason": reason, "message": "m"}
        for kind, reason in conditions
    ]
    return {
        "metadata": {"name": NAME, **meta},
        "spec": {"suspend": suspend},
        "status": {"conditions": listed},
    }


FAILED = ("Failed", "BackoffLimitExceeded")
WAITING = {
    "name": "wrapper",
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes",
}


@pytest.mark.parametrize(
    ("item", "pods", "state", "code"),
    [
        (job(("Complete", "")), [], "succeeded", None),
        (job(("Completed", "AllJobsCompleted")), [], "succeeded", None),
        (job(FAILED), [ended(1)], "failed", 1),
        (job(FAILED), [ended(75)], "failed", 75),
        (job(("Failed", "PodFailurePolicy")), [ended(2)], "failed", 2),
        (job(FAILED), [ended(137, "OOMKilled")], "oom", 137),
        (job(FAILED), [pod(phase="Failed", reason="DeadlineExceeded")], "timeout", None),
        (job(FAILED), [], "failed", None),
        (job(suspend=True), [], "held", None),
        (job(suspend=True, labels={"kueue.x-k8s.io/queue-name": "q"}), [], "queued", None),
        (job(), [], "queued", None),
        (job(), [pod(conditions=[UNSCHEDULABLE])], "queued", None),
        (job(), [pod(containerStatuses=[WAITING])], "held", None),
        (job(), [pod(phase="Running")], "running", None),
        (job(), [ended(75)], "queued", None),
        (job(deletionTimestamp="t"), [pod(phase="Running")], "running", None),
    ],
)
def test_a_job_and_its_pods_add_up_to_a_state(
    item: dict[str, Any], pods: list[dict[str, Any]], state: str, code: int | None
) -> None:
    seen = observe(item, pods)
    assert (seen.state, seen.exit_code) == (state, code)


def test_a_pod_that_was_taken_away_is_started_again_and_counted() -> None:
    gone = observe(job(), [ended(75)])
    assert (gone.state, gone.will_rerun) == ("queued", True)
    again = observe(job(), [ended(75), pod("q", phase="Running", born="2")])
    assert (again.state, again.restarts) == ("running", 1)


def test_what_waits_for_a_person_says_what_to_do() -> None:
    seen = observe(job(), [pod(containerStatuses=[WAITING])])
    assert "no such image" in (seen.reason or "")
    assert "job.image" in (seen.reason or "")
    assert observe(job(), [pod(conditions=[UNSCHEDULABLE])]).reason == "0/3 nodes"
