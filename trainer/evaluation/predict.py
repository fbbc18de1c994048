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
from collections.abc import Iterator, Sequence
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
from trainer.exports import record
from trainer.files.atomic import aside, create_json, read_json, refusals, replace_file, sha256_of
from trainer.models import adapters
from trainer.protocol import cut_counts
from trainer.protocol.abilities import Prediction, Trained
from trainer.retrieval.embeddings import fingerprint
from trainer.runtime import distributed
from trainer.statistics.opening import cut_line
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
    parts = request.out.with_name(f".{request.out.name}.parts")
    out = request.out
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: its folder does not exist. Make it, or write elsewhere.")
    if out.exists() and not parts.is_dir():
        raise ConfigError(
            f"--out {out}: exists already, and nothing is overwritten. Give another name."
        )
    rank, world = (int(os.environ.get(name, other)) for name, other in _RANKS.items())
    if torch.cuda.is_available():
        torch.cuda.set_device(distributed.device())
    values, folder = export_of(request.model)
    places = folder.resolve().parent.parent
    data = request.rows if request.rows.is_dir() else request.rows.parent
    options = Options(places, data_path=data, cache_dir=request.cache_dir)
    task, model, _ = open_model(Question(values, model=str(folder)), options)
    batch = request.batch or task.cfg.train.eval_batch or task.cfg.train.micro_batch
    cut_tokens = _judge_rows(request, task, model)
    _begin(parts, request, folder, task, batch)
    pieces = _Pieces(parts, batch, rank, world, cut_tokens)
    count = _write_pieces(pieces, request, task, model)
    # not earlier: ranks have different numbers of forwards, so these must not be collectives
    distributed.init(timeout_s=_PATIENCE_S)
    distributed.barrier()
    distributed.on_main(lambda: _finish(parts, out, -(-count // (batch * _BATCHES))))
    return count


_RANKS = {"RANK": "0", "WORLD_SIZE": "1"}


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


def _begin(parts: Path, request: RowsToPredict, folder: Path, task: Task, batch: int) -> None:
    """Make the folder of pieces with its plan, or continue one. ConfigError when the plan of the
    folder is another one.
    """
    files = row_files.files_in(request.rows) if request.rows.is_dir() else [request.rows]
    with refusals(request.rows):
        digests = [sha256_of(file) for file in files]
    plan = {
        "format": 1,
        "model": fingerprint(folder, task.fingerprint()),
        "rows": hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        "batch": batch,
        **asdict(request.how),
    }
    with refusals(parts):
        parts.mkdir(exist_ok=True)
    path = parts / "plan.json"
    if create_json(path, plan):
        return
    begun = read_json(path) or {}
    changed = [name for name in plan if begun.get(name) != plan[name]]
    if changed:
        raise ConfigError(
            f"{parts} holds pieces of a command with another {' and '.join(changed)}. Give it "
            "again as it was to go on, or delete that folder to begin anew."
        )


def _rows(request: RowsToPredict, task: Any) -> Iterator[tuple[Any, str, Row]]:
    """(id, place, object in our names) of every row, in their order."""
    data = task.cfg.data
    layout = data.layout() or Layout(())
    placed = row_files.placed_rows(request.rows)
    rows = unlabelled(placed, data, layout, task.places.data_path)
    for number, (place, raw) in enumerate(rows):
        identity = fields.first_given(raw, fields.QUESTION_IDS)[1]
        yield number if identity is None else identity, place, raw


def _judge_rows(request: RowsToPredict, task: Any, model: nn.Module) -> Sequence[int]:
    """Tell what is left out of the rows, cut or doubted; refuse it under --strict. No row is wrong
    in a piece that comes later: the first wrong one is an error here. Returns how many tokens
    limits cut off each row.
    """
    controls, trained = controls_of(task), _trained(task)
    counts: cut_counts.CutCounts = {}
    cut_tokens = array("q")
    assert controls is not None, "every task that predicts has a tokenizer"
    with left_out.one_reading(str(request.rows), strict=request.strict):
        for _, place, raw in _rows(request, task):
            row = trained.row_to_predict(task, raw, place)
            cut_row = trained.cut_row(task, model, row, request.how)
            cut_counts.add(counts, cut_row.cuts)
            cut_tokens.append(cut_row.tokens)
            for doubt in cut_row.doubts:
                left_out.note(place, doubt)
            if "ids" in row:  # a prompt in tokens: its texts are those that were read
                row = {name: raw[name] for name in _PROMPTS if name in raw}
            for control in controls.in_row(row):
                left_out.note(place, reason(control), field=control[0])
    logger.info("%s", _opening_line(request.rows, cut_tokens, counts))
    return cut_tokens


def _opening_line(rows: Path, cut_tokens: Sequence[int], counts: cut_counts.CutCounts) -> str:
    """The rows, and what limits cut off them: "rows.jsonl: 37 rows; 2 of 37 prompts cut, ..."."""
    lost = [cut_line(name, one) for name, one in counts.items() if one["texts_cut"]]
    if not lost:
        return f"{rows}: {len(cut_tokens):,} rows, nothing cut"
    rows_cut = sum(count > 0 for count in cut_tokens)
    total = f"{rows_cut:,} rows lose {sum(cut_tokens):,} tokens"
    return "; ".join([f"{rows}: {len(cut_tokens):,} rows", total, *lost])


def _trained(task: Any) -> Trained:
    return importlib.import_module(f"trainer.tasks.{task.cfg.task}.trained")  # type: ignore


@dataclass(frozen=True)
class _Pieces:
    """The pieces of all rows, and those of this rank."""

    folder: Path
    batch: int
    rank: int
    world: int
    cut_tokens: Sequence[int]  # of every row

    def line(self, number: int, name: Any, prediction: dict[str, Any]) -> str:
        """The line of a row, which tells what was cut off it."""
        told = {"id": name, **prediction}
        if self.cut_tokens[number]:
            told["cut_tokens"] = self.cut_tokens[number]
        return json.dumps(told, ensure_ascii=False) + "\n"


def _write_pieces(pieces: _Pieces, request: RowsToPredict, task: Any, model: nn.Module) -> int:
    """Write the missing pieces of this rank; returns the number of all rows."""
    trained = _trained(task)
    rows, piece, count = _rows(request, task), 0, 0
    batch = pieces.batch
    while block := list(islice(rows, batch * _BATCHES)):
        path = pieces.folder / f"{piece:07d}.jsonl"
        if piece % pieces.world == pieces.rank and not path.is_file():
            to_predict = [trained.row_to_predict(task, raw, place) for _, place, raw in block]
            predictions = _predict_rows(trained, task, model, to_predict, request.how, batch)
            lines = [
                pieces.line(count + at, name, one)
                for at, ((name, *_), one) in enumerate(zip(block, predictions, strict=True))
            ]
            replace_file(path, "".join(lines).encode(), is_durable=False)
        piece, count = piece + 1, count + len(block)
        logger.info("%d rows", count)
    return count


def _predict_rows(
    trained: Trained, task: Any, model: nn.Module, rows: list[Row], how: Prediction, batch: int
) -> list[dict[str, Any]]:
    """The predictions for rows, in their order. Rows of similar length are in one batch."""
    order = sorted(range(len(rows)), key=lambda n: len(json.dumps(rows[n])), reverse=True)
    by_row: dict[int, dict[str, Any]] = {}
    for start in range(0, len(order), batch):
        numbers = order[start : start + batch]
        with torch.no_grad():
            predictions = trained.predict(task, model, [rows[n] for n in numbers], how)
        by_row.update(zip(numbers, predictions, strict=True))
    return [by_row[n] for n in range(len(rows))]


def _finish(parts: Path, out: Path, pieces: int) -> None:
    with aside(out) as part, part.open("wb") as file:
        for piece in range(pieces):
            with (parts / f"{piece:07d}.jsonl").open("rb") as content:
                shutil.copyfileobj(content, file)
    shutil.rmtree(parts)
    logger.info("wrote %s", out)
