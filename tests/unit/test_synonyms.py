"""A key under another library's name, or in another block, leads to ours."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

import exp_configs
import trainval
from tests.wording import Fault, fault, says
from trainer import tasks
from trainer.config import reference
from trainer.config.mistakes import paths
from trainer.config.synonyms import SYNONYMS
from trainer.errors import ConfigError

LEGAL = {name: set(paths(tasks.config_of(name))) for name in tasks.names()}
TINY = {
    values["task"]: values
    for group, experiments in exp_configs.EXP_GROUPS.items()
    if group.endswith("_tiny")
    for values in experiments
}


def refusal(task: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        tasks.parse(exp_configs.vary(TINY[task], **changes))
    return str(caught.value)


def test_every_key_that_a_synonym_leads_to_is_a_key_of_some_task() -> None:
    every = set().union(*LEGAL.values())
    assert {key for synonym in SYNONYMS.values() for key in synonym.keys} - every == set()


def test_every_flag_that_a_synonym_leads_to_is_a_flag_of_trainval() -> None:
    flags = {flag for option in get_command(trainval.app).params for flag in option.opts}
    assert {flag for synonym in SYNONYMS.values() for flag in synonym.flags} - flags == set()


def test_no_synonym_is_a_key_itself() -> None:
    names = {
        key.path.rpartition(".")[2]
        for task in tasks.names()
        for key in reference.keys(tasks.config_of(task))
    }
    assert set(SYNONYMS) & names == set()


def test_every_synonym_says_something_to_at_least_one_task() -> None:
    silent = [
        name
        for name, synonym in SYNONYMS.items()
        if not any(synonym.sentence(legal) for legal in LEGAL.values())
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("task", "changes", "line"),
    [
        (
            "causal_lm",
            {"learning_rate": 1e-4},
            fault("key_of_others", key="learning_rate", ours="optim.lr"),
        ),
        (
            "causal_lm",
            {"optim": {"learning_rate": 1e-4}},
            fault("key_of_others", key="optim.learning_rate", ours="optim.lr"),
        ),
        ("causal_lm", {"seed": 1}, fault("key_unknown", key="seed", nearest="train.seed")),
        (
            "causal_lm",
            {"train": {"lr": 1.0}},
            fault("key_unknown", key="train.lr", nearest="optim.lr"),
        ),
        (
            "causal_lm",
            {"train": {"save_steps": 5}},
            fault(
                "key_of_others",
                key="train.save_steps",
                ours="train.save_every",
                note=' It is a number of steps, or "0.5 epoch".',
            ),
        ),
        (
            "causal_lm",
            {"num_train_epochs": 3},
            fault("key_of_others", key="num_train_epochs", ours="train.epochs", note=""),
        ),
        (
            "causal_lm",
            {"per_device_train_batch_size": 8},
            fault(
                "key_of_others",
                key="per_device_train_batch_size",
                ours="train.micro_batch",
                note=" train.global_batch is the rows of one optimizer step",
            ),
        ),
        (
            "causal_lm",
            {"max_seq_length": 8},
            fault("key_of_others", key="max_seq_length", ours="data.max_tokens"),
        ),
        (
            "cross_attention",
            {"max_seq_length": 8},
            fault(
                "key_of_others",
                key="max_seq_length",
                ours="data.decoder_tokens or data.context_tokens",
            ),
        ),
        ("retriever", {"data": {"q_max_len": 8}}, fault("key_of_others", ours="data.query_tokens")),
        ("fid", {"n_context": 8}, fault("key_of_others", key="n_context", ours="data.contexts")),
        (
            "fid",
            {"output_dir": "x"},
            fault("key_of_others", key="output_dir", ours="a flag of trainval.py: --savedir_base"),
        ),
        (
            "vera",
            {"report_to": "wandb"},
            fault(
                "key_of_others",
                key="report_to",
                ours="flags of trainval.py: --trackers or --wandb_project_name",
            ),
        ),
    ],
)
def test_a_foreign_name_leads_to_ours(task: str, changes: dict[str, Any], line: Fault) -> None:
    says(line, refusal(task, **changes))


def test_a_name_that_stands_for_nothing_in_this_task_gets_the_legal_ones() -> None:
    text = refusal("causal_lm", data={"gc_q_chunk_size": 8})
    legal = re.compile("chat_template, .*")
    says("key_unknown", text, key="data.gc_q_chunk_size", legal=legal)
