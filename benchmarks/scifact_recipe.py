"""SciFact with mined negatives, a cross-encoder as judge and teacher, and vectors of two widths.

    python benchmarks/minilm.py scifact --recipe [--data_path DIR] [--out DIR] [--seeds 1 2 3]

Mines with the stock weights and with BM25 (`mine --run A --run B`), trains a cross-encoder on that
(reranker_minilm_scifact), and then two `rounds` a seed (retriever_minilm_scifact_taught), in which
the cross-encoder judges what is mined and its scores are learnt. 8% of the training claims are
held out in all of it, and the retriever does not train on claims that nearly repeat them; the
recipe is chosen by these. Measures the last round on the test claims: whole vectors, their first 96
numbers, and the first 100 hits in the order of the cross-encoder, alone and fused with the search
(`fuse`), whose weights are those that are best for the held-out claims. Killed, it goes on where it
was.
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

RERANKER = exp_configs.EXP_GROUPS["reranker_minilm_scifact"]
TAUGHT = exp_configs.EXP_GROUPS["retriever_minilm_scifact_taught"]
EXP_GROUPS = {"reranker": RERANKER} | {
    f"seed_{values['train']['seed']}": [values] for values in TAUGHT
}
"""


def recipe(
    of: Set, stock: Measured, data: Path, work: Path, seeds: Sequence[int], *, common: list[str]
) -> dict[str, dict[str, float]]:
    """The figures of every seed, by its name.

    stock: the model that all begin with. common: the words behind -e of every command.
    """
    reranker, judge = _reranker(of, stock, data, common)

    def of_seed(seed: int) -> tuple[str, dict[str, float]]:
        own = ["-e", f"seed_{seed}", *common]
        return f"seed {seed}", _seed(of, data, work, own, seed=seed, judge=judge, reranker=reranker)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(of_seed, seeds))


def _reranker(of: Set, stock: Measured, data: Path, common: list[str]) -> tuple[list[str], str]:
    """The words that name the trained cross-encoder, and its run folder."""
    texts = ["--queries", data / of.train.queries, "--passages", data / of.corpus]
    dense, words = stock.ranking("mined.jsonl", of.train), stock.folder / "bm25.trec"
    if not words.is_file():
        stock.command("bm25", *texts, "--out", words)
    mined = data / "mined.both.jsonl"
    if not mined.is_file():
        runs = ["--run", dense, "--run", words, "--last", "50", "--count", "30"]
        stock.command("mine", *runs, *of.train.at(data), *texts[2:], "--out", mined)
    own = ["-e", "reranker", *common]
    run("trainval.py", *own, log=stock.folder / "reranker.txt")
    (values,) = exp_configs.EXP_GROUPS["reranker_minilm_scifact"]
    return own, str(Path(common[3]) / exp_id(values))


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
    """nDCG@10 of the first 100 hits in the order of the cross-encoder, and of both scores fused."""
    rankings = {}
    for name, part in (("held_out", held_out), ("test", of.test)):
        ranking, reranked = found.ranking(name, part), found.folder / f"{name}.reranked.trec"
        if not reranked.is_file():
            texts = ["--queries", data / part.queries, "--passages", data / of.corpus]
            words = ["--run", ranking, *texts, "--depth", "100", "--out", reranked, *PRECISION]
            found.command("rerank", *reranker, *words)
        rankings[name] = (ranking, reranked, part)

    def ndcg(name: str, share: float) -> float:
        ranking, reranked, part = rankings[name]
        out = found.folder / f"{name}.fused.trec"
        runs = ["--run", ranking, "--weight", 1 - share, "--run", reranked, "--weight", share]
        found.command("fuse", *runs, "--out", out)
        return float(figures(found.command("judge", "--run", out, *part.at(data)))["ndcg@10"])

    share = max(SHARES, key=lambda one: ndcg("held_out", one))
    return {
        "nDCG@10, reranked": ndcg("test", 1.0),
        "nDCG@10, fused": ndcg("test", share),
        "share of the cross-encoder": share,
    }
