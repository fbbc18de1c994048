"""Rows of random tokens whose lengths are of five kinds, for benchmarks/best_of_hf.py: those of
published data, all equal, short, long, and mixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from trainer.protocol.task import DRAW, EPOCH

Row = dict[str, Any]
KINDS = ("real", "uniform", "short", "long", "mixed")
PASSAGES = 10  # of a question of fid
STATEMENTS = 4  # of a group of vera; real ones stand alone
END = 0
# The median, the spread (of the logarithm) and the limit of each text of a row, by kind.
TEXTS: dict[str, dict[str, tuple[float, float]]] = {
    "causal_lm": {"uniform": (192, 0), "short": (40, 0.4), "long": (700, 0.2), "mixed": (180, 0.9)},
    "source": {"uniform": (256, 0), "short": (64, 0.3), "long": (700, 0.2), "mixed": (250, 0.8)},
    "target": {"uniform": (32, 0), "short": (12, 0.3), "long": (80, 0.2), "mixed": (32, 0.6)},
    "fid": {"uniform": (120, 0), "short": (50, 0.3), "long": (215, 0.1), "mixed": (110, 0.5)},
    "answer": {"uniform": (7, 0), "short": (5, 0.3), "long": (16, 0.3), "mixed": (7, 0.5)},
    "vera": {"uniform": (24, 0), "short": (12, 0.3), "long": (64, 0.2), "mixed": (24, 0.8)},
    "query": {"uniform": (12, 0), "short": (8, 0.3), "long": (24, 0.2), "mixed": (12, 0.4)},
    "passage": {"uniform": (96, 0), "short": (24, 0.4), "long": (200, 0.2), "mixed": (90, 0.7)},
    "context": {"uniform": (384, 0), "short": (100, 0.3), "long": (800, 0.2), "mixed": (350, 0.8)},
    "decoder": {"uniform": (40, 0), "short": (16, 0.3), "long": (100, 0.1), "mixed": (40, 0.5)},
}
LIMITS = {"causal_lm": 1024, "source": 1024, "target": 96, "fid": 226, "answer": 24, "vera": 96}
LIMITS |= {"query": 32, "passage": 256, "context": 1024, "decoder": 128}


class Lengths:
    """The lengths of the texts of rows, row after row: a list of (name of the text, length)."""

    def __init__(self, task: str, kind: str, data: Path | None) -> None:
        """data: the folder of the published texts, for the kind "real"."""
        self.task, self.kind = task, kind
        self._published = Published(data) if kind == "real" and data is not None else None

    def drawn(self, random: np.random.Generator) -> list[int]:
        """The lengths of one row's texts, in the order in which Draw reads them."""
        if self._published is not None:
            rows = self._published.of_task(self.task)
            return list(rows[int(random.integers(len(rows)))])
        if self.task == "causal_lm":
            return [self._one("causal_lm", random)]
        if self.task == "vera":
            return [self._one("vera", random) for _ in range(STATEMENTS)]
        names = {
            "summariser": ["source", "target"],
            "fid": ["query", "answer", *["fid"] * PASSAGES],
            "retriever": ["query", "passage", "passage"],
            "cross_attention": ["decoder", "context"],
        }[self.task]
        return [self._one(name, random) for name in names]

    def _one(self, name: str, random: np.random.Generator) -> int:
        median, spread = TEXTS[name][self.kind]
        return int(np.clip(random.lognormal(np.log(median), spread), 4, LIMITS[name]))


