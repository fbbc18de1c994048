"""Kubernetes manifests: a batch/v1 Job for one node, a JobSet (v1alpha2) for several.

The pod and the Job are built of the kubernetes client's own models, which refuse a misspelt field;
what those do not check (names, mounts, secrets) is checked here. Values stand in YAML scalars and
argv lists only, and no shell runs.

Kubernetes expands $(NAME) in argv and in values of variables, so every "$" is doubled, its escape
for one "$".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import yaml

from jobs.backends.k8s.checks import check_spec, label, name_of, volume_parts
from trainer.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, ConfigError

if TYPE_CHECKING:
    from jobs.protocol import JobSpec

CONTAINER, REPLICATED = "wrapper", "node"
KINDS = {"job": ("batch", "v1", "jobs"), "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets")}
MANAGED = {"app.kubernetes.io/managed-by": "lathe"}
TOKEN = "lathe/token"
RANK = "batch.kubernetes.io/job-completion-index"
GRACE_MARGIN_S = 15  # the wrapper writes exit.json after the training's own grace
# Backstop behind the wrapper's own limit, which ends a run as `timeout`. It is the pod's, so each
# restart has it anew, and it begins before the image is pulled.
DEADLINE_MARGIN_S = 900


def text_of(manifest: dict[str, Any]) -> str:
    """The manifest as YAML, keys in their usual order."""
    return yaml.safe_dump(manifest, sort_keys=False, width=120, allow_unicode=True)


def manifest(spec: JobSpec) -> dict[str, Any]:
    """The Job or JobSet of one attempt, as the API server takes it. Pure; needs the `k8s` extra.

    ConfigError names everything that cannot be rendered: a key of another backend, a missing image,
    a bad name.
    """
    job = check_spec(spec).job
    version, kind = "batch/v1", "Job"
    body: dict[str, Any] = wire(job_spec(spec))
    if job.nodes > 1:  # one child Job with a pod per node, and DNS names for the rendezvous
        version, kind = "jobset.x-k8s.io/v1alpha2", "JobSet"
        preempted = {
            "name": "preempted",
            "action": "RestartJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        body = {
            "failurePolicy": {
                "maxRestarts": job.max_preemptions,
                "rules": [preempted, {"name": "failed", "action": "FailJobSet"}],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": {"spec": body}}],
        }
    if job.queue is not None:
        body["suspend"] = True  # Kueue starts it
    return {"apiVersion": version, "kind": kind, "metadata": metadata(spec), "spec": body}


def metadata(spec: JobSpec) -> dict[str, Any]:
    """Name, namespace, labels, and in annotations what a label cannot hold."""
    return {
        "name": name_of(spec.token),
        "namespace": spec.job.namespace,
        "labels": labels(spec),
        "annotations": {"lathe/group": spec.group, "lathe/folder": spec.folder},
    }


def labels(spec: JobSpec) -> dict[str, str]:
    """Labels of the object; `lathe/token` finds it and its pods."""
    texts = {
        **MANAGED,
        TOKEN: spec.token,
        "lathe/exp-id": label(spec.exp_id),
        "lathe/group": label(spec.group),
    }
    texts["lathe/attempt"] = str(spec.attempt)
    if spec.job.queue is not None:
        texts["kueue.x-k8s.io/queue-name"] = spec.job.queue
    return texts


def job_spec(spec: JobSpec) -> Any:
    """V1JobSpec: one pod for each node, none ever started again after it has failed by itself.

    backoffLimit is 0: exit.json of a failure is final, so the wrapper would refuse a second start;
    `max_retries` is the submitter's. Only a pod that the platform took away is started again, and
    its attempt goes on.
    """
    models = _models()
    if spec.job.nodes > 1:
        # a lost node fails the child Job as `PodFailurePolicy`; then the JobSet restarts all nodes
        rules = [_on_disruption("FailJob"), _on_exit("FailJob", EXIT_PREEMPTED)]
    else:
        # bad input ends the Job with a reason of its own; an evicted or preempted pod is replaced
        rules = [_on_exit("FailJob", EXIT_BAD_INPUT), _on_disruption("Ignore")]
    return models.V1JobSpec(
        completion_mode="Indexed",
        completions=spec.job.nodes,
        parallelism=spec.job.nodes,
        backoff_limit=0,
        pod_failure_policy=models.V1PodFailurePolicy(rules=rules),
        template=models.V1PodTemplateSpec(
            metadata=models.V1ObjectMeta(labels={**MANAGED, TOKEN: spec.token}), spec=pod_spec(spec)
        ),
    )


def _on_exit(action: str, code: int) -> Any:
    models = _models()
    codes = models.V1PodFailurePolicyOnExitCodesRequirement(
        container_name=CONTAINER, operator="In", values=[code]
    )
    return models.V1PodFailurePolicyRule(action=action, on_exit_codes=codes)


def _on_disruption(action: str) -> Any:
    models = _models()
    pattern = models.V1PodFailurePolicyOnPodConditionsPattern(
        type="DisruptionTarget", status="True"
    )
    return models.V1PodFailurePolicyRule(action=action, on_pod_conditions=[pattern])


def head_node(spec: JobSpec) -> str:
    """DNS name of the first pod of a JobSet, within its namespace."""
    name = name_of(spec.token)
    return f"{name}-{REPLICATED}-0-0.{name}"


def pod_spec(spec: JobSpec) -> Any:
    """V1PodSpec: one wrapper in one container, never restarted in place."""
    models, job = _models(), spec.job
    volumes, mounts = storage(spec)
    container = models.V1Container(
        name=CONTAINER,
        image=job.image,
        command=[literal(part) for part in spec.wrapper],
        working_dir=spec.workdir,
        env=variables(spec),
        resources=resources(spec),
        volume_mounts=mounts or None,
    )
    limit_s = job.max_run_time
    return models.V1PodSpec(
        restart_policy="Never",
        termination_grace_period_seconds=job.grace_s + GRACE_MARGIN_S,
        active_deadline_seconds=limit_s and limit_s + job.grace_s + DEADLINE_MARGIN_S,
        service_account_name=job.service_account,
        automount_service_account_token=job.service_account is not None,
        enable_service_links=False,  # a Service named "wandb" would set WANDB_PORT in every pod
        containers=[container],
        volumes=volumes or None,
    )


def resources(spec: JobSpec) -> Any:
    """Requests for the scheduler; memory is a limit too, so that a leak ends a job, not a node."""
    own = spec.job.resources
    memory = f"{own.mem}Gi"
    limits = {"memory": memory, **({"nvidia.com/gpu": str(own.gpu)} if own.gpu else {})}
    return _models().V1ResourceRequirements(
        requests={"cpu": str(own.cpu), "memory": memory}, limits=limits
    )


def variables(spec: JobSpec) -> list[Any]:
    """What the wrapper must know; the training's own environment it reads in spec.json."""
    models = _models()
    # the same at every restart
    entries = [models.V1EnvVar(name="LATHE_JOB_ID", value=literal(job_id(spec)))]
    for name, text in spec.wrapper_environment.items():
        entries.append(models.V1EnvVar(name=name, value=literal(text)))
    if spec.job.nodes > 1:
        field = models.V1ObjectFieldSelector(field_path=f"metadata.annotations['{RANK}']")
        source = models.V1EnvVarSource(field_ref=field)
        entries.append(models.V1EnvVar(name="LATHE_NODE_RANK", value_from=source))
        entries.append(models.V1EnvVar(name="LATHE_HEAD_NODE", value=head_node(spec)))
    if spec.job.wandb_key_secret is not None:
        name, _, key = spec.job.wandb_key_secret.partition("/")
        source = models.V1EnvVarSource(
            secret_key_ref=models.V1SecretKeySelector(name=name, key=key)
        )
        entries.append(models.V1EnvVar(name="WANDB_API_KEY", value_from=source))
    return entries


