"""What a run tells: the same numbers everywhere, from rank 0 alone, and as if no interruption had
happened.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer.runtime import distributed, host_memory, process
from trainer.runtime.gpus import peak_flops
from trainer.runtime.preemption import Preemption
from trainer.telemetry import flops as flops_module
from trainer.telemetry import meter as meter_module
from trainer.telemetry import metrics_file
from trainer.telemetry import run_record as telemetry
from trainer.telemetry.console import ConsoleHandler, format_number
from trainer.telemetry.flops import StepFlops
from trainer.telemetry.meter import Meter
from trainer.telemetry.run_record import RunRecord
from trainer.telemetry.wandb_run import WandbSettings, tell_wandb

NOW = "2026-11-23T12:00:00+00:00"
told_now = metrics_file._now  # what it says outside these tests
KEY = "markermarkermarkermarkermarkermarkermarker"  # stands for an API key


def run(folder: Path, **options: Any) -> RunRecord:
    return RunRecord(folder, total=20, **{"console": Console(file=io.StringIO()), **options})


def lines(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, without the moment of each line, and without its seal."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry.pop("at") for entry in entries] == [NOW] * len(entries)
    assert len({entry.pop("seal") for entry in entries}) == len(entries)
    return entries


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are compared byte for byte are not of another second."""
    monkeypatch.setattr(metrics_file, "_now", lambda: NOW)


# ---------------------------------------------------------------- metrics.jsonl


def test_a_line_holds_the_step_and_the_scalars_in_the_order_given(tmp_path: Path) -> None:
    run(tmp_path).log(3, loss=0.1, lr=3e-4, tokens=12)
    text = f'{{"step": 3, "loss": 0.1, "lr": 0.0003, "tokens": 12, "at": "{NOW}"'
    seal = hashlib.sha256(f"{text}}}".encode()).hexdigest()[:16]
    assert (tmp_path / "metrics.jsonl").read_text() == f'{text}, "seal": "{seal}"}}\n'


def test_a_line_is_on_the_disk_when_log_returns(tmp_path: Path) -> None:
    live = run(tmp_path)
    live.log(1, loss=1.0)
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_numbers_of_numpy_and_torch_become_plain_ones(tmp_path: Path) -> None:
    run(tmp_path).log(1, a=np.float32(0.5), b=np.int64(2**53 + 1), c=torch.tensor(1.5))  # pyright: ignore
    assert lines(tmp_path) == [{"step": 1, "a": 0.5, "b": 2**53 + 1, "c": 1.5}]


def test_a_value_that_is_not_finite_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = run(tmp_path)
    for step in (1, 2):
        live.log(step, **{"valid/auroc": float("nan"), "valid/loss": 1.0})
    assert lines(tmp_path) == [{"step": 1, "valid/loss": 1.0}, {"step": 2, "valid/loss": 1.0}]
    assert [record.getMessage() for record in caplog.records] == [
        "valid/auroc is nan: left out of the log whenever it is not finite"
    ]


def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with refused("disk_full"):
        run(tmp_path).log(1, loss=1.0)


def test_a_metrics_file_that_is_removed_under_a_run_is_put_back_whole(tmp_path: Path) -> None:
    live = run(tmp_path)
    live.log(1, loss=1.0)
    for step in (2, 3):
        (tmp_path / "metrics.jsonl").unlink()
        live.log(step, loss=1.0 / step)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").unlink()
    live.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def _replaced(path: Path) -> None:
    path.unlink()
    path.write_text('{"step": 1}\n')


def _written_by_another(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"step": 7, "loss": 3.0}\n')


