"""Predictions of a trained model for unlabelled rows: files of rows in, JSON lines out.

The rows are cut into pieces, which depend only on the rows and the batch. Each piece is predicted
by one rank and written to a file beside the output. When all pieces are there, they become the
output. So a killed command can continue, and the output has the same bytes on any number of ranks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.formats.layouts import Layout
from trainer.data import left_out
from trainer.data.control_tokens import controls_of, reason
from trainer.data.readers import fields, row_files
from trainer.data.usual.rows import unlabelled
from trainer.errors import ConfigError
from trainer.evaluation.run import Question, open_model
from trainer.evaluation.search import check_search
from trainer.exports import record
from trainer.files.atomic import (
    aside,
    check_output,
    create_json,
    read_json,
    refusals,
    replace_file,
    sha256_of,
)
from trainer.models import adapters
from trainer.protocol import cut_counts
from trainer.protocol.abilities import Prediction, Trained
from trainer.retrieval.embeddings import fingerprint
from trainer.runtime import distributed
from trainer.statistics.opening import cut_line
from trainer.switches import CPU_KERNELS, uses_cpu_kernels, with_cpu_kernels_of
from trainer.training.options import Options

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row, Task

logger = logging.getLogger(__name__)

_BATCHES = 8  # batches of a piece: a kill loses at most one piece per rank
_EXPORTS = ("best", "final")
_PROMPTS = ("messages", "tools", "system", "prompt", "input", "text")  # of a language model
# Ranks wait for each other at the end, and some may have much more work than others.
_PATIENCE_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class RowsToPredict:
    """The rows to predict, and the file to write."""

    model: Path  # a run folder, or an exported one
    rows: Path  # a file of rows, or a folder of such files
    out: Path
    how: Prediction
    batch: int | None = None  # rows of one forward; None: train.eval_batch
    cache_dir: Path = Path("tmp-cache")
    strict: bool = False  # refuse rows that are doubted, before the first is predicted


def predict(request: RowsToPredict) -> int:
    """Write the prediction for each row, in order; returns the number of rows.

    Every rank of a launcher calls it. ConfigError and DataError for a missing model, invalid rows
    or an existing output. Pieces that were predicted before an error stay.
    """
    check_search(request.how.search)
    check_output(request.out)
    parts = request.out.with_name(f".{request.out.name}.parts")
    with with_cpu_kernels_of(_began_with_kernels(parts)):
        return _predicted(request, parts)


def _predicted(request: RowsToPredict, parts: Path) -> int:
    out = request.out
    if out.exists() and not parts.is_dir():
        raise ConfigError(
            f"--out {out}: exists already, and nothing is overwritten. Give another name."
        )
    rank, world = (int(os.environ.get(name, other)) for name, other in _RANKS.items())
    if torch.cuda.is_available():
        torch.cuda.set_device(distributed.device())
    data = request.rows if request.rows.is_dir() else request.rows.parent
    opened_model = open_export(request.model, data=data, cache_dir=request.cache_dir)
    task, folder = opened_model.task, opened_model.folder
    batch = request.batch or rows_at_once(task)
    cut_tokens = judge_rows(
        opened_model,
        row_files.placed_rows(request.rows),
        request.how,
        what=str(request.rows),
        strict=request.strict,
    )
    _begin(parts, request, folder, task, batch)
    pieces = _Pieces(parts, batch, rank, world, cut_tokens)
    count = _write_pieces(pieces, request, opened_model)
    # not earlier: ranks have different numbers of forwards, so these must not be collectives
    distributed.init(timeout_s=_PATIENCE_S, is_late=True)
    distributed.barrier()
    distributed.on_main(lambda: _finish(parts, out, -(-count // (batch * _BATCHES))))
    return count


_RANKS = {"RANK": "0", "WORLD_SIZE": "1"}


@dataclass(frozen=True)
class OpenExport:
    """A trained model on this process's device, with its task and its folder."""

    task: Any
    model: nn.Module
    folder: Path


def open_export(model: Path, *, data: Path | None, cache_dir: Path) -> OpenExport:
    """The model of a run folder or of an exported folder, in evaluation mode. ConfigError if there
    is none.

    data: the folder of rows, if the experiment names files of it (a chat template).
    """
    values, folder = export_of(model)
    options = Options(folder.resolve().parent.parent, data_path=data, cache_dir=cache_dir)
    return OpenExport(*open_model(Question(values, model=str(folder)), options))


def rows_at_once(task: Task) -> int:
    """The rows of one forward, if nobody says another number."""
    return task.cfg.train.eval_batch or task.cfg.train.micro_batch


