"""Which tests stay in one process when several processes share the work."""

from __future__ import annotations

import pytest

from tests.conftest import group

CONTRACT = "tests/contract/test_task_contract.py::test_stages_ranks_and_accumulation_agree"
FEATURES = "tests/contract/test_task_features.py::test_a_run_resumed_on_another_number_of_ranks"


@pytest.mark.parametrize(
    ("one", "other", "is_together"),
    [
        (f"{CONTRACT}[fid]", f"{FEATURES}[fid-2-1]", True),
        (f"{CONTRACT}[fid]", f"{CONTRACT}[vera]", False),
        ("tests/unit/test_rng.py::test_a", "tests/unit/test_rng.py::test_b[fid]", True),
        ("tests/unit/test_rng.py::test_a", "tests/unit/test_store.py::test_a", False),
        ("tests/jobs/test_slurm.py::test_a", "tests/jobs/test_chaos.py::test_on_slurm[x]", True),
        ("tests/jobs/test_local.py::test_a", "tests/jobs/test_chaos.py::test_on_slurm[x]", False),
    ],
)
def test_tests_that_share_what_is_dear_stay_together(
    one: str, other: str, is_together: bool
) -> None:
    assert (group(one) == group(other)) is is_together
