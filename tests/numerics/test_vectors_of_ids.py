"""The service embeds token ids where they are those of the model's own tokenizer for a text."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.runs import from_folder
from tests.facts import experiment, write_facts
from tests.numerics.test_ways_to_generate import exported
from tests.wording import says
from trainer.commands.answer import answers
from trainer.evaluation.predict import OpenExport

TEXT = "Where is the red key?"


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> OpenExport:
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    values: dict[str, Any] = from_folder(experiment("retriever", folder), folder / "bases")
    return exported(values, folder, Path(tmp_path_factory.mktemp("export")) / "final")[2]


def test_ids_of_a_text_are_embedded_as_the_text_and_others_are_refused(
    retriever: OpenExport,
) -> None:
    def vectors(*texts: Any) -> dict[str, Any]:
        (answer,) = answers(retriever, [{"texts": list(texts), "side": "query"}])
        return answer

    tokenizer = retriever.task.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    around = tokenizer(TEXT)["input_ids"]
    of_text, *of_ids = [
        np.frombuffer(base64.b64decode(one), "<f4").tolist()
        for one in vectors(TEXT, plain, around)["vectors"]
    ]
    assert of_ids == [pytest.approx(of_text, abs=1e-6)] * 2
    letters = [token for letter in "red" for token in tokenizer(letter)["input_ids"]]
    assert letters != tokenizer("red")["input_ids"], "one token, so that these spell it otherwise"
    wrong = vectors(letters)
    assert wrong["param"] == "input"
    says("ids_of_no_text", wrong["error"])
