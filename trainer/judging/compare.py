"""Whether a trained model is better than another one, what broke, and what it forgot: judge.json,
judge.md and judge_answers.jsonl of a run.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer import tasks
from trainer.config.identity import exp_id
from trainer.config.scores.judged import Judging
from trainer.data.stream.store import is_streamed
from trainer.data.token_store import store_of
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import read_json, refusals, replace_file, write_json
from trainer.judging.by_row import START, RowTexts, results_of
from trainer.judging.general_texts import is_language_model, loss_on_texts
from trainer.judging.sides import ComparedModels, Side
from trainer.judging.votes import ANSWERS, choices_of, read_pairs, read_votes
from trainer.metrics.intervals import RowSums
from trainer.metrics.test_record import weights_of
from trainer.runtime.distributed import on_main
from trainer.statistics.overlap import shared_rows
from trainer.verdict.judgement import Judgement, ScoredRows, judge
from trainer.verdict.opinions import PeopleSay, people_say
from trainer.verdict.report import report, text_of

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row, Task
    from trainer.training.options import Options

logger = logging.getLogger(__name__)

FILE, REPORT = "judge.json", "judge.md"
EARLIER = "judge_earlier"  # the folder of comparisons of something else that stood there before
# Of FILE, what tells two comparisons apart.
_COMPARED = ("model", "runs", "against", "against_runs", "split", "limit", "answers")
_FIRST = 5  # rows that a refusal names


@dataclass(frozen=True)
class _Evaluated:
    """What one side scored."""

    results: list[ScoredRows]  # by seed
    texts: list[RowTexts]
    general: RowSums | None  # the first seed's loss on general texts


def run_judge(
    comparison: ComparedModels,
    options: Options,
    folder: Path,
    *,
    stop: Callable[[], None] | None = None,
) -> Judgement:
    """Compare the two models, and write FILE, REPORT and ANSWERS into a folder; those of another
    comparison move into EARLIER there. A collective.

    ConfigError for models that cannot be compared, and for a gate on a score that nobody has
    computed. DataError for rows that are training rows, unless they are to be left out.
    """
    how, options = comparison.how, replace(options, wandb_project_name=None)
    on_main(partial(_make, folder))  # before anything is computed that could not be written
    left_out = shared_with_training(comparison, options)
    sides = [
        _evaluated(side, comparison, options, stop)
        for side in (comparison.before, comparison.after)
    ]
    _refuse_other_rows(comparison, [rows for side in sides for rows in side.texts])
    rows = sides[0].texts[0]
    keeps_N = np.ones(len(rows.rows), dtype=bool)
    keeps_N[left_out] = False
    before, after = ([_part(one, keeps_N) for one in side.results] for side in sides)
    rows = _rows_part(rows, keeps_N)
    try:
        judgement = judge(
            before,
            after,
            rows.rows,
            general=_pair(sides[0].general, sides[1].general),
            slices_by=how.slices_by,
            gate=how.gate,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    facts = _facts(comparison, options, left_out)
    facts["not_measured"] = _not_measured(comparison, sides, judgement)
    run_folder = options.savedir_base / exp_id(comparison.after.experiments[0])

    def write() -> None:
        keep_earlier(folder, facts)
        people = _write_answers(folder, run_folder, before[0], after[0], rows)
        texts = (before[0].answers, after[0].answers)
        page = report(facts, judgement, rows.rows, rows.references, texts, people=people)
        replace_file(folder / REPORT, page.encode(errors="replace"))
        votes = None if people is None else asdict(people)
        write_json(folder / FILE, {**facts, **judgement.record(), "votes": votes})

    on_main(write)
    return judgement


def _evaluated(
    side: Side, comparison: ComparedModels, options: Options, stop: Callable[[], None] | None
) -> _Evaluated:
    how, results, texts = comparison.how, list[ScoredRows](), list[RowTexts]()
    questions = [*side.questions(how, comparison.limit, comparison.batch)]
    for question in questions:
        task = tasks.load(tasks.parse(question.values), options.places)
        result, rows = results_of(task, question, options, num_replies=how.answers, stop=stop)
        results.append(result)
        texts.append(rows)
        gc.collect()  # the model
    general = None
    if how.keep is not None:
        general = loss_on_texts(questions[0], how.keep, options, stop=stop)
        gc.collect()
    return _Evaluated(results, texts, general)


def _pair(before: RowSums | None, after: RowSums | None) -> tuple[RowSums, RowSums] | None:
    """The losses of both models on general texts, where they are of the same tokens."""
    if before is None or after is None:
        return None
    if not np.array_equal(before.den_N, after.den_N):
        return None
    return before, after


# Rows
# --------------------------------------------------------------------------------------------------


def shared_with_training(
    comparison: ComparedModels,
    options: Options,
    *,
    ours: tuple[Task, TokenStore] | None = None,
) -> list[int]:
    """The rows, from 0, that one of the compared runs has trained on and that are left out. A
    DataError where they are to be refused. A collective.

    ours: the task and the training rows of the run that is about to begin.
    """
    how, limit = comparison.how, comparison.limit
    experiments = [*comparison.after.experiments]
    if comparison.before.model != START:
        experiments += comparison.before.experiments
    seen: set[tuple[str, str]] = set()
    left_out: set[int] = set()
    for number, values in enumerate(experiments):
        if ours is None or number:
            task: Any = tasks.load(tasks.parse(values), options.places)
            train: Any = None if is_streamed(task) else store_of(task, "train", options.cache_dir)
        else:
            task, train = ours
        if is_streamed(task):
            logger.info("%s rows that a stream trains on, too, are not looked for", how.split)
            continue
        split = store_of(task, how.split, options.cache_dir)
        if (key := (str(train.digest), str(split.digest))) in seen:  # another seed
            continue
        seen.add(key)
        pairs: list[tuple[int, int]] = on_main(partial(shared_rows, train, split))
        pairs = [(row, trained) for row, trained in pairs if limit is None or row < limit]
        refuse_overlap(how, pairs, len(split), run=exp_id(values) if number else None)
        left_out |= {row for row, _ in pairs}
    return sorted(left_out)


def refuse_overlap(
    how: Judging, pairs: Sequence[tuple[int, int]], num_rows: int, *, run: str | None = None
) -> None:
    """DataError for rows of the split that are training rows, unless they are to be left out.

    pairs: the row and the training row of each, from 0. run: whose training rows; None: of the run
    that is judged.
    """
    if not pairs:
        return
    first = ", ".join(f"row {row + 1} is training row {one + 1}" for row, one in pairs[:_FIRST])
    more = ", ..." if len(pairs) > _FIRST else ""
    whose = "" if run is None else f" of run {run}"
    line = (
        f"{len(pairs):,} of {num_rows:,} rows of the {how.split} split are training rows"
        f"{whose} ({first}{more}): what is measured on them is remembered, not learnt"
    )
    if how.overlap == "refuse":
        raise DataError(
            f"judge: {line}. Take them out of one of the two, or use --overlap leave_out "
            '("overlap": "leave_out" in a dictionary).'
        )
    logger.warning("%s; they are left out", line)


def _refuse_other_rows(comparison: ComparedModels, texts: Sequence[RowTexts]) -> None:
    """ConfigError when the runs were not evaluated on the same rows."""
    digests = [_digest(one.rows) for one in texts]
    names = [exp_id(values) for values in _experiments(comparison)]
    for name, digest in zip(names, digests, strict=True):
        if digest != digests[0]:
            raise ConfigError(
                f"judge: run {name} has other rows in its {comparison.how.split} split than run "
                f"{names[0]}: two models are compared on the same rows. Give both dictionaries the "
                "same data, and --data_path."
            )


def _experiments(comparison: ComparedModels) -> list[dict[str, Any]]:
    return [*comparison.before.experiments, *comparison.after.experiments]


def _digest(rows: Sequence[Row]) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, default=str).encode())
    return total.hexdigest()


def _part(result: ScoredRows, keeps_N: np.ndarray) -> ScoredRows:
    """The results of some rows."""
    sums = {
        name: RowSums(one.num_N[keeps_N], one.den_N[keeps_N]) for name, one in result.sums.items()
    }
    answers = [text for text, keeps in zip(result.answers, keeps_N, strict=True) if keeps]
    known_N = result.confidence_N
    confidence_N = None if known_N is None else known_N[keeps_N]
    return replace(result, sums=sums, answers=answers, confidence_N=confidence_N)


def _rows_part(rows: RowTexts, keeps_N: np.ndarray) -> RowTexts:
    places: list[int] = np.flatnonzero(keeps_N).tolist()
    return RowTexts([rows.rows[at] for at in places], [rows.references[at] for at in places])


# Files
# --------------------------------------------------------------------------------------------------


def _facts(comparison: ComparedModels, options: Options, left_out: Sequence[int]) -> dict[str, Any]:
    """What was compared."""
    after = comparison.after
    folder = options.savedir_base / exp_id(after.experiments[0]) / after.model
    return {
        "model": after.model,
        "weights": weights_of(folder),
        "runs": [exp_id(values) for values in after.experiments],
        "against": comparison.before.name,
        "against_runs": [exp_id(values) for values in comparison.before.experiments],
        "split": comparison.how.split,
        "limit": comparison.limit,
        "answers": comparison.how.answers,
        "left_out_rows": [row + 1 for row in left_out],
    }


def _make(folder: Path) -> None:
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _not_measured(
    comparison: ComparedModels, sides: Sequence[_Evaluated], judgement: Judgement
) -> dict[str, str]:
    """What the comparison does not say although it can, and why, as sentences for people."""
    reasons: dict[str, str] = {}
    values = comparison.after.experiments[0]
    if comparison.how.keep is None:
        reasons["what was forgotten"] = "no general texts are named (keep)"
    elif not is_language_model(values):
        reasons["what was forgotten"] = (
            f"task {values['task']!r} trains no language model whose loss on texts would tell"
        )
    elif _pair(sides[0].general, sides[1].general) is None:
        reasons["what was forgotten"] = "the two models cut general texts into other tokens"
    elif judgement.general is None:
        reasons["what was forgotten"] = "the loss on general texts is not a finite number"
    if judgement.slices_by is None:
        reasons["slices"] = "the score by which they would be compared could not be tested"
    if judgement.calibrations is None:
        reasons["how sure the answers are"] = (
            "only greedy replies of language models have a probability, and there are none"
        )
    return reasons


def keep_earlier(folder: Path, facts: Mapping[str, Any]) -> None:
    """Move the files of a comparison of something else out of the way of a new one: into a folder
    of EARLIER whose name follows from what was compared. Whoever dies here and begins again moves
    the rest there, for FILE, which says what was compared, moves last. StorageError.
    """
    before = read_json(folder / FILE)
    if before is None:
        return
    old, new = ([one.get(name) for name in _COMPARED] for one in (before, facts))
    if old == new:
        return
    digest = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    place = folder / EARLIER / digest[:8]
    with refusals(place):
        place.mkdir(parents=True, exist_ok=True)
        for name in (REPORT, ANSWERS, FILE):
            if (folder / name).is_file():
                os.replace(folder / name, place / name)
    logger.info("the comparison with %s is now in %s", before.get("against"), place)


def _write_answers(
    folder: Path, run_folder: Path, before: ScoredRows, after: ScoredRows, rows: RowTexts
) -> PeopleSay | None:
    """Write ANSWERS into `folder`. Returns what people have voted of these answers before, by the
    files of the trained model's run folder.
    """
    lines = [json.dumps(one, ensure_ascii=False) for one in _pairs_of_answers(before, after, rows)]
    # half of a surrogate pair, which a model or a row may hold, is no text of a file
    replace_file(folder / ANSWERS, "".join(f"{line}\n" for line in lines).encode(errors="replace"))
    votes = read_votes(run_folder, read_pairs(folder / ANSWERS, most=None))
    return people_say(choices_of(votes), len({vote.voter for vote in votes}))


def _pairs_of_answers(
    before: ScoredRows, after: ScoredRows, rows: RowTexts
) -> Iterator[dict[str, Any]]:
    """Each row that both models answered, for people who say which answer is better: its number,
    `prompt` (turns of a conversation, or a text), the right answers, `before` and `after`, and the
    `tools` of a conversation that has some.
    """
    answers = zip(before.answers, after.answers, strict=True)
    for number, (one, other) in enumerate(answers):
        if one is None or other is None:
            continue
        pair: dict[str, Any] = {
            "row": number + 1,
            "prompt": _prompt_of(rows.rows[number]),
            "references": list(rows.references[number]),
            "before": one,
            "after": other,
        }
        if rows.rows[number].get("tools"):
            pair["tools"] = rows.rows[number]["tools"]
        yield pair


def _prompt_of(row: Row) -> Any:
    """What a row asks: the turns before the last answer, or the text before it."""
    turns: list[Row] | None = row.get("messages")
    if turns is not None:
        last = max(at for at, turn in enumerate(turns) if turn.get("role") == "assistant")
        return turns[:last]
    if "answer_spans" in row:
        return row["text"][: row["answer_spans"][-1][0]]
    return text_of(row)
