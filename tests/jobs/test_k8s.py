"""Manifests of the k8s backend, against the schemas of Kubernetes and JobSet. test_k8s_requests.py
has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

if find_spec("kubernetes") is None:  # importing it takes seconds, which few tests need
    pytest.skip("the extra `k8s` is not installed", allow_module_level=True)

from jobs.backends.k8s import checks
from jobs.backends.k8s.backend import K8s
from jobs.config import JobConfig
from jobs.protocol import JobSpec
from tests.jobs import hostile
from tests.jobs.hostile import CORPUS, TOKEN, make
from tests.wording import Fault, fault, refused
from trainer.errors import ConfigError

JOB: dict[str, Any] = {
    "image": "registry.example/lathe:1",
    "volumes": ["results:/shared/results", "code:/shared/code:ro"],
    "resources": {"cpu": 8, "mem": 64, "gpu": 4},
    "namespace": "team",
    "grace_s": 90,
    "max_run_time": 3600,
    "queue": "gold",
    "service_account": "runner",
    "wandb_key_secret": "wandb/api-key",
}
NAME = TOKEN.replace("_", "-")
GANG_ID = f"team/jobset/{NAME}"


def spec(**job: Any) -> JobSpec:
    return make({**JOB, **job})


def rendered(of: JobSpec) -> dict[str, Any]:
    return yaml.safe_load(K8s().render(of).text)


def pod_of(body: dict[str, Any]) -> dict[str, Any]:
    job = body if body["kind"] == "Job" else body["spec"]["replicatedJobs"][0]["template"]
    return job["spec"]["template"]["spec"]


def expanded(text: str, known: dict[str, str]) -> str:
    """What a kubelet makes of argv: $(NAME) is replaced, $$ is one $. Kubernetes' expansion rules,
    written anew.
    """
    rule = re.compile(r"\$(?:(\$)|\(([^)]*)\))")
    return rule.sub(lambda m: "$" if m[1] else known.get(m[2], m[0]), text)


def complaint(body: dict[str, Any]) -> str | None:
    """What Kubernetes' strict schema has against an object; None: it passes."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="the extra `dev` is not installed"
    )
    try:
        validator.validate(body, validator.latest_version(), strict=True)
    except validator.ValidationError as error:
        return str(error)
    return None


def test_a_job_passes_the_strict_schema_of_kubernetes() -> None:
    for of in (spec(), make({"image": "i", "volumes": ["c:/shared"]})):
        assert complaint(rendered(of)) is None


def test_the_schema_would_have_caught_a_misspelt_field() -> None:
    body = rendered(spec())
    body["spec"]["backofLimit"] = body["spec"].pop("backoffLimit")
    assert "backofLimit" in str(complaint(body))


def test_a_jobset_survives_a_round_trip_through_kubeflows_models() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the extra `dev` is not installed"
    )
    body = rendered(spec(nodes=2))
    assert (
        models.JobsetV1alpha2JobSet.from_dict(body).to_dict() == body
    )  # a field that it does not know is dropped


