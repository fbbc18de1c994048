"""Where the key of W&B is found, and that it spreads nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.config import JobConfig
from jobs.record.paths import RunFolder
from jobs.record.wandb_key import check_key_file, find_key_source, sync_hint
from jobs.secret_keys import is_secret_file, minimal_environment, redact, secret_in
from tests.wording import refused

KEY = "0123456789" + "abcdef0123" * 3  # looks like one, in no file of this tree
LONG_KEY = "wandb_v1_" + "Ab3-_" * 15


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "wandb_key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


def job(**values: str) -> JobConfig:
    return JobConfig.model_validate(values)


def test_a_key_file_of_mode_0600_is_found_and_named(key_file: Path) -> None:
    source = find_key_source(job(wandb_key_file=str(key_file)), {})
    assert (source.kind, source.key_file) == ("file", key_file)
    assert str(key_file) in source.text


def test_a_key_file_may_be_named_by_the_environment(key_file: Path) -> None:
    source = find_key_source(job(), {"WANDB_API_KEY_FILE": str(key_file)})
    assert (source.kind, source.key_file) == ("file", key_file)


def test_a_secret_of_the_platform_comes_first(key_file: Path) -> None:
    source = find_key_source(job(wandb_key_secret="wandb/key", wandb_key_file=str(key_file)), {})
    assert (source.kind, source.key_file) == ("platform", None)


def test_a_key_in_netrc_is_found(tmp_path: Path) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    source = find_key_source(job(), {"HOME": str(tmp_path)})
    assert (source.kind, source.key_file) == ("file", None)
    assert str(netrc) in source.text


def test_a_key_of_the_shell_is_reported_but_not_handed_on() -> None:
    environ = {"WANDB_API_KEY": KEY, "HOME": "/nowhere"}
    source = find_key_source(job(), environ)
    assert source.kind == "environment"
    assert "offline" in source.text
    assert KEY not in minimal_environment(environ).values()


def test_without_a_key_wandb_runs_offline() -> None:
    source = find_key_source(job(), {"HOME": "/nowhere"})
    assert source.kind == "none"
    assert "offline" in source.text


@pytest.mark.parametrize("kind", ["file", "environment"])
def test_no_text_about_a_key_holds_it(kind: str, key_file: Path) -> None:
    environ = {"HOME": "/nowhere", "WANDB_API_KEY": KEY}
    source = find_key_source(
        job(wandb_key_file=str(key_file)) if kind == "file" else job(), environ
    )
    assert source.kind == kind
    assert KEY not in repr(source)


@pytest.mark.parametrize("key", [KEY, LONG_KEY, f"local-{KEY}"])
def test_old_new_and_local_keys_are_accepted(key: str, key_file: Path) -> None:
    key_file.write_text(key)
    check_key_file(key_file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o400, 0o700])
def test_any_other_mode_is_refused_with_the_cure(mode: int, key_file: Path) -> None:
    key_file.chmod(mode)
    with refused("key_file_mode", mode=f"0{mode:o}"):
        check_key_file(key_file)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "short", f"{KEY}\n{KEY}\n", f"WANDB_API_KEY={KEY}", f"{KEY} # mine", "\xff" * 60],
)
def test_what_is_no_single_key_is_refused_without_showing_it(text: str, key_file: Path) -> None:
    key_file.write_text(text)
    with refused("key_file_lines") as caught:
        check_key_file(key_file)
    assert KEY not in str(caught.value)


def test_a_key_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    with refused("key_file_absent", reason="No such file or directory"):
        check_key_file(tmp_path / "absent")


def test_a_folder_or_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with refused("key_file_kind"):
            check_key_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_somebody_else_is_refused(key_file: Path) -> None:
    os.chown(key_file, 12345, -1)
    with refused("key_file_owner", user=12345):
        check_key_file(key_file)


def test_a_job_inherits_what_it_needs_and_nothing_else() -> None:
    needed = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "LC_ALL": "C.UTF-8",
        "CONDA_PREFIX": "/conda",
        "HF_HOME": "/hf",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_DEBUG": "INFO",
        "WANDB_MODE": "offline",
        "LATHE_X": "1",
    }
    foreign = {
        "SSH_AUTH_SOCK": "/s",
        "DISPLAY": ":0",
        "RANK": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "WANDB_RUN_ID": "other",
    }
    assert minimal_environment({**needed, **foreign}) == needed


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "HF_HUB_TOKEN", "LATHE_SECRET", "CONDA_TOKEN", "WANDB_PASSWORD"],
)
def test_no_variable_that_is_called_like_a_secret_is_inherited(name: str) -> None:
    assert minimal_environment({name: "x"}) == {}


def test_no_value_that_holds_the_key_is_inherited() -> None:
    environ = {"WANDB_API_KEY": KEY, "LATHE_NOTE": f"my key is {KEY}", "PATH": "/bin"}
    assert minimal_environment(environ) == {"PATH": "/bin"}


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "http://me:word@proxy:3128"])
def test_no_value_with_a_line_break_or_a_password_is_inherited(value: str) -> None:
    assert minimal_environment({"HTTP_PROXY": value, "http_proxy": "http://proxy:3128"}) == {
        "http_proxy": "http://proxy:3128"
    }


def test_the_path_of_a_key_file_does_not_cost_the_home_folder(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "WANDB_API_KEY_FILE": str(tmp_path)}
    assert minimal_environment(environ) == {"HOME": str(tmp_path)}


def test_facts_of_this_machine_are_inherited_on_this_machine_only() -> None:
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TMPDIR": "/scratch"}
    assert minimal_environment(environ) == {}
    assert minimal_environment(environ, is_same_machine=True) == environ


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_the_devices_of_the_submitter_are_never_inherited(is_same_machine: bool) -> None:
    """They would go over those that the queue gives to each job: all would run on the first GPU."""
    assert (
        minimal_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, is_same_machine=is_same_machine) == {}
    )


@pytest.mark.parametrize(
    "text",
    ["WANDB_API_KEY={}", "--api_key {}", "wandb.login(key={!r}) password: {}", '"api_key": "{}"'],
)
def test_what_looks_like_a_key_is_blotted_out_unasked(text: str) -> None:
    assert KEY not in redact(text.format(KEY, KEY).replace(f"key='{KEY}'", ""))
    assert LONG_KEY not in redact(text.format(LONG_KEY, LONG_KEY))


@pytest.mark.parametrize(
    "path",
    [
        *(
            ".env",
            ".env.local",
            "a/.ENV",
            "server.pem",
            "x/tls.key",
            "id_rsa",
            ".ssh/known_hosts",
            ".netrc",
        ),
        *(
            "wandb_key.txt",
            "my_wandb_api_key",
            "gcp-credentials.json",
            ".aws/config",
            "credentials",
        ),
        *(".git-credentials", "copy_wandb_key.sh"),
    ],
)
def test_files_called_like_a_secret_are_known(path: str) -> None:
    assert is_secret_file(path)


@pytest.mark.parametrize(
    "path",
    [
        "trainval.py",
        "jobs/secret_keys.py",
        "tests/test_wandb_key.py",
        "docs/credentials.md",
        "keys",
    ],
)
def test_modules_and_texts_about_secrets_are_none(path: str) -> None:
    assert not is_secret_file(path)


@pytest.mark.parametrize(
    "text",
    [
        f"x\nWANDB_API_KEY={KEY}\n",
        f'x\nwandb.login(key="{KEY}")',
        f"x\nwandb login {KEY}",
        f"x\nmachine api.wandb.ai login user password {KEY}",
        f"x\nkey = '{LONG_KEY}'",
        "x\ntoken = 'hf_" + "aB3d" * 9 + "'",
    ],
)
def test_a_key_in_a_file_is_found_and_only_its_line_is_told(text: str) -> None:
    found = secret_in(text.encode(), {})
    assert found is not None
    assert found.startswith("line 2: ")
    assert KEY not in found


@pytest.mark.parametrize(
    "text",
    [
        f"wandb @ git+https://github.com/wandb/wandb@{KEY}",
        f"commit {KEY}",
        "wandb==0.31 --hash=sha256:" + "ab" * 32,
        "os.environ['WANDB_API_KEY'] = read(path)",
        "wandb_key_file: ~/.wandb_key",
    ],
)
def test_hashes_and_talk_of_keys_are_no_keys(text: str) -> None:
    assert secret_in(text.encode(), {}) is None


def test_a_secret_of_this_user_is_found_word_for_word() -> None:
    assert (
        secret_in(b"a\nb odd-but-secret-value c", {"MY_TOKEN": "odd-but-secret-value"})
        == "line 2: the value of MY_TOKEN"
    )


def offline_run(folder: Path, name: str) -> Path:
    run = folder / "wandb" / f"offline-run-{name}"
    run.mkdir(parents=True)
    (run / f"run-{name}.wandb").write_bytes(b"")
    return run


def test_offline_runs_not_sent_yet_are_named_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    second, first = offline_run(folder, "20260102_1-x"), offline_run(folder, "20260101_1-x")
    assert sync_hint(RunFolder(folder)) == f"wandb sync '{first}' '{second}'"


def test_there_is_no_hint_once_all_are_sent(tmp_path: Path) -> None:
    run = offline_run(tmp_path, "20260101_1-x")
    (run / "run-20260101_1-x.wandb.synced").write_text("")
    assert sync_hint(RunFolder(tmp_path)) is None


def test_a_run_that_was_sent_in_part_still_waits(tmp_path: Path) -> None:
    run = offline_run(tmp_path, "20260101_1-x")
    (run / "run-20260101_1-x.wandb.synced").write_text("")
    (run / "run-y.wandb").write_bytes(b"")
    assert sync_hint(RunFolder(tmp_path)) == f"wandb sync {run}"


def test_a_folder_that_cannot_be_listed_costs_only_the_hint(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("no folder")
    assert sync_hint(RunFolder(tmp_path)) is None


def test_there_is_no_hint_without_offline_runs(tmp_path: Path) -> None:
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    assert sync_hint(RunFolder(tmp_path)) is None
