"""--python_binary is read as words; whatever a shell would do with it is refused."""

from __future__ import annotations

import pytest

from jobs.config import JobConfig, Resources
from jobs.submit.launch_line import processes, read
from tests.wording import refused

EXP_ID = "ab12cd" + "0" * 26


def job(gpu: int = 0, nodes: int = 1) -> JobConfig:
    return JobConfig(resources=Resources(gpu=gpu), nodes=nodes)


@pytest.mark.parametrize(
    ("text", "gpu", "activate", "argv"),
    [
        ("", 0, None, ["/env/bin/python3"]),
        ("", 1, None, ["/env/bin/python3"]),
        ("", 4, None, ["/env/bin/python3", "-m", "torch.distributed.run", "--nproc-per-node", "4"]),
        ("python", 0, None, ["python"]),
        ("python3.11 -u", 0, None, ["python3.11", "-u"]),
        ("torchrun --nproc-per-node NGPUS", 8, None, ["torchrun", "--nproc-per-node", "8"]),
        ("torchrun --nproc-per-node=NGPUS", 0, None, ["torchrun", "--nproc-per-node=1"]),
        ("deepspeed --num_gpus NGPUS", 2, None, ["deepspeed", "--num_gpus", "2"]),
        # the published forms
        (
            "source activate /mnt/home/envs/p2 ; /mnt/home/envs/p2/bin/torchrun --nproc-per-node "
            "NGPUS ",
            4,
            "/mnt/home/envs/p2",
            ["/mnt/home/envs/p2/bin/torchrun", "--nproc-per-node", "4"],
        ),
        (
            "conda activate lathe; torchrun --nproc-per-node NGPUS",
            2,
            "lathe",
            ["torchrun", "--nproc-per-node", "2"],
        ),
        ("source /envs/a/bin/activate; python", 0, "/envs/a/bin/activate", ["python"]),
    ],
)
def test_launch_lines_are_read(text: str, gpu: int, activate: str | None, argv: list[str]) -> None:
    launch = read(text, job(gpu), python="/env/bin/python3", exp_id=EXP_ID)
    assert (launch.activate, list(launch.argv)) == (activate, argv)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "rm -rf /",
            "python; touch x",
            "python && touch x",
            "python | tee x",
            "$(touch x)",
            "`touch x`",
            "python > x",
        ),
        *(
            "python\ntouch x",
            "python\0",
            "source activate a; source activate b; python",
            "source activate -x; python",
        ),
        *(
            "source a b c; python",
            "bash -c python",
            "'",
            "python &",
            "source activate $HOME; python",
            "sh python",
        ),
    ],
)
def test_what_a_shell_would_run_is_refused(text: str) -> None:
    with refused("python_binary"):
        read(text, job(), python="python", exp_id=EXP_ID)


def test_several_nodes_meet_at_the_first() -> None:
    argv = list(read("", job(4, nodes=2), python="python", exp_id=EXP_ID).argv)
    assert argv[argv.index("--nnodes") + 1] == "2"
    endpoint = argv[argv.index("--rdzv-endpoint") + 1]
    assert endpoint.startswith("HEAD_NODE:")
    assert 29400 <= int(endpoint.partition(":")[2]) < 31400
    with refused("launcher_of_nodes"):
        read("deepspeed", job(4, nodes=2), python="python", exp_id=EXP_ID)


@pytest.mark.parametrize(
    ("text", "gpu", "nodes", "world"),
    [
        ("python", 4, 1, 1),
        ("", 4, 1, 4),
        ("", 4, 2, 8),
        ("torchrun --nproc-per-node=2", 0, 1, 2),
        ("torchrun --nproc_per_node gpu", 0, 1, None),
        ("deepspeed --num_accelerators 2", 0, 1, 2),
        ("deepspeed", 4, 1, 4),
        ("torchrun", 4, 1, 1),
    ],
)
def test_the_world_size_is_known_before_anything_is_sent(
    text: str, gpu: int, nodes: int, world: int | None
) -> None:
    config = job(gpu, nodes)
    assert processes(read(text, config, python="python", exp_id=EXP_ID).argv, config) == world
