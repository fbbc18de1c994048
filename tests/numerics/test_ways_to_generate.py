"""Training's evaluation, predict, the service and the card's program give one text: for every task
and template, from a base whose generation_config.json ends texts at a second token and recommends
penalties and least lengths.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.runs import from_folder
from tests.facts import LLAMA, TINY_T5, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.commands.answer import answers
from trainer.commands.options import module_of
from trainer.evaluation.predict import OpenExport
from trainer.models.generation.texts import TORN
from trainer.models.weights import generation_file
from trainer.protocol.abilities import Prediction, Search
from trainer.protocol.task import Places

QUESTION = "Where is the red key?"
CONTEXTS = ["Ada keeps the red key in the cellar.", "The attic is empty."]
DATED = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ (date_string or 'today') + '<assistant> ' }}{% endif %}"
)
RECOMMENDED = {
    **{"repetition_penalty": 3.0, "no_repeat_ngram_size": 2, "suppress_tokens": [20, 21, 22]},
    **{"min_length": 60, "do_sample": True, "temperature": 0.6, "top_k": 3, "num_beams": 3},
}
KINDS = ("texts", "chatml", "plain", "date", "summariser", "fid", "cross_attention")
LONGEST = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_facts(tmp_path_factory.mktemp("facts"))
    (made / "date.jinja").write_text(DATED)
    return made


def values_of(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    """An experiment of a kind. more: keys of the dictionary that replace its own."""
    task = kind if kind in ("summariser", "fid", "cross_attention") else "causal_lm"
    own: dict[str, Any] = {}
    if task == "causal_lm":
        template = "date.jinja" if kind == "date" else kind
        chat = {"source": "chat", "chat_template": template}
        own = {"base": LLAMA, "data": {"source": "files"} if kind == "texts" else chat}
    if kind == "fid":
        own = {"base": {**TINY_T5, "seed": 3}, "data": {"answer_tokens": LONGEST + 1}}
    if kind == "cross_attention":
        own = {"base": LLAMA, "data": {"answer_tokens": LONGEST}, "layers": {"stride": 1}}
    if kind == "summariser":
        how = {"max_tokens": LONGEST, "min_tokens": 0, "num_beams": 1}
        own = {"base": {**TINY_T5, "seed": 3}, "generation": how}
    return from_folder(experiment(task, folder, **own | more), folder / "bases")


def exported(values: dict[str, Any], folder: Path, out: Path) -> tuple[Any, Any, Any]:
    """The task that trains, its model, and what answers from the export of the same weights."""
    cfg, places = tasks.parse(values), Places(folder, folder / "cache", folder)
    task = tasks.load(cfg, places)
    model = task.model().eval()
    task.export({name: one.detach() for name, one in model.named_parameters()}, out)
    other = tasks.load(cfg, places)
    return task, model, OpenExport(other, other.load_export(out).eval(), out)


def row_of(kind: str) -> dict[str, Any]:
    if kind == "texts":
        return {"text": QUESTION}
    if kind == "summariser":
        return {"context": QUESTION}
    if kind in ("fid", "cross_attention"):
        return {"question": QUESTION, "contexts": CONTEXTS}
    return {"messages": [{"role": "user", "content": QUESTION}]}


def trained_of(opened: OpenExport) -> Any:
    return module_of(opened.task.cfg.task, "trained", "predict")


def evaluated(kind: str, task: Any, model: Any) -> str | None:
    """None: the task is evaluated by its loss."""
    if task.cfg.task == "causal_lm":
        return None
    trained = module_of(task.cfg.task, "trained", "predict")
    row = task.encode(trained.row_to_predict(task, row_of(kind), "here"))
    with torch.no_grad():
        return task.answers(model, [row], [{"question": "", "answers": []}]).predictions[0]


def predicted(kind: str, opened: OpenExport, how: Prediction) -> str:
    trained = trained_of(opened)
    row = trained.row_to_predict(opened.task, row_of(kind), "here")
    with torch.no_grad():
        return trained.predict(opened.task, opened.model, [row], how)[0]["prediction"]


def served(kind: str, opened: OpenExport, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text, and the last piece."""
    row = row_of(kind)
    asked = {"prompt": row["text"]} if "text" in row else row
    if opened.task.cfg.task != "causal_lm":
        asked = {"question": QUESTION, "contexts": row.get("contexts", [])}
    asked = {"max_tokens": LONGEST, "temperature": 0, "seed": 1, "stop": [], **asked, **more}
    pieces = list(answers(opened, [asked]))
    return "".join(piece.get("text", "") for piece in pieces), pieces[-1]