@pytest.mark.parametrize(
    "meddle", [_replaced, _written_by_another, lambda path: os.truncate(path, 0)]
)
def test_a_metrics_file_that_somebody_else_changes_stops_the_run(
    meddle: Any, tmp_path: Path
) -> None:
    live = run(tmp_path)
    live.log(1, loss=1.0)
    meddle(tmp_path / "metrics.jsonl")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with refused("metrics_file_changed", at="metrics.jsonl"):
        live.log(2, loss=0.5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_cuts_exactly_to_what_an_undisturbed_run_had_written(tmp_path: Path) -> None:
    live = run(tmp_path)
    for step in range(1, 6):
        live.log(step, loss=1 / step)
    undisturbed = (tmp_path / "metrics.jsonl").read_bytes()
    live.log(6, loss=9.0)
    live.log(7, loss=9.0)
    again = run(tmp_path)
    again.resume(5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == undisturbed
    again.log(6, loss=1 / 6)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3, "loss": 1.0}', b"\x00\x00\n", b"[]\n"]
)
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes) -> None:
    live = run(tmp_path)
    live.log(1, loss=1.0)
    live.log(2, loss=1.0)
    live.close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
    run(tmp_path).resume(5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_resume_from_the_beginning_empties_the_log(tmp_path: Path) -> None:
    live = run(tmp_path)
    live.log(1, loss=1.0)
    live.score(1, loss=1.0)
    live.resume(0)
    assert lines(tmp_path) == []
    assert json.loads((tmp_path / "score_list.json").read_text()) == []


# ---------------------------------------------------------------- scores and status


def test_scores_are_kept_as_json_and_as_haven_reads_them(tmp_path: Path) -> None:
    live = run(tmp_path)
    live.score(10, loss=2.0, em=np.float64(0.25))  # pyright: ignore
    live.score(20, loss=1.0, em=0.5)
    expected = [{"step": 10, "loss": 2.0, "em": 0.25}, {"step": 20, "loss": 1.0, "em": 0.5}]
    assert json.loads((tmp_path / "score_list.json").read_text()) == expected
    content = (tmp_path / "score_list.pkl").read_bytes()
    assert pickle.loads(content) == expected
    assert b"numpy" not in content


def test_resume_cuts_the_scores_too_and_a_repeated_evaluation_replaces_its_entry(
    tmp_path: Path,
) -> None:
    live = run(tmp_path)
    for step in (10, 20, 30):
        live.score(step, loss=float(step))
    again = run(tmp_path)
    again.resume(20)
    again.score(20, loss=0.5)
    expected = [{"step": 10, "loss": 10.0}, {"step": 20, "loss": 0.5}]
    assert json.loads((tmp_path / "score_list.json").read_text()) == expected
    assert pickle.loads((tmp_path / "score_list.pkl").read_bytes()) == expected


def test_status_says_the_step_that_is_done_though_an_earlier_one_was_logged(tmp_path: Path) -> None:
    live = run(tmp_path)
    live.log(10, loss=1.0)
    live.move(13)
    live.status("preempted")
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 13
    live.resume(10)
    live.status("running")
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 10


def test_status_says_state_step_total_host_time_and_error(tmp_path: Path) -> None:
    live = run(tmp_path)
    live.status("running", step=4)
    live.log(7, loss=1.0)
    live.status("failed", error="DivergedError: loss is nan")
    status = json.loads((tmp_path / "status.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", status.pop("updated_at"))
    assert status.pop("host")
    assert process.life(status.pop("process")) == "alive"
    assert status.pop("goodput")["share"] == 0
    assert status.pop("checkpoint") is None
    assert status.pop("startup") == {}
    assert status == {
        "state": "failed",
        "step": 7,
        "total": 20,
        "error": "DivergedError: loss is nan",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "status.json"]


def test_status_says_the_step_of_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    live = run(tmp_path)
    for name in ("step-9", "step-10", ".step-20.tmp", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    live.status("preempted", step=12)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["step"], status["checkpoint"]) == (12, 10)


# ---------------------------------------------------------------- the console


def test_a_run_that_ends_on_a_full_disk_still_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = run(tmp_path)
    live.status("running", step=3)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with refused("disk_full"):
        live.status("running", step=4)
    live.status("failed", error="StorageError: " + "long " * 2000)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 4)
    assert status["error"].startswith("StorageError: long long")
    assert (tmp_path / "status.json").stat().st_size < 4096, "one block, which the file has already"


def _untimed(line: str) -> str:
    """A line of the console without the time of day that it begins with."""
    time, line = line.split("  ", 1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", time)
    return line


def test_without_a_terminal_each_entry_is_one_plain_line(tmp_path: Path) -> None:
    screen = io.StringIO()
    live = run(tmp_path, console=Console(file=screen))
    live.log(
        10, loss=5.12341, lr=3e-4, tokens=123456, tokens_per_s=8123.46, step_s=9.0, **{"x" * 90: 1}
    )
    live.log(20, **{"valid/loss": 4.5})
    first, second = (_untimed(line) for line in screen.getvalue().splitlines())
    assert first == (
        f"step 10/20  loss 5.1234  lr 3.0e-4  tokens 123456  tokens_per_s 8123.5"
        f"  step_s 9.0000  {'x' * 90} 1  eta 0:01:30"
    )
    assert second == "step 20/20  valid/loss 4.5000"


def test_on_a_terminal_lines_stay_above_a_bar_that_moves_at_every_step(tmp_path: Path) -> None:
    written = io.StringIO()
    live = run(tmp_path, console=Console(file=written, force_terminal=True, width=120))
    live.log(10, loss=5.1234, lr=3e-4, tokens_per_s=8123.46, step_s=9.0)
    live.move(11)
    assert live._screen._progress.tasks[0].completed == 11  # pyright: ignore
    live.log(12, **{"valid/loss": 4.5})
    live.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert "11/20" in text
    assert "loss 5.1234  eta 0:01:30" in text
    assert "step 10/20  loss 5.1234  lr 3.0e-4  tokens_per_s 8123.5  step_s 9.0000" in text
    assert "step 12/20  valid/loss 4.5000" in text


def test_log_lines_have_a_time_of_day_and_metrics_the_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.Logger("of this test")
    logger.addHandler(ConsoleHandler())
    logger.warning("[bold]%d rows[/bold]", 3)
    assert _untimed(capsys.readouterr().out) == "[bold]3 rows[/bold]\n"
    live = run(tmp_path)
    live.log(1, loss=1.0)
    live.say(2, loss=2.0)
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}], "what is said is not kept"
    assert datetime.fromisoformat(told_now()).tzinfo == timezone.utc


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12, "12"),
        (5.12344, "5.1234"),
        (3e-4, "3.0e-4"),
        (-2e-10, "-2.0e-10"),
        (12345.67, "12345.7"),
        (4e9, "4.0e9"),
    ],
)
def test_numbers_are_shown_as_a_person_reads_them(value: float, text: str) -> None:
    assert format_number(value) == text


