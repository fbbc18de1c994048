"""From a corpus to a judged answer: docs/retrieval.md to its end, where every step can be right.

    python benchmarks/chain.py [--out DIR] [--questions N]

Makes up a corpus of facts, each about one person (trainer/data/lookup.py), 450 test questions whose
names no training question holds, and N to train on. all-MiniLM-L6-v2 retrieves as it comes and
after fine-tuning on negatives that it mined itself, beside BM25; the reader of fid_lookup_cpu reads
the five passages that it found, before and after training on such; a verifier that begins with
the reader's encoder says whether a passage supports what was answered. The control is the same
questions with the gold passage taken out: the reader is wrong there, and the verifier is to say so.
Our own commands alone, one thread. Prints one table, with the CPU minutes of what this call did,
and writes it as JSON. Started again after a kill it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from log_tables import table
from minilm import linked
from our_commands import figures, run
from sklearn.metrics import roc_auc_score

from exp_configs import EXP_GROUPS
from trainer.config.identity import exp_id
from trainer.data import lookup

PASSAGES_PER_QUESTION = 2  # of the corpus: one answers, one is about the same person
READ = 5  # passages that the reader gets, and the most that a training group of statements has
VALID, TEST = 200, 450
RETRIEVER, READER = "retriever_minilm_lookup", "fid_lookup_retrieved"
VERIFIER, FIRST_READER = "vera_lookup_answers", "fid_lookup_cpu"
MEASURES = ("recall@1", "recall@5", "recall@100", "mrr@10", "answer_recall@5")
Row = dict[str, Any]


def make_corpus(folder: Path, num_train: int) -> None:
    """corpus.tsv and queries.jsonl in NaturalQuestions' form: of everybody each thing is told once.

    A question whose answer another one's passages told already is left out.
    """
    corpus: dict[str, str] = {}  # a fact without its place -> the fact
    number_of: dict[str, int] = {}  # a fact -> its id
    questions: list[Row] = []
    for split, count in (("train", num_train), ("valid", VALID), ("test", TEST)):
        kept = 0
        for row in lookup.questions(split, passages=PASSAGES_PER_QUESTION):
            (answer,) = row["answers"]
            texts = [passage["text"] for passage in row["ctxs"]]
            (gold,) = [text for text in texts if text.endswith(f" {answer}.")]
            if _without_place(gold) in corpus:
                continue
            for text in texts:
                if _without_place(text) not in corpus:
                    number_of[text] = len(corpus)
                    corpus[_without_place(text)] = text
            fact = {"question": row["question"], "answers": [answer], "gold": number_of[gold]}
            questions.append({"qid": len(questions), "split": split, **fact})
            kept += 1
            if kept == count:
                break
    lines = (f"{number}\t{text}\t\n" for number, text in enumerate(corpus.values()))
    (folder / "corpus.tsv").write_text("id\ttext\ttitle\n" + "".join(lines))
    write_lines(folder / "queries.jsonl", questions)


def _without_place(fact: str) -> str:
    return fact.rsplit(" ", 2)[0]


def place_of(fact: str) -> str:
    return " ".join(fact.removesuffix(".").rsplit(" ", 2)[1:])


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Chain:
    """The folder of a chain, and the commands that fill it."""

    def __init__(self, out: Path, num_train: int) -> None:
        self.out, self.data, self.cpu_s = out, out / "data", 0.0
        self.data.mkdir(parents=True, exist_ok=True)
        if not (self.data / "queries.jsonl").is_file():
            make_corpus(self.data, num_train)
        self.corpus = ["--passages", self.data / "corpus.tsv"]
        self.queries = ["--queries", self.data / "queries.jsonl"]

    def command(self, *argv: object) -> str:
        text, cpu_s = run(*argv, log=self.out / "log.txt")
        self.cpu_s += cpu_s
        return text

    def trainer(self, *argv: object) -> str:
        return self.command("-m", "trainer", *argv)

    def where(self, group: str, data: Path) -> list[object]:
        roots = ("-sb", self.out / "runs", "--cache_dir", self.out / "cache")
        return ["-e", group, *roots, "--data_path", data]

    # The retriever
    # ----------------------------------------------------------------------------------------------

    def ranking(self, name: str, *model: str) -> Path:
        """The best hundred passages of every question by a retriever's vectors."""
        folder, found = self.out / name, self.out / f"{name}.trec"
        group = [*self.where(RETRIEVER, self.data), *model]
        sides = {"query": "queries.jsonl", "passage": "corpus.tsv"}
        for side, source in sides.items():
            self.trainer(
                "encode", *group, "--in", self.data / source, "--side", side, "--out", folder / side
            )
        if not found.is_file():
            both = ("--queries", folder / "query", "--passages", folder / "passage")
            self.trainer("search", *both, "--depth", 100, "--out", found)
        return found

    def by_words(self) -> Path:
        found = self.out / "bm25.trec"
        if not found.is_file():
            self.trainer("bm25", *self.queries, *self.corpus, "--out", found)
        return found

    def judged(self, ranking: Path) -> dict[str, float]:
        text = self.trainer(
            "judge", "--run", ranking, *self.queries, *self.corpus, "--split", "test"
        )
        return {name: float(figures(text)[name]) for name in MEASURES}

    def mined(self, ranking: Path) -> None:
        for split in ("train", "valid"):
            out = self.data / f"mined.{split}.jsonl"
            if not out.is_file():
                asked = (*self.queries, "--split", split, "--count", 30, "--last", 100)
                self.trainer("mine", "--run", ranking, *asked, *self.corpus, "--out", out)

    # The reader
    # ----------------------------------------------------------------------------------------------

    def to_read(self, ranking: Path) -> tuple[Path, Path]:
        """FiD's files of what was found, and those of the control, which lack the gold passage."""
        folder, control = self.out / "read", self.out / "read_without"
        folder.mkdir(exist_ok=True)
        for split in ("train", "valid", "test"):
            asked = (*self.queries, *self.corpus, "--split", split)
            out = folder / f"{split}.json"
            self.trainer("contexts", "--run", ranking, *asked, "--depth", READ + 1, "--out", out)
        linked(folder, control)
        rows = json.loads((folder / "test.json").read_text())
        for row in rows:
            row["ctxs"] = [
                each for each in row["ctxs"] if place_of(each["text"]) not in row["answers"]
            ]
        (control / "test.json").unlink()
        (control / "test.json").write_text(json.dumps(rows))
        return folder, control

    def answers(self, name: str, data: Path, *model: object) -> tuple[float, list[Row]]:
        """EM of a reader on the test questions, and what it answered to each."""
        out = self.out / f"{name}.jsonl"
        text = self.trainer(
            "evaluate", *self.where(READER, data), *model, "--split", "test", "--pred", out
        )
        return float(figures(text)["test/em"]), list(map(json.loads, out.open()))

    # The verifier
    # ----------------------------------------------------------------------------------------------

    def groups_to_judge(self, read: Path) -> Path:
        """Groups of statements from what was found for training and validation questions."""
        folder = self.out / "judge"
        folder.mkdir(exist_ok=True)
        for split in ("train", "valid"):
            rows = json.loads((read / f"{split}.json").read_text())
            write_lines(folder / f"{split}.jsonl", list(_groups(rows)))
        return folder

    def plausible(self, name: str, answers: Sequence[Row], read: Path, judge: Path) -> list[float]:
        """What the verifier gives each answer beside the passage it was read in, 0 to 1."""
        rows, asked = json.loads((read / "test.json").read_text()), self.out / f"{name}.statements"
        assert [row["question"] for row in rows] == [each["question"] for each in answers]
        lines = [_read_in(row, each["prediction"]) for row, each in zip(rows, answers, strict=True)]
        asked.write_text("".join(line + "\n" for line in lines))
        text = self.trainer("score", *self.where(VERIFIER, judge), "--in", asked)
        return [float(line.split("\t")[0]) for line in text.splitlines() if "\t" in line]


