"""What is garbage in a savedir_base, and above all what is not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from jobs.code import gc
from jobs.code.gc import collect, plan_gc
from jobs.code.snapshot import STAGING, Snapshot, link, take
from jobs.job_state import ACTIVE, ENDED_BADLY, JobState
from jobs.record import events as record
from jobs.record.paths import BaseFolder, RunFolder
from tests.wording import refused
from trainer import run_changes

EXP_ID = "9f2c" * 8
LONG_AGO_S = 10 * gc.DAY_S


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    folder = BaseFolder(tmp_path / "results")
    folder.path.mkdir()
    return folder


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is there was made ten days ago."""
    now = time.time()
    monkeypatch.setattr(gc.time, "time", lambda: now + LONG_AGO_S)


def stored(base: BaseFolder, tmp_path: Path, text: str = "x = 1\n") -> Snapshot:
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    (project / "trainval.py").write_text(text)
    return take(project, base, allow_dirty=True)


def recorded(folder: RunFolder, state: JobState) -> None:
    """A run folder with one attempt in this state."""
    folder.path.mkdir(parents=True, exist_ok=True)
    record.create(folder, exp_id=EXP_ID, digest="0" * 64, group="g")
    record.append(folder, record.intent(1, "ft_x_1", name="ft_x_1", index=None, backend="local"))
    record.append(folder, {"event": "submitted", "attempt": 1, "id": "1", "adopted": False})
    record.append(folder, {"event": "observed", "attempt": 1, "state": state})


def planned(base: BaseFolder, days: float = 7) -> list[str]:
    return [str(item.path.relative_to(base.path)) for item in plan_gc(base, older_than_days=days)]


def array_of(base: BaseFolder, *folders: RunFolder) -> Path:
    base.arrays.mkdir(parents=True, exist_ok=True)
    path = base.arrays / "fta_1.json"
    path.write_text(json.dumps({str(i): [str(folder.path), 1] for i, folder in enumerate(folders)}))
    return path


def test_an_empty_or_absent_base_holds_no_garbage(base: BaseFolder, tmp_path: Path) -> None:
    assert planned(base) == []
    assert plan_gc(BaseFolder(tmp_path / "absent"), older_than_days=0) == []


def test_a_negative_age_is_refused(base: BaseFolder) -> None:
    with refused("older_than_days"):
        plan_gc(base, older_than_days=-1)


@pytest.mark.usefixtures("later")
def test_code_that_no_run_uses_is_garbage(base: BaseFolder, tmp_path: Path) -> None:
    used, unused = stored(base, tmp_path, "x = 1\n"), stored(base, tmp_path, "x = 2\n")
    link(base.run(EXP_ID), used)
    assert planned(base) == [f"_jobs/code/{unused.digest}"]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("place", [EXP_ID, f"deleted/{EXP_ID}-1", f"{EXP_ID}.bak-1", "my own name"])
@pytest.mark.parametrize("how", ["link", "spec"])
def test_code_is_used_wherever_a_run_folder_lies(
    base: BaseFolder, tmp_path: Path, place: str, how: str
) -> None:
    snapshot = stored(base, tmp_path)
    folder = RunFolder(base.path / place)
    if how == "link":
        link(folder, snapshot)
    else:
        folder.attempt(3).folder.mkdir(parents=True)
        folder.attempt(3).spec.write_text(
            json.dumps({"workdir": str(snapshot.tree)})[:-1]
        )  # torn, and it counts
    assert f"_jobs/code/{snapshot.digest}" not in planned(base)


