"""Language modelling with a loss on answers alone: which tokens are labels."""

from __future__ import annotations

import json
import unicodedata
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.facts import experiment, write_facts
from tests.tolerance import assert_close
from tests.wording import refused
from trainer import tasks
from trainer.data import lookup
from trainer.data.padding import pad_right
from trainer.data.vocabulary import most_tokens_per_byte
from trainer.models.losses import IGNORED
from trainer.protocol.task import Places
from trainer.tasks.causal_lm import text_tokens

LINES = [
    {"prompt": "Dana keeps the map. Who? ", "completion": "Dana."},
    {"prompt": "Say it twice: no.", "completion": " No, no, said Ada in the attic."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_facts(tmp_path)
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LINES))
    return tmp_path


def load(folder: Path, **data: Any) -> Any:
    values = experiment("causal_lm", folder, data={"loss_on": "answer", **data})
    return tasks.load(tasks.parse(values), Places(folder, folder / "c", folder))


def labelled(task: Any, row: dict[str, Any]) -> str:
    encoded = task.encode(row)
    pairs = zip(encoded["ids"], encoded["scored"], strict=True)
    return task.decode([token for token, is_scored in pairs if is_scored])


def test_the_labels_of_a_line_are_its_completion_and_the_end(folder: Path) -> None:
    task = load(folder)
    rows = list(task.rows("train"))
    assert [row["text"] for row in rows] == [x["prompt"] + x["completion"] for x in LINES]
    for row, line in zip(rows, LINES, strict=True):
        # a token may begin before the completion, with the blank in front of it
        assert labelled(task, row).strip() == line["completion"].strip() + "<|endoftext|>"


def test_pieces_of_a_long_text_have_the_labels_of_the_whole(folder: Path) -> None:
    whole, cut = load(folder), load(folder, max_tokens=7)
    pieces = [row for row in cut.rows("train") if row["text"].startswith("Say")]
    assert len(pieces) > 3
    said = "".join(labelled(cut, row) for row in pieces)
    assert said == labelled(whole, list(whole.rows("train"))[1])
    assert labelled(cut, pieces[0]) == ""


def test_the_made_up_corpus_is_scored_on_its_answers(folder: Path) -> None:
    task = load(folder, source="lookup", max_tokens=100)
    for row in islice(lookup.texts("valid"), 20):
        answers = [row["text"][first:stop] for first, stop in row["answer_spans"]]
        assert all(row["text"].count(answer) == 2 for answer in answers), "told, then answered"
        said = "".join(labelled(task, {**row, "piece": piece}) for piece in range(9))
        assert said == "".join(answers) + "<|endoftext|>"


def test_the_loss_is_over_the_answers_alone(folder: Path) -> None:
    task = load(folder)
    model = task.model().eval()
    rows = [task.encode(row) for row in task.rows("train")]
    batch = task.collate(rows)
    ids, mask = pad_right([row["ids"] for row in rows], 0)
    is_label, _ = pad_right([row["scored"] for row in rows], 0)
    labels = ids.masked_fill(is_label == 0, IGNORED)
    stock = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with torch.no_grad():
        (got,) = task.losses(model, [batch])
        want = model.base(**stock, num_items_in_batch=torch.tensor(1)).loss
    assert_close(got, want, what="loss", depth=6 * 2 * 64, margin=0.1)
    assert 0 < task.units(batch) == is_label.sum() < mask.sum()


def test_a_line_without_a_completion_is_refused(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "Who?"}\n')
    with refused("field_missing", at="train.jsonl, line 1", key="completion"):
        list(load(folder).rows("train"))


def test_a_source_without_answers_is_refused(folder: Path) -> None:
    with refused("answers_of_source", source="stdlib_docs"):
        load(folder, source="stdlib_docs")


# The beginning of a text
# --------------------------------------------------------------------------------------------------


def with_opening(folder: Path) -> Path:
    """A tokenizer that begins every text with a token, as Llama's does: here <|pad|>, id 1."""
    backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|pad|>", eos_token="<|endoftext|>"
    )
    made.save_pretrained(folder / "opened")
    return folder / "opened"


