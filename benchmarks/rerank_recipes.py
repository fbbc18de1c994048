"""A cross-encoder that is trained here: judge and teacher on SciFact, and reranker of both sets.

    python benchmarks/minilm.py scifact --recipe [--data_path DIR] [--out DIR] [--seeds 1 2 3]
    python benchmarks/minilm.py nq --recipe [--data_path DIR] [--out DIR]

Both mine with the stock weights and with BM25 (`mine --run A --run B`), train a cross-encoder on
that (reranker_minilm_<set>), let it order the first 100 hits, and measure its order alone and fused
with the search (`fuse`), whose weights are those that are best for held-out questions.

scifact: a round of `rounds` a seed (retriever_minilm_scifact_taught), in which the cross-encoder
judges what is mined and its scores are learnt. 8% of the training claims are held out in all of it,
and the retriever does not train on claims that nearly repeat them; the recipe is chosen by these.
Measures the trained retriever on the test claims: whole vectors, and their first 96 numbers. nq:
the search is that of the stock weights; the 300 questions of the split valid are held out. Killed,
both go on where they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from our_commands import figures, run

import exp_configs
from trainer.config.identity import exp_id

if TYPE_CHECKING:
    from minilm import Measured, Part, Set

ROUNDS, SHARE, NARROW = 1, "0.08", 96
PRECISION = ["--precision", "bf16"]
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the cross-encoder's score
MARGIN = "0"  # a negative that the judge prefers to the best positive is left out
GROUPS = """import exp_configs

EXP_GROUPS = {{"reranker": exp_configs.EXP_GROUPS["reranker_minilm_{set}"]}} | {{
    f"seed_{{values['train']['seed']}}": [values]
    for values in exp_configs.EXP_GROUPS["{searching}"]
}}
"""
SEARCHING = {"scifact": "retriever_minilm_scifact_taught", "nq": "retriever_minilm_nq"}


def groups(name: str) -> str:
    """The file of groups of a recipe: the cross-encoder, and the retriever once a seed."""
    return GROUPS.format(set=name, searching=SEARCHING[name])


def recipe(
    name: str,
    of: Set,
    stock: Measured,
    data: Path,
    work: Path,
    seeds: Sequence[int],
    *,
    common: list[str],
) -> dict[str, dict[str, float]]:
    """The figures of every seed, by its name; one row for a set with questions for validation, for
    which the cross-encoder alone is trained.

    stock: the model that all begin with. common: the words behind -e of every command.
    """
    reranker = _reranker(name, of, stock, data, common)
    if of.valid is not None:
        found = stock.figures() | _reranked(of, data, stock, reranker, of.valid)
        return {"stock, reranked": {**found, "CPU minutes": stock.cpu_s / 60}}
    (values,) = exp_configs.EXP_GROUPS[f"reranker_minilm_{name}"]
    judge = str(Path(common[3]) / exp_id(values))

    def of_seed(seed: int) -> tuple[str, dict[str, float]]:
        own = ["-e", f"seed_{seed}", *common]
        return f"seed {seed}", _seed(of, data, work, own, seed=seed, judge=judge, reranker=reranker)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(of_seed, seeds))


def _reranker(name: str, of: Set, stock: Measured, data: Path, common: list[str]) -> list[str]:
    """The words that name the trained cross-encoder, after it was trained."""
    files = {"mined.both.jsonl": of.train}
    if of.valid is not None:
        files["mined.both.valid.jsonl"] = of.valid
    for file, part in files.items():
        if (data / file).is_file():
            continue
        dense, words = stock.ranking(file, part), stock.folder / f"{file}.bm25.trec"
        texts = ["--passages", data / of.corpus]
        if not words.is_file():
            stock.command("bm25", *part.asked(data), *texts, "--out", words)
        runs = ["--run", dense, "--run", words, "--last", "50", "--count", "30"]
        stock.command("mine", *runs, *part.at(data), *texts, "--out", data / file)
    own = ["-e", "reranker", *common]
    _, cpu_s = run("trainval.py", *own, log=stock.folder / "reranker.txt")
    stock.cpu_s += cpu_s
    return own


def _seed(
    of: Set,
    data: Path,
    work: Path,
    own: list[str],
    *,
    seed: int,
    judge: str,
    reranker: list[str],
) -> dict[str, float]:
    """The figures of one seed."""
    from minilm import Measured, Part

    out = work / f"rounds-{seed}"
    train = ["--passages", data / of.corpus, *of.train.at(data), "--valid_share", SHARE]
    how = ["--drop_copies", "--by", "both", "--count", "12", "--last", "50"]
    judged = ["--judge", judge, "--judge_margin", MARGIN, "--rounds", ROUNDS]
    log = work / f"rounds-{seed}.txt"
    _, cpu_s = run(
        "-m", "trainer", "rounds", *own, *train, *how, *judged, *PRECISION, "--out", out, log=log
    )
    last = json.loads((out / "rounds.json").read_text())[-1]
    named = ["--exp_id", last["id"], *own[4:], "--model", "final", *PRECISION]
    wide = Measured(f"taught-{seed}", data, of, work=work, experiment=named)
    values = {f"{name}, 384": value for name, value in wide.figures().items()}
    narrow = Measured(
        f"taught-{seed}-{NARROW}", data, of, work=work, experiment=[*named, "--dims", str(NARROW)]
    )
    values |= {f"{name}, {NARROW}": value for name, value in narrow.figures().items()}
    held_out = Part("valid.jsonl", ("--qrels", "qrels/train.tsv"))
    (data / held_out.queries).write_bytes((out / "valid.jsonl").read_bytes())
    values |= _reranked(of, data, wide, reranker, held_out)
    values["nDCG@10, held-out training claims"] = last["measures"]["ndcg@10"]
    return {**values, "CPU minutes": (cpu_s + wide.cpu_s + narrow.cpu_s) / 60}


def _reranked(
    of: Set, data: Path, found: Measured, reranker: list[str], held_out: Part
) -> dict[str, float]:
    """The set's measure of the first 100 hits in the order of the cross-encoder, and of both scores
    fused.
    """
    rankings = {}
    for name, part in (("held_out", held_out), ("test", of.test)):
        ranking, reranked = found.ranking(name, part), found.folder / f"{name}.reranked.trec"
        if not reranked.is_file():
            texts = [*part.asked(data), "--passages", data / of.corpus]
            words = ["--run", ranking, *texts, "--depth", "100", "--out", reranked, *PRECISION]
            found.command("rerank", *reranker, *words)
        rankings[name] = (ranking, reranked, part)

    def measured(name: str, share: float) -> float:
        ranking, reranked, part = rankings[name]
        out = found.folder / f"{name}.fused.trec"
        runs = ["--run", ranking, "--weight", 1 - share, "--run", reranked, "--weight", share]
        found.command("fuse", *runs, "--out", out)
        text = found.command("judge", "--run", out, *part.at(data))
        return float(figures(text)[of.measure])

    title = next(iter(of.columns)).partition(",")[0]
    share = max(SHARES, key=lambda one: measured("held_out", one))
    return {
        f"{title}, reranked": measured("test", 1.0),
        f"{title}, fused": measured("test", share),
        "share of the cross-encoder": share,
    }
