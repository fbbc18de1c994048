"""A run that was trained, or an exported model: its numbers, and what it answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.api.arguments import refuse_below_one
from trainer.api.process_state import as_found
from trainer.api.table import Table
from trainer.data.formats.json_text import half_of_pair, json_value
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import read_json
from trainer.files.packages import require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.api.chart import Chart
    from trainer.evaluation.predict import OpenExport

_DICTIONARY, _METRICS, _STATUS = "exp_dict.json", "metrics.jsonl", "status.json"
_NOT_SHOWN = ("proof", "seal")  # what proves a line (trainer/telemetry/chain.py)
_OF_PARAMETERS = "grad_norm/"  # norms of single parameters, with --wandb_log_gradients
_WRITING = ("causal_lm", "preference")  # tasks whose model continues prompts, but for some losses
_MAX_TOKENS = 256  # of a text, where nobody says a number: as lathe predict and the service have it
_NO_LIMIT = 1 << 20  # tokens of a reader's answer: more than its experiment allows


def load(folder: str | Path, *, cache_dir: str | Path = "tmp-cache") -> Run:
    """Open a run or an exported model. Its weights are read when they are first needed.

    folder: results/<id>, its best/ or final/, or a folder that `lathe export` or `lathe merge`
        wrote. Of a run, best/ answers, else final/, as in `lathe predict`.
    cache_dir: the folder of tokenizers (`--cache_dir`).

    Raises ConfigError when the folder is none of these.
    """
    path = Path(folder)
    values = read_json(path / _DICTIONARY)
    if not isinstance(values, dict):
        if not path.is_dir():
            raise ConfigError(
                f"{path}: there is no such folder (from {Path.cwd()}). Give results/<id>, or an "
                "exported model."
            )
        from trainer.evaluation.predict import export_of
        from trainer.exports import record

        values, _ = export_of(path)
        about = record.read(path)
        values = values if about is None else about.experiment
    return Run(path, values, cache_dir=Path(cache_dir))


class Run:
    """A run that was trained, or an exported model. `fine_tune` and `load` make it.

    folder: its folder.
    values: the experiment's dictionary.
    id: the experiment's id, 32 hexadecimal digits, which names the folder of a run.
    """

    def __init__(self, folder: Path, values: dict[str, Any], *, cache_dir: Path) -> None:
        from trainer.config.identity import exp_id

        self.folder, self.values, self.id = folder, values, exp_id(values)
        self._cache_dir = cache_dir

    def __repr__(self) -> str:
        state = self.status.get("state")
        ending = f", {state}, step {self.status.get('step')}" if state else ""
        return f"<Run {self.folder}: {self.values.get('task')}{ending}>"

    @property
    def status(self) -> dict[str, Any]:
        """What status.json says now: "state" (running, succeeded, failed, preempted, paused),
        "step" and "total" in optimizer steps, "error", ...; empty for an exported model.
        """
        return read_json(self.folder / _STATUS) or {}

    def metrics(self) -> Table:
        """The numbers of the run: a row for each step that was logged or evaluated, in order.

        "loss" is the mean over the units of a step (of a language model: nats a token), "lr" the
        learning rate, "grad_norm" the norm before clipping, "step_s" the seconds of a step, keys
        that end in "_per_s" are rates, "valid/..." the scores of an evaluation, "at" the time in
        UTC. Other keys depend on the task. The file is metrics.jsonl; its proofs and the norms of
        single parameters are left out.

        Raises ConfigError where there is no metrics.jsonl, as in the folder of an exported model.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for line in self._lines():
            row = by_step.setdefault(line["step"], {})
            row |= {
                name: value
                for name, value in line.items()
                if name not in _NOT_SHOWN and not name.startswith(_OF_PARAMETERS)
            }
        return Table(by_step[step] for step in sorted(by_step))

    def plot(self) -> Chart:
        """The losses and the scores of validation over the steps, as a figure of matplotlib that
        a notebook shows and `run.plot().savefig("run.png")` writes.

        Raises ConfigError where there is nothing to draw yet, and without the extra `plots`.
        """
        require("matplotlib", "plots")
        from trainer.api.chart import chart

        rows = self.metrics()
        if not rows:
            raise ConfigError(f"{self.folder / _METRICS} has no line yet: no step was logged.")
        return chart(rows, f"{self.values.get('task')}  {self.folder}")

    def predict(
        self,
        rows: Sequence[Mapping[str, Any]] | str | Path,
        *,
        batch: int | None = None,
        max_tokens: int | None = None,
        num_beams: int = 1,
        num_answers: int = 1,
        temperature: float | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        strict: bool = False,
    ) -> Table:
        """The predictions for rows, in their order, as `lathe predict` writes them.

        rows: dictionaries as the task reads them, in the columns that the experiment names, without
            answers; or a file of rows, or a folder of such files.
        batch: rows of one forward; None: train.eval_batch.
        max_tokens: the most tokens of a text; None: as in the experiment, of a language model 256.
        num_beams: beams of the search; 1: the likeliest token is taken.
        num_answers: texts for each row: the best beams, or with a temperature draws.
        temperature: draw tokens at this temperature; None: search.
        top_p: draw from the likeliest tokens that have this probability together.
        seed: of the draws.
        strict: refuse rows of which anything is doubted.

        Each row has "id" (the row's own, else its number, from 0) and, by task, "prediction" (with
        several answers also "n_best"), "score" or "scores" (of a verifier 0 to 1; of a retriever
        one for each passage), or "vector" (of a query without passages); "cut_tokens" where limits
        cut tokens off it.

        Raises ConfigError where there is no model yet, DataError for a wrong row, by its place.
        """
        counts = {"num_beams": num_beams, "num_answers": num_answers}
        refuse_below_one(batch=batch, max_tokens=max_tokens, **counts)
        with as_found():
            from trainer.evaluation import predict
            from trainer.evaluation.search import check_search
            from trainer.protocol.abilities import Prediction, Search

            how = Prediction(
                Search(**counts, temperature=temperature, top_p=top_p, seed=seed), max_tokens
            )
            check_search(how.search)
            own = self._model
            name = str(rows) if isinstance(rows, str | Path) else "rows"
            cut_tokens = predict.judge_rows(own, _with_places(rows), how, what=name, strict=strict)
            at_once = batch or predict.rows_at_once(own.task)
            return Table(
                predict.predict_rows(
                    own, _with_places(rows), how, batch=at_once, cut_tokens=cut_tokens
                )
            )

    def answer(
        self,
        question: str | Sequence[Mapping[str, Any]],
        contexts: str | Sequence[str] = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> str:
        """The text with which the model answers.

        question: a text; of a model that was trained on conversations also the messages so far,
            [{"role": "user", "content": ...}, ...]. A model that was trained on plain texts goes on
            with the text, a summariser sums it up.
        contexts: the text that a reader reads, or several.
        max_tokens: the most tokens; None: 256, of a reader as in its experiment.
        temperature: draw tokens at this temperature; None: the likeliest ones.
        top_p: draw from the likeliest tokens that have this probability together.
        seed: of the draws.
        stop: the answer ends before this text, or before the first of several.

        Raises ConfigError where there is no model yet, for a task that makes no texts (`predict`
        gives its scores and vectors), and for a question that the task cannot read.
        """
        refuse_below_one(max_tokens=max_tokens)
        contexts, stops = _texts(contexts, "contexts"), _texts(stop, "stop")
        is_decoder = self.values.get("task") in _WRITING
        request: dict[str, Any] = {
            "max_tokens": max_tokens or (_MAX_TOKENS if is_decoder else _NO_LIMIT),
            "temperature": temperature or 0,
            "top_p": top_p,
            "seed": seed,
            "stop": stops,
        }
        half = half_of_pair([question, contexts])
        if half is not None:
            raise ConfigError(f"answer: got {half}.")
        if not is_decoder and not isinstance(question, str):
            raise ConfigError("answer: got messages, and this model reads one question, a text.")
        with as_found():
            from trainer.commands.answer import answers
            from trainer.evaluation.search import check_search
            from trainer.protocol.abilities import Search

            check_search(Search(temperature=temperature or None, top_p=top_p))
            own = self._model
            if not is_decoder:
                request |= {"question": question, "contexts": contexts}
            elif contexts:
                raise ConfigError("answer: a language model reads no contexts. Leave them out.")
            elif not isinstance(question, str):
                request["messages"] = [dict(message) for message in question]
            elif own.task.chat is None:
                request["prompt"] = question
            else:
                request["messages"] = [{"role": "user", "content": question}]
            pieces = list(answers(own, [request]))
        problems = [piece["error"] for piece in pieces if "error" in piece]
        if problems:
            raise ConfigError(problems[0])
        return "".join(piece.get("text", "") for piece in pieces)

    def judge(
        self,
        against: str = "base",
        data: str | Path | None = None,
        *,
        model: str | None = None,
        limit: int | None = None,
        batch: int | None = None,
        **how: Any,
    ) -> dict[str, Any]:
        """Whether the trained model is better than another one, what broke and what it forgot, as
        `lathe judge` says it.

        against: "base", what the run began with, or the id of a run beside this one.
        data: the folder of the rows (`--data_path`).
        model: "best" or "final"; None: best/, else final/.
        limit: use only so many rows, the first ones.
        batch: rows of one forward; None: train.eval_batch.
        how: values of the block `judge` ([keys.md](keys.md)), such as split="valid" or
            gate={"em": {"gain": 0.01}}.

        Returns what it also writes into judge.json of the run: "verdict", a sentence; "scores",
        each with "before", "after", "effect", its 95% interval ("low", "high"), "p_corrected" and
        "result"; "slices", "broken", "keep", "calibration" and "gate" (docs/judging.md).

        Raises ConfigError where there is no model or other run, DataError for rows that are
        training rows.
        """
        refuse_below_one(limit=limit, batch=batch)
        with as_found():
            from trainer.judging import sides
            from trainer.judging.compare import FILE, run_judge
            from trainer.training.options import Options

            base = self.folder.resolve().parent
            where: dict[str, Any] = {"model": model, "limit": limit, "batch": batch}
            stated = {"against": against, **how}
            comparison = sides.compared(base, [self.values], stated, **where)
            place = None if data is None else Path(data)
            run_judge(
                comparison,
                Options(base, data_path=place, cache_dir=self._cache_dir),
                self.folder,
            )
            return read_json(self.folder / FILE) or {}

    @functools.cached_property
    def _model(self) -> OpenExport:
        from trainer.evaluation.predict import open_export

        return open_export(self.folder, data=None, cache_dir=self._cache_dir)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        try:
            content = (self.folder / _METRICS).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"{self.folder} has no {_METRICS}: only the folder of a run, results/<id>, has one."
            ) from None
        for line in content.splitlines(keepends=True):
            if line.endswith("\n"):  # the last one is being written
                yield json.loads(line)


def _texts(given: Any, name: str) -> list[str]:
    """A text, or a list of texts, as a list. ConfigError for anything else, and for empty texts."""
    texts = [given] if isinstance(given, str) else list(given)
    wrong = [one for one in texts if not isinstance(one, str) or not one]
    if wrong:
        raise ConfigError(f"answer: got {wrong[0]!r} in {name}, want texts that are not empty.")
    return texts


def _with_places(
    rows: Sequence[Mapping[str, Any]] | str | Path,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each row, as a file of JSON lines would give it."""
    if isinstance(rows, str | Path):
        from trainer.data.readers import row_files

        yield from row_files.placed_rows(Path(rows))
        return
    for number, row in enumerate(rows):
        place = f"rows, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{place} is a {type(row).__name__}, want a dictionary.", place=place)
        try:
            yield place, json_value(json.dumps(dict(row)))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{place} holds what JSON cannot ({error}). Want texts, numbers, lists and "
                "dictionaries.",
                place=place,
            ) from None
