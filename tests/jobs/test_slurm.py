"""The Slurm backend against a real Slurm: two virtual nodes on loopback
(tests/jobs/real_slurm.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.slurm.backend import Slurm
from jobs.config import JobConfig
from jobs.errors import NotYet, Refused, Unreachable
from jobs.job_state import Observed
from jobs.protocol import ArrayBackend, Backend, JobSpec
from tests.jobs.real_slurm import RealSlurm, need_slurm, real_slurm, wait_for
from tests.wording import Fault, fault, refused
from trainer.config.block import validate
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEP = "import time; time.sleep(60)"
SOON_S = 90.0  # a limit, not a wait: the machine may be busy
CORPUS = (
    "; touch CANARY",
    "$(touch CANARY)",
    "`touch CANARY`",
    "' ; touch CANARY ; '",
    '" ; touch CANARY ; "',
    "a\ntouch CANARY\n",
    "a\n#SBATCH --array=0-9",
    "a\r\ntouch CANARY",
    "nul\0byte",
    "| touch CANARY",
    "&& touch CANARY &",
    "--wrap=touch CANARY",
    "-n2",
    "../up",
    "%j%x%u",
    "back\\slash",
    "$HOME ~ * ? [a] {a,b} !x #y",
    "é 漢字 \u2028 \U0001f525",
    "\udcff",
    " leading and trailing ",
)


UNCHECKED = [
    (key, text) for key in ("account", "qos") for text in ("../up", "%j%x%u")
]  # without accounting Slurm takes any


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealSlurm]:
    need_slurm()
    with real_slurm() as running:
        yield running


@pytest.fixture
def slurm(cluster: RealSlurm) -> Slurm:
    return Slurm()


class Specs:
    """Makes specs with tokens and folders of their own."""

    def __init__(self, base: Path) -> None:
        self.base, self.made = base, 0

    def __call__(
        self, code: str = "pass", *arguments: str, folder: str | None = None, **job: Any
    ) -> JobSpec:
        self.made += 1
        run = self.base / (folder or f"{self.made:032x}")
        (run / "attempts" / "1").mkdir(parents=True, exist_ok=True)
        values = {"resources": {"cpu": 1, "mem": 1, "gpu": 0}, **job}
        name = f"{self.base.name}_{self.made}".lower().replace("-", "_")
        return JobSpec(
            token=f"ft_{name}"[-64:],
            exp_id=f"{self.made:032x}",
            digest="0" * 64,
            group="tests",
            attempt=1,
            backend="slurm",
            folder=str(run),
            workdir=str(run),
            wrapper=[*PYTHON, code, *arguments],
            launcher=[sys.executable],
            program=["trainval.py"],
            job=validate(JobConfig, values),
        )


@pytest.fixture
def make(tmp_path: Path) -> Specs:
    return Specs(tmp_path)


def sent(slurm: Slurm, spec: JobSpec) -> str:
    return slurm.submit(slurm.render(spec))


def reached(slurm: Slurm, job_id: str, *states: str) -> Observed:
    """What the scheduler says of a job once it is in one of these states."""
    seen: list[Observed] = []

    def is_there() -> bool:
        seen[:] = slurm.query([job_id]).values()
        return bool(seen) and seen[0].state in states

    try:
        wait_for(is_there, within_s=SOON_S, what=f"{job_id} is {states}")
    except AssertionError as error:
        raise AssertionError(f"{error}, but {seen}") from None
    return seen[0]


def text_of(spec: JobSpec, name: str) -> str:
    return (Path(spec.folder) / name).read_text()


def test_it_is_a_backend_that_takes_arrays(slurm: Slurm) -> None:
    backend: Backend = slurm
    assert isinstance(backend, ArrayBackend)


def test_a_job_runs_in_its_workdir_and_succeeds(slurm: Slurm, make: Specs) -> None:
    spec = make("import os; open('where', 'w').write(os.getcwd())")
    job_id = sent(slurm, spec)
    observed = reached(slurm, job_id, "succeeded")
    assert (observed.exit_code, observed.reason) == (0, None)
    assert observed.host in ("n1", "n2")
    assert text_of(spec, "where") == spec.workdir


def test_exit_codes_and_signals_are_told_apart(slurm: Slurm, make: Specs) -> None:
    failed = sent(slurm, make("raise SystemExit(75)"))
    killed = sent(slurm, make("import os; os.kill(os.getpid(), 9)"))
    assert reached(slurm, failed, "failed").exit_code == 75
    observed = reached(slurm, killed, "failed")
    assert observed.exit_code == 128 + 9
    assert "signal 9" in str(observed.reason)


def test_the_job_gets_a_small_environment_without_a_login_shell(
    slurm: Slurm, make: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET_OF_MINE", "x")
    monkeypatch.setenv("SLURM_JOB_ID", "424242")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-9")
    monkeypatch.setenv("SQUEUE_PARTITION", "high")
    spec = make("import json, os; json.dump(dict(os.environ), open('env', 'w'))")
    job_id = sent(slurm, spec)
    reached(slurm, job_id, "succeeded")
    environment = json.loads(text_of(spec, "env"))
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["HOME"] == os.environ["HOME"]
    assert environment["SLURM_JOB_ID"] == job_id
    assert not {"SOME_SECRET_OF_MINE", "SLURM_GET_USER_ENV", "SLURM_EXPORT_ENV"} & set(environment)


def test_slurms_own_text_lies_in_the_folder_of_the_attempt(slurm: Slurm, make: Specs) -> None:
    spec = make("print('hello'); print('there', end='')")
    job_id = sent(slurm, spec)
    reached(slurm, job_id, "succeeded")
    assert (Path(spec.folder) / "attempts" / "1" / f"slurm-{job_id}.txt").exists()
    assert list(slurm.logs(job_id, follow=False)) == ["hello", "there"]
    assert list(slurm.logs("999999", follow=False)) == []


def test_a_log_can_be_followed_until_the_job_has_ended(
    slurm: Slurm, make: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.backends.slurm.backend.ALIVE_S", 0.2)
    job_id = sent(slurm, make("import time; print('one', flush=True); time.sleep(1); print('two')"))
    assert list(slurm.logs(job_id, follow=True)) == ["one", "two"]


def test_a_running_job_is_cancelled_and_once_more_does_no_harm(slurm: Slurm, make: Specs) -> None:
    job_id = sent(slurm, make(SLEEP))
    reached(slurm, job_id, "running")
    slurm.cancel(job_id)
    assert reached(slurm, job_id, "cancelled").reason == "CANCELLED"
    slurm.cancel(job_id)
    slurm.cancel("999999")


def test_a_pending_job_is_cancelled(slurm: Slurm, make: Specs) -> None:
    first = make(SLEEP)
    running, pending = sent(slurm, first), sent(slurm, first)
    slurm.cancel(pending)
    assert reached(slurm, pending, "cancelled").host is None
    slurm.cancel(running)


def test_a_second_copy_of_an_attempt_waits_for_the_first(slurm: Slurm, make: Specs) -> None:
    spec = make(SLEEP)
    first, second = sent(slurm, spec), sent(slurm, spec)
    reached(slurm, first, "running")
    assert reached(slurm, second, "queued").reason == "Dependency"
    assert slurm.find(spec.token) == [first, second]
    slurm.cancel(second)
    slurm.cancel(first)


def test_a_job_is_found_by_its_token_alive_and_dead(slurm: Slurm, make: Specs) -> None:
    spec = make()
    assert slurm.find(spec.token) == []
    job_id = sent(slurm, spec)
    assert slurm.find(spec.token) == [job_id]
    reached(slurm, job_id, "succeeded")
    assert slurm.find(spec.token) == [job_id]


def test_an_array_runs_no_more_than_k_at_once_and_is_found_by_its_token(
    slurm: Slurm, make: Specs
) -> None:
    specs = [make(), make(), make()]
    # What `python -m jobs.node.wrapper --array INDEX` finds in the folder where it starts.
    room = Path(specs[0].workdir) / "jobs" / "node"
    room.mkdir(parents=True)
    (room / "wrapper.py").write_text(
        "import os, sys, time; from pathlib import Path; me = os.environ['SLURM_ARRAY_TASK_ID']\n"
        "here = Path(sys.argv[2]).parent; (here / f'on-{me}').touch(); time.sleep(0.3)\n"
        "assert len(list(here.glob('on-*'))) == 1; (here / f'on-{me}').rename(here / "
        "f'done-{me}'); sys.exit(int(me))\n"
    )
    specs = [spec.model_copy(update={"workdir": specs[0].workdir}) for spec in specs]
    index_file = make.base / "array.json"
    array = slurm.render_array(
        specs, token="fta_" + specs[0].token[3:], index_file=str(index_file), max_parallel=1
    )
    array_id = slurm.submit(array)
    elements = [slurm.element(array_id, index) for index in range(3)]
    assert slurm.find(array.token) == [array_id]
    assert set(slurm.query(elements)) == set(elements)
    codes = [reached(slurm, element, "succeeded", "failed").exit_code for element in elements]
    assert codes == [0, 1, 2], [list(slurm.logs(element, follow=False)) for element in elements]
    assert sorted(path.name for path in make.base.glob("done-*")) == ["done-0", "done-1", "done-2"]
    assert (make.base / f"slurm-{elements[1]}.txt").exists()


def test_an_element_of_an_array_is_cancelled_alone(slurm: Slurm, make: Specs) -> None:
    room = make.base / "jobs" / "node"
    room.mkdir(parents=True)
    (room / "wrapper.py").write_text(SLEEP)
    specs = [make().model_copy(update={"workdir": str(make.base)}) for _ in range(2)]
    index_file = str(make.base / "array.json")
    array_id = slurm.submit(
        slurm.render_array(specs, token="fta_alone", index_file=index_file, max_parallel=None)
    )
    elements = [slurm.element(array_id, index) for index in range(2)]
    for element in elements:
        reached(slurm, element, "running")
    slurm.cancel(elements[0])
    assert reached(slurm, elements[0], "cancelled")
    assert slurm.query(elements)[elements[1]].state == "running"
    slurm.cancel(array_id)
    reached(slurm, elements[1], "cancelled")


def test_a_waiting_element_that_a_person_cancelled_is_cancelled_and_not_forgotten(
    slurm: Slurm, cluster: RealSlurm, make: Specs
) -> None:
    room = make.base / "jobs" / "node"
    room.mkdir(parents=True)
    (room / "wrapper.py").write_text(SLEEP)
    specs = [make().model_copy(update={"workdir": str(make.base)}) for _ in range(4)]
    index_file = str(make.base / "array.json")
    array_id = slurm.submit(
        slurm.render_array(specs, token="fta_waiting", index_file=index_file, max_parallel=1)
    )
    elements = [slurm.element(array_id, index) for index in range(4)]
    reached(slurm, elements[0], "running")
    cluster.command("scancel", elements[2])
    observed = slurm.query(elements)
    assert [observed[element].state for element in elements] == [
        *("running", "queued", "cancelled", "queued"),
    ]
    assert observed[elements[2]].is_missing
    assert slurm.query([elements[2]])[elements[2]].state == "cancelled"
    assert slurm.query(["987654_2", "987654"]) == {}
    slurm.cancel(array_id)
    for element in elements:
        reached(slurm, element, "cancelled")


@pytest.mark.parametrize(
    ("said", "queue", "kind"),
    [
        ("QOSMaxSubmitJobPerUserLimit", "", NotYet),
        ("AssocMaxSubmitJobLimit", "", NotYet),
        ("AssocGrpSubmitJobsLimit", "", NotYet),
        ("", "17", NotYet),  # the sentence alone, while own jobs stand in the queue
        ("", "", Refused),  # and with none there, which could end
        ("QOSMaxCpuPerUserLimit", "17", Refused),
    ],
)
def test_a_limit_on_the_number_of_jobs_passes_by_itself(
    make: Specs, monkeypatch: pytest.MonkeyPatch, said: str, queue: str, kind: type[Exception]
) -> None:
    policy = "Batch job submission failed: Job violates accounting/QOS policy"
    text = f"sbatch: error: {said}\\nsbatch: error: {policy} (job submit limit, user's size)"
    for name, script in (
        ("sbatch", f'printf "{text}" >&2; exit 1'),
        ("squeue", f"printf '{queue}'"),
    ):
        program = make.base / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{make.base}:{os.environ['PATH']}")
    rendered = Slurm().render(make())
    with pytest.raises(kind):
        Slurm().submit(rendered)


def test_what_cannot_share_an_array_is_refused(slurm: Slurm, make: Specs) -> None:
    specs = [make(), make(qos="other")]
    with refused("array_differs", keys=re.compile("job.*")):
        slurm.render_array(specs, token="fta_mixed", index_file="/x/index.json", max_parallel=None)


def test_the_largest_array_is_what_the_cluster_says(slurm: Slurm) -> None:
    assert slurm.max_array() == 101


def test_a_held_job_names_its_cure(slurm: Slurm, cluster: RealSlurm, make: Specs) -> None:
    job_id = sent(slurm, make(SLEEP))
    reached(slurm, job_id, "running")
    cluster.command("scontrol", "requeuehold", job_id)
    observed = reached(slurm, job_id, "held")
    assert f"`scontrol release {job_id}`" in str(observed.reason)
    slurm.cancel(job_id)


def test_a_drained_node_is_told_with_its_cure(
    slurm: Slurm, cluster: RealSlurm, make: Specs
) -> None:
    cluster.command("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=Duplicate jobid")
    try:
        two_nodes, named, other = (
            sent(slurm, make(nodes=2)),
            sent(slurm, make(nodelist="n1")),
            sent(slurm, make(SLEEP, resources={"cpu": 2, "mem": 1})),
        )
        for job_id in (two_nodes, named):
            reason = str(reached(slurm, job_id, "held").reason)
            assert "n1 (Duplicate jobid)" in reason
            assert "`scontrol update NodeName=n1 State=RESUME`" in reason
        assert reached(slurm, other, "running").host == "n2"
        waiting = sent(
            slurm, make(resources={"cpu": 2, "mem": 1})
        )  # the other node is in use, and will be free
        assert reached(slurm, waiting, "queued", "held").state == "queued"
    finally:
        cluster.command("scontrol", "update", "NodeName=n1", "State=RESUME")
    slurm.cancel(other)
    for job_id in (two_nodes, named, waiting):
        reached(slurm, job_id, "succeeded")


def test_a_dependent_job_waits_and_is_cancelled_when_what_it_waits_for_fails(
    slurm: Slurm, make: Specs
) -> None:
    first = sent(slurm, make("import time; time.sleep(0.5); raise SystemExit(1)"))
    second = sent(slurm, make().model_copy(update={"after": [first]}))
    assert slurm.query([second])[second].reason == "Dependency"
    assert "DependencyNeverSatisfied" in str(reached(slurm, second, "cancelled").reason)


def test_preempted_jobs_are_rerun_or_end_as_preempted(slurm: Slurm, make: Specs) -> None:
    whole = {"cpu": 2, "mem": 1}
    again = make(SLEEP, resources=whole, partition="low")
    once = make(SLEEP, resources=whole, partition="low", requeue=False)
    ids = [sent(slurm, again), sent(slurm, once)]
    for job_id in ids:
        reached(slurm, job_id, "running")
    urgent = sent(
        slurm, make("import time; time.sleep(1)", resources=whole, partition="high", nodes=2)
    )
    observed = reached(slurm, ids[0], "queued")
    assert (observed.restarts, observed.will_rerun) == (1, True)
    assert "PREEMPTED" in str(reached(slurm, ids[1], "preempted").reason)
    reached(slurm, urgent, "succeeded")
    slurm.cancel(ids[0])


def test_a_requeued_job_keeps_its_id_and_counts_its_restarts(
    slurm: Slurm, cluster: RealSlurm, make: Specs
) -> None:
    spec = make(
        "import os, time; n = os.environ.get('SLURM_RESTART_COUNT', '0'); print(n); time.sleep(0 "
        "if n > '0' else 60)"
    )
    job_id = sent(slurm, spec)
    reached(slurm, job_id, "running")
    cluster.command("scontrol", "requeue", job_id)
    reached(slurm, job_id, "queued")
    cluster.start_now(job_id)
    done = reached(slurm, job_id, "succeeded", "failed")
    assert (done.state, done.restarts) == ("succeeded", 1), list(slurm.logs(job_id, follow=False))
    assert list(slurm.logs(job_id, follow=False))[-1] == "1"


def test_the_launcher_runs_once_on_every_node_and_meets_at_the_first(
    slurm: Slurm, make: Specs
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = make.base / "rank.py"
    rank.write_text(
        "import os, socket, sys, time\n"
        "host, port = sys.argv[1].split(':')\n"
        "me = os.environ['SLURMD_NODENAME'] + ' ' + os.environ['SLURM_CPUS_PER_TASK']\n"
        "if os.environ['SLURM_NODEID'] == '0':\n"
        "    with socket.create_server((host, int(port))) as server:\n"
        "        open('met', 'w').write(me + ', ' + server.accept()[0].recv(99).decode())\n"
        "else:\n"
        "    for _ in range(100):\n"
        "        try:\n"
        "            socket.create_connection((host, int(port))).sendall(me.encode()); break\n"
        "        except ConnectionRefusedError: time.sleep(0.1)\n"
    )
    launcher = [*PYTHON[:-1], str(rank), f"HEAD_NODE:{port}"]
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from jobs.node import host, rendezvous; "
        f"argv = rendezvous.fill_in({launcher!r}, {{}}); "
        "argv = host.on_each_node(argv, {'job': {'nodes': 2}}); "
        "assert argv[0] == 'srun'; os.execvp(argv[0], argv)"
    )
    spec = make(code, nodes=2, resources={"cpu": 2, "mem": 1, "gpu": 1})
    job_id = sent(slurm, spec)
    observed = reached(slurm, job_id, "succeeded", "failed")
    assert observed.state == "succeeded", list(slurm.logs(job_id, follow=False))
    assert text_of(spec, "met") == "n1 2, n2 2"


def test_a_dry_run_says_when_the_job_would_start(slurm: Slurm, make: Specs) -> None:
    spec = make(resources={"cpu": 1, "mem": 1, "gpu": 2})
    said = slurm.rehearse(slurm.render(spec))
    assert "to start at" in str(said)
    assert slurm.find(spec.token) == []


@pytest.mark.parametrize(
    "job",
    [
        {"partition": "nope"},
        {"gres": "gpu:9"},
        {"gres": "tpu:1"},
        {"resources": {"cpu": 1, "mem": 999}},
        {"reservation": "nope"},
        {"constraint": "nope"},
        {"nodelist": "nope"},
        {"time": "1:99999999999"},
        {"partition": "../low"},
    ],
    ids=str,
)
def test_what_slurm_cannot_run_is_refused_in_its_own_words(
    slurm: Slurm, make: Specs, job: dict[str, Any]
) -> None:
    try:
        rendered = slurm.render(make(**job))
    except ConfigError:
        return
    for send in (slurm.rehearse, slurm.submit):
        with refused(
            "scheduler_says", Refused, words=re.compile("nvalid|specification|not available")
        ):
            send(rendered)
    found = slurm.query(
        slurm.find(rendered.token)
    )  # Slurm keeps some of what it refuses, as failed from the start
    assert all(
        (job.state, job.host, job.exit_code) == ("failed", None, None) for job in found.values()
    ), found


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ({"image": "x"}, fault("job_keys_unknown_to", keys="image")),
        ({"bid": 3}, fault("job_keys_unknown_to", keys="bid")),
        ({"data": ["a:/b"]}, fault("job_keys_unknown_to", keys="data")),
        ({"account_id": "x"}, fault("job_keys_unknown_to", keys="account_id")),
        ({"namespace": "x"}, fault("job_keys_unknown_to", keys="namespace")),
        ({"wandb_key_secret": "a/b"}, fault("job_keys_unknown_to", keys="wandb_key_secret")),
        ({"resources": {"gpu_model": "A100"}}, fault("gpu_model_of_slurm", value="A100")),
    ],
)
def test_a_key_of_another_scheduler_is_named(make: Specs, job: dict[str, Any], name: Fault) -> None:
    with refused(name):
        Slurm().render(make(**job))


def test_every_wish_of_the_job_dictionary_becomes_one_argument(make: Specs) -> None:
    values: dict[str, Any] = {
        "account": "a",
        "qos": "q",
        "constraint": "c",
        "reservation": "r",
        "exclude": "n[1-2]",
    }
    values |= {"max_run_time": 3600, "grace_s": 100, "signal_s": 90, "requeue": False, "nodes": 3}
    argv = Slurm().render(make(**values, resources={"cpu": 4, "mem": 5, "gpu": 2})).argv
    wanted = {
        "--account=a",
        "--qos=q",
        "--constraint=c",
        "--reservation=r",
        "--exclude=n[1-2]",
        "--time=1:02:40",
    }
    wanted |= {
        "--signal=B:USR1@90",
        "--no-requeue",
        "--nodes=3",
        "--cpus-per-task=4",
        "--mem=5G",
        "--gres=gpu:2",
    }
    assert wanted <= set(argv)


@pytest.mark.parametrize(
    "key", ["partition", "account", "qos", "gres", "constraint", "nodelist", "exclude", "time"]
)
def test_no_value_of_the_job_dictionary_is_more_than_a_value(
    slurm: Slurm, make: Specs, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make.base)
    for text in CORPUS:
        with contextlib.suppress(ConfigError, Refused):  # most of them before Slurm sees them
            slurm.rehearse(slurm.render(make(**{key: text})))
            assert (key, text) in UNCHECKED
    assert not list(make.base.rglob("CANARY"))


def test_no_folder_and_no_word_of_the_wrapper_is_more_than_a_word(
    slurm: Slurm, make: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make.base)
    code = "import os, sys; open('seen', 'w').write(repr([os.getcwd(), sys.argv[1:]]))"
    running: dict[str, JobSpec] = {}
    refused: list[str] = []
    for text in CORPUS:
        folder = text.replace("\0", "")
        spec = make(code, text, folder=f"{folder}-{len(running)}/run")
        try:
            running[sent(slurm, spec)] = spec
        except ConfigError:
            refused.append(text)
    for job_id, spec in running.items():
        reached(slurm, job_id, "succeeded")
        assert text_of(spec, "seen") == repr([os.path.realpath(spec.workdir), [spec.wrapper[-1]]])
        assert (Path(spec.folder) / "attempts" / "1" / f"slurm-{job_id}.txt").exists()
    assert all(any(letter in text for letter in "\n\r\0\\\udcff") for text in refused), refused
    assert not list(make.base.rglob("CANARY"))


def test_jobs_of_a_bad_name_or_id_are_never_asked_for(slurm: Slurm, make: Specs) -> None:
    for text in CORPUS:
        assert slurm.find(text) == []
        assert slurm.query([text]) == {}
        assert list(slurm.logs(text, follow=False)) == []
        with pytest.raises(Refused):
            slurm.cancel(text)
        for change in ({"token": text}, {"after": [text]}):
            with pytest.raises(ConfigError):
                slurm.render(make().model_copy(update=change))


def test_accounting_tells_of_jobs_that_the_controller_has_forgotten(
    slurm: Slurm, make: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sacct = make.base / "sacct"  # prints what sacct 22.05.8 with a slurmdbd printed
    sacct.write_text(
        "#!/bin/sh\nexec cat "
        "<<'END'\n9000001|COMPLETED|0:0|n1\n9000002|FAILED|75:0|n1\n9000003|FAILED|0:9|n2\n"
        "9000004|CANCELLED by 0|0:0|None "
        "assigned\n9000005|NODE_FAIL|0:0|n[1-2]\n9000006_1|OUT_OF_MEMORY|0:125|n1\n"
        "9000007|RUNNING|0:0|n1\n9000009_[2,4-8:2%3]|CANCELLED by 0|0:0|None assigned\nEND\n"
    )
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{make.base}:{os.environ['PATH']}")
    ids = [*(f"900000{number}" for number in range(1, 6)), "9000006_1", "9000007", "9000008"]
    ids += [f"9000009_{place}" for place in range(10)]
    assert slurm.query(ids) == {
        "9000001": Observed("succeeded", host="n1", exit_code=0),
        "9000002": Observed("failed", "FAILED", "n1", exit_code=75),
        "9000003": Observed("failed", "FAILED, signal 9", "n2", exit_code=137),
        "9000004": Observed("cancelled", "CANCELLED by 0", never_ran=True),
        "9000005": Observed("preempted", "NODE_FAIL", "n[1-2]", exit_code=0),
        "9000006_1": Observed("oom", "OUT_OF_MEMORY", "n1"),
        **{
            f"9000009_{place}": Observed("cancelled", "CANCELLED by 0", never_ran=True)
            for place in (2, 4, 6, 8)
        },
    }  # and one that is said to run while the controller does not know it is not there


def test_doctor_tells_of_programs_controller_accounting_and_partitions(slurm: Slurm) -> None:
    findings = {finding.name: finding for finding in slurm.check()}
    assert "22." in findings["controller"].text or "Slurm" in findings["controller"].text
    assert findings["controller"].is_good
    assert "none is kept" in findings["accounting"].text
    assert findings["partition low*"].is_good
    assert not findings["partition off"].is_good


def test_a_machine_without_slurm_says_so(make: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(make.base))
    slurm, spec = Slurm(), make()
    assert [finding.is_good for finding in slurm.check()] == [False]
    with refused("program_not_on_path"):
        slurm.submit(slurm.render(spec))
    with pytest.raises(Unreachable):
        slurm.query(["1"])


@pytest.mark.long
def test_a_killed_controller_is_unreachable_and_knows_the_jobs_when_it_is_back(
    slurm: Slurm, cluster: RealSlurm, make: Specs
) -> None:
    spec = make("import time; time.sleep(900)")  # cancelled below: it must outlast every wait
    job_id = sent(slurm, spec)
    reached(slurm, job_id, "running")
    rendered = slurm.render(make())
    # That a job runs is not saved for minutes unless something else happens, another job for example.
    reached(slurm, sent(slurm, make()), "succeeded")
    cluster.wait_saved(spec.token)
    cluster.kill_controller()
    try:
        asks: list[Callable[[], object]] = [
            lambda: slurm.query([job_id]),
            lambda: slurm.find(spec.token),
            lambda: slurm.cancel(job_id),
        ]
        asks += [lambda: slurm.submit(rendered), lambda: slurm.rehearse(rendered), slurm.max_array]
        with ThreadPoolExecutor(len(asks)) as pool:  # each client tries for a while
            failures = [job.exception() for job in [pool.submit(ask) for ask in asks]]
        assert [type(failure) for failure in failures] == [Unreachable] * len(asks), failures
        assert [finding.is_good for finding in slurm.check()] == [True, False]
    finally:
        cluster.start_controller()
    assert slurm.find(spec.token) == [job_id]
    assert slurm.find(rendered.token) == []
    assert reached(slurm, job_id, "running", "held", "queued")
    slurm.cancel(job_id)
    reached(slurm, job_id, "cancelled")


@pytest.mark.long
def test_a_job_that_slurm_has_forgotten_is_left_out(cluster: RealSlurm, make: Specs) -> None:
    with real_slurm(min_job_age_s=2) as forgetful:
        slurm, spec = Slurm(), make()
        job_id = sent(slurm, spec)
        reached(slurm, job_id, "succeeded")
        forgetful.wait_for(
            lambda: slurm.query([job_id]) == {}, within_s=SOON_S, what="the job is forgotten"
        )
        assert slurm.query([job_id, "77"]) == {}
        assert slurm.find(spec.token) == []
        assert list(slurm.logs(job_id, follow=False)) == []
        slurm.cancel(job_id)


def test_the_wrappers_own_python_gets_the_library_path_that_the_training_gets(
    slurm: Slurm, make: Specs
) -> None:
    libraries = "/apps/python 3.11/lib:$HOME/`x`"
    code = "import os; open('seen', 'w').write(os.environ.get('LD_LIBRARY_PATH', '-'))"
    for environment, seen in (({"LD_LIBRARY_PATH": libraries, "A": "b"}, libraries), ({}, "-")):
        spec = make(code).model_copy(update={"environment": environment})
        reached(slurm, sent(slurm, spec), "succeeded")
        assert text_of(spec, "seen") == seen
    with refused("script_control_character", value="a\x1bb"):
        slurm.render(make().model_copy(update={"environment": {"LD_LIBRARY_PATH": "a\x1bb"}}))


def test_a_wrapper_that_could_not_start_names_the_file_with_its_output(
    slurm: Slurm, make: Specs
) -> None:
    spec = make("import sys; print('libpython is not there', file=sys.stderr); sys.exit(127)")
    job_id = sent(slurm, spec)
    observed = reached(slurm, job_id, "failed")
    assert f"`logs` shows slurm-{job_id}.txt, where its output is" in str(observed.reason)
    assert list(slurm.logs(job_id, follow=False)) == ["libpython is not there"]
