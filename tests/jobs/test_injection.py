"""Hostile text in every value of the dictionary, the job dictionary and the flags: nothing is
executed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.config import JobConfig
from tests.jobs.conftest import Make
from tests.jobs.toolkit_standin import standin
from tests.long import long_but
from trainer.config.block import validate
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def corpus(trap: Path) -> list[str]:
    """Texts that would make `trap` if any shell, option parser or template read them."""
    return [
        f"'; touch {trap}; '",
        f'"; touch {trap}; "',
        f"$(touch {trap})",
        f"`touch {trap}`",
        f"x\ntouch {trap}\n",
        f"x\r\n#SBATCH --wrap='touch {trap}'",
        f"| touch {trap}",
        f"&& touch {trap}",
        f"; touch {trap} #",
        f"--wrap=touch {trap}",
        "-rf",
        "--help",
        "../../../../etc/passwd",
        "~/x",
        "*",
        "%j{0}{user}$HOME",
        "snowman ☃ \u202e rtl \U0001f512",
        "NGPUS HEAD_NODE",
        "",
    ]


KEYS = [
    name for name, field in JobConfig.model_fields.items() if field.annotation not in (bool, int)
]


@pytest.mark.parametrize("key", [*KEYS, "unknown"])
def test_every_key_of_a_job_dictionary_refuses_or_carries_it_as_text(
    key: str, tmp_path: Path
) -> None:
    carried: list[object] = []
    for text in [*corpus(tmp_path / "trap"), "x\0y"]:
        for value in (text, [text], {"cpu": text}, {text: "1"}, {"A": text}):
            job, refusal = attempt(key, value)
            if job is None:
                assert key in refusal  # by name
            else:
                carried.append(getattr(job, key))
    if key not in (
        "python_binary",
        "environment_vars",
    ):  # these are read further, by parsers of their own
        assert {str(value) for value in carried} <= INERT


# Words without a space, a quote or anything else that could end one argument and begin another.
INERT = {str(value) for text in ("~/x", "../../../../etc/passwd") for value in (text, [text])}


def attempt(key: str, value: object) -> tuple[JobConfig | None, str]:
    """The job dictionary with this value, or what was said instead."""
    try:
        return validate(JobConfig, {key: value}, source="job dictionary"), ""
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize("backend", long_but(("local",), ("local", "toolkit")))
def test_flags_and_dictionaries_reach_the_training_as_they_are(
    place: Make, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, trap = place(1), tmp_path / "trap"
    texts = corpus(trap)
    here.groups.write_text(
        "from exp_configs import EXP_GROUPS as BUILT_IN, vary\n"
        f"TEXTS = {texts!r}\n"
        'SMALL = BUILT_IN["causal_lm_tiny"][0]\n'
        'EXP_GROUPS = {"sweep": [vary(SMALL, label=f"{i}{text}", train={"seed": i}) for i, text '
        "in enumerate(TEXTS)]}\n"
    )
    configs = tmp_path / "jobs.py"
    job = {
        "environment_vars": {"HOSTILE": f"$(touch {trap}); 'x' \"y\""},
        "resources": {"cpu": 1, "mem": 1},
    }
    if backend == "toolkit":
        job |= {"image": "i", "data": [f"org.a.x:{tmp_path}"], "python": sys.executable}
    configs.write_text(f"JOB_CONFIGS = {{'default': {job!r}}}")
    with standin(own_process=True, slots=8):
        for text in (texts[2], texts[4], texts[9]):
            said = here.submit(
                "--job_configs", str(configs), "--", f"--wandb_run_name={text}", backend=backend
            )
            assert said.code == 0, said.out
        rows = here.until_all("succeeded", within_s=180)
    assert len(rows) == len(texts)
    assert len(here.starts()) == len(texts)
    for row in rows:
        folder = Path(row["folder"])
        log = (folder / "attempts" / "1" / "logs.txt").read_text()
        assert repr(f"--wandb_run_name={texts[2]}") in log or f"--wandb_run_name={texts[2]}" in log
    labels = {json.loads(path.read_text())["label"] for path in here.base.glob("*/exp_dict.json")}
    assert labels == {f"{i}{text}" for i, text in enumerate(texts)}
    assert not trap.exists()


def test_a_nul_in_a_flag_is_refused_by_name(place: Make) -> None:
    said = place(1).submit("--", "--wandb_run_name=a\0b")
    assert said.code == 2
    assert "--wandb_run_name" in said.out


@pytest.mark.parametrize("name", ["../x", "a;touch b", "$(x)", "-x", ""])
def test_ids_and_groups_that_are_none_match_nothing(place: Make, name: str) -> None:
    here = place(1)
    here.submit()
    here.until_all("succeeded")
    for words in (
        ["show", "--", name],
        ["logs", "--", name],
        ["cancel", "--", name],
        ["reset", "--yes", "--", name],
    ):
        said = here.lathe(words[0], "-sb", str(here.base), *words[1:])
        assert said.code in (2, 5), (words, said.out)
    assert here.lathe("submit", "-e", f"no{name}", "-sb", str(here.base), "-j", "local").code == 2


def test_a_savedir_with_spaces_and_quotes_works_and_a_line_break_is_refused(
    place: Make, tmp_path: Path
) -> None:
    here = place(2)
    here.base = tmp_path / 'it\'s a "base" $(touch trap) ; x'
    assert here.submit().code == 0
    here.until_all("succeeded")
    here.base = tmp_path / "a\nb"
    assert here.submit().code == 2
    assert not (tmp_path / "a\nb").exists()
    assert not list(tmp_path.rglob("trap"))


@pytest.mark.long  # nine seconds
def test_the_published_line_gives_nothing_to_a_shell(
    place: Make, tmp_path: Path, queue: Path
) -> None:
    here, trap = place(1, is_base_there=False), tmp_path / "trap"
    line = [
        "-e",
        "sweep",
        "-sb",
        str(here.base),
        "--exp_configs",
        str(here.groups),
        "-j",
        "local",
        "--allow_dirty",
    ]
    for text in corpus(trap):
        done = subprocess.run(
            [sys.executable, "trainval.py", *line, f"--python_binary={text}", "--dry_run"],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == (2 if text else 0), (text, done.stdout, done.stderr)
    assert not trap.exists()
    assert not here.base.exists()
