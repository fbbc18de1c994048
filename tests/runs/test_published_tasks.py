"""`lathe evaluate RUN --lm_eval` and `--mteb`: the numbers are those of lm-eval on an export, those of
plain torch, and those of our own search, on task files that lie here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import exported, forked
from tests.environments import interpreter_or_skip
from tests.facts import LLAMA, PLACES, experiment, facts, write_facts
from tests.harnesses import __file__ as room
from tests.harnesses.environment import HARNESSES
from tests.ranks import run_on_ranks
from tests.wording import says
from trainer.config.schema import RandomBase
from trainer.data.chat.templates.built_in import BUILT_IN
from trainer.models import base_model
from trainer.protocol.task import Places

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SHORT = {"steps": 2, "eval_every": 2, "save_every": 2, "best": None, "eval_batch": 4}
# Three kinds of requests: choices are scored, a text is scored, an answer is written.
TASKS = {
    "lathe_places": {
        "output_type": "multiple_choice",
        "fewshot_split": "train",
        "num_fewshot": 2,
        "doc_to_text": "{{question}}",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm")
        ],
    },
    "lathe_words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{answer}}",
        "metric_list": [
            {"metric": "bits_per_byte"},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity"},
        ],
    },
    "lathe_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        # max_gen_toks by another name that lm-eval takes: without it an answer has 256 tokens
        "generation_kwargs": {"until": ["\n"], "max_new_tokens": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
VALID = (20, 37)
# By name, tasks that are refused.
WRONG = {
    "unknown": "lathe_place",
    "no data": "lathe_gone",
    "retrieval unknown": "PlacesRetrieva",
    "retrieval without data": "SciFact",
}
# A log-probability is a sum of up to 16 of fp32; of a whole text HFLM adds up 30 in fp32.
CHOICE, TEXT = 1e-5, 5e-5


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter_or_skip(HARNESSES, "LATHE_REQUIRE_LM_EVAL")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(start: int, stop: int) -> list[dict[str, Any]]:
    """Questions with four places, of which one is right."""
    rows: list[dict[str, Any]] = []
    for number, fact in enumerate(facts(start, stop)):
        right, place = fact["answer"], number % 4
        others = [f"in the {one}" for one in PLACES if f"in the {one}" != right][:3]
        choices = [*others[:place], right, *others[place:]]
        row = {"question": fact["question"], "answer": right, "choices": choices, "label": place}
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts, a base in a folder, and the files of tasks."""
    place, content = write_facts(tmp_path_factory.mktemp("facts")), dict[str, Any]()
    places = Places(place, place / "cache", place / "runs")
    base = base_model.load(RandomBase(**LLAMA), places, precision="fp32", kind="causal_lm")
    base.save_pretrained(place / "model")
    AutoTokenizer.from_pretrained(place / "tokenizer").save_pretrained(place / "model")
    chats = [{"prompt": row["question"], "completion": row["answer"]} for row in facts(0, 40)]
    write_lines(place / "chat.jsonl", chats)
    (place / "own.jinja").write_text(BUILT_IN["plain"])
    files = {name: str(place / "asked" / f"{name}.jsonl") for name in ("train", "validation")}
    write_lines(Path(files["train"]), rows_of(0, 20))
    write_lines(Path(files["validation"]), rows_of(*VALID))
    (place / "tasks").mkdir()
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        splits = {"training_split": "train", "validation_split": "validation"}
        content = {"task": name, **data, **splits, **task, "metadata": {"version": 1.5}}
        (place / "tasks" / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
    gone = {"data_files": {"validation": str(place / "gone.jsonl")}}
    content |= {"task": "lathe_gone", "dataset_kwargs": gone}
    (place / "tasks" / "lathe_gone.yaml").write_text(json.dumps(content))
    return place


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, the folders of runs."""
    base = {"base": str(folder / "model"), "tokenizer": str(folder / "model")}
    how: dict[str, Any] = {"train": SHORT, "optim": {"lr": 1e-2}}
    chat = {"source": "chat", "chat_template": "own.jinja", "files": {"train": "chat.jsonl"}}
    lora = {"r": 4, "targets": "all-linear"}
    bits: dict[str, Any] = {**how, "train": {**SHORT, "base_bits": 4}}
    values = {
        "plain": experiment("causal_lm", folder, **how) | base,
        "adapters": experiment("causal_lm", folder, lora=lora, **how) | base,
        "chat": experiment("causal_lm", folder, data={**chat, "valid_share": 0.3}, **how) | base,
        "preference": experiment("preference", folder, **how) | base,
        "4 bits": experiment("causal_lm", folder, lora=lora, **bits) | base,
        "retriever": experiment("retriever", folder, **how),
    }
    savedir = tmp_path_factory.mktemp("runs")
    (made,) = run_on_ranks(1, exported.trained, values, folder, savedir)
    return {name: run for name, (run, _) in made.items()}


TEXTS = ("plain", "adapters", "chat", "preference")


def environment(folder: Path) -> dict[str, str]:
    """No network; what datasets and MTEB keep lies in the folder."""
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "LATHE_PLACES": str(folder / "places")}


def told_by(python: Path, folder: Path, words: list[str], asked: Any) -> dict[str, Any]:
    done = subprocess.run(
        [str(python), *words],
        input=json.dumps(asked),
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def theirs(python: Path, folder: Path, runs: dict[str, Path]) -> dict[str, Any]:
    """What lm-eval's HFLM says of the exports in transformers."""
    models: dict[str, Any] = {}
    for name in TEXTS:
        export = str(runs[name] / "final")
        models[name] = {"pretrained": export, "tokenizer": export, "chat": name == "chat"}
    models["adapters"] |= {
        "pretrained": str(folder / "model"),
        "peft": str(runs["adapters"] / "final"),
    }
    asked = {"tasks": [*TASKS], "include_path": str(folder / "tasks"), "models": models}
    return told_by(python, folder, [str(Path(room).with_name("theirs.py"))], asked)


def write_places(folder: Path) -> None:
    """The passages of facts and their questions, as BEIR writes them."""
    rows = facts(0, 40)
    passages = [
        {"_id": f"p{number}", "title": row["answer"] if number % 2 else "", "text": row["context"]}
        for number, row in enumerate(rows)
    ]
    write_lines(folder / "corpus.jsonl", passages)
    queries = [{"_id": f"q{number}", "text": row["question"]} for number, row in enumerate(rows)]
    write_lines(folder / "queries.jsonl", queries[:12])
    lines = [
        f"q{number}\tp{passage}\t1" for number in range(12) for passage in (number, number + 9)
    ]
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))


