"""A public number on a laptop: all-MiniLM-L6-v2 as it comes, and after fine-tuning, by our commands
alone.

    python benchmarks/minilm.py scifact [--recipe] [--data_path DIR] [--out DIR] [--seeds 1 2 3]
    python benchmarks/minilm.py nq [--recipe]

Encodes the corpus with the stock weights, searches, judges; mines hard negatives from that search
with `trainer mine`; trains the group retriever_minilm_<set> once a seed, as many at a time as there
are cores, each on one thread; encodes, searches and judges again. Prints one table, and writes it
as JSON. Started again after a kill it goes on where it was: every step leaves a file, or continues.

scifact: 5,183 abstracts; 809 claims train and 300 are tested. Of those, 104 share no relevant
abstract with a training claim (test_no_overlap.txt): that column shows what was learnt, and not
remembered. nq: 2,600 passages, 2,000 questions of NaturalQuestions train, 355 are tested.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rerank_recipes
from our_commands import ROOT, figures, run

SHARED = ROOT.parent / "shared" / "data"
DEPTH = 100
GROUPS = """import exp_configs

EXP_GROUPS = {{
    f"seed_{{values['train']['seed']}}": [values] for values in exp_configs.EXP_GROUPS["{group}"]
}}
"""


@dataclass(frozen=True)
class Part:
    """Questions of one kind: where they lie, and what is relevant to them."""

    queries: str
    judged_by: tuple[str, ...] = ()  # --qrels FILE or --split NAME

    def asked(self, data: Path) -> list[str]:
        """What names the questions, without their judgements."""
        return self.at(data)[: 4 if self.judged_by[:1] == ("--split",) else 2]

    def at(self, data: Path) -> list[str]:
        words = [str(data / word) if word.endswith(".tsv") else word for word in self.judged_by]
        return ["--queries", str(data / self.queries), *words]


@dataclass(frozen=True)
class Set:
    """A data set, and the figures that are shown of it."""

    folder: Path
    corpus: str
    train: Part
    test: Part
    mined: dict[str, Part]  # the mined files, by their names, and of which questions they are
    columns: dict[str, tuple[str, str | None]]  # by title: the measure, and the ids that count
    published: str
    measure: str = "ndcg@10"  # that the recipe with a cross-encoder is chosen by
    valid: Part | None = None  # questions that no training sees; without them a share is held out
    mine: Sequence[str] = field(default=("--count", "30", "--last", "100"))


SCIFACT_TRAIN = Part("queries.train.jsonl", ("--qrels", "qrels/train.tsv"))
SETS = {
    "scifact": Set(
        SHARED / "retrieval" / "scifact",
        "corpus.jsonl.gz",
        SCIFACT_TRAIN,
        Part("queries.test.jsonl", ("--qrels", "qrels/test.tsv")),
        {"mined.jsonl": SCIFACT_TRAIN},
        {
            "nDCG@10, 300 claims": ("ndcg@10", None),
            "nDCG@10, the 104 of test_no_overlap": ("ndcg@10", "test_no_overlap.txt"),
            "recall@100": ("recall@100", None),
        },
        "published for the stock weights: .6451; BM25 .6789 (the same 300 claims)",
    ),
    "nq": Set(
        SHARED / "nq",
        "corpus.tsv",
        Part("queries.jsonl", ("--split", "train")),
        Part("queries.jsonl", ("--split", "test")),
        {
            "mined.train.jsonl": Part("queries.jsonl", ("--split", "train")),
            "mined.valid.jsonl": Part("queries.jsonl", ("--split", "valid")),
        },
        {
            "R@1": ("recall@1", None),
            "R@5": ("recall@5", None),
            "MRR@10": ("mrr@10", None),
        },
        "BM25 on the same 355: R@1 .735, R@5 .904, MRR@10 .804",
        "recall@1",
        Part("queries.jsonl", ("--split", "valid")),
    ),
}


class Measured:
    """One model: its folder of vectors and runs, and the commands that fill it."""

    def __init__(
        self, name: str, data: Path, of: Set, *, work: Path, experiment: list[str]
    ) -> None:
        self.data, self.of, self.folder = data, of, work / name
        self.experiment = experiment
        self.cpu_s = 0.0
        self.folder.mkdir(parents=True, exist_ok=True)

    def command(self, *argv: object) -> str:
        text, cpu_s = run("-m", "trainer", *argv, log=self.folder / "log.txt")
        self.cpu_s += cpu_s
        return text

    def passages(self) -> Path:
        corpus = self.data / self.of.corpus
        self._encode(corpus, "passage", self.folder / "passages")
        return self.folder / "passages"

    def ranking(self, name: str, part: Part) -> Path:
        """The best passages of every question of a part."""
        queries, found = self.folder / f"{name}.vectors", self.folder / f"{name}.trec"
        split = part.judged_by if part.judged_by[:1] == ("--split",) else ()
        self._encode(self.data / part.queries, "query", queries, *split)
        if not found.is_file():
            folders = ("--queries", queries, "--passages", self.passages())
            self.command("search", *folders, "--depth", DEPTH, "--out", found)
        return found

    def figures(self) -> dict[str, float]:
        ranking, values = self.ranking("test", self.of.test), {}
        for title, (measure, ids) in self.of.columns.items():
            only = ["--only", self.data / ids] if ids else []
            text = self.command("judge", "--run", ranking, *self.of.test.at(self.data), *only)
            values[title] = float(figures(text)[measure])
        return values

    def _encode(self, source: Path, side: str, out: Path, *split: str) -> None:
        where = ("--in", source, "--side", side, "--out", out, *split)
        self.command("encode", *self.experiment, *where, "--dtype", "float32")


def measure(name: str, data_path: Path, out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Every figure of a data set, by model."""
    of, work = SETS[name], out.resolve() / name
    group = f"retriever_minilm_{name}"
    data = linked(data_path, work / "data")
    groups = work / "groups.py"  # one group a seed, so that each trains in a process of its own
    groups.write_text(GROUPS.format(group=group))
    common = ["--exp_configs", str(groups), "-sb", str(work / "runs"), "--data_path", str(data)]
    common += ["--cache_dir", str(work / "cache")]

    def of_seed(seed: int) -> list[str]:
        return ["-e", f"seed_{seed}", *common]

    first = of_seed(seeds[0])
    stock = Measured("stock", data, of, work=work, experiment=[*first, "--model", "base"])
    rows: dict[str, object] = {"stock": {**stock.figures(), "CPU minutes": stock.cpu_s / 60}}
    print(line("stock", rows["stock"]), flush=True)
    for file, part in of.mined.items():
        ranking = stock.ranking(file, part)
        if not (data / file).is_file():
            corpus = ("--passages", data / of.corpus, "--out", data / file)
            stock.command("mine", "--run", ranking, *part.at(data), *corpus, *of.mine)

    def trained(seed: int) -> tuple[int, dict[str, float]]:
        log = work / f"seed-{seed}" / "training.txt"
        _, cpu_s = run("trainval.py", *of_seed(seed), log=log)
        model = Measured(f"seed-{seed}", data, of, work=work, experiment=of_seed(seed))
        return seed, {**model.figures(), "CPU minutes": (cpu_s + model.cpu_s) / 60}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for seed, found in pool.map(trained, seeds):
            rows[f"seed {seed}"] = found
            print(line(f"seed {seed}", found), flush=True)
    return rows


