"""Our own API, /lathe/v1: the commands of lathe-jobs, with the same JSON."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from exp_configs import experiments_of
from jobs.backends import load
from jobs.errors import NothingMatched, Unreachable
from jobs.job_state import ENDED_BADLY
from jobs.record.paths import RunFolder, is_exp_id, is_there
from jobs.report import logs, scores
from jobs.serve.index import RunPage
from jobs.serve.job_view import metric_lines
from jobs.serve.limits.disclosure import for_tenant, log_of_tenant, row_of_tenant
from jobs.serve.preview.command import GROUP, MAX_OUTPUT, look
from jobs.serve.requests import (
    Body,
    PlainJSON,
    Refusal,
    client_of,
    is_operator,
    keeper_of,
    page_query,
    quote,
    read_body,
    writer_of,
)
from jobs.serve.uploads import refuse_on_full_disk
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from jobs.submit.policy import Limits
from trainer.config.groups import with_steps
from trainer.errors import ConfigError, LatheError
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper
    from jobs.submit.request import ActionResult

MAX_LINES = 5000  # of metrics in one answer
MAX_TAIL = 2000  # lines of a log
MAX_ROWS = 1000  # of `status` in one page
CODE_KEYS = ("trust_remote_code", "auto_map", "custom_pipelines", "metrics")
MEMORY_PLAN, JUDGE = "memory_plan.json", "judge.json"
DRY_RUN_S = 600.0
ONE_DOCTOR = threading.Lock()


class AskExperiment(Body):
    """An experiment's dictionary or a group's name, and the action to take with it."""

    experiment: dict[str, Any] | None = None
    group: Annotated[str, Field(max_length=128)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    data_path: Annotated[str, Field(max_length=4096)] | None = None
    test: bool = False  # score the test split at the end
    action: Literal["plan", "dry_run", "submit"] = "plan"


def list_status(request: Request) -> Response:
    """Rows of `lathe-jobs status --json`. Parameters: group, state, limit (so many, the newest
    first), after (the last id of the page before). An ETag that is sent back as If-None-Match is
    answered with 304 as long as nothing has changed.
    """
    keeper, query = keeper_of(request), request.query_params
    index, owner = keeper.index, client_of(request).owner
    # read before the rows: a change between the two gives newer rows under an older tag
    tag = f'"{index.epoch()}-{index.tick()}"'
    headers = {"etag": tag, "vary": "authorization"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    cut = None
    if "limit" in query or "after" in query:
        page = page_query(request, usual=MAX_ROWS, most=MAX_ROWS)
        cut = RunPage(page.limit, page.after)
    try:
        rows = index.runs(owner, group=query.get("group"), state=query.get("state"), cut=cut)
    except KeyError:
        text = f"after: got {quote(query.get('after'))}, want the id of a run. Begin without it."
        raise Refusal(400, text, param="after") from None
    if is_operator(request):  # as they stand in the index, without a reading of each
        text = f"[{','.join(body for _, body in rows)}]"
        return Response(text, media_type="application/json", headers=headers)
    base = keeper.folder.base.path
    own = [row_of_tenant(json.loads(body), base) for _, body in rows]
    return PlainJSON(own, headers=headers)


def show_run(request: Request) -> Response:
    """A row of `status`, together with the experiment's dictionary."""
    keeper, folder = keeper_of(request), find_run(request)
    text = keeper.index.run(folder.path.name)
    if text is None:  # its folder has just gone
        raise _no_run(folder.path.name)
    job = keeper.index.job_of_run(folder.path.name)
    experiment = None
    with suppress(OSError):  # then the row says so, and the rest of it is shown
        experiment = read_json(folder.exp_dict)
    row = json.loads(text)
    if not is_operator(request):
        base = keeper.folder.base.path
        row, experiment = row_of_tenant(row, base), for_tenant(experiment, base)
    more = {
        "experiment": experiment,
        "job": None if job is None else job["id"],
        "has_memory_plan": is_there(folder.path / MEMORY_PLAN),
        "has_console": is_there(folder.console),
    }
    return PlainJSON({**row, **more})


