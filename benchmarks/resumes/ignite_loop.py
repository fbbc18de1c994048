"""pytorch-ignite: a DeterministicEngine with a Checkpoint handler, resumed by
`Checkpoint.load_objects` (https://docs.pytorch.org/ignite/engine.html, "Deterministic training").
"""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import DeterministicEngine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed
from torch.utils.data import DataLoader
from workload import (
    BATCH,
    LR,
    SAVE_EVERY,
    SEED,
    STEPS,
    arguments,
    dataset,
    model,
    row_numbers,
)

folder, is_resumed, record = arguments()
manual_seed(SEED)
network = model()
network.train()
optimizer = torch.optim.AdamW(network.parameters(), lr=LR)
loader = DataLoader(dataset(), shuffle=True, batch_size=BATCH)


def step(engine: Any, batch: Any) -> float:
    optimizer.zero_grad()
    loss = network(**batch).loss
    record.begin(engine.state.iteration, row_numbers(batch["input_ids"]), loss.item())
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = DeterministicEngine(step)
parts = {"model": network, "optimizer": optimizer, "trainer": trainer}
saves = Checkpoint(parts, DiskSaver(str(folder / "out"), require_empty=False), n_saved=None)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=SAVE_EVERY), saves)
trainer.add_event_handler(Events.ITERATION_COMPLETED(once=STEPS), lambda engine: engine.terminate())
if is_resumed:
    files = (folder / "out").glob("checkpoint_*.pt")
    newest = max(files, key=lambda path: int(path.stem.rpartition("_")[2]))
    Checkpoint.load_objects(parts, torch.load(newest, weights_only=False))
trainer.run(loader, max_epochs=3)
record.finish()