@pytest.fixture(scope="module")
def ours(python: Path, folder: Path, runs: dict[str, Path]) -> dict[str, Any]:
    """What the command says of the runs."""
    write_places(folder / "places")
    places = {"data_path": str(folder), "cache_dir": str(folder / "cache"), "model": "final"}
    flags: dict[str, Any] = {"lm_eval": ",".join(TASKS)}
    flags["paths"] = {"include_path": str(folder / "tasks")}
    asked: dict[str, Any] = {
        name: {**places, "run": str(runs[name]), "flags": {**flags}} for name in TEXTS
    }
    asked["plain"]["flags"] |= {"against": "base"}
    asked["4 bits"] = {**asked["plain"], "run": str(runs["4 bits"]), "flags": {**flags}}
    asked["4 bits padded"] = {**asked["4 bits"], "flags": {**flags}, "is_padded": True}
    own = {"include_path": str(Path(room).with_name("places.py"))}
    retrieval = {"mteb": "PlacesRetrieval", "paths": own}
    asked["retriever"] = {**places, "run": str(runs["retriever"]), "flags": retrieval}
    for name, task in WRONG.items():
        program = "mteb" if "retriev" in name else "lm_eval"
        of_run = asked["retriever" if program == "mteb" else "plain"]
        given = {program: task, "paths": of_run["flags"]["paths"]}
        asked[name] = {**of_run, "flags": given}
    return told_by(python, folder, ["-m", "tests.harnesses.ours"], asked)


def entry_of(run: Path, name: str = "lm_eval.json") -> dict[str, Any]:
    """What a run's file says of its newest evaluation."""
    return json.loads((run / name).read_text())["evaluations"][-1]


