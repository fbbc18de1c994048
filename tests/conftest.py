"""Every test runs on one thread: two ranks on two cores must not fight, and results must not depend
on the machine.
"""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist the tests of a file stay in one process, for they share what is dear to
    set up; those of submission stay together too, for they start servers and count processes.
    """
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "jobs" else item.path.name))