# ---------------------------------------------------------------- ranks


def _tell_everything(folder: Path) -> list[str]:
    rank = int(os.environ["RANK"])
    settings = WandbSettings(entity=None, project="p", name="n", id=f"id{rank}", config={})
    live = RunRecord(
        folder / str(rank),
        total=2,
        wandb=settings if rank else None,
        console=Console(file=io.StringIO()),
    )
    consumed: list[str] = []
    live.resume(0)
    live.status("running")
    live.log(1, loss=1.0)
    live.score(1, loss=1.0)
    live.gradients(1, ((consumed.append(name), (name, torch.ones(1)))[1] for name in ("a", "b")))
    live.close()
    assert "wandb" not in sys.modules
    return consumed


def test_other_ranks_write_nothing_but_take_part_in_every_collective(tmp_path: Path) -> None:
    assert run_on_ranks(2, _tell_everything, tmp_path) == [["a", "b"], ["a", "b"]]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    written = {"metrics.jsonl", "score_list.json", "score_list.pkl", "status.json"}
    assert {path.name for path in (tmp_path / "0").iterdir()} == written


# ---------------------------------------------------------------- wandb


@pytest.fixture
def offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WandbSettings]:
    home = tmp_path_factory.mktemp("home")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield WandbSettings(
        entity="e",
        project="p",
        name="n",
        id="abc",
        config={"lr": 1e-3},
        init_timeout_s=1,
    )
    import wandb

    wandb.teardown()


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of every offline run below `folder`, oldest first, read by wandb's own
    command.
    """
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [
            str(Path(sys.executable).with_name("wandb")),
            "leet",
            "inspect",
            "--json",
            str(file),
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records = [json.loads(line) for line in output.splitlines()]
        rows += [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_wandb_gets_what_metrics_jsonl_gets_and_rows_behind_the_last_step_are_not_dropped(
    tmp_path: Path, offline: WandbSettings
) -> None:
    live = run(tmp_path, wandb=offline)
    for step in (1, 2, 3):
        live.log(step, loss=1 / step)
    live.log(2, **{"valid/loss": 0.5})
    live.close()
    assert history(tmp_path) == lines(tmp_path)


def test_wandb_gets_an_evaluation_in_one_row_with_its_table(
    tmp_path: Path, offline: WandbSettings
) -> None:
    rows = [{"question": "who", "answers": "a | b", "prediction": "a", "em": 1.0}]
    tell_wandb(offline, tmp_path, "test", {"em": 1.0, "f1": 0.5}, rows)
    (row,) = history(tmp_path)
    assert (row["evaluate/test/em"], row["evaluate/test/f1"]) == (1.0, 0.5)
    assert [row[f"evaluate/test/answers.{key}"] for key in ("_type", "ncols", "nrows")] == [
        "table-file",
        4,
        1,
    ]
    (table,) = tmp_path.glob(f"wandb/offline-run-*/files/{row['evaluate/test/answers.path']}")
    assert json.loads(table.read_text()) == {
        "columns": list(rows[0]),
        "data": [["who", "a | b", "a", 1.0]],
    }


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("preempted", 75)])
def test_wandb_ends_a_run_in_the_state_that_status_says(
    tmp_path: Path,
    offline: WandbSettings,
    monkeypatch: pytest.MonkeyPatch,
    state: telemetry.State,
    code: int,
) -> None:
    import wandb

    finish, codes = wandb.Run.finish, []
    monkeypatch.setattr(
        wandb.Run,
        "finish",
        lambda self, exit_code: (codes.append(exit_code), finish(self, exit_code)),
    )
    live = run(tmp_path, wandb=offline)
    live.status(state)
    live.close()
    assert codes == [code]


def test_no_file_of_a_run_holds_the_wandb_key(tmp_path: Path, offline: WandbSettings) -> None:
    live = run(tmp_path, wandb=offline)
    live.status("running")
    live.log(1, loss=1.0)
    live.gradients(2, [("w", torch.randn(8)), ("bad", torch.tensor([float("inf")]))])
    live.status("preempted")
    live.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [str(path) for path in files if KEY.encode() in path.read_bytes()]


def test_a_wandb_that_cannot_be_reached_costs_one_warning_and_the_run_goes_on_offline(
    tmp_path: Path,
    offline: WandbSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens on the discard port
    live = run(tmp_path, wandb=offline)
    live.log(1, loss=1.0)
    live.close()
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "trainer.telemetry.wandb_run"
    ]
    assert "Training goes on with wandb offline" in warning
    assert history(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_wandb_that_breaks_while_training_costs_one_warning(
    tmp_path: Path, offline: WandbSettings, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb
    from wandb.sdk.lib import console_capture

    live = run(tmp_path, wandb=offline)
    wandb.teardown()  # its service is gone, as after a SIGTERM to the whole process group
    for step in (1, 2):
        live.log(step, loss=1.0)
    live.close()
    assert not console_capture._stderr_callbacks
    assert not console_capture._stdout_callbacks
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert (
        sum("Training goes on without it" in record.getMessage() for record in caplog.records) == 1
    )


def test_without_a_key_wandb_is_offline(
    tmp_path: Path, offline: WandbSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    run(tmp_path, wandb=offline).close()
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_wandb_keeps_the_console_and_the_requirements_unless_that_is_switched_off(
    tmp_path: Path, offline: WandbSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for switch, name in (("auto", "on"), ("off", "off")):
        monkeypatch.setenv("WANDB_CONSOLE", switch)
        live = run(tmp_path / name, wandb=offline)
        print("a line of the console")
        live.close()
        files = {file.name for file in (tmp_path / name).glob("wandb/offline-run-*/files/*")}
        assert files == {"requirements.txt"} | ({"output.log"} if name == "on" else set())


# ---------------------------------------------------------------- speed, memory and the signal to stop


def test_a_meter_counts_units_and_steps_since_the_last_reading() -> None:
    meter = Meter()
    meter.add(1000)
    began = time.monotonic()
    meter.read("tokens")
    time.sleep(0.05)
    meter.add(30)
    meter.add(70)
    found = meter.read("tokens")
    assert 0.025 <= found["step_s"] <= (time.monotonic() - began) / 2
    assert found["tokens_per_s"] == pytest.approx(100 / (2 * found["step_s"]))


def test_paused_time_does_not_slow_the_meter() -> None:
    began = time.monotonic()
    meter = Meter()
    meter.add(1)
    with meter.pause():
        time.sleep(0.2)
    assert 0 < meter.read("tokens")["step_s"] <= time.monotonic() - began - 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the peak is that of the device")
def test_peak_memory_is_that_of_this_run_not_of_an_earlier_one_in_the_process() -> None:
    Meter()
    with host_memory.returned_at_once():  # a test before may have had malloc keep what is freed
        block = bytearray(os.urandom(1)) * (256 * 2**20)
        with_block = Meter().read("tokens")["peak_gib"]
        del block
    later = Meter()
    assert later.read("tokens")["peak_gib"] < with_block - 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cpu_has_no_mfu() -> None:
    meter = Meter()
    with meter.stepping():
        torch.ones(2, 3) @ torch.ones(3, 4)
    meter.add(10)
    assert sorted(meter.read("tokens")) == ["peak_gib", "step_s", "tokens_per_s"]


def test_mfu_is_the_achieved_share_of_the_devices_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "peak_flops", lambda: 1e12)
    meter, weight = Meter(), torch.ones(3, 4, requires_grad=True)
    for _ in range(2):  # only the first step is counted
        with meter.stepping():
            (torch.ones(5, 3) @ weight).sum().backward()
        meter.add(10)
    found = meter.read("tokens")
    flops_per_token = 2 * (2 * 5 * 3 * 4) / 10  # forward, and the weight's gradient
    assert found["mfu"] == pytest.approx(found["tokens_per_s"] * flops_per_token / 1e12)
    assert found["tflops"] == pytest.approx(found["mfu"])  # of a peak of 1e12


def test_flops_of_grouped_attention_and_of_a_product_with_another_output_dtype_are_counted() -> (
    None
):
    """Both raised in torch's formulas: runs of StarCoder and of FiD died in their first step on a GPU."""
    query, key = (torch.empty(2, heads, 16, 8, device="meta") for heads in (4, 1))
    left = torch.empty(2, 8, 16, dtype=torch.bfloat16, device="meta")
    with StepFlops() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            query, query, key, key, query, query[..., 0], None, None, 16, 16, 0.0, False, left, left
        )
        torch.bmm(left, left.transpose(1, 2), out_dtype=torch.float32)
    product = 2 * (2 * 4 * 16) * 16 * 8
    assert counter.total == (2 + 5) * product + 2 * 2 * 8 * 8 * 16


