"""`lathe judge` as a person types it, on a run that people voted on, with a language model as judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.runs.test_judge import data, judge, judgement_of, train_run, values_of
from tests.unit.test_llm_judge import KEY, endpoint, error
from tests.wording import says
from trainer.config.identity import exp_id
from trainer.judging.llm_judge import FILE
from trainer.judging.votes import ANSWERS, Vote, add_vote, read_pairs

__all__ = ["data"]


@pytest.mark.long
def test_votes_and_a_language_model_are_in_the_record_the_page_and_on_the_terminal(
    data: Path, tmp_path: Path
) -> None:
    values = values_of(data)
    assert run_on_ranks(1, train_run, values, data, tmp_path) == [0]
    folder, key = tmp_path / exp_id(values), tmp_path / "key"
    key.write_text(KEY)
    command = [exp_id(values)[:8], "-sb", str(tmp_path), "--data_path", str(data), "--keep"]
    command += ["nothing", "--answers", "8", "--cache_dir", str(data / "cache")]
    code, said = judge(*command)
    assert code == 0, said
    assert (judgement_of(folder)["votes"], "votes prefer" in said) == (None, False)
    pairs = read_pairs(folder / ANSWERS)
    assert pairs, "the untrained and the trained model differ in some answers"
    for pair in pairs:
        add_vote(folder, pair, Vote(pair.row, pair.digest, "anna", "after", "after", "1"))

    # whoever wrote the trained model's answers is preferred by its text
    def prefers_trained(message: str) -> str:
        request, _, answers = message.partition("[Answer A]\n")
        (pair,) = [one for one in pairs if f"[Request]\n{one.prompt}\n" in request]
        return "A" if answers.startswith(f"{pair.after}\n\n[Answer B]\n{pair.before}\n") else "B"

    flags = ["--llm_model", "m", "--llm_key_file", str(key)]
    with endpoint(prefers_trained) as place:
        code, said = judge(*command, "--llm_judge", place.url, *flags)
    assert code == 0, said
    assert f"{len(pairs)} votes prefer the trained model's answer in 100.0%" in said
    assert "m prefers the trained model's answer in 100.0%" in said
    record, page = judgement_of(folder), (folder / "judge.md").read_text()
    assert (record["votes"]["votes"], record["votes"]["rate"]["rate"]) == (len(pairs), 1.0)
    assert record["votes"]["rate"]["low"] < 1
    assert record["llm"]["rate"]["wins"] == len(pairs)
    assert record["llm"]["agreement"]["share"] == 1.0
    assert "## Votes of people" in page
    assert page.count("## A language model as judge") == 1
    assert len((folder / FILE).read_text().splitlines()) == 2 * len(pairs)
    assert place.keys == {f"Bearer {KEY}"}
    files = [path for path in folder.iterdir() if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in said
    (folder / FILE).unlink()
    with endpoint(lambda _: error(401, f"no such key: {KEY}")) as place:
        code, said = judge(*command, "--llm_judge", place.url, *flags)
        assert code == 2
        says("llm_refuses", said, url=place.url, status=401)
    assert KEY not in said
    assert "verdict:" in said
    assert json.loads((folder / "judge.json").read_text()).keys() == record.keys() - {"llm"}
