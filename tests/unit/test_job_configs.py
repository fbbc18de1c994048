"""job_configs.py: how a job dictionary is put together, whose mount it names, and what a file may
get wrong.
"""

from __future__ import annotations

import copy
import re
import textwrap
from pathlib import Path

import pytest

import job_configs
from exp_configs import EXP_GROUPS
from job_configs import JOB_CONFIGS, job_values
from jobs.config import JobConfig
from tests.wording import Fault, fault, refused
from trainer.config.block import validate


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("group", [*EXP_GROUPS, *JOB_CONFIGS])
def test_our_own_dictionaries_are_valid(group: str) -> None:
    assert validate(JobConfig, job_values(group, environ={}))


def test_a_published_group_gets_eight_gpus_and_a_tiny_one_none() -> None:
    assert job_values("crossattn_tulu-7b", environ={})["resources"]["gpu"] == 8
    assert job_values("causal_lm_tiny", environ={}) == {}


def test_the_keys_of_a_group_go_over_those_of_default(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        JOB_CONFIGS = {
            "default": {"grace_s": 60, "partition": "gpu", "resources": {"cpu": 4, "mem": 16}},
            "sweep": {"grace_s": 30, "resources": {"mem": 64}},
        }
        """,
    )
    default = {"grace_s": 60, "partition": "gpu", "resources": {"cpu": 4, "mem": 16}}
    assert job_values("other", file, {}) == default
    assert job_values("sweep", file, {}) == {
        **default,
        "grace_s": 30,
        "resources": {"cpu": 4, "mem": 64},
    }


def test_what_is_returned_shares_nothing_with_the_dictionaries() -> None:
    before = copy.deepcopy(JOB_CONFIGS)
    job_values("crossattn_tulu-7b", environ={})["resources"]["gpu"] = 1
    assert before == JOB_CONFIGS


def test_the_published_form_is_read(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        JOB_CONFIG = {
            "base": {"bid": 1, "environment_vars": ["A=1"], "resources": {"cpu": 4, "gpu": 1}},
            "sweep": {"resources": {"gpu": 4}},
        }
        """,
    )
    values = job_values("sweep", file, {})
    assert values == {"bid": 1, "environment_vars": ["A=1"], "resources": {"cpu": 4, "gpu": 4}}
    assert validate(JobConfig, values).environment_vars == {"A": "1"}
    with refused("environment_twice", names="A"):
        validate(JobConfig, {"environment_vars": ["A=1", "B=2", "A=3"]})


def test_default_counts_where_both_are_given_also_when_it_is_empty(tmp_path: Path) -> None:
    file = written(tmp_path, 'JOB_CONFIGS = {"default": {}, "base": {"bid": 1}}')
    assert job_values("sweep", file, {}) == {}


USERS = """
EAI_ACCOUNT_ID_TO_USER = {"12-34": "ada"}
JOB_CONFIGS = {"default": {"data": ["org.{user}.home:/home/{user}", "org.shared:/data:ro"]}}
"""


def test_a_mount_gets_the_name_of_its_user_and_the_job_the_account(tmp_path: Path) -> None:
    values = job_values("sweep", written(tmp_path, USERS), {"EAI_ACCOUNT_ID": "12-34"})
    assert values["data"] == ["org.ada.home:/home/ada", "org.shared:/data:ro"]
    assert values["account_id"] == "12-34"


def test_an_account_that_is_stated_stays(tmp_path: Path) -> None:
    file = written(tmp_path, USERS.replace('{"data"', '{"account_id": "56", "data"'))
    assert job_values("sweep", file, {"EAI_ACCOUNT_ID": "12-34"})["account_id"] == "56"


@pytest.mark.parametrize("environ", [{}, {"EAI_ACCOUNT_ID": "99"}])
def test_a_mount_of_nobody_is_refused_with_the_cure(
    environ: dict[str, str], tmp_path: Path
) -> None:
    with refused("job_account_unknown", known="12-34"):
        job_values("sweep", written(tmp_path, USERS), environ)


def test_an_account_that_nobody_lists_is_not_taken_from_the_shell() -> None:
    assert job_configs.EAI_ACCOUNT_ID_TO_USER == {}
    assert "account_id" not in job_values("sweep", None, {"EAI_ACCOUNT_ID": "99"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "x = 1\nJOB_CONFIGS = {}[0]\n",
            fault("python_file_fails", file="mine.py", line=2, error="KeyError"),
        ),
        (
            "\n\nJOB_CONFIGS = {\n  'a': ]\n",
            fault("python_file_fails", file="mine.py", line=4, error="SyntaxError"),
        ),
        (
            "JOB_CONFIGS = {'a': \n",
            fault("python_file_fails", file="mine.py", line=1, error="SyntaxError"),
        ),
        (
            "x = 1\n",
            fault(
                "dictionary_wanted",
                at="mine.py",
                name="JOB_CONFIGS",
                kind="missing or None",
                entries="group -> job dictionary",
            ),
        ),
        (
            "JOB_CONFIGS = [{}]\n",
            fault("dictionary_wanted", at="mine.py", name="JOB_CONFIGS", kind="a list"),
        ),
        (
            "JOB_CONFIG = 3\n",
            fault("dictionary_wanted", at="mine.py", name="JOB_CONFIG", kind="an int"),
        ),
        (
            "JOB_CONFIGS = {'default': ['x']}\n",
            fault("dictionary_wanted", at="mine.py", name="JOB_CONFIGS['default']", kind="a list"),
        ),
        (
            "JOB_CONFIG = {'base': ['x']}\n",
            fault("dictionary_wanted", at="mine.py", name="JOB_CONFIG['base']", kind="a list"),
        ),
        (
            "JOB_CONFIGS = {'sweep': None}\n",
            fault("dictionary_wanted", name="JOB_CONFIGS['sweep']", kind="None"),
        ),
        (
            "JOB_CONFIGS = {'a': None, 'b': 3}\n",
            fault(
                "dictionary_wanted",
                name=re.compile(r"JOB_CONFIGS\['a'\] is None.*\n.*JOB_CONFIGS\['b'\]"),
                kind="an int",
            ),
        ),
        ("JOB_CONFIGS = {3: {}}\n", fault("job_group_name", name="JOB_CONFIGS[3]")),
        (
            "JOB_CONFIGS = {'sweep': {4: 1}}\n",
            fault("job_key_name", name="JOB_CONFIGS['sweep']", key=4),
        ),
        (
            "JOB_CONFIGS = {}\nEAI_ACCOUNT_ID_TO_USER = ['x']\n",
            fault("job_accounts", at="mine.py"),
        ),
        ("JOB_CONFIGS = {}\nEAI_ACCOUNT_ID_TO_USER = {'1': 2}\n", fault("job_accounts")),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_place(
    tmp_path: Path, text: str, complaint: Fault
) -> None:
    with refused(complaint):
        job_values("sweep", written(tmp_path, text), {})


@pytest.mark.parametrize("name", ["missing.py", "configs.txt", "."])
def test_what_is_no_python_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "configs.txt").write_text("JOB_CONFIGS = {}")
    with refused("python_file_wanted", flag="--job_configs"):
        job_values("sweep", tmp_path / name, {})
