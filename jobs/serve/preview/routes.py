"""/lathe/v1/preview: what was understood of a job's rows, and what its training would need."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.config import JobConfig
from jobs.errors import without_places
from jobs.serve.dialect.new_jobs import new_ticket
from jobs.serve.offers import held_out_per_mille, world_of
from jobs.serve.preview.command import MAX_OUTPUT, look
from jobs.serve.requests import (
    CreateJob,
    PlainJSON,
    Refusal,
    is_operator,
    keeper_of,
    read_body,
    shares_of,
    writer_of,
)
from jobs.serve.rows import checks as rows
from jobs.serve.tickets import UploadFolder
from trainer.config.groups import with_steps
from trainer.devices import device_of
from trainer.errors import DataError
from trainer.files.atomic import open_file

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper
    from jobs.serve.offers import Offer
    from jobs.serve.tickets import Ticket, Upload

MOST_ROWS = 2000  # of a file: a preview looks at the first ones
MOST_EXAMPLES = 2
LONGEST_TEXT = 2000  # letters of a segment of an example
PREVIEW_S = 180.0
ERROR = re.compile(r"^\w*Error: ", re.MULTILINE)

Values = dict[str, Any]


class AskPreview(CreateJob):
    """A request for a job that is only looked at. part: its rows, or its memory and time."""

    part: Literal["rows", "plan"] = "rows"


async def preview(request: Request) -> Response:
    """What a job of this request would train on (`part`: rows), or need (`part`: plan). The body is
    otherwise that of POST /v1/fine_tuning/jobs. No job is made, and nothing is kept.
    """
    keeper, client = keeper_of(request), writer_of(request)
    body = await read_body(request, AskPreview, keeper.config)
    async with shares_of(request).turn("preview", client.name):
        ticket = await run_in_threadpool(new_ticket, keeper, client, body, "preview")
        answer = await run_in_threadpool(_look, keeper, ticket, body.part, is_operator(request))
    return PlainJSON(answer)


def _look(keeper: Keeper, ticket: Ticket, part: str, sees_places: bool) -> Values:
    """The answer to a preview. Refusal for rows with mistakes, or what the command refuses."""
    offer = keeper.config.models[ticket.model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = _write_rows(keeper, ticket, offer, folder)
        words = ["-m", "trainer", "stats" if part == "rows" else "plan", "--json"]
        words += ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
        words += ["--savedir_base", str(keeper.folder.base.path)]
        if part == "plan":
            job = JobConfig.model_validate(offer.job)
            words += ["--world", str(world_of(offer)), "--nodes", str(job.nodes)]
            words += [] if offer.device is None else ["--device", offer.device]
        # of all rows, for only the first ones are counted here
        experiments = with_steps([ticket.experiment], ticket.steps)
        process = look(words, experiments, folder, within_s=PREVIEW_S)
    if process.returncode:
        text = _reason(process.stderr[-MAX_OUTPUT:]) or f"It ended with code {process.returncode}."
        text = text.replace(f"{folder}/", "")
        raise Refusal(400, text if sees_places else without_places(text), code="invalid_value")
    answer = cast("Values", json.loads(process.stdout))
    return {**counts, **(_rows_of(answer) if part == "rows" else _plan_of(answer, ticket, offer))}


def _reason(printed: str) -> str:
    """The last error that a command printed, without the log lines before it."""
    errors = list(ERROR.finditer(printed))
    return printed[errors[-1].start() :].strip() if errors else printed.strip()


def _write_rows(keeper: Keeper, ticket: Ticket, offer: Offer, folder: Path) -> Values:
    """Write the first rows of a job's files as its task reads them. Refusal for mistakes in them.

    Returns "num_rows" of the training file, its "kind", and the number of rows that are looked at.
    """
    files: list[Path | None] = [None, None]
    report = rows.RowReport()
    ids = (ticket.training_file, ticket.validation_file)
    names = ("training_file", "validation_file")
    for place, (param, file_id) in enumerate(zip(names, ids, strict=True)):
        if file_id is None:
            continue
        upload = UploadFolder(keeper.folder.uploads / file_id)
        _refuse_mistakes(param, upload.read())  # so that no line is too long
        files[place] = start = folder / f"{param}.jsonl"
        with open_file(upload.content) as whole, start.open("wb") as file:
            file.writelines(islice(whole, MOST_ROWS))
        own = rows.check(start, [ticket.kind])
        _refuse_mistakes(param, own)
        report = own if place == 0 else report
    train, valid = files
    assert train is not None, "a ticket names its training file"
    try:
        limit = 0 if valid is not None else held_out_per_mille(offer, report.places)
    except DataError as error:
        code = "invalid_training_file"
        raise Refusal(400, str(error), param="training_file", code=code) from None
    rows.write_splits(train, valid, folder, ticket.kind, limit)
    return {"num_rows": ticket.num_rows, "kind": ticket.kind, "sample_rows": report.num_rows}


def _refuse_mistakes(param: str, checked: Upload | rows.RowReport | None) -> None:
    """Return if the rows of a file have no mistakes; else Refusal, which lists the first ones."""
    if checked is not None and checked.num_mistakes:
        lines = [f"{param}: {checked.num_mistakes} mistake(s)", *map(str, checked.mistakes)]
        raise Refusal(400, "\n".join(lines), param=param, code=f"invalid_{param}")


def _rows_of(statistics: Values) -> Values:
    """What the page shows of `stats --json`: counts of each split, and examples of training."""
    splits: Values = {}
    for name, split in statistics["splits"].items():
        counts = {"rows": split["rows"], "tokens": split["fields"]["length"]["tokens"]}
        splits[name] = {**counts, "cut_rows": split["truncated_rows"]}
    examples: list[Values] = []
    for example in statistics["splits"]["train"]["examples"][:MOST_EXAMPLES]:
        texts = {name: _short(segments) for name, segments in example["texts"].items()}
        examples.append({"tokens": example["length"], "texts": texts})
    return {"splits": splits, "examples": examples}


def _short(segments: list[Mapping[str, Any]]) -> list[Values]:
    """Segments of a text, each at most LONGEST_TEXT letters."""
    return [{"text": one["text"][:LONGEST_TEXT], "in_loss": one["in_loss"]} for one in segments]


def _plan_of(shown: Values, ticket: Ticket, offer: Offer) -> Values:
    """What the page shows of `plan --json`: bytes of each phase of one device, seconds if known."""
    phases = [
        {"name": phase["name"], "bytes": sum(phase["peak"].values())}
        for phase in shown["plan"]["phases"]
    ]
    peak = max(phase["bytes"] for phase in phases)
    answer: Values = {
        "steps": ticket.steps,
        "epochs": ticket.epochs,
        "batch": ticket.batch,
        "device": offer.device,
        "phases": phases,
        "peak_bytes": peak,
        "fits": None,
        "time": None,
    }
    if offer.device is not None and not offer.device.endswith(".json"):
        device = device_of(offer.device)
        answer["fits"] = peak <= device.usable(world_of(offer))
    if "time" in shown:
        time = shown["time"]
        answer["time"] = {name: time[name] for name in ("total_s", "step_s", "world", "device")}
    return answer


ROUTES = [Route("/lathe/v1/preview", preview, methods=["POST"])]
