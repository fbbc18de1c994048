"""Faults in the step loop: what is divided, what is saved, when it stops, what is best."""

from tests.mutants.fault import Fault

FILE = "trainer/training/loop.py"
FIT = "tests/numerics/test_fit.py"
STEPS = "tests/contract/test_task_contract.py -k '(golden or stages_ranks) and causal_lm'"

FAULTS = [
    Fault(
        "trainer/metrics/direction.py",
        'return None if words & _WORDS_OF_MOST else "min"',
        'return "min"',
        why="the worst model is best/ where a rank is a part of another metric's name",
        tests="tests/unit/test_best.py",
    ),
    Fault(
        "trainer/training/validation.py",
        "train.best_is or progress.best_is or direction_of(str(train.best))",
        'train.best_is or progress.best_is or "min"',
        why="best/ of a metric that rises holds the worst weights",
        tests="tests/unit/test_best.py",
    ),
    Fault(
        "trainer/training/session.py",
        '{"best_is": "min", **state, **own}',
        "{**state, **own}",
        why="best/ of a run that began before changes its direction in the middle",
        tests="tests/unit/test_best.py",
    ),
    Fault(
        FILE,
        "unsound_before, previous = (~step.is_sound).long(), window",
        "unsound_before, previous = (~step.is_sound).long(), previous",
        why="a step whose gradient was not sound names no rows, or those of another step",
        tests=f"{FIT} -k between_two_saves",
    ),
    Fault(
        FILE,
        "    if units == 0 and not (leaves_out or diverged):",
        "    if units < 0:",
        why="a window without a label divides by zero, and the learning rate is blamed",
        tests=f"{FIT} -k without_a_label",
    ),
    Fault(
        FILE,
        "mean = summed / counts[0]",
        "mean = summed / window.units",
        why="each rank divides by its own units: the loss depends on how rows fall on ranks",
        tests=STEPS,
    ),
    Fault(
        FILE,
        "own_counts[2] = unsound_before",
        "own_counts[2] = 0",
        why="a NaN between two log lines is never noticed",
        tests=FIT,
    ),
    Fault(
        FILE,
        "if due.log or due.evaluation or saves or progress.step == 1:",
        "if due.log or due.evaluation or progress.step == 1:",
        why="a checkpoint with NaN in it replaces the last good one",
        tests=FIT,
    ),
    Fault(
        FILE,
        "if due.log or due.evaluation or saves or progress.step == 1:",
        "if due.log or saves or progress.step == 1:",
        why="a model with NaN in it is exported as the best",
        tests=FIT,
    ),
    Fault(
        FILE,
        "    if not math.isfinite(norm) and not session.engine.step_was_skipped():",
        "    if False:",
        why="weights that an infinite gradient has moved are saved",
        tests=FIT,
    ),
    Fault(
        FILE,
        "    elif is_skipped:",
        "    elif False:",
        why="bf16 skips every update behind a NaN and the run succeeds without learning",
        tests=FIT,
    ),
    Fault(
        FILE,
        "progress.skipped.count(is_skipped=is_skipped,",
        "progress.skipped.count(is_skipped=False,",
        why="fp16 skips every update and the run succeeds without learning",
        tests=FIT,
    ),
    Fault(
        FILE,
        "stop=stop > 0",
        "stop=bool(session.preemption.requested)",
        why="one rank stops and the others wait for it until the job is killed",
        tests=FIT,
    ),
    Fault(
        "trainer/training/validation.py",
        "value >= progress.best",
        "value > progress.best",
        why="an evaluation that is no better replaces best/",
        tests=FIT,
    ),
    Fault(
        "trainer/training/validation.py",
        "value <= progress.best",
        "value < progress.best",
        why="the same where a higher metric is better",
        tests=FIT,
    ),
    Fault(
        "trainer/training/validation.py",
        "if not math.isfinite(value):",
        "if False:",
        why="a metric over nothing becomes the best that no later one can beat",
        tests=FIT,
    ),
    Fault(
        FILE,
        "lr = session.cfg.optim.lr * factor * progress.plateau.factor",
        "lr = session.cfg.optim.lr * factor",
        why="reduce_on_plateau never reaches the optimizer: the log shows a rate that was not used",
        tests=FIT,
    ),
    Fault(
        FILE,
        "progress.units += 0 if step.trouble else step.units",
        "progress.units = step.units",
        why="the units trained on so far are forgotten at every step",
        tests=FIT,
    ),
    Fault(
        "trainer/training/session.py",
        "return step % every == 0 or step == last",
        "return step % every == 0",
        why="the last step is neither evaluated nor saved",
        tests=FIT,
    ),
    Fault(
        "trainer/training/scoring.py",
        "\n        model.train()\n",
        "\n",
        why="after the first evaluation the model trains without dropout",
        tests=FIT,
    ),
    Fault(
        "trainer/training/scoring.py",
        "score = score if counted else _nothing(score)",
        "score = score",
        why="rows that fill a rank's last batch are counted twice in every metric",
        tests="tests/contract/test_task_contract.py -k 'scores_do_not_depend and causal_lm'",
    ),
]
