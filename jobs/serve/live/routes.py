"""The routes of the live page: its files, the client, the stream, curves, answers, differences."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from jobs.report.curves import Place
from jobs.report.page import ASSETS, STYLE
from jobs.serve.lathe_routes import find_run
from jobs.serve.limits.disclosure import for_tenant
from jobs.serve.live import driven, votes
from jobs.serve.live.series import answers_of, curves_of, place_of
from jobs.serve.live.stream import Watch
from jobs.serve.offers import METHODS, Offer, kinds_of, offer_for
from jobs.serve.requests import (
    PlainJSON,
    Refusal,
    client_of,
    is_operator,
    keeper_of,
    quote,
    shares_of,
)
from jobs.serve.rows.kinds import KINDS
from trainer.config.differences import differing, flatten, short_names, written
from trainer.errors import ConfigError

FOLDER = Path(__file__).with_name("page")
SHARED = (ASSETS / "chart.js", ASSETS / "dom.js")  # with the report of `lathe-jobs results --html`
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
MOST_RUNS = 12  # compared in one chart
LONGEST_VALUE = 2000  # letters


def _files() -> dict[str, tuple[bytes, str]]:
    """Name -> content and type of the page's files. A request can only select one of them."""
    paths = [*(path for path in FOLDER.iterdir() if path.suffix in TYPES), *SHARED]
    files = {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in paths}
    style, kind = files["page.css"]
    files["page.css"] = (STYLE.encode() + style, kind)
    return files


FILES = _files()


def show_page(request: Request) -> Response:
    """The page itself."""
    return _file("index.html")


def show_file(request: Request) -> Response:
    """A script or the style of the page."""
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    if name not in FILES:
        raise Refusal(404, f"The page has no file {quote(name)}.")
    content, kind = FILES[name]
    return Response(content, media_type=f"{kind}; charset=utf-8")


def go_to_page(request: Request) -> Response:
    """Redirect from the root to the page."""
    return RedirectResponse("/live")


def show_me(request: Request) -> Response:
    """The name and role of the client, the backend, and the models that can be tuned, with the rows
    that each takes: method -> kind -> the keys of a row.
    """
    client, keeper = client_of(request), keeper_of(request)
    models = {
        name: {
            "task": offer.experiment["task"],
            "epochs": offer.epochs,
            "methods": kinds_by_method(offer, name),
        }
        for name, offer in sorted(keeper.config.models.items())
    }
    return PlainJSON(
        {
            "name": client.name,
            "role": client.role,
            "base": keeper.folder.base.path.name,
            "backend": keeper.send.backend,
            "models": models,
        }
    )


def kinds_by_method(offer: Offer, name: str) -> dict[str, dict[str, Any]]:
    """method -> kind -> the keys of a row, for the methods that an offered model takes."""
    methods: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        with contextlib.suppress(ConfigError):  # it does not take this one
            kinds = kinds_of(offer_for(offer, name, method))
            methods[method] = {kind: KINDS[kind].needs for kind in kinds}
    return methods


def show_stream(request: Request) -> Response:
    """Server-sent events: `board` with the cards that changed after the tick `since`, `metrics`
    with new lines of the runs in `watch` (ID:PLACE,...; a place comes from `curves`).
    """
    query = request.query_params
    since, watch_text = query.get("since", "-1"), query.get("watch", "")
    if not since.removeprefix("-").isdecimal() or len(since) > 18:
        raise Refusal(400, f"since: got {quote(since)}, want a tick.", param="since")
    words = [word for word in watch_text.split(",") if word]
    runs: dict[Path, Place] = {}
    for word in words[:MOST_RUNS]:
        name, _, place = word.partition(":")
        with contextlib.suppress(ValueError):
            runs[find_run(request, name).metrics] = place_of(place)
    if len(runs) != len(words):
        raise Refusal(400, f"watch: want at most {MOST_RUNS} times ID:PLACE.", param="watch")
    watch = Watch(keeper_of(request), client_of(request).owner, int(since), runs)
    events = watch.events(shares_of(request).news)
    return StreamingResponse(events, media_type="text/event-stream")


def show_curves(request: Request) -> Response:
    """Every metric of a run: [step, seconds, mean, low, high] of neighbouring steps."""
    return PlainJSON(curves_of(find_run(request).metrics))


def show_answers(request: Request) -> Response:
    """Generated answers of a run at a `step`; by default at the last one."""
    text = request.query_params.get("step")
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 12):
        raise Refusal(400, f"step: got {quote(text)}, want a number.", param="step")
    return PlainJSON(answers_of(find_run(request).path, None if text is None else int(text)))


def show_differences(request: Request) -> Response:
    """The keys in which the dictionaries of some runs differ: short names, values as texts."""
    names = [name for name in request.query_params.get("runs", "").split(",") if name]
    if not 1 <= len(names) <= MOST_RUNS:
        raise Refusal(400, f"runs: want 1 to {MOST_RUNS} ids.", param="runs")
    index, base = keeper_of(request).index, keeper_of(request).folder.base.path
    values = [index.experiment(find_run(request, name).path.name) for name in names]
    flat = [flatten(one if is_operator(request) else for_tenant(one, base)) for one in values]
    keys = differing(flat)
    rows = [
        {
            "key": key,
            "name": name,
            "values": [_written(values[key]) if key in values else None for values in flat],
        }
        for key, name in zip(keys, short_names(keys), strict=True)
    ]
    return PlainJSON({"runs": names, "keys": rows})


def _written(value: object) -> str:
    text = written(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


RUN, STREAM = "/lathe/v1/runs/{exp_id}", "/lathe/v1/stream"
PAGE_ROUTES = [
    Route("/", go_to_page),
    Route("/live", show_page),
    Route("/live/{name}", show_file),
]
ROUTES = [
    Route("/lathe/v1/me", show_me),
    Route(STREAM, show_stream),
    Route("/lathe/v1/differences", show_differences),
    Route(f"{RUN}/curves", show_curves),
    Route(f"{RUN}/answers", show_answers),
    *votes.ROUTES,
    *driven.ROUTES,
]