def measure_recipe(name: str, data_path: Path, out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Every figure of the recipe with a teacher (rerank_recipes.py), by seed."""
    of, work = SETS[name], out.resolve() / f"{name}-recipe"
    data = linked(data_path, work / "data")
    groups = work / "recipe.py"
    groups.write_text(rerank_recipes.groups(name))
    common = ["--exp_configs", str(groups), "-sb", str(work / "runs"), "--data_path", str(data)]
    common += ["--cache_dir", str(work / "cache")]
    untrained = ["-e", f"seed_{seeds[0]}", *common, "--model", "base", *rerank_recipes.PRECISION]
    stock = Measured("stock", data, of, work=work, experiment=untrained)
    return rerank_recipes.recipe(name, of, stock, data, work, seeds, common=common)


def linked(source: Path, folder: Path) -> Path:
    """A folder with links to the files of `source`, to which mined files can be added."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.resolve().iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


def header(name: str, titles: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(titles)} |\n| --- |{' --- |' * len(titles)}"


def line(name: str, values: object) -> str:
    assert isinstance(values, dict)
    return f"| {name} | " + " | ".join(f"{value:.4f}" for value in values.values()) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--data_path", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipe", action="store_true", help="with a cross-encoder")
    given = parser.parse_args()
    of, data = SETS[given.set], given.data_path or SETS[given.set].folder
    if not (data / of.corpus).is_file():
        print(f"{given.set}: no {data / of.corpus}, skipped. Give --data_path.")
        return
    if given.recipe:
        rows = measure_recipe(given.set, data, given.out, given.seeds)
        titles = list(next(iter(rows.values())))
        print(header(given.set, titles))
        for name, values in rows.items():
            print(line(name, values))
    else:
        titles = [*of.columns, "CPU minutes"]
        print(header(given.set, titles), flush=True)
        rows = measure(given.set, data, given.out, given.seeds)
    tuned = [values for name, values in rows.items() if name != "stock"]
    if len(tuned) > 1:
        for word, take in (("mean", statistics.fmean), ("spread (sd)", statistics.stdev)):
            values = {title: take([one[title] for one in tuned]) for title in titles}
            rows[word] = values
            print(line(word, values))
    print(of.published)
    kind = "_recipe" if given.recipe else ""
    (given.out / f"minilm_{given.set}{kind}.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