def job_id(spec: JobSpec) -> str:
    """ "<namespace>/<kind>/<name>": enough to see the object again without the job dictionary."""
    return f"{spec.job.namespace}/{'jobset' if spec.job.nodes > 1 else 'job'}/{name_of(spec.token)}"


def storage(spec: JobSpec) -> tuple[list[Any], list[Any]]:
    """Volumes and mounts of `job.volumes`, and shared memory for jobs with GPUs.

    There is one volume for each claim.
    """
    models = _models()
    parsed = [volume_parts(text) for text in spec.job.volumes]
    names = {
        claim: f"claim-{index}"
        for index, claim in enumerate(dict.fromkeys(claim for claim, *_ in parsed))
    }
    volumes = [
        models.V1Volume(
            name=name,
            persistent_volume_claim=models.V1PersistentVolumeClaimVolumeSource(claim_name=claim),
        )
        for claim, name in names.items()
    ]
    mounts = [
        models.V1VolumeMount(
            name=names[claim], mount_path=path, read_only=True if is_read_only else None
        )
        for claim, path, is_read_only in parsed
    ]
    if spec.job.resources.gpu and "/dev/shm" not in {path for _, path, _ in parsed}:
        # A container's own /dev/shm is 64 MiB: NCCL and data loaders with workers need more.
        memory = models.V1EmptyDirVolumeSource(medium="Memory")
        volumes.append(models.V1Volume(name="shared-memory", empty_dir=memory))
        mounts.append(models.V1VolumeMount(name="shared-memory", mount_path="/dev/shm"))
    return volumes, mounts


def literal(text: str) -> str:
    """`text` as Kubernetes must get it, so that $(NAME) in it is not expanded.

    The process then gets `text` as it is.
    """
    return text.replace("$", "$$")


def _models() -> Any:
    try:
        return importlib.import_module("kubernetes.client")
    except ModuleNotFoundError:
        raise ConfigError(
            "the k8s backend needs the kubernetes package. pip install -e '.[k8s]'"
        ) from None


def wire(model: Any) -> dict[str, Any]:
    """A model as the dictionary that goes over the wire, without what is not set."""
    return _models().ApiClient().sanitize_for_serialization(model)
