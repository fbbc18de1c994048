"""The code of a job: what is taken, what never, and that nobody ever sees half of it."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.code import repository, snapshot
from jobs.code.snapshot import link, take, verify
from jobs.record.paths import BaseFolder
from tests.wording import refused

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "0123456789" + "abcdef0123" * 3  # looks like one, in no file of this tree
NAMES = (
    *(
        "it's.py",
        'a"b.py',
        "a\nb.py",
        "a\rb\tc.py",
        "-rf",
        "--help",
        "$(touch pwned)",
        "`touch pwned`",
        ";touch pwned",
    ),
    *(
        "*.py",
        "[ab].py",
        ":(exclude)x",
        ":!x",
        "~",
        "#x",
        "a\\b.py",
        " lead",
        "trail ",
        "é中‮.py",
        "\udcff\udcfe",
        "%s",
    ),
    *("\x1b[31m", "deep/'/\"/\n/-x/é.py", "x" * 200, "sub/" * 40 + "long.py"),
)


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A Tester")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *arguments]
    return (
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        .stdout.decode(errors="replace")
        .strip()
    )


def write(path: Path, text: str | bytes = "x = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def repository_of_one_commit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "project"
    write(folder / "trainval.py", "print('train')\n")
    write(folder / "trainer" / "loop.py")
    write(folder / ".gitignore", "ignored/\n")
    git(folder, "init", "--quiet", "--template=", "--initial-branch=main")
    git(folder, "add", "--all")
    git(
        folder,
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@example.org",
        "commit",
        "--quiet",
        "--message",
        "first",
    )
    return folder


@pytest.fixture
def project(repository_of_one_commit: Path, tmp_path: Path) -> Path:
    """A repository with one commit."""
    return shutil.copytree(repository_of_one_commit, tmp_path / "project")


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "results")


def files(tree: Path) -> set[str]:
    return {
        str(path.relative_to(tree))
        for path in tree.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def manifest(base: BaseFolder, digest: str) -> dict[str, object]:
    return json.loads((base.snapshots / digest / "code.json").read_text())


def stored_bytes(folder: Path) -> bytes:
    """Everything that lies below a folder, archives unpacked, file names included."""
    parts = [os.fsencode(path.relative_to(folder)) + b"\n" for path in folder.rglob("*")]
    for path in folder.rglob("*"):
        if path.is_file():
            parts.append(
                gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            )
    return b"".join(parts)


# What is taken


def test_a_clean_repository_is_taken_as_it_is(project: Path, base: BaseFolder) -> None:
    taken = take(project, base, allow_dirty=False)
    assert files(taken.tree) == {"trainval.py", "trainer/loop.py", ".gitignore"}
    assert taken.commit == git(project, "rev-parse", "HEAD")
    assert (taken.is_dirty, taken.files, taken.bytes) == (
        False,
        3,
        len("print('train')\nx = 1\nignored/\n"),
    )
    assert taken.workdir == taken.tree == base.snapshot(taken.digest)
    assert verify(base, taken.digest) == []


def test_the_manifest_tells_commit_branch_and_every_file(project: Path, base: BaseFolder) -> None:
    taken = take(project, base, allow_dirty=False)
    told = manifest(base, taken.digest)
    assert (told["commit"], told["branch"], told["patch"]) == (taken.commit, "main", None)
    assert [entry["path"] for entry in told["files"]] == [
        ".gitignore",
        "trainer/loop.py",
        "trainval.py",
    ]  # type: ignore[attr-defined]


def test_the_same_content_is_stored_once_whatever_its_commit(
    project: Path, base: BaseFolder
) -> None:
    first = take(project, base, allow_dirty=False)
    git(project, "commit", "--quiet", "--allow-empty", "--message", "other")
    second = take(project, base, allow_dirty=False)
    assert first.digest == second.digest
    assert first.commit != second.commit
    assert len(list(base.snapshots.iterdir())) == 1


def test_other_content_is_another_snapshot(project: Path, base: BaseFolder) -> None:
    first = take(project, base, allow_dirty=False)
    write(project / "trainer" / "loop.py", "x = 2\n")
    commit(project)
    second = take(project, base, allow_dirty=False)
    assert first.digest != second.digest
    assert (first.tree / "trainer" / "loop.py").read_text() == "x = 1\n"


@pytest.mark.parametrize("change", ["mode", "name"])
def test_modes_and_names_are_content(project: Path, base: BaseFolder, change: str) -> None:
    first = take(project, base, allow_dirty=False)
    (project / "trainval.py").chmod(0o755) if change == "mode" else (
        project / "trainval.py"
    ).rename(project / "x.py")
    commit(project)
    assert take(project, base, allow_dirty=False).digest != first.digest


def test_the_archive_is_the_same_bytes_for_the_same_content(project: Path, tmp_path: Path) -> None:
    bases = [BaseFolder(tmp_path / name) for name in ("one", "two")]
    archives: list[bytes] = []
    for base in bases:
        os.utime(project / "trainval.py", (len(archives), 10**9))
        archives.append(
            (
                base.snapshots / take(project, base, allow_dirty=False).digest / "code.tar.gz"
            ).read_bytes()
        )
    assert archives[0] == archives[1]


def test_the_archive_holds_the_tree_sorted_without_times_and_owners(
    project: Path, base: BaseFolder
) -> None:
    (project / "trainval.py").chmod(0o755)
    (project / "again.py").symlink_to("trainval.py")
    commit(project)
    taken = take(project, base, allow_dirty=False)
    with tarfile.open(base.snapshots / taken.digest / "code.tar.gz") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [
        ".gitignore",
        "again.py",
        "trainer/loop.py",
        "trainval.py",
    ]
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {
        (0, 0, 0, "")
    }
    assert [member.mode for member in members] == [0o644, 0o777, 0o644, 0o755]


def test_files_of_the_tree_are_read_only_and_keep_their_executable_bit(
    project: Path, base: BaseFolder
) -> None:
    (project / "trainval.py").chmod(0o755)
    commit(project)
    taken = take(project, base, allow_dirty=False)
    modes = {
        name: (taken.tree / name).stat().st_mode & 0o777
        for name in ("trainval.py", "trainer/loop.py")
    }
    assert modes == {"trainval.py": 0o555, "trainer/loop.py": 0o444}


def test_hostile_file_names_survive_and_run_nothing(project: Path, base: BaseFolder) -> None:
    for name in NAMES:
        write(project / name, f"{NAMES.index(name)}\n")
    commit(project)
    taken = take(project, base, allow_dirty=False)
    assert files(taken.tree) == {*NAMES, "trainval.py", "trainer/loop.py", ".gitignore"}
    assert all((taken.tree / name).read_text() == f"{i}\n" for i, name in enumerate(NAMES))
    with tarfile.open(
        base.snapshots / taken.digest / "code.tar.gz", errors="surrogateescape"
    ) as archive:
        assert set(archive.getnames()) == files(taken.tree)
    assert verify(base, taken.digest) == []
    assert not list(project.rglob("pwned"))


def test_a_project_in_a_folder_of_its_repository_runs_in_that_folder(
    project: Path, base: BaseFolder
) -> None:
    taken = take(project / "trainer", base, allow_dirty=False)
    assert files(taken.tree) == {"trainval.py", "trainer/loop.py", ".gitignore"}
    assert taken.workdir == taken.tree / "trainer"


def test_submodules_are_taken_with_their_files(
    project: Path, base: BaseFolder, tmp_path: Path
) -> None:
    write(tmp_path / "other" / "module.py")
    git(tmp_path, "init", "--quiet", "other")
    commit(tmp_path / "other")
    git(project, "submodule", "--quiet", "add", str(tmp_path / "other"), "vendor")
    commit(project)
    assert "vendor/module.py" in files(take(project, base, allow_dirty=False).tree)
    write(project / "vendor" / "module.py", "x = 2\n")
    with refused("tree_dirty", files="M vendor"):
        take(project, base, allow_dirty=False)


def test_variables_of_a_git_hook_do_not_lead_to_another_repository(
    project: Path, base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(project / "none"))
    assert take(project, base, allow_dirty=False).files == 3


def test_this_repository_is_taken_again_without_being_read_again(base: BaseFolder) -> None:
    """.03 s; the first time about .5."""
    cpu_s: list[float] = []
    for _ in range(3):
        begin = sum(os.times()[:4])  # git's seconds too; those of a clock tell of other programs
        take(ROOT, base, allow_dirty=True)
        cpu_s.append(sum(os.times()[:4]) - begin)
    assert min(cpu_s[1:]) < 0.5, cpu_s


# Dirty trees


def test_a_dirty_tree_is_refused_and_its_files_named(project: Path, base: BaseFolder) -> None:
    write(project / "trainer" / "loop.py", "x = 2\n")
    write(project / "new\n.py")
    (project / "trainval.py").unlink()
    with refused("tree_dirty", count=3) as caught:
        take(project, base, allow_dirty=False)
    for words in ("M trainer/loop.py", "D trainval.py", r"?? new\n.py"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not base.snapshots.exists()


def test_ignored_files_are_neither_dirty_nor_taken(project: Path, base: BaseFolder) -> None:
    write(project / "ignored" / "x.py")
    assert take(project, base, allow_dirty=False).files == 3


def test_with_leave_a_dirty_tree_is_taken_with_its_patch(
    project: Path, base: BaseFolder, tmp_path: Path
) -> None:
    write(project / "trainer" / "loop.py", b"\0binary\xff\n")
    write(project / "new.py")
    (project / "trainval.py").unlink()
    taken = take(project, base, allow_dirty=True)
    assert taken.is_dirty
    assert files(taken.tree) == {"new.py", "trainer/loop.py", ".gitignore"}
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    git(tmp_path / "clone", "apply", str(base.snapshots / taken.digest / "dirty.patch"))
    assert (tmp_path / "clone" / "trainer" / "loop.py").read_bytes() == b"\0binary\xff\n"
    assert not (tmp_path / "clone" / "trainval.py").exists()
    assert manifest(base, taken.digest)["dirty"] == {
        "trainer/loop.py": " M",
        "trainval.py": " D",
        "new.py": "??",
    }


def test_a_patch_does_not_depend_on_the_settings_of_git(project: Path, base: BaseFolder) -> None:
    git(project, "config", "diff.noprefix", "true")
    git(project, "config", "diff.external", "touch pwned")
    git(project, "config", "core.fsmonitor", "touch pwned")
    git(project, "config", "color.ui", "always")
    write(project / "trainval.py", "y = 1\n")
    taken = take(project, base, allow_dirty=True)
    assert (
        (base.snapshots / taken.digest / "dirty.patch")
        .read_bytes()
        .startswith(b"diff --git a/trainval.py b/trainval.py")
    )
    assert not list(project.rglob("pwned"))


def test_hostile_names_may_be_dirty(project: Path, base: BaseFolder) -> None:
    for name in NAMES:
        write(project / name)
    commit(project)
    for name in NAMES:
        write(project / name, "x = 3\n")
    taken = take(project, base, allow_dirty=True)
    difference = (base.snapshots / taken.digest / "dirty.patch").read_bytes()
    assert difference.count(b"+x = 3\n") == len(NAMES)


def test_a_repository_without_a_commit_is_dirty(tmp_path: Path, base: BaseFolder) -> None:
    write(tmp_path / "young" / "trainval.py")
    git(tmp_path, "init", "--quiet", "young")
    git(tmp_path / "young", "add", "--all")
    with refused("tree_dirty", files="A trainval.py"):
        take(tmp_path / "young", base, allow_dirty=False)
    assert take(tmp_path / "young", base, allow_dirty=True).commit is None


def test_a_folder_without_git_needs_leave(tmp_path: Path, base: BaseFolder) -> None:
    folder = tmp_path / "plain"
    for name in (
        "trainval.py",
        "a/b.py",
        ".venv/x.py",
        "a/__pycache__/b.pyc",
        "results/r.json",
        "wandb/run",
        ".env",
    ):
        write(folder / name)
    with refused("tree_without_git"):
        take(folder, base, allow_dirty=False)
    taken = take(folder, base, allow_dirty=True)
    assert files(taken.tree) == {"trainval.py", "a/b.py"}
    assert (taken.commit, taken.is_dirty) == (None, True)


def test_a_project_that_the_repository_around_it_ignores_counts_as_without_git(
    project: Path, base: BaseFolder
) -> None:
    write(project / "ignored" / "trainval.py")
    taken = take(project / "ignored", base, allow_dirty=True)
    assert files(taken.tree) == {"trainval.py"}
    assert taken.commit is None


def test_a_folder_without_files_is_refused(tmp_path: Path, base: BaseFolder) -> None:
    (tmp_path / "empty").mkdir()
    with refused("tree_empty"):
        take(tmp_path / "empty", base, allow_dirty=True)


def test_untracked_litter_is_not_dirt(project: Path, base: BaseFolder) -> None:
    for name in (
        "__pycache__/a.pyc",
        ".venv/lib/x.py",
        "wandb/run/x",
        "trainer/.ipynb_checkpoints/a.py",
    ):
        write(project / name)
    assert take(project, base, allow_dirty=False).files == 3


# What is never taken


SECRETS = {
    ".env": "hush-hush-1",
    ".env.local": "hush-hush-2",
    "deploy/server.pem": "hush-hush-3",
    "tls.key": "hush-hush-4",
    "id_rsa": "hush-hush-5",
    ".netrc": "hush-hush-6",
    "my_wandb_key.txt": "hush-hush-7",
    "gcp-credentials.json": "hush-hush-8",
    ".ssh/config": "hush-hush-9",
}


@pytest.mark.parametrize("how", ["untracked", "committed", "changed", "deleted", "forgotten"])
def test_planted_secrets_are_in_no_stored_byte(
    project: Path, base: BaseFolder, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in SECRETS.items():
        write(project / name, text)
    if how != "untracked":
        commit(project)
    for name, text in SECRETS.items():
        if how == "changed":
            write(project / name, f"{text}\n{text}-new\n")
        elif how == "deleted":
            (project / name).unlink()
    if how == "forgotten":
        git(project, "rm", "--quiet", "--cached", *SECRETS)
    write(project / "trainval.py", "changed = 1\n")
    with caplog.at_level(logging.WARNING):
        taken = take(project, base, allow_dirty=True)
    assert files(taken.tree) == {"trainval.py", "trainer/loop.py", ".gitignore"}
    stored = stored_bytes(base.path)
    assert b"changed = 1" in stored
    assert b"hush-hush" not in stored
    assert ("committed but left out" in caplog.text) == (how in ("committed", "changed", "deleted"))


def test_left_out_files_do_not_make_a_tree_dirty(project: Path, base: BaseFolder) -> None:
    write(project / ".env", "planted")
    commit(project)
    write(project / ".env", "planted anew")
    write(project / "tls.key", "planted")
    assert not take(project, base, allow_dirty=False).is_dirty


def test_the_git_folder_is_never_taken(project: Path, base: BaseFolder) -> None:
    write(
        project / ".git" / "config",
        (project / ".git" / "config").read_text() + "[remote]\n\tpassword = hush-hush\n",
    )
    take(project, base, allow_dirty=False)
    assert not list(base.path.rglob(".git"))
    assert b"hush-hush" not in stored_bytes(base.path)


def test_a_file_that_holds_a_key_is_refused_without_showing_it(
    project: Path, base: BaseFolder
) -> None:
    write(project / "launch.sh", f"echo\nexport WANDB_API_KEY={KEY}\n")
    commit(project)
    with refused(
        "tree_holds_secret",
        file="launch.sh",
        line=2,
        what="a key of W&B",
        fix=re.compile(".*wandb_key_file"),
    ) as caught:
        take(project, base, allow_dirty=False)
    assert KEY not in str(caught.value)
    assert not base.snapshots.exists()


def test_a_file_that_holds_a_secret_of_this_shell_is_refused(
    project: Path, base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a-most-secret-value-of-mine")
    write(project / "config.json", '{"x": "a-most-secret-value-of-mine"}')
    with refused(
        "tree_holds_secret", file="config.json", line=1, what="the value of MY_SERVICE_TOKEN"
    ):
        take(project, base, allow_dirty=True)


def test_a_key_that_a_change_removes_is_not_in_the_patch(project: Path, base: BaseFolder) -> None:
    write(project / "launch.sh", f"export WANDB_API_KEY={KEY}\n")
    commit(project)
    write(project / "launch.sh", "export X=1\n")
    taken = take(project, base, allow_dirty=True)
    assert KEY.encode() not in stored_bytes(base.path)
    assert "holds a secret" in str(manifest(base, taken.digest)["why_no_patch"])


@pytest.mark.parametrize("suffix", repository.WEIGHTS)
def test_weights_are_left_out_and_small_fixtures_kept(
    project: Path, base: BaseFolder, suffix: str
) -> None:
    write(project / f"model{suffix}", bytes(repository.MAX_WEIGHTS + 1))
    write(project / f"fixture{suffix}", bytes(100))
    taken = take(project, base, allow_dirty=True)
    assert files(taken.tree) == {
        f"fixture{suffix}",
        "trainval.py",
        "trainer/loop.py",
        ".gitignore",
    }
    assert manifest(base, taken.digest)["left_out"] == {f"model{suffix}": "weights"}


def test_a_savedir_inside_the_project_is_neither_taken_nor_dirty(project: Path) -> None:
    base = BaseFolder(project / "my runs")
    write(base.path / "0" / "exp_dict.json")
    digests = {take(project, base, allow_dirty=False).digest for _ in range(2)}
    assert len(digests) == 1
    assert files(base.snapshot(digests.pop())) == {
        "trainval.py",
        "trainer/loop.py",
        ".gitignore",
    }


def test_a_savedir_reached_by_a_link_is_not_taken_either(project: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(project / "runs")
    (project / "runs").mkdir()
    write(project / "runs" / "x")
    assert take(project, BaseFolder(tmp_path / "link"), allow_dirty=False).files == 3


def test_the_project_itself_as_savedir_is_refused(project: Path) -> None:
    with refused("savedir_is_project"):
        take(project, BaseFolder(project), allow_dirty=False)


@pytest.mark.parametrize(
    "target",
    ["../outside", "/etc/passwd", "trainer/../../outside", "../project/trainval.py", "hop"],
)
def test_links_out_of_the_project_are_left_out(
    project: Path, base: BaseFolder, tmp_path: Path, target: str
) -> None:
    write(tmp_path / "outside", "planted")
    (project / "hop").symlink_to("../outside")
    (project / "link").symlink_to(target)
    commit(project)
    taken = take(project, base, allow_dirty=False)
    assert not {"hop", "link"} & files(taken.tree)
    assert b"planted" not in stored_bytes(base.path)


def test_links_inside_the_project_stay_links(project: Path, base: BaseFolder) -> None:
    (project / "trainer" / "up.py").symlink_to("../trainval.py")
    (project / "folder").symlink_to("trainer")
    commit(project)
    taken = take(project, base, allow_dirty=False)
    assert os.readlink(taken.tree / "trainer" / "up.py") == "../trainval.py"
    assert (taken.tree / "folder" / "loop.py").read_text() == "x = 1\n"
    assert verify(base, taken.digest) == []


def test_pipes_neither_hang_nor_enter(tmp_path: Path, base: BaseFolder) -> None:
    write(tmp_path / "plain" / "trainval.py")
    os.mkfifo(tmp_path / "plain" / "pipe")
    assert files(take(tmp_path / "plain", base, allow_dirty=True).tree) == {"trainval.py"}


def test_a_big_file_is_refused_by_name_and_size(project: Path, base: BaseFolder) -> None:
    with write(project / "data.jsonl").open("wb") as file:
        file.truncate(repository.MAX_FILE + 1)
    with refused("tree_file_too_big", file="data.jsonl", size="20.0 MiB", most="20 MiB"):
        take(project, base, allow_dirty=True)


def test_too_much_together_is_refused_with_the_largest_files(
    project: Path, base: BaseFolder
) -> None:
    for i in range(11):
        with write(project / f"{i}.jsonl").open("wb") as file:
            file.truncate(repository.MAX_FILE - i)
    with refused("tree_too_big", size="220 MiB", most="200 MiB", files=re.compile(r".*0\.jsonl.*")):
        take(project, base, allow_dirty=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(project: Path, base: BaseFolder) -> None:
    (project / "trainval.py").chmod(0)
    with refused("tree_unreadable", file="trainval.py", reason="Permission denied"):
        take(project, base, allow_dirty=True)


def test_a_repository_that_git_refuses_is_no_folder_without_git(
    project: Path, base: BaseFolder
) -> None:
    write(project / ".git" / "config", "[broken")
    with refused("git_refuses"):
        take(project, base, allow_dirty=True)


# Crashes and races


CHILD = """
import os, signal, sys
from pathlib import Path
from jobs.code import snapshot
from jobs.record.paths import BaseFolder