def by_request(answers: list[Any]) -> dict[str, Any]:
    return {json.dumps([kind, texts]): answer for kind, texts, answer in answers}


@pytest.mark.parametrize("name", TEXTS)
def test_answers_and_scores_are_those_of_lm_evals_own_model_on_the_export(
    name: str, runs: dict[str, Path], theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    given = ours[name]["answers"][: len(theirs[name]["answers"])]  # behind them those of the base
    mine, others = by_request(given), by_request(theirs[name]["answers"])
    assert_like(mine, others)
    entry = entry_of(runs[name])
    assert entry["how"]["apply_chat_template"] == (name == "chat")
    results = theirs[name]
    for task in TASKS:
        told = entry["tasks"][task]
        assert told["version"] == 1.5
        assert told["num_fewshot"] == results["n-shot"][task]
        assert told["rows"] == VALID[1] - VALID[0]
        for metric, score in told["scores"].items():
            of_lm_eval = results["results"][task]
            assert score["value"] == pytest.approx(of_lm_eval[f"{metric},none"], rel=1e-5)
            error = of_lm_eval[f"{metric}_stderr,none"]
            assert score["stderr"] == (None if error == "N/A" else pytest.approx(error, rel=1e-3))
    assert "Assistant:" in next(iter(mine)) or name != "chat"


def assert_like(mine: dict[str, Any], others: dict[str, Any]) -> None:
    """Choices and texts are scored alike, and the same is written."""
    assert mine.keys() == others.keys()
    kinds = {json.loads(request)[0] for request in mine}
    assert kinds == {"choice", "text", "answer"}
    for request, answer in mine.items():
        kind = json.loads(request)[0]
        if kind == "choice":
            assert answer[0] == pytest.approx(others[request][0], abs=CHOICE, rel=0)
            assert answer[1] == others[request][1]
        elif kind == "text":
            assert answer == pytest.approx(others[request], abs=TEXT, rel=0)
        else:
            assert answer == others[request]


def test_rows_without_padding_say_what_padded_ones_do_of_a_base_in_4_bits(
    ours: dict[str, Any],
) -> None:
    packed, padded = (by_request(ours[name]["answers"]) for name in ("4 bits", "4 bits padded"))
    assert_like(packed, padded)
    assert packed != by_request(ours["adapters"]["answers"]), "its base is another one"


def log_probability(model: Any, ids: list[int], length: int) -> float:
    """Of the last `length` tokens behind those before them, token by token."""
    total = 0.0
    for place in range(len(ids) - length, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:place]])).logits[0, -1].double()
        total += float(logits[ids[place]] - logits.logsumexp(0))
    return total


def test_scores_of_choices_are_those_of_a_loop_over_tokens(
    runs: dict[str, Path], ours: dict[str, Any]
) -> None:
    export = runs["plain"] / "final"
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = rows_of(*VALID)
    num_choices = 4 * len(rows)
    choices = [one for one in ours["plain"]["answers"] if one[0] == "choice"][:num_choices]
    right: list[bool] = []
    right_by_byte: list[bool] = []
    for number, row in enumerate(rows):
        sums: list[float] = []
        for _, (context, continuation), answer in choices[4 * number : 4 * number + 4]:
            assert context.endswith(row["question"])
            before = tokenizer(context, add_special_tokens=False)["input_ids"]
            ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
            sums.append(log_probability(model, ids, len(ids) - len(before)))
            assert answer[0] == pytest.approx(sums[-1], abs=CHOICE, rel=0)
        by_byte = [one / len(text) for one, text in zip(sums, row["choices"], strict=True)]
        right.append(sums.index(max(sums)) == row["label"])
        right_by_byte.append(by_byte.index(max(by_byte)) == row["label"])
    scores = entry_of(runs["plain"])["tasks"]["lathe_places"]["scores"]
    share = sum(right) / len(right)
    assert scores["acc"]["value"] == pytest.approx(share)
    assert scores["acc_norm"]["value"] == pytest.approx(sum(right_by_byte) / len(right))
    error = math.sqrt(share * (1 - share) / (len(right) - 1))
    assert scores["acc"]["stderr"] == pytest.approx(error)


