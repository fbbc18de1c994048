"""Kubernetes: Jobs and JobSets through the kubernetes Python client.

The object's name is the attempt's token, so the API server itself keeps an attempt from being made
twice. Jobs too are sent through CustomObjectsApi, which takes and gives plain dictionaries: client
37 refuses whole replies that hold a field newer than itself, and a reply that cannot be read after
the Job was made would look like a failed submission. An id is "<namespace>/<kind>/<name>", kind
being job or jobset.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from jobs.backends.k8s.checks import token_in
from jobs.backends.k8s.client import (
    SILENCE_S,
    TIMEOUT_S,
    KubernetesError,
    Object,
    core_api,
    custom_objects,
    lines_of,
    translate_errors,
)
from jobs.backends.k8s.manifest import CONTAINER, KINDS, TOKEN, manifest, text_of
from jobs.backends.k8s.observed import creation_time, observe, rank_of
from jobs.errors import Refused, Unreachable
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.job_state import Observed

CHUNK = 40  # tokens in one label selector: a URL of 2 KiB at most
CERTAIN = (400, 403, 404, 405, 413, 415, 422)  # the API server looked at it and made nothing
log = logging.getLogger(__name__)


class K8s:
    """A cluster as ~/.kube/config, $KUBECONFIG or a pod's own service account name it."""

    name: ClassVar[str] = "k8s"
    traits: ClassVar[Traits] = Traits()
    validation: ClassVar[str] = (
        "offline only: manifests against the schemas of Kubernetes and JobSet, requests against a "
        "loopback HTTP server; no real cluster"
    )

    def __init__(self, namespace: str = "default") -> None:
        """namespace: where `check` looks; `find` looks there if it may not look everywhere.

        Ids carry a namespace of their own.
        """
        self.namespace = namespace

    def check(self) -> list[Finding]:
        """Whether there is a client, the cluster answers, and Jobs and JobSets can be listed.

        They are listed in the backend's namespace.
        """
        try:
            version = importlib.import_module("kubernetes").__version__
        except ModuleNotFoundError:
            return [Finding("kubernetes client", False, "not installed: pip install -e '.[k8s]'")]
        findings = [Finding("kubernetes client", True, str(version))]
        for kind, note in (("job", ""), ("jobset", " (needed for nodes > 1 only)")):
            try:
                listed = _list(self.namespace, kind, limit=1)
            except Unreachable as error:
                return [*findings, Finding("cluster", False, str(error))]
            text = f"namespace {self.namespace}: " + (
                "can be listed" if listed is not None else "the cluster has none"
            )
            findings.append(
                Finding(f"{kind}s", listed is not None or kind == "jobset", text + note)
            )
        return findings

    def render(self, spec: JobSpec) -> Rendered:
        """The manifest as YAML. ConfigError names what cannot be rendered."""
        return Rendered(spec.token, "rendered.yaml", text_of(manifest(spec)))

    def rehearse(self, rendered: Rendered) -> str | None:
        """The API server's own dry run of admission, quota and every field; nothing is made."""
        job_id = self._create(rendered, dry_run="All")
        return f"{job_id}: the API server would take it"

    def submit(self, rendered: Rendered) -> str:
        """The id. An object of this name with our token is adopted: it is the same submission."""
        return self._create(rendered)

    def find(self, token: str) -> list[str]:
        """Ids of the objects with this token; those deleted are gone.

        Looks in all namespaces where that is allowed, else in its own. Missing one elsewhere is
        safe: a submission under the same name is adopted.
        """
        ids: list[str] = []
        for kind in KINDS:
            listed = _everywhere(self.namespace, kind, f"{TOKEN}={token}") or []
            ids += [
                f"{item['metadata']['namespace']}/{kind}/{item['metadata']['name']}"
                for item in listed
            ]
        return ids

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """The states of these ids, from their objects and pods."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for job_id in ids:
            namespace, kind, name = _parts(job_id)
            groups[namespace, kind].append(name)
        answers: dict[str, Observed] = {}
        for (namespace, kind), names in groups.items():
            for start in range(0, len(names), CHUNK):
                tokens = [token_in(name) for name in names[start : start + CHUNK]]
                objects = _list(namespace, kind, label_selector=f"{TOKEN} in ({','.join(tokens)})")
                if not objects:
                    continue
                pods: dict[str, list[Object]] = defaultdict(list)
                for pod in _pods(namespace, tokens):
                    pods[pod["metadata"]["labels"][TOKEN]].append(pod)
                for item in objects:
                    name = item["metadata"]["name"]
                    answers[f"{namespace}/{kind}/{name}"] = observe(item, pods[token_in(name)])
        return {job_id: answers[job_id] for job_id in ids if job_id in answers}

    def cancel(self, job_id: str) -> None:
        """Delete the object. It stays, marked as deleted, until its pods have ended."""
        namespace, kind, name = _parts(job_id)
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        group, version, plural = KINDS[kind]
        try:
            custom_objects(
                lambda api: api.delete_namespaced_custom_object(
                    group, version, namespace, plural, name, body=body, _request_timeout=TIMEOUT_S
                )
            )
        except KubernetesError as answer:
            if answer.status != 404:  # 404: it is gone already
                raise Unreachable(f"cannot delete {job_id}: {answer}") from None

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """Lines of the newest pod of the first node. There are none before that pod has started."""
        namespace, _, name = _parts(job_id)
        pods = [pod for pod in _pods(namespace, [token_in(name)]) if rank_of(pod) == "0"]
        if not pods:
            return
        pod = max(pods, key=creation_time)["metadata"]["name"]
        timeout = SILENCE_S if follow else TIMEOUT_S
        try:
            response = core_api(
                lambda api: api.read_namespaced_pod_log(
                    pod,
                    namespace,
                    container=CONTAINER,
                    follow=follow,
                    _preload_content=False,
                    _request_timeout=timeout,
                )
            )
        except KubernetesError as answer:
            if answer.status in (400, 404):  # its container has not started, or the pod is gone
                return
            raise Unreachable(f"no log of {job_id}: {answer}") from None
        yield from lines_of(response)

    def _create(self, rendered: Rendered, dry_run: str | None = None) -> str:
        body: Object = yaml.safe_load(rendered.text)
        kind, meta = body["kind"].lower(), body["metadata"]
        job_id = f"{meta['namespace']}/{kind}/{meta['name']}"
        group, version, plural = KINDS[kind]
        extra = {"dry_run": dry_run} if dry_run else {}
        try:
            custom_objects(
                lambda api: api.create_namespaced_custom_object(
                    group,
                    version,
                    meta["namespace"],
                    plural,
                    body,
                    field_validation="Strict",
                    _request_timeout=TIMEOUT_S,
                    **extra,
                )
            )
        except KubernetesError as answer:
            if answer.status == 409 and answer.reason == "AlreadyExists":
                return _adopt(job_id, rendered.token)
            if answer.status in CERTAIN:
                raise Refused(
                    f"the cluster refused {job_id}: {answer}{_advice(answer, kind)}"
                ) from None
            raise Unreachable(f"{job_id}: {answer}") from None
        return job_id


def _advice(answer: KubernetesError, kind: str) -> str:
    if answer.status == 404 and kind == "jobset":
        return ". Several nodes need JobSet (jobset.sigs.k8s.io) in the cluster."
    return ". Ask for the right to create it in this namespace." if answer.status == 403 else ""


def _adopt(job_id: str, token: str) -> str:
    """`job_id` if its object carries our token; Refused when it is somebody else's."""
    namespace, kind, name = _parts(job_id)
    group, version, plural = KINDS[kind]
    try:
        existing: Object = custom_objects(
            lambda api: api.get_namespaced_custom_object(
                group, version, namespace, plural, name, _request_timeout=TIMEOUT_S
            )
        )
    except KubernetesError as answer:
        raise Unreachable(f"{job_id} exists, but cannot be read: {answer}") from None
    if existing["metadata"].get("labels", {}).get(TOKEN) != token:
        raise Refused(
            f"{job_id} exists and is not ours: it has no label {TOKEN}={token}. Delete or rename "
            "it."
        )
    log.info("%s was there already: adopted", job_id)
    return job_id


