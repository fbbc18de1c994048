"""Every published format, in samples made up after the publisher's documentation (no record is a
real one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.wording import refused
from trainer.recipes.vera.adapters import ADAPTERS
from trainer.recipes.vera.adapters.adapter import csv_objects
from trainer.recipes.vera.convert import Conversion, convert

WSC = """<?xml version="1.0" encoding="ISO-8859-1"?><collection><schema><text><txt1>
The cat feared the dog because</txt1><pron> it </pron><txt2> growled. </txt2></text>
<answers><answer>The cat </answer><answer> The dog </answer></answers><correctAnswer> B. </correctAnswer></schema>
</collection>"""
COPA = """<copa-corpus version="1.0"><item id="1" asks-for="cause" most-plausible-alternative="2">
<p>The glass fell.</p><a1>The sun rose.</a1><a2>The cat pushed it.</a2></item></copa-corpus>"""
STORY = "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4," + (
    "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"
    's1,"One, two.",Three.,Four.,Five.,He slept.,He flew.,1\n'
)
SWAG = (
    ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    + ("0,v,1,He sits. He,He sits.,He,gold,stands.,flies.,melts.,sings.,0\n")
)
SCIENCE = {
    "id": "q1",
    "question": {
        "stem": "What falls from clouds?",
        "choices": [{"text": "rain", "label": "1"}, {"text": "sand", "label": "2"}],
    },
    "answerKey": "1",
}
SCIENCE_LINE = "What falls from clouds? \\n (A) rain (B) sand\train"
SCIENCE_GROUP = (["<What falls from clouds? </s> rain>."], ["<What falls from clouds? </s> sand>."])
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Sample(NamedTuple):
    """Files of one split of a set, and what its last record becomes."""

    task: str
    files: dict[str, Any]  # texts, or objects: one JSON line each; a JSON list is written as such
    line: str
    golds: Sequence[str]
    distractors: Sequence[str]


def science(task: str, name: str) -> Sample:
    return Sample(task, {name: SCIENCE}, SCIENCE_LINE, *SCIENCE_GROUP)


SAMPLES = [
    Sample(
        "wsc273",
        {"WSCollection.xml": WSC},
        "The cat feared the dog because _ growled. \\n (A) The cat (B) The dog\tThe dog",
        ["The cat feared the dog because The dog growled."],
        ["The cat feared the dog because The cat growled."],
    ),
    Sample(
        "copa",
        {"copa-dev.xml": COPA},
        "The glass fell. \\n (A) The sun rose. (B) The cat pushed it.\tThe cat pushed it.",
        ["The glass fell. The cat pushed it."],
        ["The glass fell. The sun rose."],
    ),
    Sample(
        "numersense",
        {"validation.masked.tsv": "a snake has <mask> legs.\tzero\n"},
        "a snake has _ legs. \\n "
        + " ".join(
            f"({letter}) {number}" for letter, number in zip("ABCDEFGHIJK", NUMBERS, strict=True)
        )
        + "\tno",
        ["a snake has no legs."],
        [f"a snake has {number} legs." for number in NUMBERS[1:]],
    ),
    Sample(
        "spatial_cs",
        {
            "height/data.json": {
                "question": "Is a cup taller than a door?",
                "label": 0,
                "obj_a": "cup",
            },
            "posrel/data_qa.json": {"question": "A man climbs. Is he on the tree?", "label": 1},
            "size/data.json": {"question": "Is an ant bigger than a bus?", "label": 0},
        },
        "Is an ant bigger than a bus?\tno",
        [],
        ["<Is an ant bigger than a bus? </s> yes>."],
    ),
    Sample(
        "creak",
        {"dev.json": {"sentence": "Fire is ice.", "label": "false"}},
        "Fire is ice.\tno",
        [],
        ["Fire is ice."],
    ),
    Sample(
        "csqa2",
        {"CSQA2_dev.json": {"question": "Ice is\ncold?\n", "answer": "yes"}},
        "Ice is cold?\tyes",
        ["<Ice is cold? </s> yes>."],
        [],
    ),
    Sample(
        "strategyqa",
        {"dev.json": [{"qid": "1", "question": "Can ice float?", "answer": True}]},
        "Can ice float?\tyes",
        ["<Can ice float? </s> yes>."],
        [],
    ),
    Sample(
        "com2sense_paired",
        {
            "dev.json": [
                {"id": "b", "sent": "Ice is hot.", "label": "False"},
                {"id": "a", "sent": "Ice is cold.", "label": "True"},
            ],
            "pair_id_dev.json": '{"a": "b", "b": "a"}',
        },
        "\\n (A) Ice is cold. (B) Ice is hot.\tIce is cold.",
        ["Ice is cold."],
        ["Ice is hot."],
    ),
    Sample(
        "comve_a",
        {
            "subtaskA_dev_data.csv": 'id,sent0,sent1\n7,"Cats, eat stars",Cats eat\n',
            "subtaskA_dev_gold.csv": "7,0\n",
        },
        "\\n (A) Cats, eat stars (B) Cats eat\tCats eat",
        ["Cats eat"],
        ["Cats, eat stars"],
    ),
    Sample(
        "codah",
        {"full_data.tsv": "o\tHe was hungry. He\tate.\tslept.\tflew.\tsang.\t0\n"},
        "He was hungry. He \\n (A) ate. (B) slept. (C) flew. (D) sang.\tate.",
        ["He was hungry. He ate."],
        ["He was hungry. He slept.", "He was hungry. He flew.", "He was hungry. He sang."],
    ),
    Sample(
        "winogrande_xl",
        {
            "dev.jsonl": {
                "qID": "1",
                "answer": "1",
                "sentence": "Ann beat Sue, so _ won.",
                "option1": "Ann",
                "option2": "Sue",
            }
        },
        "Ann beat Sue, so _ won. \\n (A) Ann (B) Sue \t Ann ",
        ["Ann beat Sue, so Ann won."],
        ["Ann beat Sue, so Sue won."],
    ),
    Sample(
        "alphanli",
        {
            "dev.jsonl": {
                "story_id": "1",
                "obs1": "It rained.",
                "obs2": "I was wet.",
                "hyp1": "I ran.",
                "hyp2": "I sat.",
            },
            "dev-labels.lst": "1\n",
        },
        "It rained. _ I was wet. \\n (A) I ran. (B) I sat.\tI ran.",
        ["It rained. I ran. I was wet."],
        ["It rained. I sat. I was wet."],
    ),
    Sample(
        "story_cloze_test",
        {"cloze_test_val__spring2016 - cloze_test_ALL_val.csv": STORY},
        "One, two. Three. Four. Five. \\n (A) He slept. (B) He flew.\tHe slept.",
        ["One, two. Three. Four. Five. He slept."],
        ["One, two. Three. Four. Five. He flew."],
    ),
    Sample(
        "swag",
        {"val.csv": SWAG},
        "He sits. He \\n (A) stands. (B) flies. (C) melts. (D) sings.\tstands.",
        ["He sits. He stands."],
        ["He sits. He flies.", "He sits. He melts.", "He sits. He sings."],
    ),
    Sample(
        "hellaswag",
        {
            "hellaswag_val.jsonl": {
                "ctx": "He sits. he",
                "endings": ["stands.", "flies."],
                "label": 1,
                "activity_label": "x",
            }
        },
        "He sits. he \\n (A) stands. (B) flies.\tflies.",
        ["He sits. he flies."],
        ["He sits. he stands."],
    ),
    science("commonsenseqa", "dev_rand_split.jsonl"),
    science("qasc", "dev.jsonl"),
    science("openbookqa", "dev.jsonl"),
    science("arc_easy", "ARC-Easy-Dev.jsonl"),
    science("arc_hard", "ARC-Challenge-Dev.jsonl"),
    science("ai2_science_elementary", "Elementary-NDMC-Dev.jsonl"),
    science("ai2_science_middle", "Middle-NDMC-Dev.jsonl"),
    science("quartz", "dev.jsonl"),
    Sample(
        "physical_iqa",
        {
            "valid.jsonl": {"goal": "Clean it. How?", "sol1": "Use soap.", "sol2": "Use mud."},
            "valid-labels.lst": "0\n",
        },
        "Clean it. How? \\n (A) Use soap. (B) Use mud.\tUse soap.",
        ["Clean it. <How? </s> Use soap.>."],
        ["Clean it. <How? </s> Use mud.>."],
    ),
    Sample(
        "social_iqa",
        {
            "dev.jsonl": {
                "context": "Al fell.",
                "question": "How is Al?",
                "answerA": "sad",
                "answerB": "ok",
                "answerC": "up",
            },
            "dev-labels.lst": "1\n",
        },
        "How is Al? \\n (A) sad (B) ok (C) up \\n Al fell.\tsad",
        ["Al fell. <How is Al? </s> sad>."],
        ["Al fell. <How is Al? </s> ok>.", "Al fell. <How is Al? </s> up>."],
    ),
    Sample(
        "sciq",
        {
            "valid.json": [
                {
                    "question": "What is ice?",
                    "distractor1": "air",
                    "distractor2": "sand",
                    "distractor3": "oil",
                    "correct_answer": "water",
                    "support": "",
                }
            ]
        },
        "What is ice? \\n (A) air (B) oil (C) sand (D) water\twater",
        ["<What is ice? </s> water>."],
        ["<What is ice? </s> air>.", "<What is ice? </s> oil>.", "<What is ice? </s> sand>."],
    ),
    Sample(
        "quarel",
        {
            "quarel-v1-dev.jsonl": {
                "question": "Ice melts faster in (A) sun (B) shade",
                "answer_index": 0,
            }
        },
        "Ice melts faster in \\n (A) sun (B) shade\tsun",
        ["<Ice melts faster in </s> sun>."],
        ["<Ice melts faster in </s> shade>."],
    ),
    Sample(
        "cycic_mc",
        {
            "CycIC_dev_questions.jsonl": [
                {
                    "run_id": 1,
                    "questionType": "true/false",
                    "question": "?",
                    "answer_option0": "True",
                },
                {
                    "run_id": 2,
                    "questionType": "multiple choice",
                    "question": "Who?",
                    "answer_option0": "Al",
                    "answer_option1": "Bo",
                },
            ],
            "CycIC_dev_labels.jsonl": [
                {"run_id": 2, "correct_answer": 1},
                {"run_id": 1, "correct_answer": 0},
            ],
        },
        "Who? \\n (A) Al (B) Bo\tBo",
        ["<Who? </s> Bo>."],
        ["<Who? </s> Al>."],
    ),
    Sample(
        "prost",
        {
            "default.jsonl": {
                "A": "egg",
                "B": "ball",
                "C": "sock",
                "D": "coin",
                "label": 0,
                "context": "All fall.",
                "question": "The [MASK] breaks.",
                "ex_question": "Which breaks?",
            }
        },
        "Which breaks? \\n (A) egg (B) ball (C) sock (D) coin \\n All fall.\tegg",
        ["All fall. <Which breaks? </s> egg>."],
        [f"All fall. <Which breaks? </s> {choice}>." for choice in ("ball", "sock", "coin")],
    ),
    Sample(
        "unifiedqa",
        {"dev.tsv": "Ice is _ . \\n (A) hot (B) cold\tcold\n"},
        "Ice is _ . \\n (A) hot (B) cold\tcold",
        ["Ice is cold ."],
        ["Ice is hot ."],
    ),
]
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=[sample.task for sample in SAMPLES])


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str):
            is_lines = isinstance(content, dict) or name.endswith("jsonl")
            rows = content if isinstance(content, list) else [content]
            content = (
                "".join(json.dumps(row) + "\n" for row in rows) if is_lines else json.dumps(content)
            )
        path.write_text(content)
    return folder


def made(tmp_path: Path, sample: Sample, **settings: Any) -> tuple[str, dict[str, list[str]]]:
    """The last line and the last group of a sample."""
    task = "other" if sample.task == "unifiedqa" else None
    asked = Conversion(
        sample.task, write(tmp_path / "raw", sample.files), tmp_path / "out", task=task, **settings
    )
    convert(asked, lambda texts: [f"<{text}>" for text in texts])
    folder = tmp_path / "out" / (task or sample.task)
    line = (folder / "dev.tsv").read_text().splitlines()[-1]
    return line, json.loads((folder / "dev.json").read_text())[-1]


def sample_of(task: str) -> Sample:
    return next(sample for sample in SAMPLES if sample.task == task)


def test_every_adapter_has_a_sample() -> None:
    assert sorted(sample.task for sample in SAMPLES) == sorted(ADAPTERS)


@each_sample
def test_a_record_becomes_its_line_and_its_statements(sample: Sample, tmp_path: Path) -> None:
    line, group = made(tmp_path, sample, is_strict=True)
    assert line == sample.line
    assert group == {"golds": [*sample.golds], "distractors": [*sample.distractors]}


@each_sample
def test_no_record_of_a_wrong_shape_is_taken_for_a_problem(sample: Sample, tmp_path: Path) -> None:
    wrong = {name: wrong_content(content) for name, content in sample.files.items()}
    task = "other" if sample.task == "unifiedqa" else None
    asked = Conversion(
        sample.task,
        write(tmp_path / "raw", wrong),
        tmp_path / "out",
        split="dev",
        task=task,
        is_strict=True,
    )
    with refused("rows_give_no_group", first=re.compile(rf"{tmp_path}/raw.*")):
        convert(asked)


def wrong_content(content: Any) -> Any:
    """The same file with every field or value that says something gone."""
    if isinstance(content, dict):
        return {"odd": 1}
    if isinstance(content, list):
        return [{"odd": 1} for _ in content]
    return content.replace("<a1>", "<b1>").replace("</a1>", "</b1>").replace("<answer>", "<none>").replace(
        "</answer>", "</none>"
    ).replace("\t", " ").replace(",1\n", ",\n").replace(",0\n", ",9\n").replace('"b"', '"z"')  # fmt: skip


@pytest.mark.parametrize(
    ("task", "variant", "statement"),
    [
        ("copa", {"connective": "because_so"}, "The glass fell because the cat pushed it."),
        ("wsc273", {"case": "fit"}, "The cat feared the dog because the dog growled."),
        ("prost", {"question": "masked"}, "All fall. The egg breaks."),
    ],
)
def test_a_variant_keeps_what_the_original_loses(
    task: str, variant: dict[str, str], statement: str, tmp_path: Path
) -> None:
    _, group = made(tmp_path, sample_of(task), variants=variant)
    assert group["golds"] == [statement]


def test_a_name_at_the_start_of_a_sentence_keeps_its_capital_and_an_article_gets_one(
    tmp_path: Path,
) -> None:
    schema = WSC.replace("because</txt1>", ".</txt1>").replace("The dog </", "the dog </")
    _, group = made(
        tmp_path,
        sample_of("wsc273")._replace(files={"WSCollection.xml": schema}),
        variants={"case": "fit"},
    )
    assert group["golds"] == ["The cat feared the dog . The dog growled."]


def test_an_unknown_variant_is_told_the_known_ones(tmp_path: Path) -> None:
    with refused(
        "variant_unknown",
        task="copa",
        variant="case=fit",
        choices=re.compile("connective=none, connective=because.*"),
    ):
        made(tmp_path, sample_of("copa"), variants={"case": "fit"})


def test_labels_of_another_release_are_refused(tmp_path: Path) -> None:
    files = sample_of("alphanli").files | {"dev-labels.lst": "1\n2\n"}
    with refused("label_lines", lines=2, rows=1, file="dev.jsonl"):
        made(tmp_path, sample_of("alphanli")._replace(files=files))


def test_options_of_wsc273_txt_come_in_the_order_of_the_collection(tmp_path: Path) -> None:
    files = {
        "WSCollection.xml": WSC,
        "wsc273.txt": "x [MASK] y\n[MASK]\nthe big dog , the cat\nthe big dog \n\n",
    }
    line, _ = made(tmp_path, sample_of("wsc273")._replace(files=files))
    assert line.endswith("\\n (A) the cat (B) the big dog\tthe big dog")


HUB_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "wsc273": (
        "test.jsonl",
        {
            "text": "The cat feared the dog because it growled.",
            "pronoun": "it",
            "pronoun_loc": 31,
            "quote": "it growled",
            "quote_loc": 31,
            "options": ["The cat", "The dog"],
            "label": 1,
            "source": "made up",
        },
    ),
    "copa": (
        "validation.jsonl",
        {
            "premise": "The glass fell.",
            "choice1": "The sun rose.",
            "choice2": "The cat pushed it.",
            "question": "cause",
            "idx": 0,
            "label": 1,
        },
    ),
}


@pytest.mark.parametrize(
    ("task", "variants"),
    [
        ("wsc273", {}),
        ("wsc273", {"case": "fit"}),
        ("copa", {}),
        ("copa", {"connective": "because_so"}),
    ],
)
def test_rows_of_the_hub_become_what_the_publishers_xml_becomes(
    task: str, variants: dict[str, str], tmp_path: Path
) -> None:
    name, row = HUB_ROWS[task]
    of_xml = made(tmp_path / "xml", sample_of(task), variants=variants)
    of_hub = made(tmp_path / "hub", sample_of(task)._replace(files={name: row}), variants=variants)
    assert of_hub == of_xml


def test_a_pronoun_that_is_not_where_a_row_says_is_refused(tmp_path: Path) -> None:
    name, row = HUB_ROWS["wsc273"]
    files = {name: row | {"pronoun_loc": 3}}
    with refused("rows_give_no_group", first=re.compile(r".*row 1: 'pronoun_loc' is 3.*")):
        made(tmp_path, sample_of("wsc273")._replace(files=files), is_strict=True)


def test_a_field_behind_the_header_is_no_part_that_may_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "val.csv"
    path.write_text("a,b\n1,2,\n")
    assert [raw.value for raw in csv_objects([path])] == [{"a": "1", "b": "2"}]
    path.write_text("a,b\n1,Cats, eat stars\n")
    with refused("table_more_fields", at="val.csv, line 2", count=3, names=2):
        list(csv_objects([path]))
