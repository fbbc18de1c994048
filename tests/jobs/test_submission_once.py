"""What a submission does once for each experiment: every step costs a group of thousands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.job_state import Observed
from jobs.protocol import JobSpec, Rendered
from jobs.record.paths import BaseFolder
from jobs.submit import group
from jobs.submit.group import preview, scheduler_texts, submit
from tests.jobs.test_sending import Memory, request
from trainer import tasks

COUNT = 5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each step has run."""
    counter: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(tasks, "parse")
    counted(group, "check_dictionary")
    counted(group, "survey")
    counted(Memory, "render")
    counted(Memory, "query")
    return counter


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "base")


EACH_ONCE = {"parse": COUNT, "render": COUNT, "check_dictionary": COUNT, "survey": 1}


@pytest.mark.parametrize("max_parallel", [None, COUNT])
def test_a_new_group_is_parsed_checked_rendered_and_surveyed_once(
    base: BaseFolder, calls: Counter[str], max_parallel: int | None
) -> None:
    results = submit(request(base, Memory(), COUNT, max_parallel=max_parallel))
    assert [result.action for result in results] == ["send"] * COUNT
    assert calls == EACH_ONCE


def test_a_group_that_is_alive_is_looked_at_once(base: BaseFolder, calls: Counter[str]) -> None:
    scheduler = Memory()
    submit(request(base, scheduler, COUNT))
    calls.clear()
    results = submit(request(base, scheduler, COUNT))
    assert [result.action for result in results] == ["skip"] * COUNT
    assert calls == {**EACH_ONCE, "query": 1}


def test_what_is_sent_again_is_looked_at_once_more_under_its_lock(
    base: BaseFolder, calls: Counter[str]
) -> None:
    scheduler = Memory()
    submit(request(base, scheduler, COUNT))
    scheduler.states = dict.fromkeys(scheduler.states, Observed("failed"))
    calls.clear()
    results = submit(request(base, scheduler, COUNT, retry=["failed"]))
    assert [result.action for result in results] == ["send"] * COUNT
    assert [calls[name] for name in ("parse", "render", "check_dictionary")] == [COUNT] * 3
    assert calls["survey"] == 1 + COUNT


def test_a_preview_with_its_texts_renders_once(base: BaseFolder, calls: Counter[str]) -> None:
    plan = request(base, Memory(), COUNT)
    preview(plan)
    assert len(scheduler_texts(plan)) == COUNT
    assert calls == EACH_ONCE


def test_a_record_that_somebody_else_has_begun_meanwhile_is_rendered_anew(
    base: BaseFolder,
) -> None:
    class Overtaken(Memory):
        """A scheduler whose first rendering takes so long that another submission is faster."""

        def render(self, spec: JobSpec) -> Rendered:
            text = super().render(spec)
            if not self.ids:
                self.ids["another"] = "0"
                other = request(base, faster)
                submit(other)
            return text

    faster, slower = Memory(), Overtaken()
    (result,) = submit(request(base, slower, backend_of=lambda name: faster))
    assert result.action == "skip"
    assert slower.sent == []
    assert len(faster.sent) == 1