def _parts(job_id: str) -> tuple[str, str, str]:
    namespace, _, rest = job_id.partition("/")
    kind, _, name = rest.partition("/")
    if kind not in KINDS or not name:
        raise ConfigError(
            f'{job_id!r} is no id of the k8s backend. Want "<namespace>/job/<name>" or '
            '".../jobset/...".'
        )
    return namespace, kind, name


def _list(namespace: str, kind: str, **options: Any) -> list[Object] | None:
    """Objects of one kind; None when the cluster does not know the kind. Unreachable."""
    group, version, plural = KINDS[kind]
    try:
        reply: Object = custom_objects(
            lambda api: api.list_namespaced_custom_object(
                group, version, namespace, plural, _request_timeout=TIMEOUT_S, **options
            )
        )
    except KubernetesError as answer:
        if answer.status == 404:
            return None
        raise Unreachable(f"cannot list {plural} in namespace {namespace}: {answer}") from None
    return reply.get("items", [])


def _everywhere(namespace: str, kind: str, selector: str) -> list[Object] | None:
    """Objects of one kind in all namespaces, or in `namespace` for a user who may not see all.

    Unreachable when the API server cannot be seen.
    """
    group, version, plural = KINDS[kind]
    try:
        reply: Object = custom_objects(
            lambda api: api.list_cluster_custom_object(
                group, version, plural, label_selector=selector, _request_timeout=TIMEOUT_S
            )
        )
    except KubernetesError as answer:
        if answer.status in (403, 404):
            return _list(namespace, kind, label_selector=selector)
        raise Unreachable(f"cannot list {plural}: {answer}") from None
    return reply.get("items", [])


def _pods(namespace: str, tokens: Sequence[str]) -> list[Object]:
    """The pods of these tokens. Unreachable."""
    selector = f"{TOKEN} in ({','.join(tokens)})"
    try:
        response = core_api(
            lambda api: api.list_namespaced_pod(
                namespace,
                label_selector=selector,
                _preload_content=False,
                _request_timeout=TIMEOUT_S,
            )
        )
    except KubernetesError as answer:
        raise Unreachable(f"cannot list pods in namespace {namespace}: {answer}") from None
    reply: Object = translate_errors(lambda: json.loads(response.data))
    return reply.get("items", [])
