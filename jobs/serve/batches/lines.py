"""The lines of a batch: OpenAI's requests, one a line, with what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jobs.record.times import now
from jobs.serve.batches.folder import BatchCheck, BatchMistake
from jobs.serve.requests import quote
from jobs.serve.rows.checks import lines_of
from trainer.data.formats.json_text import BadJson, json_value

if TYPE_CHECKING:
    from jobs.serve.offers import ServiceConfig

MOST_MISTAKES = 20
LONGEST_ID = 512
_KEYS = {"custom_id", "method", "url", "body"}
Values = dict[str, Any]


@dataclass
class LineCheck:
    """The check of one file. has_model: whether its owner sees a model of this name."""

    endpoint: str
    config: ServiceConfig
    has_model: Callable[[str], bool]
    total: int = 0
    model: str | None = None
    num_mistakes: int = 0
    mistakes: list[BatchMistake] = field(default_factory=list[BatchMistake])
    _ids: dict[str, int] = field(default_factory=dict[str, int])

    def of(self, path: Path) -> BatchCheck:
        """The result: how many lines, and what is wrong with the first ones that are wrong."""
        for number, content in _lines(path, self.config):
            self.total += 1
            if self.total > self.config.batch_lines:
                text = f"more than {self.config.batch_lines} requests (batch_lines). Make several."
                self._add("too_many_tasks", text, None, None)
                break
            self._check(number, content)
        if not self.total:
            self._add("empty_file", "the file has no line, want one request on each.", None, None)
        more = self.num_mistakes - len(self.mistakes)
        if more > 0:
            text = f"and {more} more mistakes"
            self.mistakes.append(BatchMistake(code="more_mistakes", message=text))
        return BatchCheck(at=now(), total=self.total, model=self.model, mistakes=self.mistakes)

    def _add(self, code: str, message: str, line: int | None, param: str | None) -> None:
        self.num_mistakes += 1
        if len(self.mistakes) < MOST_MISTAKES:
            one = BatchMistake(code=code, message=message, line=line, param=param)
            self.mistakes.append(one)

    def _check(self, number: int, content: bytes) -> None:
        if len(content) > self.config.max_body:
            text = f"a line of more than {self.config.max_body} bytes (max_body). Shorten it."
            self._add("line_too_long", text, number, None)
            return
        try:
            value: Any = json_value(content.decode())
        except UnicodeDecodeError as error:
            text = f"got byte {error.start} that is not UTF-8, want a file saved as UTF-8."
            self._add("invalid_json_line", text, number, None)
            return
        except BadJson as error:
            self._add("invalid_json_line", f"{error}, want one JSON object.", number, None)
            return
        if not isinstance(value, dict):
            text = f"got a JSON {type(value).__name__}, want one JSON object."
            self._add("invalid_json_line", text, number, None)
            return
        line = cast("Values", value)
        for code, param, message in (*self._keys(line, number), *self._body(line)):
            self._add(code, message, number, param)

    def _keys(self, line: Values, number: int) -> Iterator[tuple[str, str, str]]:
        """(code, key, message) of what is wrong beside the body."""
        for key in sorted(line.keys() - _KEYS):
            yield "unknown_parameter", key, f"{quote(key)}: there is no such key. Remove it."
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_ID:
            want = f"a text of 1 to {LONGEST_ID} letters"
            yield "missing_required_parameter", "custom_id", _got("custom_id", custom_id, want)
        elif custom_id in self._ids:
            first = self._ids[custom_id]
            text = f"{quote(custom_id)} stands in line {first} already, want another one."
            yield "duplicate_custom_id", "custom_id", f"custom_id: {text}"
        else:
            self._ids[custom_id] = number
        if line.get("method") != "POST":
            yield "invalid_method", "method", _got("method", line.get("method"), "'POST'")
        if line.get("url") != self.endpoint:
            want = f"{self.endpoint!r}, as the batch says"
            yield "invalid_url", "url", _got("url", line.get("url"), want)

    def _body(self, line: Values) -> Iterator[tuple[str, str, str]]:
        body: Any = line.get("body")
        if not isinstance(body, dict):
            yield "invalid_request", "body", _got("body", body, "the JSON object of a request")
            return
        body = cast("Values", body)
        model: Any = body.get("model")
        if body.get("stream"):
            want = "false: a line of a file has no stream"
            yield "invalid_request", "body.stream", _got("body.stream", body["stream"], want)
        if not isinstance(model, str):
            yield "missing_required_parameter", "body.model", _got("body.model", model, "a name")
        elif self.model is None:
            self.model = model
            if not self.has_model(model):
                text = f"body.model: {quote(model)} does not exist, or is not yours."
                yield "model_not_found", "body.model", text
        elif model != self.model:
            want = f"{quote(self.model)}, the model of the first line"
            yield "mismatched_model", "body.model", _got("body.model", model, want)


def _got(name: str, value: Any, want: str) -> str:
    return f"{name}: got {quote(value)}, want {want}."


def requests_of(path: Path, config: ServiceConfig) -> Iterator[Values]:
    """The requests of a file that was checked, in order."""
    for _, content in _lines(path, config):
        yield json_value(content.decode())


def _lines(path: Path, config: ServiceConfig) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of every line that is not blank. A too long line is cut."""
    for number, content in lines_of(path, config.max_body + len(b"\r\n")):
        yield number, content.rstrip(b"\r\n")