def opened_task(folder: Path, **data: Any) -> Any:
    values = experiment("causal_lm", folder, data=data)
    values["tokenizer"] = str(with_opening(folder))
    return tasks.load(tasks.parse(values), Places(folder, folder / "c", folder))


def test_a_text_and_a_prompt_begin_as_the_tokenizer_begins_texts(folder: Path) -> None:
    task = opened_task(folder, source="stdlib_docs", max_tokens=16)
    stock = task.tokenizer("Where is Ada?")["input_ids"]
    assert stock[0] == 1
    assert list(task.encode({"text": "Where is Ada?", "piece": 0})["ids"]) == [*stock, task.end]
    for raw in ({"text": "Where is Ada?"}, {"prompt": "Where is Ada?"}):
        assert task.prompt_ids(raw, "here") == stock
    assert task.prompt_ids({"text": "<|pad|>Where is Ada?"}, "here") == stock
    later = [row for row in islice(task.rows("train"), 200) if row["piece"]]
    assert later
    assert all(1 not in task.encode(row)["ids"] for row in later)
    with refused("text_blank", at="here", key="text", value=""):
        task.prompt_ids({"text": ""}, "here")
    with refused("messages_of_no_chat", at="here"):
        task.prompt_ids({"messages": [{"role": "user", "content": "a"}]}, "here")


def test_an_answer_behind_an_opening_has_the_same_labels(folder: Path) -> None:
    task = opened_task(folder, source="files", loss_on="answer")
    (first, _) = task.rows("train")
    encoded = task.encode(first)
    assert encoded["ids"][0] == 1
    assert labelled(task, first) == labelled(load(folder), first)


def test_only_an_opening_changes_the_encoding(folder: Path) -> None:
    opened = json.loads(opened_task(folder, source="stdlib_docs", max_tokens=16).encoding_id())
    plain = json.loads(load(folder, source="stdlib_docs", loss_on="all").encoding_id())
    assert opened["opening"] == [1]
    assert "opening" not in plain
    assert plain.keys() == {"task", "tokenizer", "max_tokens"}


# Pieces of long texts
# --------------------------------------------------------------------------------------------------


def spelling_task(folder: Path, normalizer: Any, limit: int) -> Any:
    """A task whose tokenizer has a token for each character, and puts a blank before a text."""
    letters = [chr(code) for code in range(33, 127)] + ["\u2581"] + sorted({*WISH})
    tokens = dict.fromkeys(["</s>", "<pad>", "<unk>", *letters])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    if normalizer is not None:
        backend.normalizer = normalizer
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    made.save_pretrained(folder / "spelling")
    data = {"source": "files", "max_tokens": limit}
    values = {**experiment("causal_lm", folder), "data": data}
    values["tokenizer"] = str(folder / "spelling")
    return tasks.load(tasks.parse(values), Places(folder, folder / "c", folder))


WISH = unicodedata.normalize("NFKC", "\ufdfa")  # one ligature of 3 bytes, 18 letters


@pytest.mark.parametrize(
    ("normalizer", "limit", "text", "most"),
    [(None, 8, "abcdefg", 9), (normalizers.NFKC(), 16, "\ufdfa" * 3, 56)],
    ids=["a blank in front", "a ligature taken apart"],
)
def test_no_token_of_a_text_is_lost_where_it_has_more_tokens_than_bytes(
    normalizer: Any, limit: int, text: str, most: int, folder: Path
) -> None:
    (folder / "valid.jsonl").write_text(json.dumps({"text": text}))
    task = spelling_task(folder, normalizer, limit)
    pieces = [list(task.encode(row)["ids"]) for row in task.rows("valid")]
    whole = [number for piece in pieces for number in piece]
    assert whole == [*task.tokenizer(text, add_special_tokens=False)["input_ids"], task.end]
    assert len(whole) == most
    assert all(len(piece) <= limit for piece in pieces)