def written(kind: str, opened: OpenExport) -> str:
    """What the card's program prints."""
    [(_, code)] = trained_of(opened).usage(opened.task.cfg, opened.folder).programs
    code = code.replace('FOLDER = "."', f"FOLDER = {str(opened.folder)!r}")
    code = code.replace("most = 32", f"most = {LONGEST}")
    code = re.sub(r'document = ".*"', f"document = {QUESTION!r}", code)
    code = re.sub(r"passages = \[.*\]", f"passages = {[('', one) for one in CONTEXTS]}", code)
    code = code.replace("Where does Ada keep the red key?", QUESTION)
    code = code.replace(str(CONTEXTS[:1]).replace("'", '"'), str(CONTEXTS))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "card"})
    return said.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_four_ways_give_one_text(
    kind: str,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = values_of(kind, folder)
    base = Path(values["base"])
    how = Prediction(max_tokens=LONGEST if "answer_tokens" not in values["data"] else None)
    file = base / generation_file.NAME
    file.unlink(missing_ok=True)
    _, _, plain = exported(values, folder, tmp_path / "plain")
    spelt: list[list[int]] = []
    spell = plain.task.tokenizer.decode

    def decode(ids: list[int], **how: Any) -> str:
        spelt.append(list(ids))
        return spell(ids, **how)

    monkeypatch.setattr(plain.task.tokenizer, "decode", decode)
    whole = predicted(kind, plain, how)
    tokens = spelt[-1]
    second = tokens[len(tokens) // 2]
    assert served(kind, plain)[0] == whole
    assert served(kind, plain)[1]["finish"] == "length"
    file.write_text(json.dumps({**RECOMMENDED, "eos_token_id": [plain.task.end, second]}))
    with caplog.at_level(logging.WARNING):
        task, model, opened = exported(values, folder, tmp_path / "export")
    [told] = [one for one in caplog.messages if "Texts are generated without" in one]
    assert all(f"{name}={value!r}" in told for name, value in RECOMMENDED.items())
    ended = predicted(kind, opened, how)
    assert whole.startswith(ended)
    assert len(ended) < len(whole)
    assert evaluated(kind, task, model) in (None, ended)
    text, last = served(kind, opened)
    assert (text, last["finish"]) == (ended, "stop")
    assert written(kind, opened).partition("\n")[0] == ended.partition("\n")[0]
    said = json.loads((opened.folder / generation_file.NAME).read_text())
    assert second in said["eos_token_id"]
    assert not {"repetition_penalty", "suppress_tokens", "temperature", "top_k"} & said.keys()


SPELT = (
    "{{% for m in messages %}}{{{{ m.role ~ ': ' ~ m.content }}}}"
    "{{% if m.role == 'assistant' %}}{{{{ {} }}}}{{% endif %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}assistant:{{% endif %}}"
)


def test_what_a_template_spells_behind_an_answer_is_no_part_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As chatml's "<|im_end|>" with a tokenizer that has no such token."""
    values = values_of("date", folder)
    values["data"] |= {"chat_template": "closing.jinja"}
    template, file = folder / "closing.jinja", Path(values["base"]) / generation_file.NAME
    template.write_text(SPELT.format("''"))
    file.unlink(missing_ok=True)
    how = Prediction(max_tokens=LONGEST)
    _, _, plain = exported(values, folder, tmp_path / "plain")
    tokens = tokens_of(plain, how, monkeypatch)
    texts = {at: plain.task.tokenizer.decode(tokens[:at]) for at in range(3, LONGEST)}
    [at, *_] = [
        at
        for at, text in texts.items()
        if tokens.index(tokens[at]) == at and TORN not in text[-2:] and len(text) > 4
    ]
    ended, closing = texts[at].removeprefix(" "), texts[at][-2:]
    file.write_text(json.dumps({"eos_token_id": [plain.task.end, tokens[at]]}))
    template.write_text(SPELT.format(json.dumps(closing)))
    _, _, opened = exported(values, folder, tmp_path / "closed")
    assert opened.task.closing == closing
    wanted = ended[:-2]
    assert predicted("date", opened, how) == wanted
    assert served("date", opened)[0] == wanted
    assert written("date", opened).removesuffix("\n") == wanted


def tokens_of(opened: OpenExport, how: Prediction, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of what predict writes."""
    spelt: list[list[int]] = []
    spell = opened.task.tokenizer.decode

    def decode(ids: list[int], **more: Any) -> str:
        spelt.append(list(ids))
        return spell(ids, **more)

    with monkeypatch.context() as patched:
        patched.setattr(opened.task.tokenizer, "decode", decode)
        predicted("date", opened, how)
    return spelt[-1]


@pytest.mark.parametrize("start", [5, [5, 5]], ids=["another", "a list"])
@pytest.mark.parametrize("kind", ["summariser", "fid"])
def test_a_text_starts_as_it_was_learnt_whatever_the_base_recommends(
    kind: str, start: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = values_of(kind, folder)
    file = Path(values["base"]) / generation_file.NAME
    file.write_text(json.dumps({"decoder_start_token_id": start, "eos_token_id": 0}))
    with caplog.at_level(logging.WARNING):
        task, model, opened = exported(values, folder, tmp_path / "export")
    assert f"decoder_start_token_id={start!r}" in caplog.text
    text = predicted(kind, opened, Prediction())
    assert evaluated(kind, task, model) == text == served(kind, opened)[0]
    learnt = TINY_T5["config"]["decoder_start_token_id"]
    said = json.loads((opened.folder / generation_file.NAME).read_text())
    assert learnt == said["decoder_start_token_id"] != start


TEMPLATES: dict[str, dict[str, str]] = {
    "texts": {},
    **{name: {"chat_template": name} for name in ("chatml", "plain")},
    "date": {"chat_template": "date.jinja"},
    "opened by content": {"chat_template": "by_content.jinja"},
}
_BY_CONTENT = DATED.replace(
    "{% endif %}",
    "{{ '<think></think>' if '/no_think' in messages[0].content else '' }}{% endif %}",
)
ROWS = (
    [{"role": "user", "content": QUESTION}],
    [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "Überall 🙂?"}],
    [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2? "},
    ],
)


@pytest.mark.long
def test_templates_times_rows_times_ways_are_equal(folder: Path, tmp_path: Path) -> None:
    """The answers of predict, alone and beside others, of the service, alone and streamed
    beside others, and of transformers on the template's text.
    """
    (folder / "by_content.jinja").write_text(_BY_CONTENT)
    num_ways = 0
    for number, (name, chat) in enumerate(TEMPLATES.items()):
        values = values_of("chatml" if chat else "texts", folder)
        values["data"] |= chat
        (Path(values["base"]) / generation_file.NAME).unlink(missing_ok=True)
        _, _, opened = exported(values, folder, tmp_path / str(number))
        raws = [{"messages": row} if chat else {"text": row[-1]["content"]} for row in ROWS]
        ways = ways_of(opened, raws)
        num_ways = len(ways)
        assert len({json.dumps(texts) for texts in ways.values()}) == 1, (name, ways)
        assert len(set(ways["predict, alone"])) > 1
    print(f"SHOW {len(TEMPLATES)} templates x {len(ROWS)} rows x {num_ways} ways: equal")


def ways_of(opened: OpenExport, raws: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By the name of a way: the answers to all rows."""
    trained, task, model = trained_of(opened), opened.task, opened.model
    how = Prediction(max_tokens=LONGEST)
    rows = [trained.row_to_predict(task, raw, "here") for raw in raws]
    asked = [
        {"max_tokens": LONGEST, "temperature": 0, "seed": 1, "stop": []}
        | ({"prompt": raw["text"]} if "text" in raw else raw)
        for raw in raws
    ]

    def told(questions: list[dict[str, Any]]) -> list[str]:
        texts = [""] * len(questions)
        for piece in answers(opened, questions):
            texts[piece["of"]] += piece.get("text", "")
        return texts

    with torch.no_grad():
        return {
            "predict, alone": [
                trained.predict(task, model, [row], how)[0]["prediction"] for row in rows
            ],
            "predict, together": [
                one["prediction"] for one in trained.predict(task, model, rows, how)
            ],
            "service, alone": [told([one])[0] for one in asked],
            "service, together": told(asked),
            "transformers": [by_transformers(opened, raw) for raw in raws],
        }


def by_transformers(opened: OpenExport, raw: dict[str, Any]) -> str:
    """As whoever loads the export does it, without our prompts and our loop."""
    tokenizer, base = opened.task.tokenizer, opened.model.base
    if "text" in raw:
        ids = opened.task.opening + tokenizer(raw["text"], add_special_tokens=False)["input_ids"]
    else:
        prompt = tokenizer.apply_chat_template(
            raw["messages"], tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024"
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    made = base.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=LONGEST,
        do_sample=False,
        eos_token_id=opened.task.ends,
        pad_token_id=opened.task.pad,
    )
    new = [token for token in made[0, len(ids) :].tolist() if token not in opened.task.ends]
    text = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text if "text" in raw else text.removeprefix(" ")


def test_a_seed_draws_the_same_texts_in_predict_and_the_service(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of("chatml", folder)
    _, _, opened = exported(values, folder, tmp_path / "export")
    search = Search(num_answers=3, temperature=0.9, top_p=0.9, seed=5)
    row = trained_of(opened).row_to_predict(opened.task, row_of("chatml"), "here")
    how = Prediction(search, max_tokens=LONGEST)
    [want] = trained_of(opened).predict(opened.task, opened.model, [row], how)
    drawn = {"n": 3, "temperature": 0.9, "top_p": 0.9, "seed": 5, "logprobs": 1}
    asked = {**row_of("chatml"), "max_tokens": LONGEST, "stop": [], **drawn}
    texts, ends = ["", "", ""], []
    for piece in answers(opened, [asked]):
        texts[piece["choice"]] += piece.get("text", "")
        if "finish" in piece:
            assert len(piece["logprobs"]) == piece["tokens"]
            tokens = "".join(one["token"] for one in piece["logprobs"])
            assert tokens == texts[piece["choice"]]
            ends.append(piece["is_last"])
    assert texts == want["n_best"]
    assert len(set(texts)) == 3
    assert ends == [False, False, True]


def test_log_probabilities_are_of_the_tokens_of_the_answer_and_not_of_its_stop(
    folder: Path, tmp_path: Path
) -> None:
    _, _, opened = exported(values_of("texts", folder), folder, tmp_path / "export")
    whole, last = served("texts", opened, logprobs=2)
    assert "".join(one["token"] for one in last["logprobs"]) == whole
    places = [at for at in range(4, len(whole) - 2) if whole.find(whole[at : at + 2]) == at]
    text, cut = served("texts", opened, logprobs=2, stop=[whole[places[0] : places[0] + 2]])
    assert text == whole[: places[0]]
    assert "".join(one["token"] for one in cut["logprobs"]) == text
    assert len(cut["logprobs"]) < len(last["logprobs"])
    for one in cut["logprobs"][:-1]:
        assert one["token"] in [other["token"] for other in one["likeliest"]]


@pytest.mark.parametrize("kind", ["summariser", "fid", "cross_attention"])
@pytest.mark.parametrize("most", [1, 3])
def test_as_many_tokens_as_asked_are_generated(
    kind: str, most: int, folder: Path, tmp_path: Path
) -> None:
    values = values_of(kind, folder)
    (Path(values["base"]) / generation_file.NAME).unlink(missing_ok=True)
    _, _, opened = exported(values, folder, tmp_path / "export")
    text, last = served(kind, opened, max_tokens=most)
    assert (last["finish"], last["tokens"]) == ("length", most)
    assert text == predicted(kind, opened, Prediction(max_tokens=most))


def test_the_least_length_of_a_summary_holds_in_the_service(folder: Path, tmp_path: Path) -> None:
    values = values_of("summariser", folder)
    values["generation"] |= {"min_tokens": 8}
    file = Path(values["base"]) / generation_file.NAME
    file.write_text(json.dumps({"eos_token_id": list(range(0, 384, 2))}))
    _, _, opened = exported(values, folder, tmp_path / "export")
    text, last = served("summariser", opened, max_tokens=256)
    assert text == predicted("summariser", opened, Prediction())
    assert last["tokens"] >= 8
    assert served("summariser", opened, max_tokens=3)[1]["tokens"] == 3
    file.unlink()


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": ["</s>"]}', "[1]", "{", '{"eos_token_id": -1}']
)
def test_a_file_that_names_no_tokens_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / generation_file.NAME).write_text(content)
    with refused("generation_file_tokens"):
        generation_file.ends_of_base(str(tmp_path), None)
