"""What a dry run finds out in seconds, and a run refuses before its first step: the same."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exp_configs import EXP_GROUPS, vary
from tests.contract.runs import untimed
from tests.facts import TINY_BASE, experiment, facts, with_dropout, write_facts
from tests.forked import TRAINVAL, run
from tests.ranks import run_on_ranks
from tests.runs.test_bad_input import refuse
from tests.wording import says
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.data.token_store import TokenStore, open_store
from trainer.launch import preflight
from trainer.launch.preflight import Findings, look
from trainer.protocol.task import Encoded
from trainer.statistics.overlap import shared_rows
from trainer.training.options import Options
from trainer.training.run_plan import plan

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def found(values: dict[str, Any], data: Path, savedir: Path) -> Findings:
    options = Options(savedir, data_path=data, cache_dir=data / "cache")
    return look(plan(values, options, world=1, rank=0), options)


def test_a_group_that_is_looked_at_for_a_few_steps_may_have_a_longer_warm_up(
    folder: Path, tmp_path: Path
) -> None:
    values = vary(experiment("causal_lm", folder), schedule={"warmup_steps": 7})
    options = Options(tmp_path, data_path=folder, cache_dir=folder / "cache", is_shortened=True)
    findings = look(plan(values, options, world=1, rank=0), options)
    assert findings.problems == []
    assert "warmup_steps=7 is longer than the run of train.steps=6" in findings.warnings[0]


def changed_copy(folder: Path, target: Path, name: str, lines: list[str]) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("cache"))
    (target / name).write_text("".join(f"{line}\n" for line in lines))
    return target


@pytest.mark.parametrize("name", tasks.names())
def test_a_dry_run_of_every_task_shows_two_rows_and_what_the_loss_is_over(
    name: str, folder: Path, tmp_path: Path
) -> None:
    values = experiment(name, folder)
    options = Options(tmp_path, data_path=folder, cache_dir=folder / "cache")
    planned = plan(values, options, world=1, rank=0)
    findings = look(planned, options)
    assert findings.problems == []
    shown = preflight.show(planned, findings)
    assert "training row 2, as the model gets it" in shown
    assert "parameters train" in shown
    assert len(findings.rows) == 2
    segments = [one for texts in findings.rows for text in texts.values() for one in text]
    assert all(one["text"] for one in segments)
    is_over_tokens = name not in ("vera", "retriever")
    assert any(one["in_loss"] for one in segments) == is_over_tokens
    assert ("«" in shown) == is_over_tokens
    assert list(tmp_path.iterdir()) == [], "nothing is written into the savedir"


def test_the_loss_of_a_reader_is_marked_on_the_answer_alone(folder: Path, tmp_path: Path) -> None:
    values = experiment("cross_attention", folder)
    values = vary(values, data={"loss_on": "answer"})
    first = facts(0, 1)[0]
    (row, _) = found(values, folder, tmp_path).rows
    in_loss = "".join(one["text"] for text in row.values() for one in text if one["in_loss"])
    assert first["answer"] in in_loss
    assert first["question"] not in in_loss


def _cases(folder: Path, root: Path) -> dict[str, tuple[dict[str, Any], Path, list[str]]]:
    """By name: an experiment, its data, and what is said of it."""
    plain = experiment("causal_lm", folder)
    rows = [json.dumps(row) for row in facts(0, 9)]
    torn = [*rows[:2], '{"text": "x", ', *rows[2:]]
    no_text = [json.dumps({"question": "x"})]
    random = {"config": {**TINY_BASE["config"]}}  # type: ignore[dict-item]
    small = {"config": {**random["config"], "vocab_size": 300}}
    wide = {"config": {**random["config"], "n_head": 3}}
    reader = vary(experiment("cross_attention", folder), data={"decoder_tokens": 12})
    return {
        "warm-up": (
            vary(plain, schedule={"warmup_steps": 7}),
            folder,
            ["warmup_steps=7", "train.steps=6"],
        ),
        "best": (vary(plain, train={"best": "train/loss"}), folder, ["begin with 'valid/'"]),
        "no rows": (
            plain,
            changed_copy(folder, root / "empty", "valid.jsonl", []),
            ["valid.jsonl"],
        ),
        "torn row": (
            plain,
            changed_copy(folder, root / "torn", "valid.jsonl", torn),
            ["valid.jsonl, line 3", "malformed JSON"],
        ),
        "layout": (
            plain,
            changed_copy(folder, root / "layout", "train.jsonl", no_text),
            ["train.jsonl, line 1", "text"],
        ),
        "vocabulary": (vary(plain, base=small), folder, ["up to 383", "300 embeddings"]),
        "family": (
            vary(experiment("fid", folder), base=TINY_BASE),
            folder,
            ["'gpt_bigcode', a decoder, want an encoder-decoder"],
        ),
        "config": (vary(plain, base=wide), folder, ["no gpt_bigcode can be built"]),
        "no label": (
            vary(plain, data={"max_tokens": 1}),
            folder,
            ["anything that the loss is over"],
        ),
        "lost labels": (reader, folder, ["train.max_lost_labels=0.05"]),
    }


def _refusals(cases: dict[str, Any], root: Path) -> dict[str, tuple[str, int, str]]:
    return {
        name: refuse(values, data, root / f"out {name}", root / f"cache {name}")
        for name, (values, data, _) in cases.items()
    }


def test_a_run_refuses_before_its_first_step_what_a_dry_run_does(
    folder: Path, tmp_path: Path
) -> None:
    cases = _cases(folder, tmp_path)
    refused = run_on_ranks(1, _refusals, cases, tmp_path)[0]
    for name, (values, data, parts) in cases.items():
        told = "\n".join(found(values, data, tmp_path / "dry").problems)
        kind, code, text = refused[name]
        assert code == 2, f"{name}: {kind} {text}"
        for part in parts:
            assert part in told, f"a dry run of {name}: {told}"
            assert part in text, f"a run of {name}: {text}"
        metrics = [
            path.stat().st_size for path in (tmp_path / f"out {name}").glob("*/metrics.jsonl")
        ]
        assert metrics in ([], [0]), f"{name}: no step was done"


def test_two_mistakes_of_an_experiment_are_named_at_once(folder: Path, tmp_path: Path) -> None:
    values = vary(
        experiment("causal_lm", folder), schedule={"warmup_steps": 7}, data={"max_tokens": 1}
    )
    assert len(found(values, folder, tmp_path).problems) == 2


def test_a_run_that_has_begun_goes_on_with_a_warm_up_that_is_too_long(
    folder: Path, tmp_path: Path
) -> None:
    values = vary(experiment("causal_lm", folder), schedule={"warmup_steps": 7})
    options = Options(tmp_path, data_path=folder, cache_dir=folder / "cache")
    planned = plan(values, options, world=1, rank=0)
    (planned.folder / "checkpoints/step-1").mkdir(parents=True)
    assert look(planned, options).problems == []


def test_a_run_that_was_killed_in_its_first_save_begins_with_the_numbers_of_a_new_one(
    folder: Path, tmp_path: Path
) -> None:
    """What is looked at before a run draws random numbers, which the first dropout comes behind."""
    values = with_dropout(experiment("vera", folder, train={"steps": 2, "save_every": 1}))
    (tmp_path / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    found = []
    for name in ("new", "killed"):
        out = tmp_path / name
        where = (
            "--data_path",
            str(folder),
            "--cache_dir",
            str(tmp_path / "cache"),
            "-sb",
            str(out),
        )
        groups = ("-e", "one", "--exp_configs", str(tmp_path / "groups.py"))
        if name == "killed":
            (out / exp_id(values) / "checkpoints/.step-1.tmp").mkdir(parents=True)
        done = run(*TRAINVAL, *groups, *where)
        assert done.returncode == 0, done.stderr
        found.append(untimed(out / exp_id(values) / "metrics.jsonl"))
    assert found[0] == found[1]


def test_a_disk_without_room_for_one_checkpoint_is_refused_with_both_sizes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = experiment("causal_lm", folder)
    options = Options(tmp_path, data_path=folder, cache_dir=folder / "cache")
    planned = plan(values, options, world=1, rank=0)
    needed = preflight.checkpoint_nbytes(
        tasks.load(planned.cfg, options.places).skeleton(), planned
    )
    for free, refusals in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(
            preflight.shutil, "disk_usage", lambda path, free=free: Usage(1, 1, free)
        )
        assert len(look(planned, options).problems) == refusals, free
    (said,) = look(planned, options).problems
    assert "KiB free, a checkpoint needs at least" in said


def test_validation_rows_that_are_training_rows_are_counted(tmp_path: Path) -> None:
    def store(name: str, rows: list[list[int]], **more: list[int]) -> TokenStore:
        return open_store(
            lambda: [{"ids": row} for row in rows],
            lambda row: Encoded({"ids": row["ids"], **more}),
            encoding_id=name,
            split=name,
            cache_dir=tmp_path,
            length=lambda row: len(row["ids"]),
        )

    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 9, size).tolist() for size in generator.integers(0, 5, 3000)]
    train, valid = store("train", rows[:2000]), store("valid", rows[2000:], other=[1])
    known = {tuple(row) for row in rows[:2000]}
    slowly = sum(tuple(row) in known for row in rows[2000:])
    assert 0 < slowly < 1000
    assert len(shared_rows(train, valid)) == slowly
    assert len(np.unique(train.row_hashes(["ids"]))) == len(known)


def test_a_dry_run_warns_of_a_validation_file_that_is_the_training_file(
    folder: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "data"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("cache"))
    values = experiment("causal_lm", folder)
    assert found(values, copied, tmp_path).warnings == []
    shutil.copy(copied / "train.jsonl", copied / "valid.jsonl")
    findings = found(values, copied, tmp_path)
    assert findings.problems == []
    (said,) = findings.warnings
    assert "64 of 64" in said


def _best(values: dict[str, Any], folder: Path, savedir: Path) -> list[Any]:
    """What becomes of metrics that exist for some rows, for generated answers, and not at all."""
    named = {
        "lives": ("valid/perplexity_none", {}),
        "answers": ("valid/em", {"answers": 2}),
        "loss": ("valid/loss", {}),
    }
    return [
        refuse(
            vary(values, train={"best": best, "steps": 2, "eval_every": 2, **more}),
            folder,
            savedir / name,
            folder / "cache",
        )
        for name, (best, more) in named.items()
    ]


def test_a_best_metric_that_no_evaluation_gives_is_refused_before_the_first_step(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("fid", folder, train={"log_every": 1, "best_is": "max"})
    refused, answered, plain = run_on_ranks(1, _best, values, folder, tmp_path)[0]
    assert refused[:2] == ("ConfigError", 2)
    assert "train.best='valid/perplexity_none': no such metric" in refused[2]
    (metrics,) = (tmp_path / "lives").glob("*/metrics.jsonl")
    assert metrics.stat().st_size == 0, "no step was done"
    assert (answered, plain) == (("none", 0, ""), ("none", 0, ""))
    assert [path.name for path in (tmp_path / "answers").glob("*/answers/*")] == ["step-2.jsonl"]


def test_a_dry_run_that_finds_a_problem_shows_everything_and_exits_with_2(
    folder: Path, tmp_path: Path
) -> None:
    tiny = EXP_GROUPS["crossattn_tiny"][0]
    later = vary(tiny, base={"experiment": vary(tiny, optim={"lr": 1.0})})
    path = tmp_path / "groups.py"
    path.write_text(f"EXP_GROUPS = {{'mine': {[tiny, later]!r}}}\n")
    flags = ["--exp_configs", str(path), "-e", "mine", "-sb", str(tmp_path / "out"), "--dry_run"]
    done = run(*TRAINVAL, *flags, "--cache_dir", str(folder / "cache"))
    assert done.returncode == 2
    assert "training row 2" in done.stdout
    assert done.stderr.startswith("ConfigError: ")
    says("run_would_be_refused", done.stderr, at="ConfigError")
    says("base_run_unfinished", done.stderr)
    assert not (tmp_path / "out").exists()
