"""A prompt that is too long: one rule for predict, the service and the card's program, and nothing
is cut that is not told.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.numerics import test_ways_to_generate as ways
from tests.wording import refused, says
from trainer import tasks
from trainer.commands.answer import answers
from trainer.data.readers.row_files import placed_rows
from trainer.evaluation import predict
from trainer.evaluation.predict import OpenExport
from trainer.models.generation.texts import Fit, fitted
from trainer.models.weights import generation_file
from trainer.protocol.abilities import Prediction, Search
from trainer.protocol.task import Places

POSITIONS = 128  # of the tiny base
MOST = 20
LONG = (POSITIONS - 1, POSITIONS, POSITIONS + 1, 10 * POSITIONS)  # tokens of a prompt
CUT = "prompts of more than 127 tokens (the beginning is cut)"
SHORT = f"prompts that leave fewer than {MOST} positions for the text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def opened(kind: str, folder: Path, out: Path, **data: Any) -> OpenExport:
    values = ways.values_of(kind, folder)
    values["data"] |= data
    (Path(values["base"]) / generation_file.NAME).unlink(missing_ok=True)
    return ways.exported(values, folder, out)[2]


def test_a_prompt_is_cut_only_where_no_room_is_left() -> None:
    ids, opening = list(range(100)), [0]
    for length in range(1, 100):
        fit = fitted(ids[:length], positions=60, most=8, opening=opening)
        if length < 60:
            assert fit == Fit(ids[:length], min(8, 60 - length), 0)
        else:
            assert fit == Fit([0, *ids[length - 51 : length]], 8, length - 52)
    assert fitted(ids, positions=60, most=59, opening=opening).ids == [99]
    assert fitted(ids, positions=60, most=8).ids == ids[-52:]
    assert fitted(ids[:56], positions=60, most=8, least=8).ids == ids[4:56]
    assert fitted(ids[:59], positions=60, most=80).most == 1
    with refused("positions_taken", most=60, positions=60):
        fitted(ids, positions=60, most=60)


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predicted(model: OpenExport, path: Path, how: Prediction, *, strict: bool = False) -> list[Any]:
    """The lines of predict."""
    placed, name = placed_rows(path), str(path)
    cut_tokens = predict.judge_rows(model, placed, how, what=name, strict=strict)
    lines = predict.predict_rows(model, placed_rows(path), how, batch=16, cut_tokens=cut_tokens)
    return [json.loads(json.dumps(line)) for line in lines]


def text_of(model: OpenExport, length: int) -> str:
    """A text of that many tokens."""
    text = "a" * length
    assert len(model.task.prompt_ids({"text": text}, "here")) == length
    return text


def served(model: OpenExport, text: str) -> tuple[str, dict[str, Any]]:
    asked = {"prompt": text, "max_tokens": MOST, "temperature": 0, "seed": 1, "stop": []}
    pieces = list(answers(model, [asked]))
    return "".join(piece.get("text", "") for piece in pieces), pieces[-1]


def test_predict_gives_the_service_s_text_or_says_what_it_cut(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = opened("texts", folder, tmp_path / "export")
    lengths = (POSITIONS - MOST, *LONG)
    texts = [text_of(model, length) for length in lengths]
    path = rows_file(tmp_path, [{"text": text} for text in texts])
    how = Prediction(max_tokens=MOST)
    with caplog.at_level(logging.INFO):
        lines = predicted(model, path, how)
    kept = POSITIONS - MOST
    lost = [length - kept for length in LONG[1:]]
    assert [line.get("cut_tokens") for line in lines] == [None, None, *lost]
    assert [line.get("max_tokens") for line in lines] == [None, 1, None, None, None]
    share = sum(lost) / sum(lengths)
    line = f"{path}: 5 rows; 3 rows lose {sum(lost):,} tokens; 3 of 5 prompts cut, {share:.1%} of"
    assert line in caplog.text
    for text, length, line in zip(texts, lengths, lines, strict=True):
        answer, last = served(model, text)
        if length < POSITIONS:
            assert answer == line["prediction"]
        else:
            assert last["error"] == f"the prompt has {length} tokens, want 1 to {POSITIONS - 1}"
            assert line["prediction"] == served(model, text[-kept:])[0]
    for row, why in ((2, CUT), (1, SHORT)):
        path = rows_file(tmp_path, [{"text": texts[0]}, {"text": texts[row]}])
        with refused("strict_refuses", count=1, why=why, places=f"{path}, line 2"):
            predicted(model, path, how, strict=True)
    path = rows_file(tmp_path, [{"text": texts[0]}])
    assert len(predicted(model, path, how, strict=True)) == 1


def test_beams_of_prompts_with_little_room_are_those_of_each_prompt_alone(
    folder: Path, tmp_path: Path
) -> None:
    model = opened("texts", folder, tmp_path / "export")
    rows = [{"text": text_of(model, length)} for length in (20, *range(POSITIONS - 10, POSITIONS))]
    how = Prediction(Search(num_beams=4), max_tokens=30)
    together = predicted(model, rows_file(tmp_path, rows), how)
    alone = [predicted(model, rows_file(tmp_path, [row]), how)[0] for row in rows]
    assert [one["prediction"] for one in together] == [one["prediction"] for one in alone]
    assert [one.get("max_tokens") for one in together] == [None, *range(10, 0, -1)]


@pytest.mark.parametrize("length", [POSITIONS - 3, POSITIONS])
def test_the_program_of_the_card_keeps_to_the_positions(
    length: int, folder: Path, tmp_path: Path
) -> None:
    model = opened("texts", folder, tmp_path / "export")
    text = text_of(model, length)
    [(_, code)] = ways.trained_of(model).usage(model.task.cfg, model.folder).programs
    code = code.replace('FOLDER = "."', f"FOLDER = {str(model.folder)!r}")
    code = code.replace("Where is the red key?", text)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if length == POSITIONS:
            with pytest.raises(ValueError, match=f"has {length} tokens, want 1 to {length - 1}"):
                exec(code, {"__name__": "card"})
            return
        exec(code, {"__name__": "card"})
    assert said.getvalue() == served(model, text)[0] + "\n"


def row_of(model: OpenExport, question: int, context: int) -> dict[str, Any]:
    """A row of that many letters for each."""
    name = model.task.cfg.task
    if name == "summariser":
        return {"context": "a" * context}
    if name == "vera":
        return {"statement": "a" * context}
    field = "query" if name == "retriever" else "question"
    return {field: "a" * question, "contexts": ["a" * context, "b"]}


@pytest.mark.parametrize(
    ("kind", "called"),
    [("cross_attention", "contexts"), ("fid", "passages"), ("summariser", "documents")],
)
def test_what_an_encoding_cuts_is_told_and_not_refused(
    kind: str, called: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = opened(kind, folder, tmp_path / "export")
    rows = [row_of(model, 5, length) for length in (5, 200)]
    with caplog.at_level(logging.INFO):
        short, cut = predicted(model, rows_file(tmp_path, rows), Prediction(), strict=True)
    assert "cut_tokens" not in short
    assert cut["cut_tokens"] > 100
    assert f"2 rows; 1 rows lose {cut['cut_tokens']} tokens; 1 of " in caplog.text
    assert f" {called} cut, " in caplog.text
    answer = asked(model, rows[1])
    assert (answer["text"], answer["cut_tokens"]) == (cut["prediction"], cut["cut_tokens"])
    assert "cut_tokens" not in asked(model, rows[0])


def asked(model: OpenExport, row: dict[str, Any]) -> dict[str, Any]:
    """The service's answer to a row."""
    question = row.get("question", row.get("context"))
    how = {"max_tokens": 4096, "temperature": 0, "seed": 1, "stop": []}
    (answer,) = answers(model, [{"question": question, "contexts": row.get("contexts", []), **how}])
    return answer