def export_of(model: Path) -> tuple[dict[str, Any], Path]:
    """The experiment and the folder of an exported model; for a run folder that of best/, else of
    final/.

    A tokenizer and whole weights in the folder replace those that the experiment names.
    """
    folder = next((model / name for name in _EXPORTS if (model / name).is_dir()), model)
    about = record.read(folder)
    values = about.experiment if about else read_json(folder.parent / "exp_dict.json")
    if values is None:
        raise ConfigError(
            f"{model}: got neither a run folder with best/ or final/ in it, nor an exported folder "
            f"with {record.NAME}. Give results/ID, or results/ID/final."
        )
    if about is None:
        return values, folder
    values = {**values, "tokenizer": str(folder)}
    template = folder / "chat_template.jinja"
    if values["data"].get("chat_template") is not None and template.is_file():
        values["data"] = {**values["data"], "chat_template": str(template)}
    if (folder / "base").is_dir():
        values["base"] = str(folder / "base")
    elif not about.base_fingerprint and not adapters.are_in(folder):
        values["base"] = str(folder)
    return values, folder


def _began_with_kernels(parts: Path) -> bool | None:
    """Whether the pieces were begun with the kernels of a processor (decision 46); None for a
    folder without a plan. Plans of before say nothing of them, and were begun without.
    """
    begun = read_json(parts / "plan.json")
    return None if begun is None else begun.get(CPU_KERNELS, "0") == "1"


def _begin(parts: Path, request: RowsToPredict, folder: Path, task: Task, batch: int) -> None:
    """Make the folder of pieces with its plan, or continue one. ConfigError when the plan of the
    folder is another one.
    """
    files = row_files.files_in(request.rows) if request.rows.is_dir() else [request.rows]
    with refusals(request.rows):
        digests = [sha256_of(file) for file in files]
    is_gpu = distributed.is_gpu()  # it has no such kernels, and leaves what the plan says of them
    has_kernels = _began_with_kernels(parts) if is_gpu else uses_cpu_kernels(os.environ)
    plan = {
        "format": 1,
        "model": fingerprint(folder, task.fingerprint()),
        "rows": hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        "batch": batch,
        **asdict(request.how),
        CPU_KERNELS: str(int(bool(has_kernels))),
    }
    with refusals(parts):
        parts.mkdir(exist_ok=True)
    path = parts / "plan.json"
    if create_json(path, plan):
        return
    begun = {CPU_KERNELS: "0", **(read_json(path) or {})}
    changed = [name for name in plan if begun.get(name) != plan[name]]
    if changed:
        raise ConfigError(
            f"{parts} holds pieces of a command with another {' and '.join(changed)}. Give it "
            "again as it was to go on, or delete that folder to begin anew."
        )


def _rows(placed: Iterable[tuple[str, Row]], task: Any) -> Iterator[tuple[Any, str, Row]]:
    """(id, place, object in our names) of every row, in their order."""
    data = task.cfg.data
    layout = data.layout() or Layout(())
    rows = unlabelled(placed, data, layout, task.places.data_path)
    for number, (place, raw) in enumerate(rows):
        identity = fields.first_given(raw, fields.QUESTION_IDS)[1]
        yield number if identity is None else identity, place, raw


def judge_rows(
    opened_model: OpenExport,
    placed: Iterable[tuple[str, Row]],
    how: Prediction,
    *,
    what: str,
    strict: bool = False,
) -> Sequence[int]:
    """Tell what is left out of the rows, cut or doubted; refuse it under --strict. No row is wrong
    in a piece that comes later: the first wrong one is an error here. Returns how many tokens
    limits cut off each row.

    placed: (place, row); what: the name of all of them, for messages.
    """
    task = opened_model.task
    controls, trained = controls_of(task), _module_of(task)
    counts: cut_counts.CutCounts = {}
    cut_tokens = array("q")
    assert controls is not None, "every task that predicts has a tokenizer"
    with left_out.one_reading(what, strict=strict) as notes:
        for _, place, raw in _rows(placed, task):
            row = trained.row_to_predict(task, raw, place)
            cut_row = trained.cut_row(task, opened_model.model, row, how)
            cut_counts.add(counts, cut_row.cuts)
            cut_tokens.append(cut_row.tokens)
            for doubt in cut_row.doubts:
                left_out.note(place, doubt)
            if "ids" in row:  # a prompt in tokens: its texts are those that were read
                row = {name: raw[name] for name in _PROMPTS if name in raw}
            for control in controls.in_row(row):
                left_out.note(place, reason(control), field=control[0])
    unread = notes.keys.line()
    line = _opening_line(what, cut_tokens, counts)
    logger.info("%s", f"{line}; {unread}" if unread else line)
    return cut_tokens


