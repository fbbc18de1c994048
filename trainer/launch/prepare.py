"""Chosen -> PreparedRun: loads the task, encodes the rows, and finds the state to resume from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.config.auto import CHUNKS, chunk_tokens
from trainer.config.identity import digest
from trainer.data import left_out
from trainer.data.content import Content, content_of, shared_test_rows, valid_splits
from trainer.data.encoding import processes_beside
from trainer.data.epochs import Epochs
from trainer.data.order import sizes_of
from trainer.data.stream.row_index import open_index
from trainer.data.stream.store import StreamStore, is_streamed
from trainer.data.token_store import TokenStore, store_of
from trainer.evaluation.run import TEST
from trainer.judging.end_of_run import check_early
from trainer.launch import preflight
from trainer.launch.origin import going_on
from trainer.launch.run_folder import check_hub, check_identity
from trainer.plan.memory.advice import RECOMPUTED
from trainer.plan.memory.measure import switched, with_value
from trainer.plan.memory.planned_rows import RowsByNumber, Specimens, StoredRows
from trainer.plan.memory.subject import Subject
from trainer.runtime import distributed, rng
from trainer.runtime.distributed import on_main
from trainer.statistics.ledger import refuse_lost_labels
from trainer.statistics.met_rows import MetRows
from trainer.statistics.opening import opening_lines
from trainer.survival import mirror
from trainer.training import checkpoint
from trainer.training.run_plan import say_steps
from trainer.training.scoring import first_questions
from trainer.training.session import ValidSet

if TYPE_CHECKING:
    from trainer.devices import Device
    from trainer.launch.choose import Chosen
    from trainer.metrics.own import OwnMetric
    from trainer.protocol.task import Places, Row, Task
    from trainer.training.checkpoint import SavedState
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """A run whose rows are encoded. No weight is loaded yet."""

    plan: RunPlan
    task: Task
    stores: dict[str, TokenStore]  # by split: train, valid, valid_NAME
    places: Places
    questions: Sequence[Row] = ()  # validation rows that each evaluation answers by generation
    set_questions: Mapping[str, Sequence[Row]] = field(  # the same of valid_NAME
        default_factory=dict[str, Sequence["Row"]]
    )
    own_metrics: Sequence[OwnMetric] = ()  # on rank 0
    identity: Mapping[str, str] = field(default_factory=dict[str, str])  # digests: base, splits
    newest: SavedState | None = None  # the state to resume from

    @property
    def zero_stage(self) -> int:
        return self.plan.ds["zero_optimization"]["stage"]

    def subject(self) -> Subject:
        """This run as the planners of memory and time need it."""
        plan = self.plan
        train = self.stores.get("train")  # of a stream or a client, each row may fill its limits
        if train is None or isinstance(train, StreamStore):
            rows: RowsByNumber = Specimens(self.task)
        else:
            rows = StoredRows(train, self.task, "train")
        values = with_value(plan.values, RECOMPUTED, plan.cfg.train.gradient_checkpointing)
        tokens = chunk_tokens(plan.cfg)
        if tokens is not None:
            values = with_value(values, CHUNKS, tokens)
        subject = Subject(
            values,
            plan.cfg,
            plan.ds,
            plan.sharding,
            self.task,
            self.places,
            rows,
            self.longest_valid(),
            bool(self.questions),
        )
        return subject if distributed.is_gpu() else subject.of_processor()

    def valid_sets(self) -> dict[str, ValidSet]:
        """What evaluations score besides the valid split, by "valid_NAME"."""
        return {
            name: ValidSet(self.stores[name], questions)
            for name, questions in self.set_questions.items()
        }

    def longest_valid(self) -> RowsByNumber:
        """The rows of the validation set with the longest row: they need the most memory."""
        splits = [split for split in self.stores if split != "train"]
        if not splits:
            return Specimens(self.task)
        longest = max(splits, key=lambda split: int(self.stores[split].lengths.max()))
        return StoredRows(self.stores[longest], self.task, longest)

    def key(self, target: Device) -> str:
        """A digest of everything that a memory plan for this device depends on."""
        plan, train = self.plan, self.plan.cfg.train
        digests = {split: store.digest for split, store in self.stores.items()}
        versions = {"torch": version("torch"), "transformers": version("transformers")}
        shards = [plan.sharding.world, plan.sharding.micro_batch, bool(self.questions)]
        shards += [train.frozen, train.gradient_checkpointing, chunk_tokens(plan.cfg)]
        if train.activation_offload:
            shards.append(distributed.is_gpu())  # a processor has nowhere to put inputs of blocks
        kernels = "fakegpu" if distributed.is_gpu() else "cpu"
        return digest(
            {"values": plan.values, "ds": plan.ds, "shards": shards, "device": target.name}
            | {"kernels": kernels, **switched(kernels)}
            | digests
            | versions
        )


def prepare(chosen: Chosen, options: Options, lap: Callable[[str], None]) -> PreparedRun:
    """Load the task, encode the rows once, and find the state to resume from. Every check that
    needs no weights is made here. A collective.

    lap: called with the name of each part of the start when it ends.
    """
    plan, cfg = chosen.plan, chosen.plan.cfg
    lap("imports")
    if options.push_to_hub:
        on_main(check_hub)
    rng.seed_everything(cfg.train.seed, distributed.rank())
    task = tasks.load(cfg, options.places)
    on_main(lambda: preflight.refuse_early(plan, options, task))
    count = cfg.train.answers or options.extra_evals
    questions = {split: first_questions(task, count, split) for split in valid_splits(cfg)}

    def content(split: str) -> Content:
        if split in chosen.content:
            return chosen.content[split]
        name, count = on_main(lambda: list(content_of(task, split, options.cache_dir)))
        return str(name), int(count)

    stores = open_stores(task, options, content)
    newest = newest_state(plan, options)
    identity = check_identity(plan, task, stores, newest, places=options.places)
    begin_stream(stores["train"], plan, newest, num_proc=options.num_proc)
    distributed.wait_for_all()
    distributed.make_side_group()  # early: while it is made, the death of a rank is noticed late
    distributed.make_neighbours(plan.sharding.sharing)
    lap("rows")
    if not is_streamed(task):
        say_steps(plan, sizes_of(stores["train"], task))
    for split in ("train", *valid_splits(cfg)):
        for line in opening_lines(split, stores[split]):
            logger.info("%s", line)
    on_main(lambda: _judge_rows(task, stores, plan, options))
    if cfg.judge is not None:
        check_early(plan, options, task, stores["train"])
    metrics = preflight.own_metrics(plan, options, task)
    own = questions.pop("valid"), questions, metrics
    return PreparedRun(plan, task, stores, options.places, *own, identity, newest)


def _judge_rows(task: Task, stores: dict[str, TokenStore], plan: RunPlan, options: Options) -> None:
    if isinstance(stores["train"], StreamStore):
        return judge_stream(task, stores["train"], stores["valid"], plan, options)
    preflight.refuse_rows(task, stores, most_lost=plan.cfg.train.max_lost_labels)
    notes = shared_test_rows(task, stores["train"], options.cache_dir)
    left_out.gather("test in train", notes)
    left_out.settle(plan.folder, strict=options.strict)


def judge_stream(
    task: Task, train: StreamStore, valid: TokenStore, plan: RunPlan, options: Options
) -> None:
    """Look at the rows that are encoded first, and have the others looked at when training meets
    them.
    """
    most = plan.cfg.train.max_lost_labels
    refuse_lost_labels(valid, most=most)
    train.check_reader()
    preflight.refuse_unlabelled(task, train.first_rows(preflight.FIRST_ROWS))
    left_out.settle(plan.folder, strict=options.strict)
    notes = left_out.gathered()
    train.judge(MetRows(plan.folder, valid, notes, most, options.strict, len(train)))


def begin_stream(
    train: TokenStore, plan: RunPlan, newest: SavedState | None, *, num_proc: int | None
) -> None:
    """Start to encode the rows of a stream, from the bucket of the next step on. The rows of any
    other store are there.
    """
    if not isinstance(train, StreamStore):
        return
    step = 0 if newest is None else newest.state()["progress"]["step"]
    seed = plan.cfg.train.seed if plan.cfg.train.order == "shuffled" else None
    epochs = plan.sharding.epochs(len(train), seed)
    assert isinstance(epochs, Epochs), "a mix is not streamed"
    bucket = (step - epochs.span(step).start) % plan.sharding.bucket_steps
    processes = num_proc or processes_beside(distributed.local_world())
    train.begin(
        seed=seed, epoch=epochs.epoch(step), place=epochs.place(step - bucket), processes=processes
    )


def is_in_memory(plan: RunPlan, options: Options) -> bool:
    """Whether ranks of `--survive` hold a newer state of the run than its folder."""
    return mirror.newest(options.memory, plan.id) is not None


def newest_state(plan: RunPlan, options: Options) -> SavedState | None:
    """The state that ranks keep in memory, else the newest good checkpoint, else the saved step of
    the run that this one goes on with. A collective.
    """
    in_memory = mirror.newest(options.memory, plan.id)
    if in_memory is not None:
        return in_memory
    folder = checkpoint.resume_point(plan.checkpoints)
    if folder is not None:
        return checkpoint.Checkpoint(folder)
    return going_on.saved_state(plan, options.savedir_base)


def open_stores(
    task: Task, options: Options, content: Callable[[str], Content]
) -> dict[str, TokenStore]:
    """Open the token store of each split, and encode its rows first if they are not encoded yet.
    The smaller split comes first, so that its errors come before the other one is read. With
    data.stream the training rows are only counted.

    content: gives (digest of the rows, number of rows) of a split.
    """
    stores: dict[str, TokenStore] = {}
    # what is scored at the end is read now, so that its errors do not come behind the last step
    is_judged_by_test = task.cfg.judge is not None and task.cfg.judge.split == TEST
    scored_last = [TEST] if options.test or is_judged_by_test else []
    for split in (*valid_splits(task.cfg), *scored_last, "train"):
        if split == "train" and is_streamed(task):
            index = open_index(task, options.cache_dir)
            stores[split] = StreamStore(task, index, options.cache_dir)
            continue
        how: dict[str, Any] = {"num_proc": options.num_proc, "content": content(split)}
        stores[split] = store_of(task, split, options.cache_dir, **how)
    stores.pop(TEST, None)
    return stores
