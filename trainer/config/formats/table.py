"""The one table of formats: what the rows of each hold, and what a task may make of them.

docs/formats.md is made from it (tests/unit/test_formats_page.py), refusals take their words from
it, and trainer/data/usual has a reader for each of its cells. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.formats.layouts import PREFERENCES, QUESTIONS, TEVATRON, TEXTS, Layout, Purpose

FormatName = Literal[
    "openai",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "conversational",
    "completion",
    "triples",
    "msmarco",
    "dpr",
    "beir",
    "kilt",
    "squad",
    "tevatron",
    "fid",
    "nq",
    "pretokenised",
    "preference",
    "openai_preference",
    "unpaired_preference",
]

# What a task reads, for messages.
WANTED: Mapping[Purpose, str] = {
    "conversation": "conversations",
    "completion": "prompts with their completions",
    "text": "texts",
    "question": "questions with answers and passages",
    "query": "queries with passages",
    "summary": "documents with summaries",
    "statement": "true and false statements",
    "preference": "answers of which some are preferred",
}


@dataclass(frozen=True)
class Format:
    """How other people write rows."""

    called: str  # "Alpaca": before "rows", in a run's opening line
    holds: str  # what a row or the folder holds, in words
    documentation: str  # the page on which it is described
    # what a task makes of a row, in a few words for the page of formats
    serves: Mapping[Purpose, str]
    # The names of a row, which data.columns may map; None: it has files of its own, whose names
    # and columns are fixed.
    names: Layout | None = None


_TRL = "https://huggingface.co/docs/trl/dataset_formats"
_TURNS = "what the assistant says"

FORMATS: Mapping[FormatName, Format] = {
    "openai": Format(
        "OpenAI",
        "conversations: messages with role and content, perhaps tools",
        "https://platform.openai.com/docs/guides/supervised-fine-tuning",
        {"conversation": _TURNS},
        Layout(
            (("messages",), ("tools",), ("system",)),
            lists=frozenset({"messages", "tools"}),
            objects=(("messages", ("role", "content", "weight", "tool_calls")),),
        ),
    ),
    "sharegpt": Format(
        "ShareGPT",
        "conversations: turns with from and value, perhaps system and tools",
        "https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
        {"conversation": _TURNS},
        Layout(
            (("conversations",), ("system",), ("tools",)),
            lists=frozenset({"conversations", "tools"}),
        ),
    ),
    "alpaca": Format(
        "Alpaca",
        "instruction, perhaps input, and output",
        "https://github.com/tatsu-lab/stanford_alpaca#data-release",
        {
            "conversation": "output, as the turn behind instruction and input",
            "completion": "output, behind Alpaca's own prompt",
            "summary": "output; instruction and input are the document",
        },
        Layout(
            (("instruction",), ("input",), ("output",), ("system",), ("history",)),
            lists=frozenset({"history"}),
        ),
    ),
    "prompt_completion": Format(
        "prompt and completion",
        "a prompt and its completion, both texts",
        _TRL,
        {
            "conversation": "completion, as the turn behind the prompt",
            "completion": "completion, behind the prompt as it stands",
            "summary": "completion; the prompt is the document",
        },
        Layout((("prompt",), ("completion",), ("tools",), ("system",), ("input",))),
    ),
    "conversational": Format(
        "conversational prompt and completion",
        "a prompt and its completion, both lists of turns",
        _TRL,
        {"conversation": "what the assistant says in the completion"},
        Layout(
            (("prompt",), ("completion",), ("tools",), ("system",)),
            lists=frozenset({"prompt", "completion", "tools"}),
        ),
    ),
    "completion": Format("plain text", "text", _TRL, {"text": "every token"}, TEXTS),
    "triples": Format(
        "triple",
        "anchor, positive and negatives, all texts",
        "https://sbert.net/docs/sentence_transformer/training_overview.html#dataset-format",
        {"query": "anchor; positive, and negative, negative_1, ... or negatives"},
        Layout(
            (
                ("anchor", "query", "question"),
                ("positive", "answer"),
                ("negative", "negatives"),
                ("id", "query_id", "_id", "qid"),
            ),
            lists=frozenset({"negatives"}),
        ),
    ),
    "msmarco": Format(
        "MS MARCO",
        "collection.tsv, queries*.tsv, and triples or qrels*.tsv",
        "https://microsoft.github.io/msmarco/Datasets.html",
        {"query": "a line of the triples, or a judged query with its relevant passages"},
    ),
    "dpr": Format(
        "DPR",
        "a question, its answers, positive_ctxs, hard_negative_ctxs and negative_ctxs",
        "https://github.com/facebookresearch/DPR#retriever-input-data-format",
        {
            "question": "question and answers; all its passages, positives first",
            "query": "question; positives, and hard negatives or else the others",
        },
        Layout(
            (
                ("question",),
                ("answers", "answer"),
                ("positive_ctxs",),
                ("hard_negative_ctxs",),
                ("negative_ctxs",),
                ("id", "query_id", "_id", "qid"),
                ("dataset",),
            ),
            lists=frozenset({"answers", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"}),
        ),
    ),
    "beir": Format(
        "BEIR",
        "corpus.jsonl, queries.jsonl and qrels/<split>.tsv",
        "https://github.com/beir-cellar/beir/wiki/Load-your-custom-dataset",
        {"query": "a judged query with its relevant documents"},
    ),
    "kilt": Format(
        "KILT",
        "input, and output with answers and provenance in kilt_knowledgesource.json",
        "https://github.com/facebookresearch/KILT#kilt-data-format",
        {
            "question": "input and its answers; the paragraphs of the provenance",
            "query": "input; the paragraphs of the provenance are its positives",
        },
        Layout((("input",), ("output",), ("id",)), lists=frozenset({"output"})),
    ),
    "squad": Format(
        "SQuAD",
        "data, paragraphs and qas, or flat rows of context, question and answers",
        "https://rajpurkar.github.io/SQuAD-explorer/",
        {
            "question": "question and answers; the paragraph with its title",
            "query": "question; the paragraph is its positive",
        },
        Layout(
            (("question",), ("id",), ("answers",), ("context",), ("title",)),
        ),
    ),
    "tevatron": Format(
        "Tevatron",
        "a query, positive_passages and negative_passages (1), or positive_document_ids and "
        "negative_document_ids (2)",
        "https://github.com/texttron/tevatron",
        {
            "question": "query and its answers; its passages, positives first",
            "query": "query, positives and negatives; ids are looked up in data.corpus",
        },
        replace(TEVATRON, groups=(*TEVATRON.groups, ("answers", "answer")), purpose=None),
    ),
    "fid": Format(
        "FiD",
        "a question, its answers, and ctxs with title, text and score",
        "https://github.com/facebookresearch/FiD#data-format",
        {
            "question": "question and answers; ctxs",
            "query": "question; the ctx with the highest score is the positive",
        },
        replace(QUESTIONS, purpose=None),
    ),
    "nq": Format(
        "Natural Questions",
        "queries.jsonl and corpus.tsv, as `python -m trainer fetch nq` writes them",
        "experiments.md",
        {
            "text": "every passage of the corpus",
            "question": "question and answers; gold passage, or BM25's passages (fid)",
            "query": "question, gold passage, and BM25's passages without an answer",
        },
    ),
    "pretokenised": Format(
        "token id",
        "query, positives and negatives as lists of token ids",
        "https://github.com/texttron/tevatron/tree/tevatron-v1",
        {"query": "the ids as they are"},
    ),
    "preference": Format(
        "preference",
        "chosen and rejected, texts or lists of turns, with their prompt or beginning with it; "
        "perhaps margin, or score_chosen and score_rejected",
        _TRL,
        {"preference": "the two answers; what both begin with is the prompt where none is given"},
        replace(PREFERENCES, purpose=None),
    ),
    "openai_preference": Format(
        "OpenAI preference",
        "input with messages and perhaps tools, preferred_output and non_preferred_output",
        "https://platform.openai.com/docs/guides/direct-preference-optimization",
        {"preference": "the two outputs, behind the messages of the input"},
        Layout(
            (("input",), ("preferred_output",), ("non_preferred_output",)),
            lists=frozenset({"preferred_output", "non_preferred_output"}),
        ),
    ),
    "unpaired_preference": Format(
        "unpaired preference",
        "a prompt, a completion and a label: true where the completion is preferred",
        _TRL,
        {"preference": 'the completion with its label (preference.loss="kto")'},
        replace(PREFERENCES, purpose=None),
    ),
}


def formats_of(purposes: Collection[Purpose]) -> list[FormatName]:
    """The formats that a task reads which makes these things of its rows."""
    return [name for name, one in FORMATS.items() if set(purposes) & one.serves.keys()]


def refusal(name: FormatName, purposes: Collection[Purpose]) -> str:
    """Why a task that makes `purposes` of its rows does not read a format, and what it reads."""
    kinds = " or ".join(WANTED[one] for one in purposes) or "no rows of other people's formats"
    legal = formats_of(purposes)
    instead = (
        f"Its formats are {', '.join(legal)}"
        if legal
        else "It reads none of these formats: leave format out, and name your columns in "
        "data.columns"
    )
    return f"format={name!r} holds {FORMATS[name].holds}; this task reads {kinds}. {instead}"
