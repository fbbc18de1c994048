"""A loopback stand-in for the Kubernetes API server: objects in a dictionary, over real HTTP, with
the real paths.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

OBJECTS = re.compile(
    r"/apis/(?P<group>[^/]+)/[^/]+(/namespaces/(?P<ns>[^/]+))?/(?P<plural>jobs|jobsets)(/(?P<name>[^/]+))?\Z"
)
PODS = re.compile(r"/api/v1/namespaces/(?P<ns>[^/]+)/pods(/(?P<name>[^/]+)/log)?\Z")
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    422: "Invalid",
}


class Cluster:
    """What the stand-in holds and how it behaves; `fail` is one reply for the next request that
    changes something.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}  # (plural, namespace, name)
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}
        self.requests: list[str] = []
        self.fail: tuple[int, str] | None = None
        self.loses_reply = False
        self.sees_all_namespaces = True
        self.has_jobset = True
        self.url = ""

    def kubeconfig(self) -> str:
        """The text of a kubeconfig that names this server."""
        named = [("clusters", "cluster", {"server": self.url}), ("users", "user", {"token": "t"})]
        config: dict[str, Any] = {
            kind: [{"name": "here", one: value}] for kind, one, value in named
        }
        config["contexts"] = [{"name": "here", "context": {"cluster": "here", "user": "here"}}]
        return yaml.safe_dump(
            {"apiVersion": "v1", "kind": "Config", "current-context": "here", **config}
        )


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def reply(self, status: int, body: Any, reason: str | None = None) -> None:
        if status >= 400:
            message = body if isinstance(body, str) else "no"
            body = {
                "kind": "Status",
                "reason": reason or REASONS.get(status, ""),
                "message": message,
                "code": status,
            }
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/plain" if isinstance(body, str) else "application/json"
        )
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_any(self) -> None:
        self.cluster.requests.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        if self.cluster.fail is not None and (
            self.command != "GET" or self.cluster.fail[0] in (401, 500)
        ):
            status, reason = self.cluster.fail
            self.cluster.fail = None
            return self.reply(status, "the server says no", reason)
        if pods := PODS.match(url.path):
            return self.pods(pods["name"], query)
        found = OBJECTS.match(url.path)
        if found is None or (found["plural"] == "jobsets" and not self.cluster.has_jobset):
            return self.reply(404, "404 page not found", "")
        if found["ns"] is None and not self.cluster.sees_all_namespaces:
            return self.reply(403, "cannot list at the cluster scope")
        return getattr(self, f"on_{self.command.lower()}")(found, query, body)

    do_GET = do_POST = do_DELETE = handle_any

    def on_get(self, at: re.Match[str], query: dict[str, str], body: Any) -> None:
        objects = self.cluster.objects
        if at["name"]:
            item = objects.get((at["plural"], at["ns"], at["name"]))
            return self.reply(200, item) if item else self.reply(404, "not found")
        chosen = [
            item
            for (plural, namespace, _), item in objects.items()
            if plural == at["plural"]
            and at["ns"] in (None, namespace)
            and fits(item, query.get("labelSelector", ""))
        ]
        return self.reply(200, {"kind": "List", "items": chosen})

    def on_post(self, at: re.Match[str], query: dict[str, str], body: Any) -> None:
        key = (at["plural"], at["ns"], body["metadata"]["name"])
        if key in self.cluster.objects:
            return self.reply(409, f'{at["plural"]} "{key[2]}" already exists')
        if query.get("dryRun") != "All":
            self.cluster.objects[key] = body
        if self.cluster.loses_reply:
            self.close_connection = True
            return self.connection.close()
        return self.reply(201, body)

    def on_delete(self, at: re.Match[str], query: dict[str, str], body: Any) -> None:
        if self.cluster.objects.pop((at["plural"], at["ns"], at["name"]), None) is None:
            return self.reply(404, "not found")
        return self.reply(200, {"kind": "Status", "status": "Success"})

    def pods(self, name: str | None, query: dict[str, str]) -> None:
        if name is None:
            chosen = [pod for pod in self.cluster.pods if fits(pod, query["labelSelector"])]
            return self.reply(200, {"kind": "PodList", "items": chosen})
        if name not in self.cluster.logs:
            return self.reply(400, "container is waiting to start")
        return self.reply(200, self.cluster.logs[name])


def fits(item: dict[str, Any], selector: str) -> bool:
    """Whether an object's labels fit "a=b" or "a in (b,c)"."""
    if not selector:
        return True
    key, _, values = selector.partition(" in (") if " in (" in selector else selector.partition("=")
    return item["metadata"].get("labels", {}).get(key) in values.rstrip(")").split(",")


@contextmanager
def running() -> Iterator[Cluster]:
    """A stand-in on a free port of 127.0.0.1, until the block ends."""
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    cluster.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
