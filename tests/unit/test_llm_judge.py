"""A language model as judge, against endpoints of the OpenAI dialect on the loopback: models that
always prefer the first answer, that talk nonsense, that are busy, that refuse.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.test_checkpoint import KILLED, die_at, in_child
from tests.unit.test_votes import write_answers
from tests.wording import Fault, fault, refused, says
from trainer.__main__ import app
from trainer.judging import llm_judge
from trainer.judging.llm_judge import LanguageModel, ask_language_model, read_key, verdict_of
from trainer.judging.votes import ANSWERS, Vote, add_vote, read_pairs

KEY = "sk-a-secret-of-the-test"


@dataclass
class Endpoint:
    """What it was asked, and the address."""

    url: str = ""
    messages: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)


# What the endpoint answers: a text, or (status, headers, document).
Answer = Callable[[str], "str | tuple[int, dict[str, str], Any]"]


@contextmanager
def endpoint(answer: Answer) -> Iterator[Endpoint]:
    """An endpoint of the OpenAI dialect on the loopback."""
    place, lock = Endpoint(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            (message,) = body["messages"]
            with lock:
                place.bodies.append(body)
                place.keys.add(self.headers.get("authorization"))
                place.messages.append(message["content"])
                said = answer(message["content"])
            if isinstance(said, str):
                choice = {"index": 0, "message": {"role": "assistant", "content": said}}
                said = (200, {}, {"choices": [choice]})
            status, headers, document = said
            content = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:  # what follows a redirect of a POST
            place.keys.add(self.headers.get("authorization"))
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        place.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield place
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def error(status: int, message: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, names, {"error": {"message": message}}


def prefers_yes(message: str) -> str:
    """The answer that says yes is the better one, wherever it stands."""
    return "A" if message.index("yes ") < message.index("no ") else "B"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a comparison leaves: five pairs of answers, a record and a page."""
    write_answers(tmp_path)
    (tmp_path / "judge.json").write_text('{"rows": 6, "votes": null}')
    (tmp_path / "judge.md").write_text("# Better or worse?\n")
    return tmp_path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits last no time; what they would have lasted."""
    waits: list[float] = []
    monkeypatch.setattr(llm_judge.time, "sleep", waits.append)
    return waits


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "judge.json").read_text())["llm"]


def ask(place: Endpoint, folder: Path, *, most: int = 200, key: str | None = None) -> Any:
    return ask_language_model(LanguageModel(place.url, "m", key), folder, folder, most=most)


def test_a_model_is_asked_twice_of_each_pair_and_its_verdict_is_in_the_record_and_the_page(
    folder: Path,
) -> None:
    for pair in read_pairs(folder / ANSWERS)[:2]:
        add_vote(folder, pair, Vote(pair.row, pair.digest, "anna", "after", "after", "1"))
    with endpoint(prefers_yes) as place:
        answer = ask(place, folder)
    assert (len(place.messages), len({*place.messages})) == (10, 10)
    assert {body["temperature"] for body in place.bodies} == {0}
    assert {body["model"] for body in place.bodies} == {"m"}
    firsts = [message.index("yes ") < message.index("no ") for message in place.messages]
    assert sum(firsts) == 5
    told = record(folder)
    assert (told["rate"]["wins"], told["reversals"], told["unclear"]) == (5, 0, 0)
    assert (told["first_share"], told["rate"]["rate"]) == (0.5, 1.0)
    assert told["agreement"]["pairs"] == 2
    assert told["agreement"]["share"] == 1.0
    page = (folder / "judge.md").read_text()
    assert page.startswith("# Better or worse?\n\n## A language model as judge\n")
    assert answer.words in page
    assert json.loads((folder / "judge.json").read_text())["rows"] == 6


def test_a_model_that_always_takes_the_first_answer_prefers_nobody(folder: Path) -> None:
    with endpoint(lambda _: "A") as place:
        answer = ask(place, folder)
    told = record(folder)
    assert (told["reversals"], told["reversal_share"], told["first_share"]) == (5, 1.0, 1.0)
    assert (told["rate"]["rate"], told["rate"]["equal"]) == (0.5, 5)
    assert "100.0% turned" in answer.words


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("A", "after"),
        (" b.\n", "before"),
        ("Equal", "equal"),
        ("<think>B? No.</think>\n\nA", "after"),
        ("Answer A", None),
        ("A or B", None),
        ("AB", None),
        ("", None),
    ],
)
def test_a_verdict_is_one_word(text: str, verdict: str | None) -> None:
    assert verdict_of(text, "after") == verdict


def test_answers_that_are_none_are_counted_by_their_text_and_their_pairs_left_out(
    folder: Path,
) -> None:
    with endpoint(lambda text: "As a model, I ..." if "0?" in text else prefers_yes(text)) as place:
        answer = ask(place, folder)
    told = record(folder)
    assert (told["pairs"], told["unclear"], told["rate"]["pairs"]) == (5, 1, 4)
    assert told["unclear_answers"] == {"As a model, I ...": 2}
    assert "1 of 5 pairs unclear" in answer.words


def test_only_nonsense_gives_no_rate(folder: Path) -> None:
    with endpoint(lambda _: "perhaps") as place:
        assert "no pair has two clear verdicts" in ask(place, folder).words
    assert (record(folder)["rate"], record(folder)["unclear"]) == (None, 5)


def test_a_busy_or_failing_endpoint_is_asked_again_and_later_each_time(
    folder: Path, quick: list[float]
) -> None:
    refusals = [error(429, "busy", retry_after="7"), error(500, "oh"), error(503, "oh")]

    def answer(message: str) -> Any:
        return refusals.pop(0) if refusals else prefers_yes(message)

    with endpoint(answer) as place:
        ask(place, folder)
    assert record(folder)["rate"]["wins"] == 5
    assert (len(place.messages), quick) == (13, [7.0, 2.0, 4.0])


def test_an_endpoint_that_stays_busy_is_given_up_after_some_tries(
    folder: Path, quick: list[float]
) -> None:
    with (
        endpoint(lambda _: error(429, "busy")) as place,
        refused("llm_refuses", url=place.url, status=429, reason="busy"),
    ):
        ask(place, folder)
    assert len(place.messages) == llm_judge.TRIES
    assert quick == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_wrong_key_is_one_message_after_one_request_and_never_repeats_the_key(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        endpoint(lambda _: error(401, f"Incorrect API key: {KEY}.")) as place,
        refused("llm_refuses", url=place.url, status=401) as caught,
    ):
        ask(place, folder, key=KEY)
    assert place.keys == {f"Bearer {KEY}"}
    assert len(place.messages) == 1
    assert "--llm_key_file" in str(caught.value)
    assert KEY not in str(caught.value)
    assert KEY not in repr(LanguageModel(place.url, "m", KEY))
    assert "llm" not in json.loads((folder / "judge.json").read_text())


def test_the_key_is_stored_nowhere(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with endpoint(prefers_yes) as place:
        ask(place, folder, key=KEY)
    texts = [path.read_text() for path in folder.iterdir() if path.is_file()]
    assert not [text for text in (*texts, *capfd.readouterr()) if KEY in text]
    assert place.keys == {f"Bearer {KEY}"}


def test_a_reply_that_repeats_the_key_is_stored_without_it(folder: Path) -> None:
    with endpoint(lambda _: f"I was called with {KEY}") as place:
        ask(place, folder, key=KEY)
    assert record(folder)["unclear_answers"] == {"I was called with ***": 10}
    assert not [p for p in folder.iterdir() if p.is_file() and KEY in p.read_text()]


def test_where_nobody_listens_one_message_says_so_at_once(folder: Path, quick: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with refused("llm_silent", url=f"http://127.0.0.1:{port}/v1"):
        ask(Endpoint(f"http://127.0.0.1:{port}/v1"), folder)
    assert quick == []
    assert json.loads((folder / "judge.json").read_text()) == {"rows": 6, "votes": None}


@pytest.mark.parametrize("document", [{"choices": []}, b"<html>", ["x"], {"choices": [{}]}])
def test_what_is_no_endpoint_of_the_dialect_is_told(folder: Path, document: Any) -> None:
    with endpoint(lambda _: (200, {}, document)) as place, refused("llm_other_dialect"):
        ask(place, folder)


def test_half_an_answer_is_asked_for_again(folder: Path, quick: list[float]) -> None:
    halves = [(200, {}, b'{"choices": [{"mess')] * 2

    def answer(message: str) -> Any:
        return halves.pop() if len(place.messages) > 3 and halves else prefers_yes(message)

    with endpoint(answer) as place:
        ask(place, folder)
    assert (len(place.messages), record(folder)["rate"]["wins"]) == (12, 5)


def test_a_redirect_does_not_take_the_key_elsewhere(folder: Path) -> None:
    with endpoint(prefers_yes) as other:
        leads = {"location": f"{other.url}/chat/completions"}
        with endpoint(lambda _: (302, leads, {})) as place, refused("llm_refuses", status=302):
            ask(place, folder, key=KEY)
    assert other.keys == set()


def test_a_pair_that_is_too_long_for_the_model_is_left_out(folder: Path) -> None:
    def answer(message: str) -> Any:
        return error(400, "too long") if "3?" in message else prefers_yes(message)

    with endpoint(answer) as place:
        ask(place, folder)
    assert record(folder)["unclear_answers"] == {"status 400: too long": 2}
    with endpoint(prefers_yes) as place:
        ask(place, folder)
    assert len(place.messages) == 2, "what was refused is asked for again"
    assert record(folder)["unclear"] == 0


def test_an_endpoint_that_refuses_every_pair_is_given_up(folder: Path) -> None:
    with (
        endpoint(lambda _: error(400, "temperature must be 1")) as place,
        refused("llm_refuses_every_pair"),
    ):
        ask(place, folder)
    assert not (folder / llm_judge.FILE).exists()


def test_the_same_command_asks_for_what_is_missing(folder: Path) -> None:
    count: list[int] = []

    def failing(message: str) -> Any:
        count.append(1)
        return prefers_yes(message) if len(count) <= 4 else error(403, "quota")

    with endpoint(failing) as place, refused("llm_refuses", status=403):
        ask(place, folder)
    stored = len((folder / llm_judge.FILE).read_text().splitlines())
    assert 1 <= stored <= 4
    with endpoint(prefers_yes) as place:
        ask(place, folder)
        assert len(place.messages) == 10 - stored
        ask(place, folder, most=3)
        assert len(place.messages) == 10 - stored
        other = LanguageModel(place.url, "another")
        ask_language_model(other, folder, folder, most=2)
        assert len(place.messages) == 14 - stored
    assert record(folder)["model"] == "another"


def test_a_command_killed_at_any_file_boundary_goes_on_without_a_torn_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_judge, "_replies", lambda _, asked: ((one, "A") for one in asked))
    model = LanguageModel("http://127.0.0.1:1/v1", "m")
    for boundary in range(1, 6):

        def killed(boundary: int = boundary) -> None:
            die_at(boundary)
            ask_language_model(model, folder, folder, most=5)

        assert in_child(killed) == KILLED
    assert ask_language_model(model, folder, folder, most=5).reversals == 5
    lines = (folder / llm_judge.FILE).read_text().splitlines()
    whole = [line for line in lines if line.endswith("}")]
    assert len({(json.loads(one)["pair"], json.loads(one)["first"]) for one in whole}) == 10


@pytest.mark.parametrize(
    ("url", "key", "what"),
    [
        ("127.0.0.1:8000/v1", None, fault("llm_address", url="127.0.0.1:8000/v1")),
        ("http://", None, fault("llm_address")),
        ("http://host:port/v1", None, fault("llm_address")),
        ("https://user:sesame@host/v1", None, fault("llm_address", url="https://***@host/v1")),
        ("https://host/v1?key=sesame", None, fault("llm_address", url="https://host/v1")),
        ("http://host/v1", KEY, fault("llm_key_in_the_clear", url="http://host/v1")),
    ],
)
def test_an_address_that_is_none_or_tells_a_key_is_refused(
    url: str, key: str | None, what: Fault
) -> None:
    with refused(what) as caught:
        LanguageModel(url, "m", key)
    assert "sesame" not in str(caught.value)


def test_a_key_is_one_word_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with refused("llm_key_unreadable", path=str(path)):
        read_key(path)
    path.write_text(f"{KEY}\n")
    assert read_key(path) == KEY
    for text, count in (("", 0), ("two words", 2)):
        path.write_text(text)
        with refused("llm_key_words", count=count):
            read_key(path)


def test_answers_that_never_differ_leave_nothing_to_ask(folder: Path) -> None:
    (folder / ANSWERS).write_text("")
    with refused("llm_has_no_pair"):
        ask(Endpoint("http://127.0.0.1:1/v1"), folder)


def test_the_page_states_the_message_as_it_is_sent() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "judging.md"
    assert f"```\n{llm_judge.PROMPT}```" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--llm_model", "m"], fault("llm_flags_alone", flags="--llm_model")),
        (["--llm_judge", "http://h/v1"], fault("llm_without_model", url="http://h/v1")),
        (["--llm_judge", "h", "--llm_model", "m"], fault("llm_address", url="h")),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_anything_is_computed(
    flags: list[str], what: Fault, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["judge", "0" * 32, "-sb", str(tmp_path), *flags])
    assert done.exit_code == 2
    says(what, done.stderr)
