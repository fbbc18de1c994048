"""Published tasks without the packages that hold them: what is refused, what a run's file says, how
ranks share texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.evaluation.named_run import experiment_run, named_run
from trainer.evaluation.run import Question
from trainer.harness import lm_eval, mteb, records
from trainer.harness.flags import HarnessFlags
from trainer.harness.mteb import TrainedEncoder
from trainer.harness.records import Evaluation, Gain, ModelScores, TaskScore, TaskScores
from trainer.harness.run import run
from trainer.harness.searcher import TrainedSearcher, form_of
from trainer.protocol.task import Places
from trainer.runtime import distributed
from trainer.tasks.preference import trained
from trainer.training.options import Options


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lm_eval": " ,"}, fault("harness_names_wanted", flag="--lm_eval", text=" ,")),
        ({"lm_eval": "a", "mteb": "b"}, fault("harness_twice")),
        (
            {"num_fewshot": 2, "against": "base"},
            fault("harness_flag_alone", flags="--num_fewshot, --against"),
        ),
        (
            {"mteb": "a", "num_fewshot": 2},
            fault("harness_flag_alone", flags="--num_fewshot", wanted="--lm_eval"),
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: dict[str, Any], said: Fault) -> None:
    with refused(said):
        _ = HarnessFlags(**flags).is_set


def test_tasks_are_names_with_commas_between() -> None:
    flags = HarnessFlags(lm_eval="hellaswag, arc_easy,", num_fewshot=0)
    assert flags.is_set
    assert flags.lm_eval_tasks == ["hellaswag", "arc_easy"]
    assert not HarnessFlags().is_set


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of runs with one, which has a final/; and its dictionary."""
    values = experiment("causal_lm", tmp_path)
    folder = tmp_path / "runs" / exp_id(values)
    (folder / "final").mkdir(parents=True)
    (folder / "exp_dict.json").write_text(json.dumps(values))
    return folder, values


def test_a_run_is_named_by_its_id_its_folder_or_its_export(
    place: tuple[Path, dict[str, Any]],
) -> None:
    folder, values = place
    for word in (folder.name, folder.name[:6], str(folder), str(folder / "final")):
        named = named_run(word, folder.parent)
        assert (named.values, named.savedir_base, named.folder) == (values, folder.parent, folder)
        assert named.question("final").model == str(folder / "final")
        assert named.question("base").model == "base"
    by_run = named_run(folder.name, folder.parent)
    assert by_run == experiment_run(values, folder.parent)
    assert by_run.question("best").model == "best", "which is refused when it is looked for"
    assert named_run(str(folder / "final"), folder.parent).question("best").model.endswith("final")
    with refused("judged_run_absent", command="evaluate", run="zz"):
        named_run("zz", folder.parent)