def _statement(question: str, passage: str, answer: str) -> str:
    return f"question: {question} title:  context: {passage} answer: {answer}"


def _groups(rows: Sequence[Row]) -> Iterator[Row]:
    """The gold passage with its place, against others of the best with theirs, and against the
    gold passage with another place.
    """
    for row in rows:
        (answer,) = row["answers"]
        texts = [each["text"] for each in row["ctxs"]]
        holding = [text for text in texts if place_of(text) == answer]
        others = [text for text in texts if place_of(text) != answer][:READ]
        if not holding or not others:
            continue
        wrong = [(text, place_of(text)) for text in others] + [(holding[0], place_of(others[0]))]
        yield {
            "golds": [_statement(row["question"], holding[0], answer)],
            "distractors": [_statement(row["question"], *each) for each in wrong],
        }


def _read_in(row: Row, answer: str) -> str:
    """The answer beside the first passage that holds it, or beside the first of all."""
    texts = [each["text"] for each in row["ctxs"][:READ]]
    holding = [text for text in texts if place_of(text) == answer]
    return _statement(row["question"], (holding or texts)[0], answer)


def measure(chain: Chain) -> dict[str, Mapping[str, float]]:
    """Every figure of the chain, by step."""
    rows: dict[str, Mapping[str, float]] = {"BM25": chain.judged(chain.by_words())}
    stock = chain.ranking("stock", "--model", "base")
    rows["retriever, as it comes"] = chain.judged(stock)
    chain.mined(stock)
    chain.command("trainval.py", *chain.where(RETRIEVER, chain.data))
    found = chain.ranking("trained")
    rows["retriever, trained"] = chain.judged(found)

    read, without = chain.to_read(found)
    chain.command("trainval.py", *chain.where(FIRST_READER, read))
    before = chain.out / "runs" / exp_id(EXP_GROUPS[FIRST_READER][-1]) / "final"
    chain.command("trainval.py", *chain.where(READER, read))
    em_before, _ = chain.answers("first", read, "--model", before)
    em, answers = chain.answers("answers", read)
    em_without, guesses = chain.answers("guesses", without)
    rows["reader"] = {"EM before": em_before, "EM": em, "EM without the gold passage": em_without}

    judge = chain.groups_to_judge(read)
    chain.command("trainval.py", *chain.where(VERIFIER, judge))
    given = chain.plausible("answers", answers, read, judge)
    given_without = chain.plausible("guesses", guesses, without, judge)
    is_right = [each["prediction"] in each["answers"] for each in answers]
    accepted = [right for right, score in zip(is_right, given, strict=True) if score >= 0.5]
    right = [score for score, ok in zip(given, is_right, strict=True) if ok]
    wrong = [*(s for s, ok in zip(given, is_right, strict=True) if not ok), *given_without]
    rows["verifier"] = {
        "accepted": len(accepted) / len(given),
        "right among them": sum(accepted) / max(1, len(accepted)),
        "accepted without the gold passage": sum(s >= 0.5 for s in given_without) / len(given),
        "AUROC, right against wrong": float(
            roc_auc_score([1] * len(right) + [0] * len(wrong), right + wrong)
        ),
    }
    rows["CPU minutes"] = {"": chain.cpu_s / 60}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/chain"))
    parser.add_argument("--questions", type=int, default=12000, help="that train")
    given = parser.parse_args()
    rows = measure(Chain(given.out.resolve(), given.questions))
    shown = [
        (step, ", ".join(f"{name} {each:.4f}" for name, each in values.items()))
        for step, values in rows.items()
    ]
    print(table(("step", "measured"), shown))
    (given.out / "chain.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