def test_code_that_was_just_stored_or_taken_again_is_kept(
    base: BaseFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = stored(base, tmp_path)
    assert planned(base) == []
    os.utime(base.snapshots / snapshot.digest, (1, 1))
    assert planned(base) == [f"_jobs/code/{snapshot.digest}"]
    stored(base, tmp_path)
    assert planned(base) == []


def test_code_that_is_taken_again_after_the_plan_is_kept(base: BaseFolder, tmp_path: Path) -> None:
    snapshot = stored(base, tmp_path)
    os.utime(base.snapshots / snapshot.digest, (1, 1))
    garbage = plan_gc(base, older_than_days=0)
    stored(base, tmp_path)
    assert collect(garbage) == 0
    assert (snapshot.tree / "trainval.py").exists()


def test_code_that_is_taken_again_during_the_collection_comes_back(
    base: BaseFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = stored(base, tmp_path)
    os.utime(base.snapshots / snapshot.digest, (1, 1))
    garbage = plan_gc(base, older_than_days=0)
    rename = Path.rename

    def just_before(path: Path, target: Path) -> Path:
        if path.name == snapshot.digest:
            os.utime(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", just_before)
    assert collect(garbage) == 0
    assert (snapshot.tree / "trainval.py").exists()


@pytest.mark.parametrize("name", [f"{STAGING}0123-1-ab", f"{STAGING}torn-ab", f"{STAGING}gc-ab"])
def test_leftovers_of_the_killed_are_garbage_after_an_hour(base: BaseFolder, name: str) -> None:
    leftover = base.snapshots / name
    (leftover / "tree").mkdir(parents=True)
    assert planned(base) == []
    os.utime(leftover, (1, 1))
    assert planned(base) == [f"_jobs/code/{name}"]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "name", [f"deleted/{EXP_ID}-20260101", f"deleted/{EXP_ID}", f"{EXP_ID}.bak-20260101"]
)
def test_what_was_set_aside_is_garbage_after_so_many_days(base: BaseFolder, name: str) -> None:
    (base.path / name).mkdir(parents=True)
    assert planned(base, days=9) == [name]
    assert planned(base, days=11) == []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("state", ACTIVE)
@pytest.mark.parametrize("where", ["its run folder", "the entry itself"])
def test_nothing_of_an_active_experiment_is_garbage(
    base: BaseFolder, state: JobState, where: str
) -> None:
    for name in (f"deleted/{EXP_ID}-1", f"{EXP_ID}.bak-1"):
        (base.path / name).mkdir(parents=True)
        if where == "the entry itself":
            recorded(RunFolder(base.path / name), state)
    if where == "its run folder":
        recorded(base.run(EXP_ID), state)
    assert planned(base, days=0) == []


@pytest.mark.usefixtures("later")
def test_what_an_ended_experiment_set_aside_is_garbage(base: BaseFolder) -> None:
    recorded(base.run(EXP_ID), "failed")
    recorded(RunFolder(base.deleted_folder / EXP_ID), "succeeded")
    (base.deleted_folder / run_changes.FILE).unlink()  # the name of a run that nobody watches
    assert planned(base) == [f"deleted/{EXP_ID}"]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("content", ["", "torn", '{"event": "created"}\n', "[]\n"])
def test_a_record_that_does_not_tell_keeps_its_folder(base: BaseFolder, content: str) -> None:
    folder = RunFolder(base.deleted_folder / EXP_ID)
    folder.path.mkdir(parents=True)
    folder.record.write_text(content)
    assert planned(base) == []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("state", ["succeeded", *ENDED_BADLY])
def test_the_index_of_an_array_is_garbage_once_all_its_jobs_have_ended(
    base: BaseFolder, state: JobState
) -> None:
    recorded(base.run(EXP_ID), state)
    array_of(base, base.run(EXP_ID), base.run("0" * 32))
    assert planned(base) == ["_jobs/arrays/fta_1.json"]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("state", [*ACTIVE, "preempted", "pending"])
def test_the_index_of_an_array_is_kept_while_one_of_its_jobs_may_start(
    base: BaseFolder, state: JobState
) -> None:
    recorded(base.run(EXP_ID), state)
    array_of(base, base.run("0" * 32), base.run(EXP_ID))
    assert planned(base) == []


def test_the_index_of_an_array_that_is_being_sent_is_kept(base: BaseFolder) -> None:
    array_of(base, base.run(EXP_ID))
    assert planned(base) == []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("content", ["", "{}", '{"0": 1}', "[1]"])
def test_a_file_among_the_arrays_that_is_no_index_is_kept(base: BaseFolder, content: str) -> None:
    base.arrays.mkdir(parents=True)
    (base.arrays / "note.json").write_text(content)
    assert planned(base) == []


@pytest.mark.usefixtures("later")
def test_run_folders_and_files_of_others_are_never_garbage(base: BaseFolder) -> None:
    recorded(base.run(EXP_ID), "failed")
    for name in (
        "notes",
        f"{EXP_ID}-copy",
        "data.bak-1",
        "_jobs/code/mine",
        "_jobs/other",
        f".{EXP_ID}.job.lock",
    ):
        (base.path / name).mkdir(parents=True)
    assert planned(base, days=0) == []


@pytest.mark.usefixtures("later")
def test_collecting_deletes_what_was_planned_and_counts_it(
    base: BaseFolder, tmp_path: Path
) -> None:
    used, unused = stored(base, tmp_path, "x = 1\n"), stored(base, tmp_path, "x = 2\n")
    link(base.run(EXP_ID), used)
    (base.deleted_folder / EXP_ID).mkdir(parents=True)
    array_of(base, base.run("0" * 32))
    garbage = plan_gc(base, older_than_days=7)
    assert all(item.bytes > 0 for item in garbage if "deleted" not in item.path.parts)
    assert collect(garbage) == 3
    assert not (base.snapshots / unused.digest).exists()
    assert (used.tree / "trainval.py").exists()
    assert planned(base, days=0) == []
    assert [path.name for path in base.snapshots.iterdir()] == [used.digest]


@pytest.mark.usefixtures("later")
def test_collecting_twice_is_fine(base: BaseFolder) -> None:
    (base.deleted_folder / EXP_ID).mkdir(parents=True)
    garbage = plan_gc(base, older_than_days=7)
    assert [collect(garbage), collect(garbage)] == [1, 0]


@pytest.mark.usefixtures("later")
def test_links_are_neither_followed_nor_garbage(base: BaseFolder, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("x")
    base.deleted_folder.mkdir()
    base.snapshots.mkdir(parents=True)
    for place in (
        base.deleted_folder / EXP_ID,
        base.path / f"{EXP_ID}.bak-1",
        base.snapshots / ("0" * 64),
    ):
        place.symlink_to(tmp_path / "outside")
    assert planned(base, days=0) == []


@pytest.mark.usefixtures("later")
def test_a_link_inside_of_garbage_costs_only_the_link(base: BaseFolder, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("x")
    (base.deleted_folder / EXP_ID).mkdir(parents=True)
    (base.deleted_folder / EXP_ID / "data").symlink_to(tmp_path / "outside")
    assert collect(plan_gc(base, older_than_days=0)) == 1
    assert (tmp_path / "outside" / "precious").exists()


@pytest.mark.usefixtures("later")
def test_garbage_that_became_a_link_after_the_plan_is_kept(
    base: BaseFolder, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("x")
    (base.deleted_folder / EXP_ID).mkdir(parents=True)
    garbage = plan_gc(base, older_than_days=0)
    base.deleted_folder.rename(tmp_path / "moved")
    base.deleted_folder.symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / EXP_ID).mkdir()
    assert collect(garbage) == 0
    assert (tmp_path / "outside" / EXP_ID).exists()


@pytest.mark.usefixtures("later")
def test_a_deleted_folder_that_is_a_link_out_of_the_base_is_left_alone(
    base: BaseFolder, tmp_path: Path
) -> None:
    (tmp_path / "outside" / EXP_ID).mkdir(parents=True)
    base.deleted_folder.symlink_to(tmp_path / "outside")
    assert planned(base, days=0) == []


@pytest.mark.usefixtures("later")
def test_the_plan_for_a_thousand_experiments_takes_under_two_cpu_seconds(
    base: BaseFolder, tmp_path: Path
) -> None:
    snapshot = stored(base, tmp_path)
    for i in range(1000):
        folder = base.run(f"{i:032x}")
        folder.attempt(1).folder.mkdir(parents=True)
        folder.attempt(1).spec.write_text(json.dumps({"workdir": str(snapshot.tree)}))
        folder.code.symlink_to("x")
    begin = time.process_time()  # of this process alone: the machine may be busy
    assert planned(base) == []
    assert time.process_time() - begin < 2.0