@pytest.mark.parametrize("kind", ["cross_attention", "fid"])
def test_a_question_that_is_cut_is_refused_by_the_service_and_under_strict(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    model = opened(kind, folder, tmp_path / "export")
    path = rows_file(tmp_path, [row_of(model, length, 3) for length in (5, 200)])
    _, cut = predicted(model, path, Prediction())
    assert cut["cut_tokens"] > 100
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    why = {
        "cross_attention": "questions of more than 48 tokens (data.decoder_tokens cuts them)",
        "fid": "questions that leave no room for a passage (data.passage_tokens 64)",
    }[kind]
    with refused("strict_refuses", count=1, why=why, places=f"{path}, line 2"):
        predicted(model, path, Prediction(), strict=True)
    assert "error" not in asked(model, rows[0])
    says("question_shortened", asked(model, rows[1])["error"], why=why)


def test_a_prompt_before_a_long_answer_loses_its_beginning_and_says_so(
    folder: Path, tmp_path: Path
) -> None:
    model = opened("cross_attention", folder, tmp_path / "export", loss_on="answer")
    path = rows_file(tmp_path, [row_of(model, length, 3) for length in (5, 32, 60)])
    lines = predicted(model, path, Prediction(max_tokens=90))
    assert [line.get("cut_tokens", 0) > 0 for line in lines] == [False, True, True]


@pytest.mark.parametrize("name", ["retriever", "vera"])
def test_texts_without_answers_tell_what_is_cut_too(
    name: str, folder: Path, tmp_path: Path
) -> None:
    cfg = tasks.parse(experiment(name, folder))
    task = tasks.load(cfg, Places(folder, folder / "cache", folder))
    model = OpenExport(task, task.model().eval(), tmp_path)
    rows = [row_of(model, 5, length) for length in (5, 200)]
    short, cut = predicted(model, rows_file(tmp_path, rows), Prediction(), strict=True)
    assert "cut_tokens" not in short
    assert cut["cut_tokens"] > 100
    texts = rows[1].get("contexts", [rows[1].get("statement")])
    question = {"texts": texts, "side": "passage"} if name == "retriever" else {"statements": texts}
    (answer,) = answers(model, [question])
    assert answer["cut_tokens"] == cut["cut_tokens"]
