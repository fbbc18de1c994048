"""Milliseconds of a step of the SDK `tinker`, in whose environment it runs: none of our packages.

usage: driven_client.py JSON with "url", "model", "rank", "vocabulary", and "steps": pairs of the
lengths of a step's rows and how many steps there are; it prints a list of times for each pair
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings

WORLD = json.loads(sys.argv[1])
os.environ |= {"TINKER_BASE_URL": WORLD["url"], "TINKER_API_KEY": "tml-none"}
warnings.simplefilter("ignore")

import tinker  # noqa: E402
from tinker import types  # noqa: E402


def row(length: int, draw: random.Random) -> types.Datum:
    """A row of so many made-up tokens."""
    ids = [draw.randrange(WORLD["vocabulary"]) for _ in range(length + 1)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * length},
    )


def main() -> None:
    service = tinker.ServiceClient()
    run = service.create_lora_training_client(WORLD["model"], rank=WORLD["rank"], seed=1).result()
    adam = types.AdamParams(learning_rate=1e-4)
    report: list[list[float]] = []
    for lengths, steps in WORLD["steps"]:
        draw, times = random.Random(7), []
        rows = [row(length, draw) for length in lengths]
        for _ in range(steps):
            began = time.perf_counter()
            passed, update = run.forward_backward(rows, "cross_entropy"), run.optim_step(adam)
            passed.result()
            update.result()
            times.append(1000 * (time.perf_counter() - began))
        report.append(times)
    service.close("success").result()
    print(json.dumps(report), flush=True)


main()