def _opening_line(rows: str, cut_tokens: Sequence[int], counts: cut_counts.CutCounts) -> str:
    """The rows, and what limits cut off them: "rows.jsonl: 37 rows; 2 of 37 prompts cut, ..."."""
    lost = [cut_line(name, one) for name, one in counts.items() if one["texts_cut"]]
    if not lost:
        return f"{rows}: {len(cut_tokens):,} rows, nothing cut"
    rows_cut = sum(count > 0 for count in cut_tokens)
    total = f"{rows_cut:,} rows lose {sum(cut_tokens):,} tokens"
    return "; ".join([f"{rows}: {len(cut_tokens):,} rows", total, *lost])


def _module_of(task: Any) -> Trained:
    return importlib.import_module(f"trainer.tasks.{task.cfg.package}.trained")  # type: ignore


@dataclass(frozen=True)
class _Pieces:
    """The pieces of all rows, and those of this rank."""

    folder: Path
    batch: int
    rank: int
    world: int
    cut_tokens: Sequence[int]  # of every row


def _write_pieces(pieces: _Pieces, request: RowsToPredict, opened_model: OpenExport) -> int:
    """Write the missing pieces of this rank; returns the number of all rows."""
    placed = row_files.placed_rows(request.rows)
    piece = count = 0
    for block in _blocks(placed, opened_model.task, pieces.batch, pieces.cut_tokens):
        path = pieces.folder / f"{piece:07d}.jsonl"
        if piece % pieces.world == pieces.rank and not path.is_file():
            predictions = _predict_block(opened_model, block, request.how, pieces.batch)
            lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in predictions]
            replace_file(path, "".join(lines).encode(), is_durable=False)
        piece, count = piece + 1, count + len(block)
        logger.info("%d rows", count)
    return count


def predict_rows(
    opened_model: OpenExport,
    placed: Iterable[tuple[str, Row]],
    how: Prediction,
    *,
    batch: int,
    cut_tokens: Sequence[int],
) -> list[dict[str, Any]]:
    """The objects that predict() writes for rows, in order: {"id", ...}.

    placed: (place, row). batch: rows of one forward. cut_tokens: what judge_rows() returned.
    """
    return [
        prediction
        for block in _blocks(placed, opened_model.task, batch, cut_tokens)
        for prediction in _predict_block(opened_model, block, how, batch)
    ]


@dataclass(frozen=True)
class _NamedRow:
    """A row of a piece."""

    id: Any
    place: str
    raw: Row  # in our names
    cut_tokens: int  # that limits cut off it


def _blocks(
    placed: Iterable[tuple[str, Row]], task: Any, batch: int, cut_tokens: Sequence[int]
) -> Iterator[list[_NamedRow]]:
    """The rows of each piece."""
    numbered = (
        _NamedRow(name, place, raw, cut)
        for (name, place, raw), cut in zip(_rows(placed, task), cut_tokens, strict=True)
    )
    while block := list(islice(numbered, batch * _BATCHES)):
        yield block


def _predict_block(
    opened_model: OpenExport, block: list[_NamedRow], how: Prediction, batch: int
) -> list[dict[str, Any]]:
    """The predictions of one piece: the id of each row, what is predicted, what was cut off it."""
    task = opened_model.task
    trained = _module_of(task)
    rows = [trained.row_to_predict(task, row.raw, row.place) for row in block]
    # rows of similar length are in one batch
    order = sorted(range(len(rows)), key=lambda n: len(json.dumps(rows[n])), reverse=True)
    by_row: dict[int, dict[str, Any]] = {}
    for start in range(0, len(order), batch):
        numbers = order[start : start + batch]
        with torch.no_grad():
            answers = trained.predict(task, opened_model.model, [rows[n] for n in numbers], how)
        by_row.update(zip(numbers, answers, strict=True))
    return [
        {"id": row.id, **by_row[n], **({"cut_tokens": row.cut_tokens} if row.cut_tokens else {})}
        for n, row in enumerate(block)
    ]


def _finish(parts: Path, out: Path, pieces: int) -> None:
    with aside(out) as part, part.open("wb") as file:
        for piece in range(pieces):
            with (parts / f"{piece:07d}.jsonl").open("rb") as content:
                shutil.copyfileobj(content, file)
    shutil.rmtree(parts)
    logger.info("wrote %s", out)
