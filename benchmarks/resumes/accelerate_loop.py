"""A loop of its own with accelerate, saved and resumed as
https://github.com/huggingface/accelerate/blob/main/examples/by_feature/checkpointing.py does:
`save_state("step_N")`, `load_state`, `skip_first_batches`.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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
accelerator = Accelerator(cpu=True)
set_seed(SEED)
network = model()
optimizer = torch.optim.AdamW(network.parameters(), lr=LR)
loader = DataLoader(dataset(), shuffle=True, batch_size=BATCH)
network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
overall_step, starting_epoch, resume_step = 0, 0, 0
if is_resumed:
    saved = max(folder.glob("step_*"), key=lambda path: int(path.name[5:]))
    accelerator.load_state(str(saved))
    resume_step = int(saved.name[5:])
    starting_epoch = resume_step // len(loader)
    overall_step = resume_step
    resume_step -= starting_epoch * len(loader)
network.train()
for epoch in range(starting_epoch, STEPS):
    active = loader
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    if is_resumed and epoch == starting_epoch and resume_step:
        active = accelerator.skip_first_batches(loader, resume_step)
    for batch in active:
        loss = network(**batch).loss
        record.begin(overall_step + 1, row_numbers(batch["input_ids"]), loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        overall_step += 1
        if overall_step % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"step_{overall_step}"))
        if overall_step == STEPS:
            break
    if overall_step == STEPS:
        break
record.finish()
