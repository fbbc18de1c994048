"""Requests to the Kubernetes API server, and what its answers mean."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from jobs.errors import Unreachable
from jobs.time_limits import within
from trainer.errors import ConfigError

TIMEOUT_S = (10, 60)  # to connect, to read
CONFIGURE_S = 60.0  # of the configuration, which may name a program that prints a token
SILENCE_S = (10, 24 * 3600)  # a log that is followed may be quiet for long
Object = dict[str, Any]
T = TypeVar("T")


class KubernetesError(Exception):
    """An HTTP status of the API server that is no success."""

    def __init__(self, status: int, body: Any, phrase: Any) -> None:
        content = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
        try:
            reply: Any = json.loads(content)
        except ValueError:
            reply = None
        facts = cast("Object", reply) if isinstance(reply, dict) else {}
        self.status, self.reason = status, facts.get("reason")
        super().__init__(f"{status} {facts.get('message') or content[:200] or phrase}")


def lines_of(response: Any) -> Iterator[str]:
    """Lines of a streamed reply; Unreachable when the connection breaks."""
    blocks: Iterator[bytes] = response.stream()
    rest = b""
    try:
        while (block := translate_errors(lambda: next(blocks, None))) is not None:
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    finally:
        response.release_conn()
    if rest:
        yield rest.decode(errors="replace")


def custom_objects(call: Callable[[Any], T]) -> T:
    """What `call` gets from the API of custom objects. KubernetesError, Unreachable."""
    return translate_errors(lambda: call(_client("CustomObjectsApi")))


def core_api(call: Callable[[Any], T]) -> T:
    """What `call` gets from the core API: pods and their logs. KubernetesError, Unreachable."""
    return translate_errors(lambda: call(_client("CoreV1Api")))


def translate_errors(call: Callable[[], T]) -> T:
    """The reply to one request.

    KubernetesError for a status that is no success, Unreachable for a broken connection.
    """
    try:
        return call()
    except (OSError, ValueError) as error:
        raise Unreachable(f"the Kubernetes API server cannot be seen: {error}") from None
    except Exception as error:
        kind = type(error)
        if kind.__module__.startswith("urllib3"):
            raise Unreachable(f"the Kubernetes API server cannot be seen: {error}") from None
        status = (
            getattr(error, "status", None) if kind.__module__.startswith("kubernetes") else None
        )
        if status is None:
            raise
        if not status:  # TLS
            raise Unreachable(f"the Kubernetes API server cannot be seen: {error}") from None
        raise KubernetesError(
            int(status), getattr(error, "body", None), getattr(error, "reason", None)
        ) from None


def _client(api: str) -> Any:
    """An API of the client, with the configuration of the user or of the pod.

    ConfigError without the kubernetes package, Unreachable when there is no configuration.
    """
    try:
        client, config = (
            importlib.import_module("kubernetes.client"),
            importlib.import_module("kubernetes.config"),
        )
    except ModuleNotFoundError:
        raise ConfigError(
            "the k8s backend needs the kubernetes package. pip install -e '.[k8s]'"
        ) from None
    configuration = client.Configuration()
    # the client reads the variable at import only
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"

    def configure() -> None:
        if any(Path(name).expanduser().exists() for name in files.split(os.pathsep)):
            config.load_kube_config(files, client_configuration=configuration, persist_config=False)
        else:
            config.load_incluster_config(client_configuration=configuration)

    try:
        within(CONFIGURE_S, "the configuration of Kubernetes", configure)
    except (config.ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        raise Unreachable(
            f"no cluster is configured: {error}. Set KUBECONFIG or write ~/.kube/config."
        ) from None
    configuration.retries = False  # repeating is the caller's business, which looks first
    return getattr(client, api)(client.ApiClient(configuration))
