"""A model of one form of retriever where another form is wanted, without its head, or with another
tokenizer.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

from tests import forked
from tests.facts import experiment, write_facts
from tests.vector_folders import write_vectors
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.data.readers.rankings import read_run
from trainer.protocol.task import Places
from trainer.retrieval import reranking

FORMS = {
    "bi": "retriever",
    "cross": "retriever, cross",
    "late": "retriever, late",
    "sparse": "retriever, sparse",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts, and an export of each form."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    for form in FORMS:
        task = loaded(folder, form)
        weights = {name: p.detach() for name, p in task.model().named_parameters()}
        task.export(weights, folder / form)
    return folder


def loaded(folder: Path, form: str, **changes: Any) -> Any:
    cfg = tasks.parse(experiment(FORMS[form], folder, **changes))
    return tasks.load(cfg, Places(folder, folder / "cache", folder))


@pytest.mark.parametrize("form", FORMS)
def test_an_experiment_starts_from_no_model_of_another_form(form: str, folder: Path) -> None:
    for other in FORMS:
        task = loaded(folder, form, base=str(folder / other))
        if other == form:
            task.model()
            continue
        with refused("base_of_other_form", folder=folder / other, form=other):
            task.model()
        with refused("export_of_other_form", folder=folder / other, form=other):
            loaded(folder, form).load_export(folder / other)


def test_the_body_of_another_form_is_taken_beside_a_new_head(folder: Path) -> None:
    taken = loaded(folder, "late", init_from=str(folder / "bi")).model()
    whole = load_file(folder / "bi" / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert (dict(taken.query_model.named_parameters())[name] == whole[name]).all()


@pytest.mark.parametrize(
    ("form", "lost"),
    [("late", "1_Dense"), ("cross", "classifier.weight"), ("bi", "pooler.pt")],
)
def test_a_model_without_its_head_is_no_base_and_no_model(
    form: str, lost: str, folder: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder / form, damaged)
    if (damaged / lost).is_dir():
        shutil.rmtree(damaged / lost)
    elif (damaged / lost).is_file():
        (damaged / lost).unlink()
    else:
        file = damaged / "model.safetensors"
        tensors = load_file(file)
        tensors.pop(lost)
        save_file(tensors, file, metadata={"format": "pt"})
    lacks = fault("head_lost", folder=damaged, form=form)
    wanted = fault("pooler_absent") if form == "bi" else lacks
    with refused(wanted):
        loaded(folder, form, base=str(damaged)).model()
    with refused(wanted):
        loaded(folder, form).load_export(damaged)


def test_a_projection_in_an_older_file_is_not_lost(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "late", tmp_path / "late")
    (tmp_path / "late" / "late_config.json").unlink()  # as sentence-transformers writes a model
    (tmp_path / "late" / "1_Dense" / "model.safetensors").rename(
        tmp_path / "late" / "1_Dense" / "pytorch_model.bin"
    )
    with refused("projection_without_weights", folder=tmp_path / "late", place="1_Dense"):
        loaded(folder, "late", base=str(tmp_path / "late")).model()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_another_tokenizer_is_refused(form: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / form, tmp_path / form)
    file = tmp_path / form / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(content))
    with refused("tokenizer_of_other_export", folder=tmp_path / form, there=384):
        loaded(folder, form).load_export(tmp_path / form)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("cross", fault("batches_without_negatives")),
        ("late", fault("topics_of_no_vectors", form="late")),
        ("sparse", fault("topics_of_no_vectors", form="sparse")),
    ],
)
def test_topics_by_the_vectors_of_a_model_are_of_dense_retrievers(
    form: str, wanted: Fault, folder: Path
) -> None:
    with refused(wanted):
        loaded(folder, form, data={"batches": {"topics": {"by": "model"}}})


# The commands
# --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("form", ["late", "sparse"])
def test_a_newcomer_encodes_and_searches_without_a_flag(
    form: str, folder: Path, tmp_path: Path
) -> None:
    groups = f"EXP_GROUPS = {{'g': [{experiment(FORMS[form], folder)!r}]}}"
    (tmp_path / "groups.py").write_text(groups)
    texts = ["Ada keeps the red key in the cellar.", "Emil's blue coin: the garden.", "!? ?!"]
    sides = {"passage": [*texts, texts[0]], "query": ["Where is the red key?", "coin"]}
    words = ["-e", "g", "--exp_configs", str(tmp_path / "groups.py"), "-sb", str(tmp_path)]
    words += ["--model", str(folder / form)]
    for side, own in sides.items():
        rows = [json.dumps({"docid": f"{side}{n}", "text": text}) for n, text in enumerate(own)]
        source = tmp_path / f"{side}.jsonl"
        source.write_text(
            "\n".join(rows).replace("docid", "query_id" if side == "query" else "docid")
        )
        done = forked.run(
            *(*forked.TRAINER, "encode", *words, "--in", str(source), "--side", side),
            *("--out", str(tmp_path / side)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run.trec"
    folders = ["--queries", str(tmp_path / "query"), "--passages", str(tmp_path / "passage")]
    done = forked.run(*forked.TRAINER, "search", *folders, "--out", str(run), "--verify")
    assert done.returncode == 0, done.stdout + done.stderr
    task = loaded(folder, form)
    model = task.load_export(folder / form)
    row = {"query": sides["query"][0], "ctxs": [{"text": text} for text in sides["passage"]]}
    of_form = importlib.import_module(f"trainer.tasks.retriever.{form}.trained")
    (found,) = of_form.predict(task, model, [row], None)
    hits = {hit.passage: hit.score for hit in read_run(run)["query0"]}
    wanted = {f"passage{n}": score for n, score in enumerate(found["scores"]) if score > 0}
    assert hits == pytest.approx(wanted, rel=2e-3), "in float16"


@pytest.mark.parametrize("form", ["bi", "late", "sparse"])
def test_a_text_of_no_token_is_refused(form: str, folder: Path) -> None:
    task = loaded(folder, form)
    assert task.ids([{"text": "a"}], side="query") != [[]]
    with refused("text_without_tokens", side="query"):
        task.ids([{"text": "a"}, {"text": ""}], side="query")
    assert loaded(folder, form, data={"append_eos": True}).ids([{"text": ""}], side="query") == [
        [0]
    ]


# Two commands at once
# --------------------------------------------------------------------------------------------------


def test_two_commands_do_not_write_one_folder(tmp_path: Path) -> None:
    import numpy as np

    exact = np.eye(3, dtype=np.float32)
    scores = {"model": "m", "texts": "t", "count": 1, "shard_questions": 4, "precision": "fp32"}
    plan, lists = reranking.ScoresPlan(**scores), [("q", [{"text": "p"}])]

    def scorer(_: Any) -> Any:
        return np.ones(1, dtype=np.float32)

    with FileLock(tmp_path / ".p.lock"):
        with refused("vectors_being_written"):
            write_vectors(tmp_path / "p", exact)
        with refused("vectors_being_written"):
            reranking.scores_of(tmp_path / "p", lists, scorer, plan=plan)
    write_vectors(tmp_path / "p", exact)
    with FileLock(tmp_path / ".p.lock"):
        assert len(write_vectors(tmp_path / "p", exact).ids) == 3, "what is finished is only read"
