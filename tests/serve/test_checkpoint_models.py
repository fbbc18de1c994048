"""Checkpoints as models: asked by OpenAI's client, and tuned further, as long as they can be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from jobs.record.bases import has_needed
from jobs.record.paths import RunFolder
from jobs.serve import exported_step
from jobs.serve.dialect.names import model_of
from jobs.serve.dialect.saved_steps import exportable_steps
from tests.serve.answering import StandIn, stand_in, tuned_model
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving, until_status
from tests.wording import says
from trainer.metrics.judge_record import record

World = tuple[Service, StandIn, OpenAI, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with pytest.MonkeyPatch.context() as patch:
        model = stand_in(folder / "standin", patch)
        with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
            yield running, model, running.client(), tuned_model(running)


def job_of(client: OpenAI, model: str) -> Any:
    return next(job for job in client.fine_tuning.jobs.list() if job.fine_tuned_model == model)


def run_of(service: Service, job: Any) -> Path:
    return service.base / job.lathe["exp_id"]


def test_a_checkpoint_is_asked_and_tuned_further_by_its_name(world: World) -> None:
    running, standin, client, model = world
    job = job_of(client, model)
    (point,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    name = point.fine_tuned_model_checkpoint
    assert name == f"{model}:ckpt-step-{point.step_number}"
    assert client.models.retrieve(name).owned_by == "local"
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "you"}]
    )
    assert (answer.model, answer.choices[0].message.content) == (name, "you said you")
    assert standin.starts() == [f"step-{point.step_number}"]
    file = client.files.create(file=("rows.jsonl", jsonl(CHAT)), purpose="fine-tune")
    later = client.fine_tuning.jobs.create(model=name, training_file=file.id)
    ended = until_status(client, later.id, "succeeded", "failed")
    assert ended["status"] == "succeeded", ended["error"]
    assert ended["model"] == name
    experiment = json.loads((run_of(running, later) / "exp_dict.json").read_text())
    assert experiment["base"]["model"] == f"step-{point.step_number}"
    assert standin.starts() == [f"step-{point.step_number}"] * 2


def test_a_checkpoint_has_its_name_for_whoever_sees_its_job(world: World) -> None:
    running, _, client, model = world
    (point,) = client.fine_tuning.jobs.checkpoints.list(job_of(client, model).id)
    name, asked = point.fine_tuned_model_checkpoint, list[str]()
    seen = model_of(running.keeper, name, lambda owner: not asked.append(owner))
    assert seen is not None
    assert (seen.step, seen.weights) == (point.step_number, f"step-{point.step_number}")
    assert asked == ["local"]
    assert model_of(running.keeper, name, lambda owner: False) is None


def test_what_is_no_checkpoint_any_more_is_refused_and_a_model_of_it_stays(world: World) -> None:
    running, _, client, model = world
    job, name = job_of(client, model), f"{model}:ckpt-step-"
    (point,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    step = point.step_number
    for unknown in (f"{name}999", f"{name}0", f"{name}x", f"{name}1/..", f"none:ckpt-step-{step}"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(
                model=unknown, messages=[{"role": "user", "content": "you"}]
            )
        says("checkpoint_unknown", caught.value, name=unknown)
    with pytest.raises(openai.BadRequestError) as stays:
        client.models.delete(f"{name}{step}")
    says("checkpoint_stays", stays.value, name=f"{name}{step}")
    with pytest.raises(openai.BadRequestError) as shared:
        client.fine_tuning.checkpoints.permissions.create(f"{name}{step}", project_ids=["p"])
    says("permissions_unserved", shared.value)
    shutil.rmtree(run_of(running, job) / "checkpoints")  # its run has pruned it
    exported = run_of(running, job) / f"step-{step}"
    exported.mkdir(exist_ok=True)
    (exported / "lathe.json").write_text("{}")
    assert [one.step_number for one in client.fine_tuning.jobs.checkpoints.list(job.id)] == [step]
    shutil.rmtree(exported)
    assert not client.fine_tuning.jobs.checkpoints.list(job.id).data


def test_a_deleted_model_takes_its_checkpoints_with_it(world: World) -> None:
    running, _, client, _ = world
    model = tuned_model(running)
    job = job_of(client, model)
    (point,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    client.models.delete(model)
    assert not client.fine_tuning.jobs.checkpoints.list(job.id).data
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(point.fine_tuned_model_checkpoint)


def test_a_job_whose_gate_refused_its_model_has_no_checkpoints(world: World) -> None:
    running, _, client, _ = world
    model = tuned_model(running)
    job = job_of(client, model)
    (point,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    record(run_of(running, job), "final", ["em fell by 3 points"])
    (run_of(running, job) / "metrics.jsonl").open("a").write("{}\n")  # so that it is read again
    until_status(client, job.id, "failed")
    assert not client.fine_tuning.jobs.checkpoints.list(job.id).data
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(point.fine_tuned_model_checkpoint)
    says("checkpoint_unknown", caught.value, name=point.fine_tuned_model_checkpoint)


@pytest.mark.long
def test_a_checkpoint_of_another_token_is_nobodys(
    tmp_path: Path, stub: Stub, queue: Path, token_file: tuple[Path, dict[str, str]]
) -> None:
    tokens, texts = token_file
    with serving(tmp_path / "base", python=stub.python, tokens=tokens) as running:
        anna, ben = running.client(texts["anna"]), running.client(texts["ben"])
        model = tuned_model(running, anna)
        (point,) = anna.fine_tuning.jobs.checkpoints.list(job_of(anna, model).id)
        name = point.fine_tuned_model_checkpoint
        assert anna.models.retrieve(name).owned_by == "anna"
        with pytest.raises(openai.NotFoundError) as caught:
            ben.models.retrieve(name)
        says("checkpoint_unknown", caught.value, name=name)
        file = ben.files.create(file=("rows.jsonl", jsonl(CHAT)), purpose="fine-tune")
        with pytest.raises(openai.NotFoundError):
            ben.fine_tuning.jobs.create(model=name, training_file=file.id)


def manifest(folder: Path, step: int, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.safetensors").write_bytes(b"12345")
    files = [{"name": "weights.safetensors", "size": 5, "sha256": ""}]
    values = {"version": 2, "step": step, "files": files, **changes}
    (folder / "manifest.json").write_text(json.dumps(values))


def test_only_whole_checkpoints_and_exports_are_usable(tmp_path: Path) -> None:
    run, saved = RunFolder(tmp_path), tmp_path / "checkpoints"
    for step in (1, 2, 3, 4, 5, 6):
        manifest(saved / f"step-{step}", step)
    (saved / "step-2" / "manifest.json").unlink()
    (saved / "step-3" / "weights.safetensors").write_bytes(b"123")
    (saved / "step-4" / "weights.safetensors").unlink()
    manifest(saved / "step-5", 5, version=99)
    manifest(saved / "step-7", 6)
    manifest(saved / ".step-8.tmp", 8)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / "lathe.json").touch()
    (tmp_path / "step-10").mkdir()
    assert list(exportable_steps(run)) == [1, 6, 9]


def test_a_job_waits_for_the_model_of_a_step_and_not_for_the_end_of_its_run(tmp_path: Path) -> None:
    values = {"base": {"experiment": {}, "model": "step-3"}}
    assert not has_needed(tmp_path, values)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "config.json").touch()
    assert has_needed(tmp_path, values)
    assert not has_needed(tmp_path, {"base": {"experiment": {}}})


def test_a_step_of_which_no_model_can_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = stand_in(tmp_path / "standin", monkeypatch)
    answer = standin.folder / "trainer/commands/answer.py"
    answer.write_text("""print('{"error": "step 3 is damaged"}')""")
    assert exported_step.export_step(tmp_path, "step-3", tmp_path) == "step 3 is damaged"
    answer.write_text("raise SystemExit(9)")
    assert "code 9" in str(exported_step.export_step(tmp_path, "step-3", tmp_path))
