"""Rounds of encoding, mining and training: each begins with the model of the one before.

A killed loop goes on with the same command. Whatever a stage gives depends on plan.json alone, so
the vectors of every round are the same bits as without the kill.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainer import tasks
from trainer.config.identity import canonical_json, exp_id
from trainer.data import left_out
from trainer.data.shard_folder import ShardFolder
from trainer.errors import EXIT_OK, ConfigError
from trainer.evaluation.run import Question
from trainer.files.atomic import read_json, refusals, write_json
from trainer.files.held_lock import HeldLock
from trainer.launch.ending import last_words
from trainer.launch.group import run_group
from trainer.rounds import stages
from trainer.rounds.dictionaries import VALID, all_rounds, rows_file
from trainer.rounds.stages import SECONDS, Judged, Model, timed
from trainer.runtime import device_defaults, distributed, watch
from trainer.runtime.distributed import on_main
from trainer.training.run_plan import is_finished
from trainer.training.run_plan import plan as plan_of_run

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.rounds.dictionaries import Values
    from trainer.rounds.plan import Loop
    from trainer.rounds.sources import LoopFiles, LoopTexts
    from trainer.training.options import Options

TABLE = "rounds.json"
SHOWN = ("recall@10", "recall@100", "ndcg@10")  # measures of the table
log = logging.getLogger(__name__)


def run_rounds(
    loop: Loop, files: LoopFiles, options: Options, *, strict: bool = False
) -> tuple[int, list[RoundLine]]:
    """Train all rounds. Returns the exit code of the last training, and the lines of the table.

    options: --data_path is that of the experiment; the rounds have the loop's folder in its place.
    strict: refuse what would be left out of the questions. HeldError when another process is at
    work in the folder of the loop. A collective.
    """
    out = loop.out.resolve()
    lock = HeldLock(
        out.parent / f".{out.name}.lock", what=str(out), held="another process makes these rounds"
    )
    try:
        return _with_lock(loop, files, options, lock, strict=strict)
    finally:
        lock.release()


def _with_lock(
    loop: Loop, files: LoopFiles, options: Options, lock: HeldLock, *, strict: bool
) -> tuple[int, list[RoundLine]]:
    read = cache(lambda: files.read(loop.guard))

    def begin() -> None:
        with refusals(loop.out):
            loop.out.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        lock.hold(loop.out)
        with left_out.one_reading("questions", strict=strict):
            read().refuse_bad_ids()

    on_main(begin)
    sources, of_judge = read(), loop.mining.judge
    judge = None if of_judge is None else stages.fingerprint_of_judge(of_judge, options)
    identity = loop.identity(sources.digests, judge)
    how: Any = {"refusal": ConfigError, "notes_kernels": True}
    folder = ShardFolder(loop.out, "rounds", "", "rounds", **how)
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    experiments = all_rounds(loop.values, loop.rounds, digest=digest)
    with folder.as_begun(), watch.watch_ranks(last_words):
        folder.begin(identity, choice="")
        return _rounds(loop, experiments, sources, options)


def _rounds(
    loop: Loop, experiments: list[Values], sources: LoopTexts, options: Options
) -> tuple[int, list[RoundLine]]:
    names = {
        exp_id(values): f"{options.group} round {number}".strip()
        for number, values in enumerate(experiments, start=1)
    }
    own = replace(options, data_path=loop.out, names=names)
    _settle(experiments[0])
    how = (own, loop.precision)
    model = Model(Question(experiments[0], model="base"), loop.folder(0), *how)
    lines = [_line(0, model, loop, sources, Judged())]
    for number, values in enumerate(experiments, start=1):
        log.info("round %d of %d: mining", number, loop.rounds)
        judged = _rows(loop, sources, model, number, options)
        del model  # its weights make room for the training
        _free()
        log.info("round %d of %d: training", number, loop.rounds)
        code = _train(values, loop.folder(number), own)
        if code != EXIT_OK:
            return code, lines
        model = Model(Question(values, model="final"), loop.folder(number), *how)
        lines.append(_line(number, model, loop, sources, judged))
    on_main(lambda: write_json(loop.out / TABLE, [asdict(line) for line in lines]))
    return EXIT_OK, lines


def _free() -> None:
    gc.collect()
    if distributed.is_gpu():
        torch.cuda.empty_cache()


def _settle(values: Values) -> None:
    """Apply the settings that a training has for its device before the first text is encoded.
    Otherwise they would hold from the first training on, and a loop that goes on after it would
    encode other bits than one that was never stopped.
    """
    cfg = tasks.parse(values)
    device_defaults.settle(
        cfg.train.precision, optimizer=cfg.optim.name, compiles=cfg.train.compile
    )


def _rows(loop: Loop, sources: LoopTexts, miner: Model, number: int, options: Options) -> Judged:
    """Mine the training rows of a round, and let the judge look at them. What is there already
    stays. ConfigError when another model has mined it.
    """
    folder, record = loop.folder(number), loop.folder(number) / "mined.json"
    known = on_main(lambda: read_json(record))
    if known is not None and known["model"] != miner.fingerprint:
        raise ConfigError(
            f"{loop.out / rows_file(number)} was mined with vectors of another model: "
            f"{known['model'][:12]}..., and the one of round {number - 1} is "
            f"{miner.fingerprint[:12]}... now. Put that model back, or name a new --out."
        )
    if known is not None:
        return Judged(known["judged"], known["false"])
    stages.mine(loop, sources, miner, loop.out / VALID, of="valid", number=0)
    rows, judged = loop.out / rows_file(number), Judged()
    with timed(folder, "mine"):
        if loop.mining.judge is None:
            stages.mine(loop, sources, miner, rows, of="train", number=number)
        else:
            mined = folder / "mined.jsonl"
            stages.mine(loop, sources, miner, mined, of="train", number=number)
            how: Any = {"precision": loop.precision, "options": options}
            judged = stages.judge(loop.mining.judge, mined, rows, folder / "scores", **how)
    on_main(lambda: write_json(record, {"model": miner.fingerprint, **asdict(judged)}))
    return judged


def _train(values: Values, folder: Path, options: Options) -> int:
    """Train one round, or go on with it. Returns its exit code."""
    run_plan = plan_of_run(values, options, world=distributed.world(), rank=distributed.rank())
    if on_main(lambda: is_finished(run_plan)):
        return EXIT_OK
    with timed(folder, "train"):
        return run_group([run_plan], replace(options, began_at=time.time()))


@dataclass(frozen=True)
class RoundLine:
    """A line of the table: a model, and how it came about."""

    round: int
    id: str | None  # of its experiment; None: the model that the first round begins with
    measures: dict[str, float]  # of the validation questions
    judged: int  # negatives
    false: int  # negatives that were taken for positives
    seconds: float  # of its mining, training, encoding and searching

    def cells(self) -> list[str]:
        share = f"{self.false / self.judged:.4f}" if self.judged else "-"
        values = [f"{self.measures[name]:.4f}" for name in SHOWN]
        return [str(self.round), *values, share, f"{self.seconds:.1f}", self.id or "-"]


def _line(number: int, model: Model, loop: Loop, sources: LoopTexts, judged: Judged) -> RoundLine:
    measures = model.measures(loop, sources)
    log.info("round %d: %s", number, ", ".join(f"{name} {measures[name]:.4f}" for name in SHOWN))
    seconds: dict[str, float] = on_main(lambda: read_json(loop.folder(number) / SECONDS) or {})
    name = None if number == 0 else exp_id(model.question.values)
    # training questions are encoded and searched within the mining of the next round
    own = (of_stage for stage, of_stage in seconds.items() if not stage.endswith(" train"))
    spent = round(sum(own), 1)
    return RoundLine(number, name, measures, judged.judged, judged.false, spent)


def table(lines: list[RoundLine]) -> list[str]:
    """The lines of the table as Markdown."""
    titles = ["round", *SHOWN, "judged false", "seconds", "experiment"]
    rows = [titles, ["---"] * len(titles), *(line.cells() for line in lines)]
    return [f"| {' | '.join(cells)} |" for cells in rows]
