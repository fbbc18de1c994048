"""The same small fine-tuning by our loop, by a bare torch loop and by the Hugging Face Trainer, one
step at a turn.

Every contestant calls `between()` after each optimizer step, once the step's work is done. The time
from the return of one call to the next call is a whole step as a run pays it, with fetching the
batch and all Python in between; what happens inside the call (the other contestants' turns) is on
nobody's clock.
"""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer import tasks
from trainer.config import deepspeed_config
from trainer.data.epochs import Epochs
from trainer.data.order import Sharding
from trainer.data.token_store import TokenStore, store_of
from trainer.protocol.task import Places
from trainer.runtime import distributed, rng
from trainer.runtime.preemption import Preemption
from trainer.telemetry.meter import Meter
from trainer.telemetry.run_record import METRICS, RunRecord
from trainer.training.engine import Engine
from trainer.training.loop import fit
from trainer.training.session import Cadence, Progress, Session

Between = Callable[[], None]

TOKENS = 64  # per row; every row is full, so that nobody gains by skipping pads
VOCABULARY = 4096
CHECKED = 3  # first steps, whose losses must agree; they are not timed
LR, DECAY, CLIP, SEED = 1e-3, 1e-2, 1.0, 5  # lr and decay are the defaults of torch.optim.AdamW
CONFIG = {
    "model_type": "gpt_bigcode",
    "vocab_size": VOCABULARY,
    "n_positions": 128,
    "n_embd": 512,
    "n_layer": 10,
    "n_head": 8,
    "n_inner": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


@dataclass(frozen=True)
class Work:
    """What every contestant does: `steps` steps of `batch` rows, after the CHECKED ones."""

    folder: Path
    batch: int
    steps: int
    clock: str = "wall"  # or "cpu": what the process used, whatever else the machine does meanwhile

    def now(self) -> float:
        """Seconds on the clock, when everything asked of the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() if self.clock == "wall" else time.process_time()

    @property
    def total(self) -> int:
        return CHECKED + self.steps

    def experiment(self, stage: int, steps: int) -> dict[str, Any]:
        return {
            "task": "causal_lm",
            "base": {"config": CONFIG, "seed": 1},
            "tokenizer": str(self.folder / "tokenizer"),
            "train": {
                "steps": steps,
                "global_batch": self.batch,
                "micro_batch": self.batch,
                "precision": "fp32",
                "seed": SEED,
            },
            "optim": {"lr": LR, "weight_decay": DECAY, "clip": CLIP},
            "schedule": {"shape": "constant"},
            "data": {"source": "jsonl", "max_tokens": TOKENS},
            "deepspeed": f"zero{stage}",
        }

    @cached_property
    def task(self) -> Any:
        places = Places(self.folder, self.folder / "cache", self.folder / "results")
        return tasks.load(tasks.parse(self.experiment(0, self.total)), places)

    def store(self, split: str) -> TokenStore:
        return store_of(self.task, split, self.folder / "cache")

    def rows_BT(self) -> list[Tensor]:
        """The (batch, TOKENS) ids of every step, those that our loop trains on."""
        store = self.store("train")
        epochs = Epochs(len(store), self.batch, SEED)
        order = [epochs.rows(step) for step in range(self.total)]
        return [
            torch.stack([torch.from_numpy(store[int(row)]["ids"]).long() for row in rows])
            for rows in order
        ]

    def network(self) -> nn.Module:
        """The stock transformers model, with the same random weights at every call."""
        return self.task.model().base.to(distributed.device())


def write_data(work: Work) -> None:
    """Random texts of TOKENS - 1 words (the end of a text is the last token), and a tokenizer of
    one id a word.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(VOCABULARY - 2)]
    vocabulary = {word: number for number, word in enumerate(["<|endoftext|>", "<|pad|>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        pad_token="<|pad|>",
    ).save_pretrained(work.folder / "tokenizer")
    draw = random.Random(SEED)
    for split, count in (("train", work.batch * work.total), ("valid", work.batch)):
        texts = [" ".join(draw.choices(words, k=TOKENS - 1)) for _ in range(count)]
        (work.folder / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )


# Ours
# --------------------------------------------------------------------------------------------------


class TurnTaking(Meter):
    """The meter of a run, whose `add` (called by `fit` once a step) also lets the others have their
    turn.
    """

    def __init__(self, between: Between) -> None:
        super().__init__()
        self._between = between

    def add(self, units: int) -> None:
        super().add(units)
        self._between()


def lathe(work: Work, stage: int, between: Between) -> list[float]:
    """Train by trainer.training.loop.fit, prefetching thread and records included. Returns the
    CHECKED first losses, as logged.

    The process group must be there already (`distributed.init`).
    """
    rng.seed_everything(SEED, distributed.rank())
    cfg = tasks.parse(work.experiment(stage, CHECKED))
    preset = deepspeed_config.read(cfg.deepspeed)
    complete = deepspeed_config.build(
        preset, train=cfg.train, optim=cfg.optim, world=1, source=cfg.deepspeed
    )
    live = Engine(work.task.model(), deepspeed_config.for_engine(complete), cfg.optim)
    run, progress = (
        RunRecord(work.folder / f"run-{socket.gethostname()}-{id(live)}", total=work.total),
        Progress(),
    )
    preemption = Preemption()
    session = Session(
        cfg=cfg,
        task=work.task,
        engine=live,
        train=work.store("train"),
        valid=work.store("valid"),
        sharding=Sharding(work.batch, work.batch, 1, 0),
        cadence=Cadence(log=1, evaluate=work.total, save=work.total),
        record=run,
        meter=Meter(),
        preemption=preemption,
        save=lambda progress: None,
        export_best=lambda: None,
    )
    fit(session, progress)
    seldom = Cadence(log=1000, evaluate=1000, save=1000)  # the default of trainval.py --log_every
    cfg = tasks.parse(work.experiment(stage, work.total))
    fit(dataclasses.replace(session, cfg=cfg, cadence=seldom, meter=TurnTaking(between)), progress)
    preemption.close()
    run.close()
    live.destroy()
    lines = [json.loads(line) for line in (run.folder / METRICS).read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line][:CHECKED]


# Bare torch
# --------------------------------------------------------------------------------------------------


class BareTorch:
    """The loop that anybody writes: forward, mean cross-entropy, backward, clip, AdamW, zero_grad.
    No padding mask.
    """

    def __init__(self, work: Work, **adamw: Any) -> None:
        """adamw: arguments of torch.optim.AdamW, on all parameters at once."""
        self._model = work.network().train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **adamw)
        self._batches = iter(work.rows_BT())

    def step(self) -> Tensor:
        """One step on the next batch; its loss, still on the device."""
        ids_BT = next(self._batches).to(distributed.device())
        logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


# Hugging Face
# --------------------------------------------------------------------------------------------------


def hugging_face(work: Work, stage: int, between: Between) -> list[float]:
    """Train by transformers.Trainer with our DeepSpeed file of `stage`. Returns the CHECKED first
    losses.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set. This file's import of
    trainer.training.engine has kept deepspeed from compiling an operator at every start (31 s).
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[Tensor] = []

    class Watched(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            if len(losses) < CHECKED:
                losses.append(loss)
            return loss

    class TakeTurns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > CHECKED:
                between()

    arguments = TrainingArguments(
        output_dir=str(work.folder / "hugging_face"),
        max_steps=work.total,
        per_device_train_batch_size=work.batch,
        learning_rate=LR,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        deepspeed=str(deepspeed_config.PRESETS / f"zero{stage}.json"),
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=SEED,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": ids_T, "labels": ids_T} for ids_BT in work.rows_BT() for ids_T in ids_BT]
    Watched(
        model=cast(Any, work.network()),
        args=arguments,
        train_dataset=cast(Any, rows),
        callbacks=[TakeTurns()],
    ).train()
    return [float(loss) for loss in losses]
