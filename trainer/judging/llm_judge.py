"""A language model behind an endpoint of the OpenAI dialect says which of two answers is better.

Every pair of judge_answers.jsonl is asked twice, with the order swapped. judge_llm.jsonl keeps each
answer as it comes, so that a command that was killed asks only for what is missing.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import ConfigError
from trainer.files.atomic import read_json, read_small, refusals, replace_file, write_json
from trainer.judging.compare import FILE as RECORD
from trainer.judging.compare import REPORT
from trainer.judging.votes import ANSWERS, AnswerPair, choices_of, read_pairs, read_votes
from trainer.metrics.win_rate import Preferred, Side
from trainer.verdict.opinions import LanguageModelSays, OneVerdict, model_lines, model_says

FILE = "judge_llm.jsonl"
AT_ONCE = 4  # requests
TRIES = 6  # of one request, while the endpoint is busy or fails
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before it is asked again; twice as long each time
_TIMEOUT_S = 300.0
_MOST_BYTES = 4 << 20  # of an answer
_MOST_REFUSED = 5  # pairs that are refused one after another before any is answered
_LATER = (408, 409, 425, 429)  # and 5xx: the same request may be answered later
_OF_ONE_PAIR = (400, 413, 422)  # such as a prompt that is too long for the model
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LONGEST_TEXT = 80  # letters of an unclear answer that are told

PROMPT = """\
Two assistants answered the same request. Which answer is better: more correct, more helpful, and no
longer than it needs to be? The order of the two says nothing about them.

[Request]
{request}

[Answer A]
{first}

[Answer B]
{second}

Reply with one word: A, B or equal.
"""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another address."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


class _NoVerdict(ConfigError):
    """An answer that is not what the dialect says; half of one, perhaps."""


class _PairRefused(Exception):
    """The endpoint does not answer this one request."""


@dataclass(frozen=True)
class LanguageModel:
    """A language model at `url`, such as http://127.0.0.1:8000/v1. ConfigError for an address that
    is none, and for a key that would cross a network unencrypted.
    """

    url: str
    name: str
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_plain = parts.port is None or parts.port > 0  # ValueError for what is no port
        except ValueError:
            parts, is_plain = urlsplit(""), False
        is_plain &= self.url.isascii() and not any(map(str.isspace, self.url))
        is_plain &= not (parts.query or parts.fragment or "@" in parts.netloc)
        if not is_plain or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--llm_judge: got {self._without_user()!r}, want the address of an "
                "endpoint and nothing else, such as http://127.0.0.1:8000/v1. A key stands in a "
                "file: --llm_key_file F."
            )
        if self.key and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise ConfigError(
                f"--llm_judge {self.url}: the key would cross the network unencrypted. Give the "
                "https:// address, or a tunnel to a port of this machine."
            )

    def _without_user(self) -> str:
        """The address without what may be a password."""
        start, at, end = self.url.rpartition("@")
        return f"{start.partition('//')[0]}//***@{end}" if at else self.url.partition("?")[0]

    def reply(self, text: str, *, is_first: bool = False) -> str:
        """What it says to a message, at temperature 0; asked again while it is busy or fails.

        is_first: nothing was answered so far, so where nobody listens it is not asked again.
        ConfigError where it does not answer; _PairRefused where it does not take this message.
        """
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
        }
        wait_s = FIRST_WAIT_S
        for number in range(1, TRIES + 1):
            try:
                return self._ask(json.dumps(body).encode())
            except urllib.error.HTTPError as error:
                with error:
                    problem = self._problem(error)
                if (error.code < 500 and error.code not in _LATER) or number == TRIES:
                    self._refuse(error.code, problem)
                retry_after = error.headers.get("retry-after", "")
                server_wait_s = float(retry_after) if retry_after.isdecimal() else 0.0
            except (OSError, http.client.HTTPException) as error:
                if is_first or number == TRIES:
                    reason = self._without_key(str(error) or type(error).__name__)
                    raise ConfigError(
                        f"--llm_judge {self.url}: nobody answers ({reason}). Start the endpoint, "
                        "or give its address; the same command asks for what is missing."
                    ) from None
                server_wait_s = 0.0
            except _NoVerdict:
                if is_first or number == TRIES:
                    raise
                server_wait_s = 0.0
            time.sleep(min(LONGEST_WAIT_S, max(wait_s, server_wait_s)))
            wait_s *= 2
        raise AssertionError("the last try returns or raises")

    def _ask(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, body, headers)
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            content = answer.read(_MOST_BYTES)
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise _NoVerdict(
                f"--llm_judge {self.url}: it answers, and not as /chat/completions of the OpenAI "
                "API does. Give the address that ends before /chat/completions, most often in /v1."
            ) from None
        # an endpoint that repeats what it got would have the key written into files
        return self._without_key(text) if isinstance(text, str) else ""

    def _refuse(self, status: int, problem: str) -> None:
        if status in _OF_ONE_PAIR:
            raise _PairRefused(f"status {status}: {problem}")
        fixes = {
            401: "Give a file with a key that it knows: --llm_key_file F.",
            403: "Give a file with a key that may do this: --llm_key_file F.",
            404: "Give the address up to /v1, and a model that it has: --llm_model NAME.",
        }
        fix = fixes.get(status, "The same command asks for what is missing.")
        raise ConfigError(f"--llm_judge {self.url}: status {status}: {problem.rstrip('.')}. {fix}")

    def _problem(self, error: urllib.error.HTTPError) -> str:
        """The endpoint's own words, without the key, should it repeat it."""
        try:
            text = str(json.loads(error.read(1 << 16))["error"]["message"])
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            text = str(error.reason)
        return self._without_key(text)

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


