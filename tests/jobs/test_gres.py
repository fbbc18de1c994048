"""Which GPUs a `gres` asks for: a table, and the same table asked of a real Slurm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.backends.slurm.backend import Slurm
from jobs.config import JobConfig, Resources
from jobs.errors import Refused
from jobs.gres import gpus_of
from jobs.protocol import JobSpec
from jobs.record.paths import RunFolder
from jobs.record.row import starts_of
from tests.jobs.real_slurm import RealSlurm, need_slurm, real_slurm, wait_for
from tests.wording import Fault, fault, refused
from trainer.config.block import validate
from trainer.errors import ConfigError

TABLE = {
    "gpu": 1,
    "gpu:2": 2,
    "gpu:0": 0,
    "gpu:01": 1,
    "gpu:a100": 1,
    "gpu:a100:4": 4,
    "gpu:v100:4,nvme:3600": 4,
    "gpu:4,lustre:1": 4,
    "nvme:3600,gpu:4": 4,
    "gpu:1,gpu:a100:2": 3,
    "gpu:2,nvme": 2,
    "shard:10": 0,
    "mps:100": 0,
    "nvme:3600": 0,
    "tmpfs:100G": 0,
    "craynetwork:1,gpu:2": 2,
    "gpu:2k": 2048,
    "gpu=2": 2,
    "gres/gpu:2": 2,
    "gres:gpu:2": 2,
    "gres/gpu:a100=4": 4,
    "gpu:1g.10gb:2": 2,
    "none": 0,
}
UNREADABLE = (
    "gpu:a100:4(S:0-1)",
    "gpu:",
    "gpu::2",
    ":2",
    "gpu:-1",
    "gpu:2x",
    "gpu:a:b:2",
    "gpu:2,",
    ",gpu:2",
    "gpu: 2",
    "gpu:2 ",
    "gpu:two words",
    "4",
    "gpu;touch x",
)


@pytest.mark.parametrize(("gres", "gpus"), TABLE.items(), ids=TABLE)
def test_only_entries_named_gpu_count_and_they_add_up(gres: str, gpus: int) -> None:
    assert gpus_of(gres) == gpus
    assert validate(JobConfig, {"gres": gres}).gpus == gpus


@pytest.mark.parametrize("gres", UNREADABLE[1:])
def test_a_gres_that_cannot_be_read_is_refused_with_the_form_that_is_wanted(gres: str) -> None:
    with refused("gres_form"):
        validate(JobConfig, {"gres": gres})


def test_the_sockets_that_scontrol_shows_are_refused_with_what_to_write() -> None:
    with refused("gres_sockets", instead="gpu:a100:4"):
        validate(JobConfig, {"gres": UNREADABLE[0]})


def test_a_record_with_a_gres_that_is_refused_now_is_still_shown(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    attempt.spec.write_text(json.dumps({"job": {"gres": "gpu:a100:4(S:0-1)", "nodes": 2}}))
    attempt.start_file(1).write_text(json.dumps({"at": "2026-01-01T00:00:00+00:00"}))
    assert [start.gpus for start in starts_of(attempt)] == [0]


@pytest.mark.parametrize(
    "told",
    [
        fault("sbatch_exclusive", key="exclusive"),
        fault("key_of_others", key="gpus_per_node", ours="resources.gpu"),
        fault("sbatch_ntasks", key="ntasks"),
    ],
)
def test_an_option_of_sbatch_that_is_no_key_is_told_what_stands_for_it(told: Fault) -> None:
    with refused(told) as caught:
        validate(JobConfig, {told.fields["key"]: 4})
    assert "'exclude'" not in str(caught.value)


@pytest.mark.parametrize("text", ["a100|h100", "a100&nvlink", "[rack1|rack2]", "(a|b)&c", "a*2"])
def test_constraints_are_written_as_slurm_combines_them(text: str) -> None:
    assert validate(JobConfig, {"constraint": text}).constraint == text
    for wrong in (f"{text} x", f"-{text}", f"{text};x", f"{text}\n", f"{text}$x", "`x`"):
        with pytest.raises(ConfigError):
            validate(JobConfig, {"constraint": wrong})


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealSlurm]:
    need_slurm()
    with real_slurm() as running:
        yield running


def test_a_real_slurm_gives_a_job_as_many_gpus_as_are_counted(
    cluster: RealSlurm, tmp_path: Path
) -> None:
    slurm = Slurm()
    code = (
        "import os; open('aside', 'w').write(os.environ.get('SLURM_GPUS_ON_NODE', '0')); "
        "os.rename('aside', 'gpus')"
    )
    sent: dict[str, tuple[str, Path]] = {}
    refused: list[str] = []
    for number, gres in enumerate([*TABLE, *UNREADABLE[1:9]]):
        folder = tmp_path / str(number)
        (folder / "attempts" / "1").mkdir(parents=True)
        job = JobConfig(resources=Resources(mem=1)).model_copy(update={"gres": gres})
        spec = JobSpec(
            token=f"ft_gres_{number}",
            exp_id=f"{number:032x}",
            digest="",
            group="tests",
            attempt=1,
            backend="slurm",
            folder=str(folder),
            workdir=str(folder),
            wrapper=[sys.executable, "-I", "-S", "-c", code],
            launcher=[],
            program=[],
        ).model_copy(update={"job": job})
        try:
            sent[gres] = slurm.submit(slurm.render(spec)), folder
        except Refused:
            refused.append(gres)
    for gres, (job_id, folder) in sent.items():
        if gres in UNREADABLE:
            cluster.command("scancel", job_id)
            continue
        wait_for((folder / "gpus").exists, within_s=60, what=f"{gres} has run as {job_id}")
        assert int((folder / "gpus").read_text()) == gpus_of(gres), gres
    taken = {gres: gpus_of(gres) for gres in sent if gres in TABLE}
    assert {"gpu": 1, "gpu:2": 2, "gpu:0": 0, "gpu:2,nvme": 2, "nvme:3600": 0}.items() <= (
        taken.items()
    )
    print(f"SHOW gres: {len(TABLE)} read, {len(UNREADABLE)} refused; Slurm itself gave {taken}")
