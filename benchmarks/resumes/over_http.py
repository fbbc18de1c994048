"""The Tinker SDK against `lathe serve`: a loop whose client is started again with its journal.

usage: over_http.py JSON with "url", "model", "steps" and "journal"

Its operations are sent again from the first one on; the server answers those that it has with what
they gave, and runs each once.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

WORLD = json.loads(sys.argv[1])
os.environ |= {"TINKER_BASE_URL": WORLD["url"], "TINKER_API_KEY": "tml-none"}
warnings.simplefilter("ignore")

from tinker import ServiceClient, TrainingClient, types  # noqa: E402
from tinker.lib.public_interfaces.training_client import fetch_training_info  # noqa: E402
from workload import BATCH, LR, ROWS, SEED, rows  # noqa: E402

content = rows()


def batch_of(step: int) -> list[int]:
    """The rows of a step: all in an order of its own, epoch after epoch."""
    epoch, index = divmod(step, ROWS // BATCH)
    order = random.Random(f"{SEED} {epoch}").sample(range(ROWS), ROWS)
    return order[BATCH * index : BATCH * (index + 1)]


def datum_of(number: int) -> Any:
    ids = content[number]
    share = 1 / (BATCH * (len(ids) - 1))  # the sum is the mean, as elsewhere in the table
    inputs = {"target_tokens": ids[1:], "weights": [share] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


journal = Path(WORLD["journal"])
lines = journal.read_text().splitlines() if journal.exists() else []
service = ServiceClient()
if lines:
    name, holder = json.loads(lines[0])["run"], service.holder
    info = holder.run_coroutine_threadsafe(fetch_training_info(holder, name)).result()
    client = TrainingClient(holder, 0, name, info=info)
else:
    client = service.create_lora_training_client(WORLD["model"], rank=4, seed=SEED).result()
with journal.open("a") as file:

    def note(**line: Any) -> None:
        file.write(json.dumps(line) + "\n")
        file.flush()

    if not lines:
        note(run=client.model_id)
    for step in range(WORLD["steps"]):
        numbers = batch_of(step)
        losses = client.forward_backward([datum_of(one) for one in numbers], "cross_entropy")
        update = client.optim_step(types.AdamParams(learning_rate=LR))
        note(step=step + 1, rows=numbers, loss=losses.result().metrics["loss:sum"])
        update.result()
os._exit(0)