def test_an_export_that_has_left_its_run_is_read_alone(
    place: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, values = place
    record = {"lathe": "0.1.0", "exp_id": folder.name, "experiment": values, "format": 1}
    record |= {"data": {}, "scores": {}, "files": {}}
    away = tmp_path / "away"
    (folder / "final").rename(away)
    (away / "lathe.json").write_text(json.dumps(record))
    named = named_run(str(away), folder.parent)
    assert named.folder == away
    question = named.question("best")
    assert (question.model, question.values["base"]) == (str(away), str(away))
    assert named.question("base").values == values, "the base is that of the run"


def options_of(folder: Path) -> Options:
    return Options(folder, cache_dir=folder / "cache")


def test_what_says_how_a_split_is_evaluated_is_refused(
    place: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, values = place
    question = Question(values, split="test", best_answer=True)
    with refused("harness_with_split", flags="--split, --best_answer"):
        run(experiment_run(values, folder), question, HarnessFlags(mteb="a"), options_of(tmp_path))


def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lm_eval, mteb):
        monkeypatch.setattr(module, "extra", lambda module, name: None)


@pytest.mark.parametrize(
    ("task", "flags", "limit", "said"),
    [
        (
            "retriever",
            {"lm_eval": "hellaswag"},
            None,
            fault("lm_eval_without_texts", task="retriever", others="causal_lm, preference"),
        ),
        ("causal_lm", {"mteb": "SciFact"}, None, fault("mteb_without_vectors", task="causal_lm")),
        ("retriever", {"mteb": "SciFact"}, 5, fault("mteb_with_limit")),
    ],
)
def test_a_model_that_cannot_do_the_tasks_is_refused_before_it_is_read(
    task: str,
    flags: dict[str, Any],
    limit: int | None,
    said: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_if_installed(monkeypatch)
    question = Question(experiment(task, tmp_path), limit=limit)
    program = lm_eval if "lm_eval" in flags else mteb
    with refused(said):
        program.evaluate([question], HarnessFlags(**flags), options_of(tmp_path))


class OfReward:
    continues_prompts = False


class WithoutTemplate:
    class tokenizer:
        chat_template = None


def test_a_reward_model_and_a_missing_template_are_refused() -> None:
    with refused("lm_eval_of_reward"):
        trained.language_model(OfReward(), None)
    with refused("lm_eval_without_template"):
        lm_eval.is_chat(WithoutTemplate(), True)
    assert lm_eval.is_chat(WithoutTemplate(), None) is False


RESULTS = {
    "results": {
        "places": {"alias": "places", "acc,none": 0.5, "acc_stderr,none": 0.25, "sample_len": 4},
        "sums": {
            "exact_match,strict": 0.75,
            "exact_match_stderr,strict": "N/A",
            "exact_match,loose": 1.0,
            "exact_match_stderr,loose": 0.0,
        },
    },
    "groups": {"all": {"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4}},
    "versions": {"places": 1.0, "sums": 3.0, "all": 2},
    "n-shot": {"places": 5, "sums": 0},
    "n-samples": {"places": {"original": 9, "effective": 4}, "sums": {"effective": 4}},
}


def test_scores_have_lm_evals_names_and_errors() -> None:
    tasks = lm_eval.tasks_of(RESULTS)
    assert tasks["places"] == TaskScores(1.0, 4, {"acc": TaskScore(0.5, 0.25)}, {"num_fewshot": 5})
    assert tasks["sums"].scores == {
        "exact_match,strict": TaskScore(0.75),
        "exact_match,loose": TaskScore(1.0, 0.0),
    }
    assert (tasks["all"].version, tasks["all"].rows) == (2, 4)


def model_of(values: list[float], folder: Path) -> ModelScores:
    scores = {"acc": TaskScore(sum(values) / len(values)), "perplexity": TaskScore(9.0)}
    return ModelScores(folder.name, folder, folder.name, {"places": TaskScores(1, 4, scores)})


def samples_of(values: list[float]) -> dict[str, Any]:
    rows = [
        {"doc_id": row, "filter": "none", "metrics": ["acc", "perplexity"], "acc": value}
        | {"perplexity": (value, 3)}
        for row, value in enumerate(values)
    ]
    return {"places": rows[::-1]}


def evaluation_of(mine: list[float], others: list[float]) -> Evaluation:
    of, against = model_of(mine, Path("final")), model_of(others, Path("base"))
    samples = [samples_of(mine), samples_of(others)]
    return Evaluation(of, against, {"places": lm_eval.gains_of("places", of, against, samples)})


def test_models_are_compared_row_by_row_where_a_metric_is_a_mean() -> None:
    evaluation = evaluation_of([1.0] * 30 + [0.0] * 10, [1.0] * 20 + [0.0] * 15 + [1.0] * 5)
    gain = evaluation.gains["places"]["acc"]
    assert gain.value == pytest.approx(0.125)
    assert gain.paired is not None
    assert gain.paired.mcnemar is not None
    assert (gain.paired.mcnemar.broken, gain.paired.mcnemar.mended) == (5, 10)
    assert gain.paired.low < 0.125 < gain.paired.high
    assert evaluation.gains["places"]["perplexity"] == Gain(0.0), "its rows are no numbers"
    first, second = evaluation.lines()
    assert first.startswith("places/acc 0.750000; base 0.625000; difference +0.125000 (95%: ")
    assert second == "places/perplexity 9.000000; base 9.000000; difference +0.000000 (no interval)"


def test_a_mean_that_is_not_that_of_its_rows_has_no_interval() -> None:
    of, against = model_of([1.0, 0.0], Path("final")), model_of([0.0, 0.0], Path("base"))
    samples = [samples_of([1.0, 1.0]), samples_of([0.0, 0.0])]
    assert lm_eval.gains_of("places", of, against, samples)["acc"] == Gain(0.5)


def test_a_file_keeps_each_question_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lm_eval.json"
    for seconds, limit in ((1, None), (2, 7), (3, None)):
        about = {"lm_eval": "0.4.13", "how": {"limit": limit}, "seconds": seconds}
        records.add(path, Evaluation(model_of([1.0], Path("final"))), about)
    entries = json.loads(path.read_text())["evaluations"]
    assert [(one["seconds"], one["how"]["limit"]) for one in entries] == [(2, 7), (3, None)]
    assert entries[0]["tasks"]["places"]["scores"]["acc"] == {"value": 1.0, "stderr": None}


def test_a_comparison_stays_beside_another_one_and_the_model_alone(tmp_path: Path) -> None:
    path = tmp_path / "lm_eval.json"
    about = {"lm_eval": "0.4.13", "how": {"limit": None}}
    alone = Evaluation(model_of([1.0], Path("final")))
    for evaluation in (
        evaluation_of([1.0], [0.0]),
        alone,
        Evaluation(alone.of, model_of([0.5], Path("best"))),
        alone,
        evaluation_of([1.0], [0.0]),
    ):
        records.add(path, evaluation, about)
    entries = json.loads(path.read_text())["evaluations"]
    assert [one.get("against", {}).get("model") for one in entries] == ["best", None, "base"]


def encoded() -> list[tuple[list[Any], int]]:
    """What each rank gets of five passages, of one query and of sentences, and how many texts it
    read.
    """
    texts: list[str] = []

    def encoder(side: str) -> Any:
        def encode(rows: list[dict[str, str]]) -> Tensor:
            texts.extend(row["text"] for row in rows)
            sizes = [[len(row["text"]), len(row.get("title", "")), len(side)] for row in rows]
            return torch.tensor(sizes, dtype=torch.float32)

        return encode

    model = TrainedEncoder({"query": encoder("query"), "passage": encoder("passage")}, None)
    joined = [f"T {'a' * number}" for number in range(5)]
    passages = [
        {
            "text": joined[:3],
            "body": ["a" * number for number in range(3)],
            "title": ["T", "", "T"],
        },
        {"text": joined[3:], "body": ["aaa", "aaaa"], "title": ["T", "T"]},
    ]
    found: list[tuple[list[Any], int]] = []
    for batches, prompt in ((passages, "document"), ([{"text": ["ab"]}], "query")):
        texts.clear()
        found.append((model.encode(batches, prompt_type=prompt).tolist(), len(texts)))
    found.append((model.encode([{"text": ["abc", "d"]}]).tolist(), distributed.world()))
    return found


def test_texts_are_shared_by_ranks_and_read_on_their_side() -> None:
    passages = [[0, 1, 7], [1, 0, 7], [2, 1, 7], [3, 1, 7], [4, 1, 7]]
    vectors = [passages, [[2, 0, 5]], [[3, 0, 5], [1, 0, 5]]]
    alone, *ranks = [*run_on_ranks(1, encoded), *run_on_ranks(2, encoded)]
    for found in (alone, *ranks):
        assert [one for one, _ in found] == vectors
    assert [count for _, count in alone[:2]] == [5, 1]
    assert [[count for _, count in found[:2]] for found in ranks] == [[3, 1], [2, 1]]


def test_a_word_beside_an_experiment_is_refused(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from trainer.__main__ import app

    result = CliRunner().invoke(app, ["evaluate", "6e64", "-e", "fid_tiny", "-sb", str(tmp_path)])
    assert result.exit_code == 2
    says("run_twice", " ".join(result.output.split()), word="6e64", flag="-e")


# Searches of tokens and words
# --------------------------------------------------------------------------------------------------

PASSAGES = [
    {"id": "a b", "title": "Ada", "text": "The key is in the cellar."},
    {"id": "2", "title": "", "text": "The map is in the attic."},
    {"id": "title alone", "title": "Dana", "text": ""},
    {"id": "3", "title": "Emil", "text": "The coin is in the garden."},
]
ASKED = [
    {"id": "q1", "text": "Where is the key?", "instruction": "Find it."},
    {"id": "q2", "text": "the map"},
]


def searched(form: str, folder: Path) -> list[Any]:
    """What MTEB's SearchProtocol answers, and the products of all questions and passages."""
    values = experiment(f"retriever, {form}", folder)
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    model, of_form = task.model().eval(), form_of(task)
    assert of_form is not None
    searcher = TrainedSearcher(of_form, task, model, batch=3, meta=None)
    searcher.index(PASSAGES, task_metadata=None)
    found = [searcher.search(ASKED, top_k=k, encode_kwargs={}) for k in (2, 1000)]
    one = {"q1": ["3", "2"]}
    found.append(searcher.search(ASKED[:1], top_k=1, top_ranked=one, encode_kwargs={}))
    with torch.no_grad():
        queries = task.ids([{"text": text} for text in TEXTS_ASKED], side="query")
        passages = task.ids(PASSAGES, side="passage")
        if form == "late":
            both = [task.token_vectors(model, queries, side="query")]
            both.append(task.token_vectors(model, passages, side="passage"))
            return [*found, task.compare(*both).tolist()]
        asked = task.embed_words(model, queries, side="query")
        return [*found, (asked @ task.embed_words(model, passages, side="passage").T).tolist()]


TEXTS_ASKED = ["Where is the key? Find it.", "the map"]


@pytest.mark.parametrize("form", ["late", "sparse"])
def test_mteb_gets_the_scores_of_our_own_search(form: str, tmp_path: Path) -> None:
    two, every, chosen, products = searched(form, write_facts(tmp_path))
    for question, scores in zip(("q1", "q2"), products, strict=True):
        wanted = {one["id"]: score for one, score in zip(PASSAGES, scores, strict=True)}
        assert every[question] == pytest.approx(wanted, rel=1e-5)
        best = sorted(wanted, key=lambda name: -wanted[name])[:2]
        assert list(two[question]) == best
    assert list(chosen["q1"]) == ["3", "2"]
    assert chosen["q1"]["2"] == every["q1"]["2"]
    assert not [*(tmp_path / "cache").glob("mteb-*")], "what was encoded is gone"


@pytest.mark.long
def test_ranks_share_a_search_of_mteb(tmp_path: Path) -> None:
    folder = write_facts(tmp_path)
    alone, *others = [searched("late", folder), *run_on_ranks(2, searched, "late", folder)]
    for found in others:
        assert found[1]["q1"] == pytest.approx(alone[1]["q1"], rel=1e-5)


def test_a_task_that_searches_nothing_is_refused_for_tokens_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_facts(tmp_path)
    values = experiment("retriever, late", folder)
    own = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    sentences = SimpleNamespace(metadata=SimpleNamespace(name="STS12"))
    fake = SimpleNamespace(AbsTaskRetrieval=type("Retrieves", (), {}))
    with refused("mteb_compares_vectors", task="STS12", form="late"):
        mteb._refuse_others(fake, [sentences], own.cfg.form)
    with refused("mteb_rows_without_texts", keys="id, image"):
        searcher = TrainedSearcher(form_of(own), own, None, batch=1, meta=None)  # type: ignore
        searcher.index([{"id": "1", "image": b""}])