def read_key(path: Path) -> str:
    """The key in a file. ConfigError for a file without one."""
    try:
        key = read_small(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--llm_key_file {path}: cannot be read ({type(error).__name__}). Give a file that "
            "holds the key alone."
        ) from None
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(
            f"--llm_key_file {path}: got {len(key.split())} words, want one, the key alone."
        )
    return key


def ask_language_model(
    model: LanguageModel, folder: Path, run_folder: Path, *, most: int
) -> LanguageModelSays:
    """Ask a language model about the pairs of a comparison that stands in a folder, and add what it
    says to judge.json and judge.md there. On one rank alone.

    most: pairs; they are the ones that people are shown first. run_folder: of the trained model,
    with the votes of people. ConfigError where nobody answers; what was answered stays.
    """
    pairs = read_pairs(folder / ANSWERS, most=None)
    if not pairs:
        raise ConfigError(
            f"--llm_judge: {folder / ANSWERS} has no row with two different answers. Compare "
            "models that answer, and rows that have a prompt (--answers N)."
        )
    votes = read_votes(run_folder, pairs)
    pairs = pairs[:most]
    texts = _texts(model, pairs, folder / FILE)
    verdicts: dict[str, OneVerdict] = {}
    unclear: Counter[str] = Counter()
    for pair in pairs:
        both: dict[Side, Preferred | None] = {}
        for first in ("before", "after"):
            text = texts[pair.digest, first]
            both[first] = verdict_of(text, first)
            if both[first] is None:
                unclear[" ".join(text.split())[:_LONGEST_TEXT]] += 1
        verdicts[pair.digest] = OneVerdict(both["before"], both["after"])
    says = model_says(model.name, verdicts, choices_of(votes))
    _write(folder, {**says.record(), "unclear_answers": dict(unclear.most_common())}, says)
    return says


def verdict_of(text: str, first: Side) -> Preferred | None:
    """Which model's answer is better by a text that says A, B or equal, and nothing else but what
    the model thought before; None for any other text.

    first: the model whose answer was A.
    """
    word = text.rpartition("</think>")[2].strip().removesuffix(".").lower()
    second: Side = "before" if first == "after" else "after"
    verdicts: dict[str, Preferred] = {"a": first, "b": second, "equal": "equal"}
    return verdicts.get(word)