def test_flops_that_torch_cannot_count_end_the_counting_and_not_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*shapes: Any, **_: Any) -> int:
        raise AssertionError("no formula for these shapes")

    monkeypatch.setitem(flops_module._FORMULAS, torch.ops.aten.mm, refuse)
    monkeypatch.setattr(meter_module, "peak_flops", lambda: 1e12)
    meter = Meter()
    for _ in range(2):
        with meter.stepping():
            assert (torch.ones(5, 3) @ torch.ones(3, 4)).sum() == 60
        meter.add(10)
    assert "mfu" not in meter.read("tokens")
    ours = [record for record in caplog.records if record.name == flops_module.__name__]
    assert [record.levelname for record in ours] == ["WARNING"]


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_only_sets_the_flag_however_often_it_comes(number: signal.Signals) -> None:
    preemption = Preemption()
    try:
        assert not preemption.requested
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert preemption.requested
    finally:
        preemption.close()


def test_closing_gives_the_signals_back() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    preemption = Preemption()
    preemption.close()
    preemption.close()
    assert signal.signal(signal.SIGUSR1, before) == signal.SIG_IGN


def test_wandb_leaves_the_preemption_handler_in_place(
    tmp_path: Path, offline: WandbSettings
) -> None:
    preemption = Preemption()
    try:
        run(tmp_path, wandb=offline).close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
    finally:
        preemption.close()


def test_the_time_to_the_first_step_is_told_once_with_its_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    live = run(tmp_path)
    live.startup.lap("imports")
    live.startup.lap("rows")
    for step in (1, 2):
        live.move(step)
    (told,) = [line for line in caplog.messages if line.startswith("started in")]
    assert re.search(r"in [\d.]+ s: imports [\d.]+, rows [\d.]+, first step", told)
    live.status("running")
    parts = json.loads((tmp_path / "status.json").read_text())["startup"]
    assert list(parts) == ["imports", "rows", "first step"]


def _fail_on(rank: int, folder: Path) -> None:
    live = RunRecord(folder, total=3)
    live.status("running")
    distributed.barrier()
    for failing in (rank, 1 - rank):
        if distributed.rank() == failing:
            live.fail(MemoryError("no room") if failing == rank else RuntimeError("peer is gone"))
        distributed.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_status_names_what_the_rank_that_failed_first_said(rank: int, tmp_path: Path) -> None:
    run_on_ranks(2, _fail_on, rank, tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    named = "rank 1: " if rank else ""
    assert (status["state"], status["error"]) == ("failed", f"{named}MemoryError: no room")