def test_two_models_are_compared_on_the_same_rows(
    runs: dict[str, Path], ours: dict[str, Any]
) -> None:
    entry = entry_of(runs["plain"])
    base = entry["against"]
    assert (entry["model"], base["model"]) == ("final", "base")
    assert entry["weights"] != base["weights"]
    for task, of_task in entry["tasks"].items():
        for metric, score in of_task["scores"].items():
            difference = entry["differences"][task][metric]
            other = base["tasks"][task]["scores"][metric]["value"]
            assert difference["value"] == pytest.approx(score["value"] - other)
            is_mean = task != "lathe_words"
            assert (difference["low"] is not None) == is_mean
            if is_mean:
                assert difference["low"] <= difference["value"] <= difference["high"]
    (line,) = [one for one in ours["plain"]["lines"] if one.startswith("lathe_places/acc ")]
    assert "; base " in line
    assert "difference" in line


def test_tasks_that_cannot_be_run_are_refused_by_name(ours: dict[str, Any]) -> None:
    errors = {name: ours[name]["error"] for name in WRONG}
    says("lm_eval_task_unknown", errors["unknown"], task="lathe_place", nearest="lathe_places")
    says("lm_eval_data_absent", errors["no data"], task="lathe_gone")
    says("mteb_task_unknown", errors["retrieval unknown"], nearest="PlacesRetrieval")
    says("mteb_data_absent", errors["retrieval without data"], task="SciFact")


def test_the_command_gives_the_same_on_two_ranks(
    python: Path, folder: Path, runs: dict[str, Path], ours: dict[str, Any]
) -> None:
    """By torchrun, by the run's id, with each request on one rank; the file says it once."""
    before = entry_of(runs["plain"])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "trainer", "evaluate", runs["plain"].name, "-sb", str(runs["plain"].parent)]
    words += ["--model", "final", "--lm_eval", ",".join(TASKS), "--against", "base"]
    words += ["--include_path", str(folder / "tasks"), "--cache_dir", str(folder / "cache")]
    done = subprocess.run(
        [str(python), *launch, *words],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [one for one in done.stdout.splitlines() if one.startswith("lathe_")] == (
        ours["plain"]["lines"]
    )
    content = json.loads((runs["plain"] / "lm_eval.json").read_text())["evaluations"]
    assert len(content) == 1
    assert {**content[0], "seconds": 0} == {**before, "seconds": 0}


def test_a_retrievers_scores_are_those_of_our_own_search(
    folder: Path, runs: dict[str, Path], ours: dict[str, Any], tmp_path: Path
) -> None:
    (line,) = ours["retriever"]["lines"]
    scores = entry_of(runs["retriever"], "mteb.json")["tasks"]["PlacesRetrieval"]["scores"]
    assert line == f"PlacesRetrieval/test/ndcg_at_10 {scores['test/ndcg_at_10']['value']:.6f}"
    place = folder / "places"
    run = runs["retriever"]
    for side, name in (("query", "queries"), ("passage", "corpus")):
        words = ["--exp_id", run.name, "-sb", str(run.parent), "--model", "final"]
        words += ["--in", str(place / f"{name}.jsonl"), "--side", side, "--dtype", "float32"]
        words += ["--out", str(tmp_path / side), "--data_path", str(folder)]
        done = forked.run(*forked.TRAINER, "encode", *words)
        assert done.returncode == 0, done.stderr
    folders = ["--queries", str(tmp_path / "query"), "--passages", str(tmp_path / "passage")]
    done = forked.run(
        *forked.TRAINER, "search", *folders, "--out", str(tmp_path / "run.trec"), "--depth", "20"
    )
    assert done.returncode == 0, done.stderr
    words = ["--run", str(tmp_path / "run.trec"), "--queries", str(place / "queries.jsonl")]
    words += ["--qrels", str(place / "qrels" / "test.tsv"), "--at", "10"]
    done = forked.run(*forked.TRAINER, "judge", *words)
    assert done.returncode == 0, done.stderr
    measures = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
    # MTEB rounds to five digits
    assert float(measures["ndcg@10"]) == pytest.approx(
        scores["test/ndcg_at_10"]["value"], abs=1.01e-5, rel=0
    )
    assert 0 < float(measures["ndcg@10"]) < 1