def test_a_long_text_is_tokenised_once_for_all_of_its_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load(folder, max_tokens=8)
    calls: list[str] = []
    of_tokenizer = task.tokenizer

    def tokenizer(texts: list[str], **how: Any) -> Any:
        calls.extend(texts)
        return of_tokenizer(texts, **how)

    tokenizer.backend_tokenizer = of_tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    assert (task.opening, task.end) == ([], 0)
    monkeypatch.setattr(task, "tokenizer", tokenizer)
    text = "Ada keeps the red key in the cellar. " * 50
    row = {"text": text, "answer_spans": [(4, 9)]}
    pieces = [task.encode(piece)["ids"] for piece in task._pieces([row])]
    assert len(pieces) > 40
    assert calls == [text]
    other = {**row, "answer_spans": [(0, 3)], "piece": 0}
    assert task.encode(other)["scored"] != task.encode({**row, "piece": 0})["scored"]


def counting(task: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """The sizes of the calls of a task's tokenizer from now on, and all their texts."""
    sizes, texts, of_tokenizer = list[int](), list[str](), task.tokenizer

    def tokenizer(given: list[str], **how: Any) -> Any:
        sizes.append(len(given))
        texts.extend(given)
        return of_tokenizer(given, **how)

    tokenizer.backend_tokenizer = of_tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    assert (task.opening, task.end) == ([], 0)
    monkeypatch.setattr(task, "tokenizer", tokenizer)
    return sizes, texts


@pytest.mark.parametrize("is_on_answers", [False, True])
def test_texts_are_tokenised_many_at_a_time_and_as_one_by_one(
    folder: Path, is_on_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"Ada {'keeps it. ' * (n % 60)}" for n in range(150)]
    rows = [{"text": text, "answer_spans": [(0, 3)]} for text in texts]
    alone = load(folder, max_tokens=16, loss_on="answer" if is_on_answers else "all")
    pieces = [piece for row in rows for piece in alone._pieces([row])]
    one_by_one = [alone.encode(piece) for piece in pieces]
    task = load(folder, max_tokens=16, loss_on="answer" if is_on_answers else "all")
    sizes, _ = counting(task, monkeypatch)
    assert list(task._pieces(rows)) == pieces
    assert task.encode_rows(pieces) == one_by_one
    assert ("scored" in one_by_one[0]) == is_on_answers
    assert len(sizes) <= 2 * 3 + 3  # three chunks of 64 rows, read and encoded
    whole = [number for piece in one_by_one[:1] for number in piece["ids"]]
    assert whole == [*alone.tokenizer(texts[0], add_special_tokens=False)["input_ids"], alone.end]


def test_a_second_reading_of_the_rows_tokenises_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load(folder, max_tokens=8, loss_on="all")
    _, texts = counting(task, monkeypatch)
    rows = [{"text": f"Ada keeps key {n} of the cellar. " * 5} for n in range(100)]
    first = list(task._pieces(rows))
    assert sorted(texts) == sorted(row["text"] for row in rows)
    assert list(task._pieces(rows)) == first
    assert len(texts) == len(rows)
    longer = [{"text": row["text"] * 2} for row in rows]  # they have changed meanwhile
    assert len(list(task._pieces(longer))) > len(first)


def test_long_texts_do_not_fill_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokens, "_REMEMBERED_TOKENS", 1000)
    monkeypatch.setattr(text_tokens, "_LETTERS_AT_ONCE", 4000)
    task = load(folder, max_tokens=64, loss_on="all")
    sizes, _ = counting(task, monkeypatch)
    rows = [{"text": f"{n} " * 900} for n in range(20)]
    pieces = list(task._pieces(rows))
    assert max(sizes) <= 3
    assert len(task._text_tokens._recent) == 1
    encoded = zip(pieces, task.encode_rows(pieces), strict=True)
    text = rows[0]["text"]
    ids = [number for piece, one in encoded if piece["text"] == text for number in one["ids"]]
    assert ids == [*task.tokenizer([text], add_special_tokens=False)["input_ids"][0], task.end]


@pytest.mark.parametrize(
    ("normalizer", "most"),
    [(None, 1), (normalizers.NFC(), 3), (normalizers.NFKC(), 11), (normalizers.Lowercase(), None)],
)
def test_a_byte_becomes_no_more_tokens_than_the_bound(
    normalizer: Any, most: int | None, folder: Path
) -> None:
    tokenizer = load(folder).tokenizer
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    assert most_tokens_per_byte(tokenizer) == most
    for text in ("\ufdfa", "\u0390", "\U0001d160", "\u0958"):
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert most is None or count <= most * len(text.encode())