project, base, killed_at = sys.argv[1:]
if killed_at:
    setattr(snapshot, killed_at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
print("ready", flush=True)
sys.stdin.readline()
print(snapshot.take(Path(project), BaseFolder(Path(base)), allow_dirty=True).digest)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(project: Path, base: BaseFolder) -> Start:
    """Start a process that takes a snapshot when it reads a line; `killed_at` names where it is
    killed.
    """
    children: list[subprocess.Popen[str]] = []

    def run(killed_at: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(project), str(base.path), killed_at]
        child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        return child

    yield run  # type: ignore[misc]
    for child in children:
        child.kill()
        child.communicate(timeout=120)


def go(*children: subprocess.Popen[str]) -> None:
    """Let them all begin, at once."""
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()


def test_a_submission_killed_at_any_point_leaves_nothing_that_counts(
    project: Path, base: BaseFolder, start: Start
) -> None:
    points = ("_write_file", "_sync", "replace_file", "_publish")
    children = [start(point) for point in points]
    go(*children)
    assert [child.wait(timeout=120) for child in children] == [-signal.SIGKILL] * len(points)
    leftovers = list(base.snapshots.iterdir())
    assert len(leftovers) == len(points)
    assert all(path.name.startswith(snapshot.STAGING) for path in leftovers)
    taken = take(project, base, allow_dirty=False)
    assert verify(base, taken.digest) == []


def test_kill_9_in_the_middle_of_writing_leaves_no_half_snapshot(
    project: Path, base: BaseFolder, start: Start
) -> None:
    write(project / "noise.txt", os.urandom(15 * repository.MIB))  # half a second of compression
    child = start()
    go(child)
    deadline = time.monotonic() + 120
    while (
        not list(base.snapshots.glob(f"{snapshot.STAGING}*/tree/noise.txt"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)
    child.kill()
    assert child.wait(timeout=120) == -signal.SIGKILL
    assert [path.name[:5] for path in base.snapshots.iterdir()] == [snapshot.STAGING]
    (project / "noise.txt").unlink()
    assert verify(base, take(project, base, allow_dirty=False).digest) == []


def test_three_submitters_at_once_share_one_snapshot(base: BaseFolder, start: Start) -> None:
    children = [start() for _ in range(3)]
    go(*children)
    digests = {child.communicate(timeout=120)[0].strip() for child in children}
    assert len(digests) == 1
    assert [path.name for path in base.snapshots.iterdir()] == list(digests)
    assert verify(base, digests.pop()) == []


def test_a_snapshot_without_its_manifest_is_not_trusted(project: Path, base: BaseFolder) -> None:
    taken = take(project, base, allow_dirty=False)
    (base.snapshots / taken.digest / "code.json").write_text('{"digest":')
    (taken.tree / "trainval.py").unlink()
    again = take(project, base, allow_dirty=False)
    assert again.digest == taken.digest
    assert verify(base, taken.digest) == []


def test_a_file_that_changes_while_it_is_copied_is_hashed_anew(
    project: Path, base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = snapshot._write_files, []

    def edited_just_before(*arguments: object) -> None:
        if not calls:
            write(project / "trainval.py", "saved = 1\n")
        calls.append(1)
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "_write_files", edited_just_before)
    taken = take(project, base, allow_dirty=True)
    assert len(calls) == 2
    assert (taken.tree / "trainval.py").read_text() == "saved = 1\n"
    assert [path.name for path in base.snapshots.iterdir()] == [taken.digest]


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    project: Path, base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(snapshot, "_sync", full)
    with refused("disk_full"):
        take(project, base, allow_dirty=False)
    assert not list(base.snapshots.iterdir())


# Links and verification


def test_a_run_folder_links_to_its_code_by_a_relative_path(
    project: Path, base: BaseFolder, tmp_path: Path
) -> None:
    taken = take(project, base, allow_dirty=False)
    folder = base.run("0" * 32)
    link(folder, taken)
    assert os.readlink(folder.code) == f"../_jobs/code/{taken.digest}/tree"
    base.path.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / ("0" * 32) / "code" / "trainval.py").exists()


def test_a_link_is_replaced_and_nothing_is_left_beside_it(project: Path, base: BaseFolder) -> None:
    folder = base.run("0" * 32)
    for text in ("x = 2\n", "x = 3\n"):
        write(project / "trainval.py", text)
        link(folder, take(project, base, allow_dirty=True))
        assert (folder.code / "trainval.py").read_text() == text
    assert [path.name for path in folder.path.iterdir()] == ["code"]


def test_a_folder_of_code_is_not_replaced_by_a_link(project: Path, base: BaseFolder) -> None:
    folder = base.run("0" * 32)
    write(folder.code / "trainval.py")
    with refused("code_is_folder"):
        link(folder, take(project, base, allow_dirty=False))
    assert (folder.code / "trainval.py").exists()


def test_altered_absent_and_added_files_are_named(project: Path, base: BaseFolder) -> None:
    taken = take(project, base, allow_dirty=False)
    (taken.tree / "trainval.py").chmod(0o644)
    write(taken.tree / "trainval.py", "print('other')\n")
    (taken.tree / ".gitignore").unlink()
    write(taken.tree / "added.py")
    write(taken.tree / "trainer" / "__pycache__" / "loop.pyc")
    write(base.snapshots / taken.digest / "code.tar.gz", "")
    assert verify(base, taken.digest) == [".gitignore", "added.py", "code.tar.gz", "trainval.py"]


def test_a_manifest_that_was_altered_is_named(project: Path, base: BaseFolder) -> None:
    taken = take(project, base, allow_dirty=False)
    told = manifest(base, taken.digest)
    told["files"] = told["files"][:-1]  # type: ignore[index]
    (base.snapshots / taken.digest / "code.json").write_text(json.dumps(told))
    assert verify(base, taken.digest) == ["code.json", "trainval.py"]
    (base.snapshots / taken.digest / "code.json").unlink()
    assert verify(base, taken.digest) == ["code.json"]


@pytest.mark.parametrize("digest", ["", "..", "../../etc", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_what_is_no_digest_is_never_looked_up(base: BaseFolder, digest: str) -> None:
    with refused("digest_form"):
        verify(base, digest)
