"""Ray: what is rendered, by itself; what is sent, by Ray's real client to a loopback stand-in of
its REST server.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from jobs.backends import ray as module
from jobs.backends.k8s import checks
from jobs.backends.ray import Ray, observe
from jobs.errors import Refused, Unreachable
from jobs.protocol import JobSpec
from tests.jobs import hostile
from tests.jobs.hostile import CORPUS, TOKEN, make
from tests.wording import Fault, fault, refused
from trainer.errors import ConfigError

JOB: dict[str, Any] = {"resources": {"cpu": 4, "mem": 32, "gpu": 2}, "grace_s": 90}
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"
)


def submission(spec: JobSpec) -> dict[str, Any]:
    return json.loads(Ray().render(spec).text)["submission"]


def test_the_submission_id_is_the_token_and_the_entry_point_is_the_wrapper_in_the_snapshot() -> (
    None
):
    spec = make(JOB)
    sent = submission(spec)
    assert sent["submission_id"] == TOKEN
    assert shlex.split(sent["entrypoint"]) == ["env", "-C", "/shared/code/tree", *spec.wrapper]


def test_resources_are_ray_s_own_units() -> None:
    sent = submission(make(JOB))
    assert sent["entrypoint_num_cpus"] == 4
    assert sent["entrypoint_num_gpus"] == 2
    assert sent["entrypoint_memory"] == 32 * 2**30


def test_ray_waits_for_the_grace_of_the_job_and_gets_no_variable_of_the_training() -> None:
    sent = submission(make(JOB, environment={"HF_HOME": "/shared/hf"}))
    assert sent["runtime_env"] == {
        "env_vars": {"LATHE_JOB_ID": TOKEN, "RAY_JOB_STOP_WAIT_TIME_S": "105"}
    }


def test_an_id_names_the_cluster_when_the_job_dictionary_does() -> None:
    sent = submission(make({**JOB, "address": "http://head:8265/"}))
    assert sent["runtime_env"]["env_vars"]["LATHE_JOB_ID"] == f"http://head:8265/{TOKEN}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            ("partition", "gpu"),
            ("bid", 1),
            ("account_id", "a"),
            ("image", "i"),
            ("namespace", "team"),
            ("queue", "q"),
        ],
        *[
            ("volumes", ["c:/m"]),
            ("service_account", "s"),
            ("wandb_key_secret", "n/k"),
            ("requeue", False),
        ],
    ],
)
def test_a_key_of_another_backend_is_refused_by_name(key: str, value: Any) -> None:
    with refused("job_key_unknown_to", key=key):
        Ray().render(make({**JOB, key: value}))


@pytest.mark.parametrize(
    ("job", "changes", "named"),
    [
        ({"nodes": 2}, {}, fault("nodes_of_ray", nodes=2)),
        ({"address": "os://x"}, {}, fault("address_form", value="os://x")),
        ({"address": "ray://head:10001"}, {}, fault("address_form", value="ray://head:10001")),
        ({"address": "http://user@head"}, {}, fault("address_form", value="http://user@head")),
        ({}, {"after": ["x"]}, fault("backend_cannot_wait", after=["x"])),
        ({}, {"wrapper": []}, fault("wrapper_form", value=[])),
        ({}, {"wrapper": ["A=b", "python"]}, fault("wrapper_form", value=["A=b", "python"])),
        ({}, {"wrapper": ["-S", "python"]}, fault("wrapper_form", value=["-S", "python"])),
    ],
)
def test_what_ray_cannot_do_is_refused(
    job: dict[str, Any], changes: dict[str, Any], named: Fault
) -> None:
    with refused(named):
        Ray().render(make({**JOB, **job}, **changes))


@pytest.mark.parametrize("field", hostile.FIELDS)
def test_a_hostile_text_is_refused_by_name_or_is_only_a_word(field: str) -> None:
    for text in CORPUS:
        try:
            spec = hostile.with_text(field, text, JOB)
            sent = submission(spec)
        except (ConfigError, ValidationError) as error:
            message = str(error)
        else:
            assert shlex.split(sent["entrypoint"]) == ["env", "-C", spec.workdir, *spec.wrapper]
            continue
        assert field in message


def test_a_shell_makes_the_words_of_the_wrapper_of_the_entry_point_and_nothing_else(
    tmp_path: Path,
) -> None:
    words = [text for text in CORPUS if text.isprintable()]
    program = "import json, os, sys; print(json.dumps([os.getcwd(), *sys.argv[1:]]))"
    folder = tmp_path / "it's; touch pwned $(touch pwned)"
    folder.mkdir()
    spec = make(JOB, workdir=str(folder), wrapper=[sys.executable, "-c", program, *words])
    argv = ["sh", "-c", submission(spec)["entrypoint"]]  # as Ray does
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == [str(folder), *words]
    assert [path.name for path in tmp_path.rglob("*")] == [folder.name]


def details(status: str, **changes: Any) -> SimpleNamespace:
    defaults = {"message": "m", "error_type": None, "driver_exit_code": None}
    return SimpleNamespace(
        **{
            **defaults,
            "driver_agent_http_address": "http://node-a:52365",
            "status": status,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("seen", "state", "code"),
    [
        (details("PENDING"), "queued", None),
        (details("RUNNING"), "running", None),
        (details("SUCCEEDED", driver_exit_code=0), "succeeded", 0),
        (details("STOPPED"), "cancelled", None),
        (details("FAILED", driver_exit_code=75), "failed", 75),
        (details("FAILED", error_type="JOB_SUPERVISOR_ACTOR_DIED"), "preempted", None),
        (details("FAILED", error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), "preempted", None),
        (details("FAILED", error_type="RUNTIME_ENV_SETUP_FAILURE"), "failed", None),
        (details("SOMETHING_NEW"), "submitted", None),
    ],
)
def test_what_ray_says_is_one_of_our_states(
    seen: SimpleNamespace, state: str, code: int | None
) -> None:
    found = observe(seen)
    assert (found.state, found.exit_code, found.host) == (state, code, "node-a")


def test_a_reason_is_without_the_log_that_ray_adds() -> None:
    message = "exit code 2, last available logs (truncated to 20,000 chars):\nsecret"
    assert observe(details("FAILED", message=message)).reason == "exit code 2"


def test_a_cluster_that_does_not_answer_is_unreachable() -> None:
    answered = threading.Event()  # who waits for the answer waits for ever
    with refused("ray_did_not_answer"):
        module._within(0.05, answered.wait)
    answered.set()


class Handler(BaseHTTPRequestHandler):
    """Ray's REST server, as far as its client asks: statuses and texts as Ray 2.60 gives them."""

    jobs: dict[str, dict[str, Any]]
    knobs: SimpleNamespace

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def reply(self, status: int, body: Any) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/api/version":
            return self.reply(
                200,
                {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": "s"},
            )
        if self.path == "/api/jobs/":
            return self.reply(200, [*self.jobs.values()])
        _, _, name, *rest = self.path.strip("/").split("/")
        if name not in self.jobs:
            return self.reply(404, f"Job {name} does not exist")
        return self.reply(200, {"logs": "step 1\nstep 2\n"} if rest else self.jobs[name])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        if self.path.endswith("/stop"):
            name = self.path.split("/")[3]
            known = name in self.jobs
            self.knobs.stops.append(name)
            return self.reply(
                200 if known else 404, {"stopped": True} if known else f"Job {name} does not exist"
            )
        if self.knobs.status is not None:
            return self.reply(self.knobs.status, "the server says no")
        name = body["submission_id"]
        if name in self.jobs:
            text = (
                f"ValueError: Job with submission_id {name} already exists. Please use a "
                "different submission_id."
            )
            return self.reply(500, f"Traceback (most recent call last):\n{text}\n")
        self.jobs[name] = {"type": "SUBMISSION", "submission_id": name, "status": "RUNNING", **body}
        if self.knobs.loses_reply:
            self.close_connection = True
            return self.connection.close()
        return self.reply(200, {"job_id": name, "submission_id": name})


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    knobs = SimpleNamespace(status=None, loses_reply=False, jobs={}, stops=[], url="")
    handler = type("Bound", (Handler,), {"jobs": knobs.jobs, "knobs": knobs})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    knobs.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in module.OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield knobs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def submit(head: SimpleNamespace) -> str:
    return Ray().submit(Ray().render(make({**JOB, "address": head.url})))


@needs_ray
def test_a_submission_is_found_by_its_token(head: SimpleNamespace) -> None:
    job_id = submit(head)
    assert job_id == f"{head.url}/{TOKEN}"
    assert Ray(head.url).find(TOKEN) == [job_id]
    assert Ray(head.url).find("ft_other_1") == []
    assert head.jobs[TOKEN]["metadata"]["group"] == "fid_nq_base"


@needs_ray
def test_submitting_twice_makes_one_job(head: SimpleNamespace) -> None:
    assert submit(head) == submit(head)
    assert len(head.jobs) == 1


@needs_ray
def test_a_lost_reply_is_unreachable_and_the_job_is_adopted_after_it(head: SimpleNamespace) -> None:
    head.loses_reply = True
    with pytest.raises(Unreachable):
        submit(head)
    head.loses_reply = False
    assert [submit(head)] == Ray(head.url).find(TOKEN)
    assert len(head.jobs) == 1


@needs_ray
@pytest.mark.parametrize(
    ("status", "kind"), [(400, Refused), (403, Unreachable), (500, Unreachable), (503, Unreachable)]
)
def test_only_a_clear_no_is_a_refusal(
    head: SimpleNamespace, status: int, kind: type[Exception]
) -> None:
    head.status = status
    with refused("scheduler_says", kind, words="the server says no"):
        submit(head)


@needs_ray
def test_a_cluster_that_is_down_is_unreachable(head: SimpleNamespace) -> None:
    down = SimpleNamespace(url="http://127.0.0.1:9")
    job_id = f"{down.url}/{TOKEN}"
    backend = Ray(down.url)
    for ask in (
        lambda: submit(down),
        lambda: backend.find(TOKEN),
        lambda: backend.query([job_id]),
        lambda: backend.cancel(job_id),
        lambda: list(backend.logs(job_id, follow=True)),
    ):
        with pytest.raises(Unreachable):
            ask()
    assert backend.check()[-1].is_good is False


@needs_ray
def test_an_environment_that_overrides_the_address_is_told(
    head: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    with refused("ray_address_set"):
        submit(head)
    assert not head.jobs


@needs_ray
def test_a_query_leaves_out_what_ray_does_not_know(head: SimpleNamespace) -> None:
    job_id = submit(head)
    found = Ray().query([f"{head.url}/ft_other_1", job_id])
    assert {key: seen.state for key, seen in found.items()} == {job_id: "running"}


@needs_ray
def test_cancelling_what_ray_has_forgotten_is_fine(head: SimpleNamespace) -> None:
    Ray().cancel(submit(head))
    Ray().cancel(f"{head.url}/ft_other_1")  # answered with 404, which is no error
    assert head.stops == [TOKEN, "ft_other_1"]


@needs_ray
def test_the_log_comes_line_by_line(head: SimpleNamespace) -> None:
    assert list(Ray().logs(submit(head), follow=False)) == ["step 1", "step 2"]
    for follow in (False, True):
        assert list(Ray().logs(f"{head.url}/ft_other_1", follow=follow)) == []


@needs_ray
def test_check_says_whether_the_cluster_answers(head: SimpleNamespace) -> None:
    assert [finding.is_good for finding in Ray(head.url).check()] == [True, True]


def test_without_ray_every_request_says_what_to_install() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("ray is installed")
    with refused("package_of_backend", extra="ray"):
        Ray().find(TOKEN)
    assert Ray().check()[0].is_good is False


def test_every_key_that_ray_does_not_know_is_listed_once() -> None:
    assert len({*checks.FOREIGN, *checks.K8S_ONLY}) == len(checks.FOREIGN) + len(checks.K8S_ONLY)