def test_the_child_job_of_a_jobset_passes_the_strict_schema_of_kubernetes() -> None:
    body = rendered(spec(nodes=2))
    child = body["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "child"}, **child}
    assert complaint(job) is None


def test_the_name_is_the_token_and_back() -> None:
    assert rendered(spec())["metadata"]["name"] == NAME == checks.name_of(TOKEN)
    assert checks.token_in(NAME) == TOKEN


@pytest.mark.parametrize("token", ["ft-a", "ft_", "1ft", "FT_a", "a" * 53, "", "ft_a\n", "../x"])
def test_a_token_that_is_no_object_name_is_refused(token: str) -> None:
    with refused("token_wanted"):
        checks.name_of(token)


def test_one_node_runs_one_wrapper_that_is_never_restarted_after_a_failure() -> None:
    body = rendered(spec())
    job, pod = body["spec"], pod_of(body)
    assert (body["kind"], job["completionMode"], job["completions"], job["backoffLimit"]) == (
        "Job",
        "Indexed",
        1,
        0,
    )
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["command"] == spec().wrapper
    assert pod["containers"][0]["workingDir"] == "/shared/code/tree"
    bad_input, disrupted = job["podFailurePolicy"]["rules"]
    assert (bad_input["action"], bad_input["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == (
        "Ignore",
        "DisruptionTarget",
    )


def test_the_pod_outlives_the_wrappers_own_limits() -> None:
    pod = pod_of(rendered(spec()))
    assert pod["terminationGracePeriodSeconds"] == 90 + 15
    assert (
        pod["activeDeadlineSeconds"] > 3600 + 90
    )  # the wrapper ends it as a timeout before this does


def test_a_job_without_a_limit_has_no_deadline() -> None:
    assert "activeDeadlineSeconds" not in pod_of(rendered(spec(max_run_time=None)))


def test_resources_are_requests_and_gpus_and_memory_are_limits() -> None:
    resources = pod_of(rendered(spec()))["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }


def test_volumes_are_mounted_and_gpu_jobs_get_shared_memory() -> None:
    pod = pod_of(rendered(spec()))
    assert pod["volumes"] == [
        {"name": "claim-0", "persistentVolumeClaim": {"claimName": "results"}},
        {"name": "claim-1", "persistentVolumeClaim": {"claimName": "code"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False)
        for mount in pod["containers"][0]["volumeMounts"]
    }
    assert mounts == {"/shared/results": False, "/shared/code": True, "/dev/shm": False}


def test_kueue_gets_a_suspended_job_with_its_label() -> None:
    for nodes in (1, 2):
        body = rendered(spec(nodes=nodes))
        assert body["spec"]["suspend"] is True
        assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"
    assert "suspend" not in rendered(spec(queue=None))["spec"]


def test_the_wandb_key_is_a_reference_and_no_variable_of_the_training_is_in_the_pod() -> None:
    text = (
        K8s()
        .render(make(JOB, environment={"HF_HOME": "/shared/hf", "MY_VALUE": "hidden-value"}))
        .text
    )
    env = {item["name"]: item for item in pod_of(yaml.safe_load(text))["containers"][0]["env"]}
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert env["WANDB_API_KEY"] == {"name": "WANDB_API_KEY", "valueFrom": reference}
    assert "hidden-value" not in text


def test_every_pod_of_several_nodes_knows_its_rank_and_the_first_ones_name() -> None:
    body = rendered(spec(nodes=3))
    [replicated] = body["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["parallelism"] == 3
    env = {item["name"]: item for item in pod_of(body)["containers"][0]["env"]}
    assert env["LATHE_HEAD_NODE"]["value"] == f"{NAME}-node-0-0.{NAME}"
    rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["LATHE_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == rank
    assert env["LATHE_JOB_ID"]["value"] == GANG_ID


def test_losing_a_node_restarts_all_of_them_and_a_failure_ends_them() -> None:
    body = rendered(spec(nodes=2, max_preemptions=7))
    policy = body["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [rule["action"] for rule in policy["rules"]] == ["RestartJobSet", "FailJobSet"]
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    rules = body["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "FailJob"]
    assert rules[1]["onExitCodes"]["values"] == [75]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            ("partition", "gpu"),
            ("bid", 1),
            ("account_id", "a"),
            ("qos", "high"),
            ("gres", "gpu:1"),
            ("time", "1:00"),
        ],
        *[
            ("constraint", "a100"),
            ("data", ["a:/b"]),
            ("preemptable", True),
            ("requeue", False),
            ("signal_s", 60),
        ],
        *[
            ("account", "a"),
            ("reservation", "r"),
            ("exclude", "n1"),
            ("nodelist", "n1"),
            ("restartable", True),
        ],
        ("address", "http://head:8265"),
    ],
)
def test_a_key_of_another_backend_is_refused_by_name(key: str, value: Any) -> None:
    with refused("job_key_unknown_to", key=key):
        K8s().render(make({**JOB, "resources": {}, key: value}))


def test_every_key_of_the_job_dictionary_is_either_rendered_or_refused() -> None:
    known = {
        *(
            "resources",
            "nodes",
            "python_binary",
            "survive",
            "python",
            "environment_vars",
            "max_run_time",
            "grace_s",
            "image",
        )
    }
    known |= {
        *(
            "max_retries",
            "max_preemptions",
            "wandb_key_file",
            "wandb_key_secret",
            "namespace",
            "queue",
        )
    }
    known |= {*("service_account", "volumes", "interactive")}
    assert {*JobConfig.model_fields} == known | {"address", *checks.FOREIGN}


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"image": None}, fault("image_required")),
        ({"image": "a=b"}, fault("image_form", value="a=b")),
        ({"namespace": "Team"}, fault("dns_label", key="namespace", value="Team")),
        ({"namespace": "a.b"}, fault("dns_label", key="namespace", value="a.b")),
        ({"queue": "_q"}, fault("object_name", key="queue", value="_q")),
        ({"service_account": "S"}, fault("object_name", key="service_account", value="S")),
        (
            {"wandb_key_secret": "wandb"},
            fault("secret_form", key="wandb_key_secret", value="wandb"),
        ),
        (
            {"wandb_key_secret": "Wandb/key"},
            fault("secret_form", key="wandb_key_secret", value="Wandb/key"),
        ),
        ({"volumes": ["results"]}, fault("volume_form", value="results")),
        ({"volumes": ["results:relative"]}, fault("volume_form", value="results:relative")),
        (
            {"volumes": ["results:/shared/../etc"]},
            fault("volume_form", value="results:/shared/../etc"),
        ),
        ({"volumes": ["results:/shared:rw"]}, fault("volume_form", value="results:/shared:rw")),
        ({"volumes": ["a:/shared", "b:/shared"]}, fault("volume_twice", value="/shared")),
        ({"volumes": ["results:/elsewhere"]}, fault("folder_below_no_mount", key="folder")),
        (
            {"volumes": ["results:/shared/res", "code:/shared/code"]},
            fault("folder_below_no_mount", key="folder"),
        ),
        (
            {"resources": {"gpu": 1, "gpu_model": "A100"}},
            fault("job_key_unknown_to", key="resources.gpu_model"),
        ),
    ],
)
def test_what_the_cluster_would_refuse_later_is_refused_now(
    job: dict[str, Any], named: Fault
) -> None:
    with refused(named):
        K8s().render(spec(**job))


def test_a_job_cannot_wait_for_another() -> None:
    with refused("backend_cannot_wait"):
        K8s().render(make(JOB, after=["team/job/x"]))


def refused_or_rendered(
    make_it: Callable[[], JobSpec], named: str
) -> tuple[JobSpec, dict[str, Any]] | None:
    """The spec and its manifest, or None when it was refused, which must have been by name."""
    try:
        of = make_it()
        return of, rendered(of)
    except (ConfigError, ValidationError) as error:
        message = str(error)
    assert named in message, f"{named}: {message}"
    return None


@pytest.mark.parametrize("field", ["token", "exp_id", "group", "folder", "workdir", "wrapper"])
def test_a_hostile_text_is_refused_by_name_or_is_only_data(field: str) -> None:
    plain = shape(rendered(spec()), skip="command")
    for text in CORPUS:
        found = refused_or_rendered(partial(hostile.with_text, field, text, JOB), field)
        if found is None:
            continue
        of, body = found
        command = pod_of(body)["containers"][0]["command"]
        assert [expanded(part, {"HOME": "/home/user"}) for part in command] == of.wrapper
        assert shape(body, skip="command") == plain, f"{text!r} in {field}"
        for key, value in body["metadata"]["labels"].items():
            assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", value), (
                key,
                value,
            )


def test_what_only_the_wrapper_reads_is_not_in_the_manifest() -> None:
    plain = K8s().render(spec()).text
    for field in ("digest", "launcher", "program", "activate", "environment"):
        assert K8s().render(hostile.with_text(field, "$(touch pwned)", JOB)).text == plain


@pytest.mark.parametrize(
    "key", ["image", "namespace", "queue", "service_account", "volumes", "wandb_key_secret"]
)
def test_a_hostile_text_in_the_job_dictionary_is_refused_by_name_or_is_a_name(key: str) -> None:
    for text in CORPUS:
        job = {key: [*JOB["volumes"], text] if key == "volumes" else text}
        if refused_or_rendered(lambda job=job: spec(**job), key) is not None:
            assert re.fullmatch(r"[a-z0-9/.-]+", text), f"{text!r} in {key}"


def shape(value: Any, skip: str = "") -> Any:
    """Keys, lengths and types of a nested value, but not its texts."""
    if isinstance(value, dict):
        return {key: "..." if key == skip else shape(item, skip) for key, item in value.items()}
    return (
        [shape(item, skip) for item in value] if isinstance(value, list) else type(value).__name__
    )