def message_of(pair: AnswerPair, first: Side) -> str:
    """The message that asks about a pair, with the answer of the model `first` as A."""
    second: Side = "before" if first == "after" else "after"
    parts = {"first": pair.answer(first), "second": pair.answer(second)}
    return PROMPT.format(request=_request_of(pair.prompt), **parts)


def _request_of(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return str(prompt)
    turns: list[Mapping[str, Any]] = prompt
    if len(turns) == 1 and isinstance(turns[0].get("content"), str):
        return turns[0]["content"]
    return "\n\n".join(f"{turn.get('role')}: {_content_of(turn)}" for turn in turns)


def _content_of(turn: Mapping[str, Any]) -> str:
    parts = [turn[name] for name in ("content", "tool_calls") if turn.get(name)]
    texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in parts)
    return "\n".join(texts)


# What was answered
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    """A pair in one order."""

    pair: AnswerPair
    first: Side


def _texts(
    model: LanguageModel, pairs: Sequence[AnswerPair], path: Path
) -> dict[tuple[str, Side], str]:
    """(pair, whose answer was A) -> what the model said, read or asked for. What it refuses of a
    single pair is told as "status 400: ..." and asked for the next time.
    """
    how = {"model": model.name, "prompt": hashlib.sha256(PROMPT.encode()).hexdigest()[:16]}
    texts = dict(_earlier(path, how))
    missing = [_Question(pair, first) for pair in pairs for first in ("before", "after")]
    missing = [one for one in missing if (one.pair.digest, one.first) not in texts]
    is_answered, num_refused = bool(texts), 0
    for one, text in _replies(model, missing):
        key = one.pair.digest, one.first
        if isinstance(text, _PairRefused):
            num_refused += 1
            texts[key] = str(text)
            if not is_answered and num_refused == min(_MOST_REFUSED, len(missing)):
                raise ConfigError(
                    f"--llm_judge {model.url}: {str(text).rstrip('.')}. It refuses every pair so "
                    "far: give another model, --llm_model NAME."
                )
            continue
        is_answered, texts[key] = True, text
        facts = {"pair": one.pair.digest, "row": one.pair.row, "first": one.first}
        _append(path, {**facts, **how, "text": text})
    return texts


def _replies(
    model: LanguageModel, questions: Sequence[_Question]
) -> Iterator[tuple[_Question, str | _PairRefused]]:
    """Each question with its answer, as they come. The first one alone: where nobody listens, or a
    key is wrong, one request shows it.
    """

    def reply(one: _Question, *, is_first: bool = False) -> str | _PairRefused:
        try:
            return model.reply(message_of(one.pair, one.first), is_first=is_first)
        except _PairRefused as refusal:
            return refusal

    for one in questions[:1]:
        yield one, reply(one, is_first=True)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        futures = {pool.submit(reply, one): one for one in questions[1:]}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _earlier(path: Path, how: Mapping[str, str]) -> Iterator[tuple[tuple[str, Side], str]]:
    """What this model has answered to this prompt before."""
    try:
        lines = read_small(path).splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            value = json.loads(line)
            if all(value[name] == one for name, one in how.items()):
                yield (value["pair"], value["first"]), value["text"]
        except (ValueError, KeyError, TypeError):
            continue  # torn: its writer was killed


def _append(path: Path, value: Mapping[str, Any]) -> None:
    """Add a line, durably."""
    line = json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n"
    with refusals(path), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line  # the last writer was killed in the middle of its line
        file.write(line)
        os.fsync(file.fileno())


def _write(folder: Path, record: Mapping[str, Any], says: LanguageModelSays) -> None:
    """Add what the model says to the record and the page of the comparison."""
    page = read_small(folder / REPORT).decode().rstrip()
    replace_file(folder / REPORT, "\n".join([page, "", *model_lines(says)]).encode())
    write_json(folder / RECORD, {**(read_json(folder / RECORD) or {}), "llm": record})