@dataclass(frozen=True)
class Published:
    """The lengths of rows of CREAK and CSQA2 (vera), SciTLDR (summariser) and NaturalQuestions (the
    other tasks), by the tokenizers of T5, BERT and StarCoder.
    """

    data: Path

    def of_task(self, task: str) -> Sequence[Sequence[int]]:
        return self._rows[task]

    @cached_property
    def _rows(self) -> dict[str, list[list[int]]]:
        questions = self._read("nq/queries.jsonl")[:600]
        passages = [line.split("\t") for line in self._lines("nq/corpus.tsv")[1:]]
        texts = [f"{title} {text}" for _, text, title in passages]
        t5, bert, code = (self._counts(name) for name in ("t5", "bert-uncased", "starcoder"))
        asked = [row["question"] for row in questions]
        answers = t5([row["answers"][0] for row in questions], "answer")
        of_t5, of_bert = t5(texts, "fid"), bert(texts, "passage")
        of_code, half = code(texts, "causal_lm"), LIMITS["context"]
        found: dict[str, list[list[int]]] = {"fid": [], "retriever": [], "causal_lm": []}
        found["cross_attention"] = []
        for number, row in enumerate(questions):
            others = [n for n in row["bm25"] if n != row["gold"]]
            q5, qb, qc = self._questions[number]
            read = [row["gold"], *others[: PASSAGES - 1]]
            found["fid"].append([q5, answers[number], *(of_t5[n] for n in read)])
            found["retriever"].append([qb, of_bert[row["gold"]], of_bert[others[0]]])
            found["causal_lm"].append([qc + of_code[row["gold"]]])
            context = min(half, sum(of_code[n] for n in read[:3]))
            found["cross_attention"].append([qc + answers[number], context])
        assert len(asked) == len(found["fid"])
        claims = [row["sentence"] for row in self._read("statements/creak/train.json")[:2000]]
        claims += [
            row["question"] for row in self._read("statements/csqa2/csqa2_train.json")[:2000]
        ]
        found["vera"] = [[n] for n in t5(claims, "vera")]
        papers = self._read("summarisation/scitldr/train.jsonl")[:1000]
        sources = t5([" ".join(row["source"]) for row in papers], "source")
        targets = t5([row["target"][0] for row in papers], "target")
        found["summariser"] = [list(pair) for pair in zip(sources, targets, strict=True)]
        return found

    @cached_property
    def _questions(self) -> list[tuple[int, int, int]]:
        asked = [row["question"] for row in self._read("nq/queries.jsonl")[:600]]
        counts = [
            self._counts(name)(asked, "query") for name in ("t5", "bert-uncased", "starcoder")
        ]
        return list(zip(*counts, strict=True))  # pyright: ignore[reportReturnType]

    def _counts(self, tokenizer: str) -> Any:
        cut = Tokenizer.from_file(str(self.data / "tokenizers" / tokenizer / "tokenizer.json"))
        cut.no_padding()
        cut.no_truncation()

        def count(texts: Sequence[str], name: str) -> list[int]:
            encodings = cut.encode_batch(list(texts), add_special_tokens=False)
            return [min(max(4, len(one.ids) + 1), LIMITS[name]) for one in encodings]

        return count

    def _lines(self, name: str) -> list[str]:
        return (self.data / name).read_text().splitlines()

    def _read(self, name: str) -> list[Row]:
        return [json.loads(line) for line in self._lines(name)]


class Draw:
    """Encoded rows of a task, as its collate() takes them."""

    def __init__(self, lengths: Lengths, vocabulary: int, seed: int) -> None:
        self._lengths, self._vocabulary = lengths, vocabulary
        self._random = np.random.default_rng(seed)

    def rows(self, count: int) -> Iterator[Row]:
        for _ in range(count):
            row = getattr(self, self._lengths.task)(self._lengths.drawn(self._random))
            arrays = {name: np.asarray(value, dtype=np.int32) for name, value in row.items()}
            if self._lengths.task in ("vera", "retriever"):
                arrays |= {DRAW: np.array([0]), EPOCH: np.array([0])}
            yield arrays

    def _ids(self, length: int) -> list[int]:
        return [*self._random.integers(2, self._vocabulary, length - 1).tolist(), END]

    def _flat(self, lengths: Sequence[int]) -> list[int]:
        return [token for length in lengths for token in self._ids(length)]

    def causal_lm(self, lengths: Sequence[int]) -> Row:
        return {"ids": self._ids(lengths[0])}

    def summariser(self, lengths: Sequence[int]) -> Row:
        source, target = lengths
        texts = {"source": self._ids(source), "targets": self._ids(target)}
        return {**texts, "targets_lengths": [target]}

    def fid(self, lengths: Sequence[int]) -> Row:
        question, answer, *passages = lengths
        texts = {"question": self._ids(question), "targets": self._ids(answer)}
        texts |= {"passages": self._flat(passages)}
        return {**texts, "passages_lengths": passages, "targets_lengths": [answer]}

    def vera(self, lengths: Sequence[int]) -> Row:
        """Several statements are choices, of which the first is right; one is true or false."""
        are_choices = len(lengths) > 1
        is_true = are_choices or bool(self._random.integers(2))
        row = {"statements": self._flat(lengths), "lengths": lengths, "has_gold": [int(is_true)]}
        return {**row, "is_multiple_choice": [int(are_choices)], "task": [0], "number": [0]}

    def retriever(self, lengths: Sequence[int]) -> Row:
        query, *passages = lengths
        identities = self._random.integers(0, 2**31 - 1, 2 * len(passages)).tolist()
        row = {"query": self._ids(query), "passages": self._flat(passages), "lengths": passages}
        row |= {"identities": identities, "scores": [0] * len(passages)}
        return {**row, "num_positives": [1], "item": [0]}

    def cross_attention(self, lengths: Sequence[int]) -> Row:
        decoder, context = lengths
        row = {"decoder": self._ids(decoder), "answer_start": [3], "context": self._ids(context)}
        return {**row, "context_lengths": [context]}