def show_metrics(request: Request) -> Response:
    """The lines of metrics.jsonl after the step `since`."""
    text = request.query_params.get("since", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise Refusal(400, f"since: got {quote(text)}, want a step, such as 100.", param="since")
    lines = [line for line in metric_lines(find_run(request).metrics) if _step(line) > int(text)]
    return PlainJSON({"metrics": lines[:MAX_LINES], "has_more": len(lines) > MAX_LINES})


def show_logs(request: Request) -> Response:
    """The last lines that an attempt printed. Parameters: limit, attempt, err=1 for stderr."""
    query = request.query_params
    tail = page_query(request, usual=200, most=MAX_TAIL).limit
    number = query.get("attempt")
    if number is not None and not (number.isascii() and number.isdigit() and len(number) < 6):
        raise Refusal(400, f"attempt: got {quote(number)}, want a number.", param="attempt")
    attempt = None if number is None else int(number)
    lines = logs.show(
        find_run(request), None, attempt=attempt, err=query.get("err") == "1", tail=tail
    )
    if not is_operator(request):
        lines = log_of_tenant(lines, keeper_of(request).folder.base.path)
    return PlainJSON({"lines": list(lines)})


def show_memory(request: Request) -> Response:
    """The memory plan of a run and its measured peak: memory_plan.json."""
    plan = read_json(find_run(request).path / MEMORY_PLAN)
    if plan is None:
        raise Refusal(404, "This run has no memory plan: only a run on a GPU has one.")
    return _for_reader(request, plan)


def show_judgement(request: Request) -> Response:
    """Whether a run is better than what it began with, and what it broke: judge.json."""
    folder = find_run(request)
    judgement = read_json(folder.path / JUDGE)
    if judgement is None:
        name = folder.path.name
        text = f"This run has no {JUDGE}. Make one on the server's machine: lathe judge {name}."
        raise Refusal(404, text, param="exp_id", code="not_judged")
    return _for_reader(request, judgement)


def list_results(request: Request) -> Response:
    """The answer of `lathe-jobs results --json`. Parameter: group."""
    keeper, group = keeper_of(request), request.query_params.get("group")
    ids = [name for name, _ in keeper.index.runs(client_of(request).owner, group=group)]
    results = scores.as_json(scores.gather(keeper.folder.base, ids))
    return _for_reader(request, results)


def show_doctor(request: Request) -> Response:
    """Whether the service's backend can be used: the answer of `lathe-jobs doctor --json`."""
    if not ONE_DOCTOR.acquire(blocking=False):  # a scheduler that hangs takes few threads
        raise Refusal(429, "Another doctor is in progress. Ask again.", retry_after_s=10)
    try:
        findings = load(keeper_of(request).send.backend).check()
    finally:
        ONE_DOCTOR.release()
    entries = [asdict(finding) for finding in findings]
    return _for_reader(request, entries)


def cancel_run(request: Request) -> Response:
    """Cancel a live run; its training saves a checkpoint first."""

    def cancel(keeper: Keeper, rows: list[Any]) -> list[ActionResult]:
        return control.cancel(keeper.folder.base, rows, keeper.backend_of)

    return _change_run(request, cancel)


def retry_run(request: Request) -> Response:
    """Run an ended experiment again from its last checkpoint, with the same flags and code."""
    limits = Limits(retry=(*ENDED_BADLY, "preempted"), with_bad_input=True)

    def retry(keeper: Keeper, rows: list[Any]) -> list[ActionResult]:
        refuse_on_full_disk(keeper, 0)
        return control.again(control.Again(keeper.folder.base, keeper.backend_of, limits), rows)

    return _change_run(request, retry)


def reconcile(request: Request) -> Response:
    """Do what `lathe-jobs reconcile` does: adopt submissions, run preempted experiments again,
    submit those that waited.
    """
    keeper = keeper_of(request)
    _refuse_others(request)
    return _results(control.reconcile(control.Again(keeper.folder.base, keeper.backend_of)))


async def ask_experiments(request: Request) -> Response:
    """Plan, check without training (dry_run) or submit an experiment's dictionary, or a group of
    the repository.
    """
    keeper = keeper_of(request)
    _refuse_others(request)
    body = await read_body(request, AskExperiment, keeper.config)
    return await run_in_threadpool(_plan_or_submit, keeper, body)


def _plan_or_submit(keeper: Keeper, body: AskExperiment) -> Response:
    if (body.experiment is None) == (body.group is None):
        raise Refusal(400, "experiment, group: give one of them.", param="experiment")
    if body.group is not None:
        experiments = experiments_of(body.group, None, body.steps)
    else:
        experiments = with_steps([dict(body.experiment or {})], body.steps)
    strays = [text for values in experiments for text in strange_texts(values, keeper.config.roots)]
    if body.data_path is not None and not is_below(body.data_path, keeper.config.roots):
        strays.append(f"data_path={quote(body.data_path)}")
    if strays:
        text = f"{'; '.join(strays[:5])}: want names and folders below one of the service's roots."
        raise Refusal(403, text, code="path_not_allowed")
    flags = prepare.with_steps({"cache_dir": str(keeper.folder.cache)}, body.steps)
    if body.data_path is not None:
        flags["data_path"] = body.data_path
    if body.test:
        flags["test"] = ""
    if body.action == "dry_run":
        return _dry_run(keeper, experiments, flags)
    group = body.group or GROUP
    job = prepare.job_config(group, None, keeper.send.python_binary)
    is_plan = body.action == "plan"
    if not is_plan:
        refuse_on_full_disk(keeper, 0)
    request = keeper.request(experiments, group, job, flags, is_plan=is_plan)
    if is_plan:
        return _results(group_of_jobs.preview(request))
    results = group_of_jobs.submit(request)
    keeper.reader.read_runs()  # whoever asks for them now is to find them
    return _results(results)


def _dry_run(keeper: Keeper, experiments: list[dict[str, Any]], flags: dict[str, str]) -> Response:
    """The output and exit code of `trainval.py --dry_run`, in a process that may import torch."""
    words = [str(prepare.PROJECT / "trainval.py"), "--dry_run"]
    words += ["-sb", str(keeper.folder.base.path)]
    words += [f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()]
    with tempfile.TemporaryDirectory() as folder:
        process = look(words, experiments, Path(folder), within_s=DRY_RUN_S)
    outcome = {"code": process.returncode, "text": process.stdout[-MAX_OUTPUT:]}
    return PlainJSON(
        {**outcome, "error": process.stderr[-MAX_OUTPUT:] if process.returncode else None}
    )


def strange_texts(value: Any, roots: list[str], place: str = "") -> Iterator[str]:
    """The places in a request's dictionary that name code, or paths outside of the roots."""
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[str, Any]", value).items():
            # the keys of data.mix are names of files
            if key in CODE_KEYS or not is_below(key, roots):
                yield f"{place}{key}"
            yield from strange_texts(one, roots, f"{place}{key}.")
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from strange_texts(one, roots, place)
    elif isinstance(value, str) and not is_below(value, roots):
        yield f"{place.rstrip('.')}={quote(value)}"


def is_below(text: str, roots: list[str]) -> bool:
    """Whether a text is not a path that leaves the run folders, or is a path below a root."""
    is_path = text.startswith(("/", "~", "file:")) or ".." in Path(text).parts or "\0" in text
    if not is_path:
        return True
    if "\0" in text or not text.startswith("/"):
        return False
    path = Path(text).resolve()
    return any(path.is_relative_to(Path(root).resolve()) for root in roots)


def _change_run(
    request: Request, act: Callable[[Keeper, list[Any]], list[ActionResult]]
) -> Response:
    client, keeper, folder = writer_of(request), keeper_of(request), find_run(request)
    job = keeper.index.job_of_run(folder.path.name)
    if job is not None:
        text = f"It belongs to {job['id']}: use /v1/fine_tuning/jobs/{job['id']}."
        raise Refusal(409, text, code="job_of_a_client")
    if client.role != "admin":
        raise Refusal(403, "Only a token of the role admin changes what others sent.")
    rows = list(keeper.reader.rows([folder.path.name]).values())
    if not rows:
        raise Refusal(400, "It was started by hand: stop or start it on its own machine.")
    return _results(act(keeper, rows))


def _for_reader(request: Request, value: Any) -> Response:
    """An answer that says where files lie to operators alone."""
    if not is_operator(request):
        value = for_tenant(value, keeper_of(request).folder.base.path)
    return PlainJSON(value)


def _results(results: list[ActionResult]) -> Response:
    return PlainJSON([asdict(result) for result in results])


def _refuse_others(request: Request) -> None:
    if writer_of(request).role != "admin":
        raise Refusal(403, "Only a token of the role admin may do this.")


def find_run(request: Request, name: str | None = None) -> RunFolder:
    """The run `name`, or else the one in the request's path. Refusal when this client sees no such
    run.
    """
    keeper = keeper_of(request)
    name = str(request.path_params["exp_id"]) if name is None else name
    own = own_runs(request)
    is_there = is_exp_id(name) and keeper.index.run(name) is not None
    if not is_there or (own is not None and name not in own):
        raise _no_run(name)
    return keeper.folder.base.run(name)


def _no_run(name: str) -> Refusal:
    return Refusal(404, f"No such run: {quote(name)}.", param="exp_id")


def own_runs(request: Request) -> set[str] | None:
    """Ids of the runs that a client sees; None when it sees all."""
    owner = client_of(request).owner
    return None if owner is None else keeper_of(request).index.run_ids_of(owner)


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def refusal_of(error: LatheError) -> Refusal:
    """The answer for one of our errors: bad input, no match, an unreachable scheduler."""
    if isinstance(error, NothingMatched):
        return Refusal(404, str(error))
    if isinstance(error, Unreachable):
        return Refusal(503, str(error), code="scheduler_unreachable", retry_after_s=30)
    if isinstance(error, ConfigError):
        return Refusal(400, str(error), code="invalid_value")
    return Refusal(500, str(error))


_SCHEMA = {"schema": {"$ref": "#/components/schemas/AskExperiment"}}
_TAKES_EXPERIMENT = {"requestBody": {"required": True, "content": {"application/json": _SCHEMA}}}


def openapi(request: Request) -> Response:
    """The OpenAPI document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    routes: list[Route] = [one for one in request.app.routes if one.path.startswith("/lathe/v1/")]
    for route in routes:
        for method in sorted(route.methods or ()):
            if method == "HEAD":
                continue
            endpoint: Any = route.endpoint
            text = (endpoint.__doc__ or "").strip().replace("\n    ", " ")
            names = [name for name in ("exp_id",) if f"{{{name}}}" in route.path]
            paths.setdefault(route.path, {})[method.lower()] = {
                "summary": text,
                "operationId": endpoint.__name__,
                **(_TAKES_EXPERIMENT if endpoint is ask_experiments else {}),
                "parameters": [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in names
                ],
                "responses": {"200": {"description": "JSON"}, "default": {"description": "Error"}},
            }
    info = {"title": "Lathe", "version": "1"}
    bearer = {"bearer": {"type": "http", "scheme": "bearer"}}
    return PlainJSON(
        {
            "openapi": "3.1.0",
            "info": info,
            "paths": paths,
            "components": {
                "securitySchemes": bearer,
                "schemas": {"AskExperiment": AskExperiment.model_json_schema()},
            },
            "security": [{"bearer": []}],
        }
    )


RUN = "/lathe/v1/runs/{exp_id}"
ROUTES = [
    Route("/lathe/v1/status", list_status),
    Route("/lathe/v1/results", list_results),
    Route("/lathe/v1/doctor", show_doctor),
    Route("/lathe/v1/reconcile", reconcile, methods=["POST"]),
    Route("/lathe/v1/experiments", ask_experiments, methods=["POST"]),
    Route("/lathe/v1/openapi.json", openapi),
    Route(RUN, show_run),
    Route(f"{RUN}/metrics", show_metrics),
    Route(f"{RUN}/logs", show_logs),
    Route(f"{RUN}/memory", show_memory),
    Route(f"{RUN}/judge", show_judgement),
    Route(f"{RUN}/cancel", cancel_run, methods=["POST"]),
    Route(f"{RUN}/retry", retry_run, methods=["POST"]),
]
