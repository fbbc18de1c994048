"""The blocks that every experiment dictionary has. Imports no torch."""

from __future__ import annotations

import fractions
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from trainer.config.block import Fraction, Positive, Strict
from trainer.config.optimizer.freeze import Freeze
from trainer.config.optimizer.lora import Lora
from trainer.config.optimizer.optim import Optim
from trainer.config.optimizer.schedule import Schedule
from trainer.config.origin.continues import Continues
from trainer.config.scores.direction import Direction
from trainer.config.scores.judged import Judging
from trainer.config.scores.stated import Best, BestIs, OwnMetrics
from trainer.config.synonyms import SYNONYMS

Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch takes


def _rows_or_auto(value: Any) -> Any:
    if value == 0:
        raise ValueError('Input should be greater than 0, or "auto"')
    return 0 if value == "auto" else value


# 0 stands for "auto": the largest that fits, by the memory plan, which a launched run puts in its
# place.
_ROWS_OR_AUTO = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": "auto"}]}
MicroBatch = Annotated[
    int, BeforeValidator(_rows_or_auto), Field(ge=0), WithJsonSchema(_ROWS_OR_AUTO)
]


def _recomputation(value: Any) -> Any:
    if isinstance(value, bool) or value == "auto" or (isinstance(value, int) and value > 0):
        return value
    raise ValueError('Input should be true, false, "auto" or an integer above 0')


_RECOMPUTATION = {"anyOf": [{"type": "boolean"}, {"const": "auto"}, _ROWS_OR_AUTO["anyOf"][0]]}
Recomputation = Annotated[
    bool | int | Literal["auto"],
    PlainValidator(_recomputation),
    WithJsonSchema(_RECOMPUTATION),
]


def _steps(value: Any) -> Any:
    if value == 0:
        raise ValueError("Input should be greater than 0")
    return 0 if value is None else value


# 0 stands for the steps that train.epochs are, which a run puts in its place once rows are counted.
_STEPS = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]}
Steps = Annotated[int, BeforeValidator(_steps), Field(ge=0), WithJsonSchema(_STEPS)]


def _every(value: Any) -> Any:
    if isinstance(value, str) and (match := _EPOCHS.fullmatch(value)) and float(match[1]):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError('Input should be an integer above 0, or a text such as "0.5 epoch"')


_EPOCHS = re.compile(r"([0-9]+(?:\.[0-9]+)?) epochs?")
_STEPS_OR_EPOCHS = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": f"^{_EPOCHS.pattern}$"},
    ]
}
Every = Annotated[int | str, PlainValidator(_every), WithJsonSchema(_STEPS_OR_EPOCHS)]


def steps_between(every: int | str, epoch_steps: fractions.Fraction) -> fractions.Fraction:
    """The steps that stand for `every`: a number of steps, or of epochs of so many steps each."""
    if isinstance(every, int):
        return fractions.Fraction(every)
    match = _EPOCHS.fullmatch(every)
    assert match is not None, "the schema has looked"
    return fractions.Fraction(match[1]) * epoch_steps


class Train(Strict):
    """What one run does. `global_batch` defines it; the world size changes only accumulation."""

    steps: Steps = Field(0, json_schema_extra={"default": None})
    """Optimizer steps of the whole run; None: those of `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """How often each row is trained on; `steps` follows from it and the rows. The step in which an
    epoch ends is filled with rows of the next one. With `steps`, rows that fill no step of an epoch
    are left out of it.
    """
    global_batch: Positive
    """Rows per optimizer step, over all devices."""
    micro_batch: MicroBatch
    """Rows per device and forward; with micro_tokens: at most."""
    micro_tokens: Positive | None = None
    """Tokens, pads included, per device and forward; a longer row goes alone."""
    bucket_steps: Positive = 1
    """Rows of so many steps are sorted by length and cut into steps of like rows."""
    eval_batch: Positive | None = None
    """Rows per device and forward in evaluation; None: micro_batch."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of weights and activations; optimizers keep fp32 masters beside bf16 and fp16."""
    base_bits: Literal[4, 8, "fp8"] | None = None
    """Of a frozen base's linear layers: 8 (rows of int8), 4 (NF4, as QLoRA) or "fp8" (e4m3, whose
    forward products are in FP8, too: a GPU of sm89 or later, precision bf16, and an error of some
    4% of a product); None: as `precision` says. Not at ZeRO-3.
    """
    gradient_checkpointing: Recomputation = False
    """Compute blocks again in the backward pass: less memory, a third more time. k: every k-th
    block. auto: none where the memory plan says that it fits, else every k-th of the largest k
    that does; the choice is the run's from its first step on.
    """
    activation_offload: bool = False
    """With gradient_checkpointing: the inputs of blocks that are computed again wait in pinned host
    memory for the backward pass. The same bits. On a processor it changes nothing.
    """
    compile: bool = False
    """Blocks are compiled once for all lengths (torch.compile): fewer kernels, other rounding and
    dropout. Not at ZeRO-3.
    """
    frozen: Literal["shard", "replicate", "auto"] = "shard"
    """Frozen weights at ZeRO-3. shard: divided among ranks, gathered for every micro-batch.
    replicate: gathered once, and kept whole. auto: whole where the memory plan says that they fit.
    """
    freeze: tuple[Freeze, ...] = ()
    """Weights that stand still, by name, in all steps or in some of them."""
    seed: Seed = 42
    """Of weights that are drawn, dropout and the order of rows."""
    order: Literal["shuffled", "as_given"] = "shuffled"
    """Of the rows. shuffled: anew in every epoch; as_given: as the task gives them."""
    log_every: Every | None = None
    """Steps between two log lines, or "0.5 epoch"; None: the flag --log_every, else a hundred lines
    a run.
    """
    eval_every: Every | None = None
    """Steps between two evaluations, or "0.5 epoch"; None: the flag --log_every, else 1000."""
    save_every: Every | None = None
    """Steps between two checkpoints, or "0.5 epoch"; None: the flag --log_every, else 1000."""
    answers: Positive | Literal["all"] | None = None
    """Validation rows that evaluations answer by generation; None: the flag --do_extra_evals."""
    keep_last: Positive = 2
    """Checkpoints that are kept; the best one is kept besides."""
    best: Best = "valid/loss"
    """The metric that chooses best/. A list: the first one, and where it is equal the next. Of a
    set in data.valid_sets: "valid_NAME/loss".
    """
    best_is: BestIs = None
    """Whether the lowest or the highest value of `best` is the best, of several by name:
    {"valid/em": "max"}. None: as its name says, the lowest of a loss, the highest of a recall. A
    metric whose name does not say it is asked for it.
    """
    hours: Annotated[float, Field(gt=0)] | None = None
    """The longest that the run may take, all its starts together; it ends before that, evaluated,
    saved and exported; scores of the test split (--test) come after. None: it trains all of its
    steps.
    """
    patience: Positive | None = None
    """Evaluations in a row without a better `best` after which the run ends; None: it trains all of
    its steps.
    """
    max_lost_labels: Fraction = 0.05
    """Share of a split's label tokens that limits may cut off; more is refused."""
    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    """What a loss or gradient that is not finite does, or a spike (spike_z). skip: that update is
    left out. rollback: back to the last checkpoint, and that window is left out.
    """
    bad_steps_allowed: Positive = 10
    """So many bad steps may be left out among the last bad_steps_among; one more stops the run."""
    bad_steps_among: Positive = 1000
    """The steps among which bad ones are counted."""
    spike_z: Annotated[float, Field(gt=0)] | None = None
    """A loss so many robust deviations above the median of the window is a spike; None: none is."""
    spike_window: Annotated[int, Field(ge=8)] = 100
    """Losses of good steps that a spike is told by; before there are so many, none is."""
    label_smoothing: Fraction = 0.0
    """In training, this share of a token's loss is the mean loss over the vocabulary, as torch's
    cross_entropy defines it. The validation loss has none.
    """
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """In training, so often the square of log Z is added to a token's loss; Z is the sum of the
    exponentials of its logits (PaLM: 1e-4). The validation loss has none.
    """
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """NEFTune: in training, noise between -s and s on the embeddings of what is read; s = alpha /
    sqrt(tokens of the row x width). None: no noise.
    """
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluations, best/ and final/ take an exponential moving average of the weights, in which the
    past keeps this share at every step; 0.999 looks back a thousand steps. None: the weights
    themselves.
    """

    @property
    def recompute_every(self) -> int | None:
        """Every so many blocks are computed again in backward; None: none, or not yet chosen."""
        how = self.gradient_checkpointing
        return int(how) or None if how != "auto" else None

    @model_validator(mode="after")
    def _limits_of_bad_steps_fit_what_is_done(self) -> Train:
        fields_set = self.model_fields_set
        counted = [key for key in ("bad_steps_allowed", "bad_steps_among") if key in fields_set]
        if self.on_bad_step == "stop" and counted:
            raise ValueError(
                f'{", ".join(counted)} with on_bad_step="stop", which stops at the first: leave '
                'it out, or on_bad_step="skip" or "rollback"'
            )
        if self.spike_z is None and "spike_window" in fields_set:
            raise ValueError("spike_window without spike_z: leave it out, or give spike_z, say 10")
        if self.spike_z is not None and 0 < self.steps <= self.spike_window:
            raise ValueError(
                f"spike_window={self.spike_window} with steps={self.steps}: no step would be "
                "judged. Give a spike_window below steps, or leave spike_z out"
            )
        return self

    @property
    def best_metrics(self) -> list[str]:
        """The metrics that choose best/: the first one decides, each other one breaks a tie."""
        return [self.best] if isinstance(self.best, str) else list(self.best or ())

    def stated_direction(self, metric: str) -> Direction | None:
        """What best_is says of a metric of `best`."""
        return self.best_is.get(metric) if isinstance(self.best_is, dict) else self.best_is

    @model_validator(mode="after")
    def _best_is_of_best(self) -> Train:
        metrics = self.best_metrics
        if isinstance(self.best_is, str) and len(metrics) > 1:
            raise ValueError(
                f'best_is="{self.best_is}" with {len(metrics)} metrics: say it by name, such as '
                f'{{"{metrics[0]}": "{self.best_is}"}}'
            )
        if isinstance(self.best_is, dict):
            strange = sorted(set(self.best_is) - set(metrics))
            if strange:
                raise ValueError(
                    f"best_is: {', '.join(map(repr, strange))} is not in best="
                    f"{self.best!r}. Use the names that stand there"
                )
        return self

    @model_validator(mode="after")
    def _patience_has_a_metric(self) -> Train:
        if self.patience is not None and self.best is None:
            raise ValueError(
                f"patience={self.patience} with best=None: no evaluation would be better or worse. "
                "Leave patience out, or name a metric as best"
            )
        return self

    @model_validator(mode="after")
    def _what_is_frozen_is_so_in_some_step(self) -> Train:
        late = [one for one in self.freeze if 0 < self.steps <= one.since]
        if late:
            raise ValueError(
                f'freeze: "{late[0].match}" has since={late[0].since} with steps={self.steps}: it '
                "would never stand still. Give a since below steps"
            )
        return self

    @model_validator(mode="after")
    def _has_an_end(self) -> Train:
        if not self.steps and self.epochs is None:
            raise ValueError("steps is missing: give it, or epochs")
        return self

    @model_validator(mode="after")
    def _a_given_order_is_kept(self) -> Train:
        if self.order == "as_given" and self.bucket_steps > 1:
            raise ValueError(
                f'bucket_steps={self.bucket_steps} reorders rows: leave it out, or order="as_given"'
            )
        return self


class RandomBase(Strict):
    """A base model with random weights: a transformers config as a dictionary (`model_type` names
    the family).
    """

    config: dict[str, Any]
    """What transformers writes into a model's config.json; `model_type` is needed."""
    seed: Seed = 0
    """Of the weights that are drawn."""


class Adapted(Strict):
    """A decoder-only model (gemma3_text) as both halves of an encoder-decoder, a T5Gemma 2."""

    window: Positive | None = None
    """Tokens that a windowed layer sees: an encoder's on both sides together. None: as many as in
    the decoder-only model.
    """


class ExperimentBase(Strict):
    """A base model trained by another experiment of the same --savedir_base."""

    experiment: dict[str, Any]
    """The whole dictionary of that experiment."""
    model: Annotated[str, Field(pattern=r"^(final|best|step-[1-9]\d*)$")] = "final"
    """Which of its models: "final", that of its last step, or "best", of its best evaluation, once
    it has finished; "step-N", a saved step that the service has made a model of.
    """
    adapted: Adapted | None = None
    """Makes an encoder-decoder of it, which both halves begin with. None: the model as it is."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Of its weights, as behind "#sha256=" of a folder; of adapters, of adapter_model.safetensors.
    None: a run says which it began with in its data.json, and is resumed with those alone.
    """


def _kind_of_base(value: Any) -> str:
    if isinstance(value, dict):
        return "<experiment>" if "experiment" in value else "<random>"
    return {"RandomBase": "<random>", "ExperimentBase": "<experiment>"}.get(
        type(value).__name__, "<name>"
    )


# A name is a Hub id, a folder, or "package:NAME/FOLDER", perhaps with "#sha256=" (docs/bases.md).
# The tags pick one kind, so that a mistake is reported for that kind alone.
Base = Annotated[
    Annotated[str, Tag("<name>")]
    | Annotated[RandomBase, Tag("<random>")]
    | Annotated[ExperimentBase, Tag("<experiment>")],
    Discriminator(_kind_of_base),
]


class EmbeddedTokenizer(Strict):
    """A byte-level BPE trained once on a corpus that needs no data."""

    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Ids in all, special tokens included."""
    corpus: Literal["stdlib_docs", "lookup"] = "stdlib_docs"
    """What it is trained on. lookup: the made-up corpus, whose names are then few tokens."""


Tokenizer = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[EmbeddedTokenizer, Tag("<embedded>")],
    Discriminator(
        lambda value: "<embedded>" if isinstance(value, (dict, EmbeddedTokenizer)) else "<name>"
    ),
]


class Experiment(Strict):
    """What every experiment states. A task's own Config derives from it and adds its blocks."""

    synonyms = SYNONYMS
    encoded = frozenset({"task", "base", "tokenizer"})  # the base may bring the tokenizer
    not_encoded = frozenset(
        {"label", "train", "optim", "schedule", "lora", "continues", "init_from", "deepspeed"}
        | {"metrics", "judge"}
    )
    # Whether the loss is over the tokens of a vocabulary, so that it may be smoothed.
    scores_vocabulary: ClassVar[bool] = False

    task: str
    """What is trained: the name of a folder in trainer/tasks/."""
    label: str | None = None
    """Tells experiments apart that are otherwise equal, and so have other ids; trains nothing."""
    base: Base
    """A Hub id, a folder, a package's folder, {"config": ...} or {"experiment": ...}:
    docs/bases.md.
    """
    tokenizer: Tokenizer | None = None
    """A folder (also below --data_path) or a Hub id; None: the base's."""
    train: Train
    """The run: steps, batch, precision, what is saved."""
    optim: Optim
    """The optimizer."""
    schedule: Schedule = Schedule()
    """The learning rate over the run."""
    lora: Lora | None = None
    """Low-rank adapters; None: the weights train that the task says."""
    init_from: str | None = None
    """A folder of a whole model, of any task: the weights whose names and shapes fit are taken over
    those of the base; in cross_attention a folder of added layers. None: the base as it is.
    """
    continues: Continues | None = None
    """The run that this one goes on with, as `lathe train --continue ID --steps N` writes it:
    docs/experiments.md. None: it begins anew.
    """
    metrics: OwnMetrics = None
    """Metrics of your own, a function in a Python file, "mine.py:style", or a list of them: of
    (predictions, references, rows) of the rows that train.answers says, it gives numbers by name,
    which are logged as "valid/style/...". Only of tasks that answer.
    """
    judge: Judging | None = None
    """At the end of the run: whether the model is better than another one, what broke, and whether
    it may become final/: docs/judging.md. None: nobody asks.
    """
    deepspeed: str = "zero2"
    """ZeRO and the rest: ds_configs/<name>.json, or a path. The flag --deepspeed overrides it and
    never changes the id.
    """

    @model_validator(mode="after")
    def _only_a_frozen_base_is_quantized(self) -> Experiment:
        if self.train.base_bits is not None and not self.freezes_base:
            raise ValueError(
                f"train.base_bits={self.train.base_bits}: the weights of the base train, and need "
                'all their bits. Freeze it by "lora": {}, or leave base_bits out'
            )
        change = self.lora and self.lora.weights_of_base
        if self.train.base_bits is not None and change:
            raise ValueError(
                f"train.base_bits={self.train.base_bits} with lora.{change}, which changes weights "
                "of the base: they need all their bits. Leave one of the two out"
            )
        if self.train.base_bits == "fp8" and self.train.precision != "bf16":
            raise ValueError(
                f'train.base_bits="fp8" with train.precision="{self.train.precision}": products in '
                'FP8 come out in bf16. Use precision "bf16", or base_bits 8 or 4'
            )
        return self

    @model_validator(mode="after")
    def _vocabulary_is_scored(self) -> Experiment:
        keys = ("label_smoothing", "z_loss", "neftune_alpha")
        usual = Train.model_fields
        foreign = [key for key in keys if getattr(self.train, key) != usual[key].default]
        if foreign and not self.scores_vocabulary:
            raise ValueError(
                f"train.{', train.'.join(foreign)}: the loss of task {self.task!r} is over no "
                f"vocabulary. Leave {'it' if len(foreign) == 1 else 'them'} out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_taken_over_trains(self) -> Experiment:
        if self.init_from is not None and self.lora is not None and not self.inserts_layers:
            raise ValueError(
                f"init_from={self.init_from!r} with lora: adapters would belong to a base that no "
                'folder holds. Make that folder the base: "base": the folder'
            )
        return self

    @property
    def inserts_layers(self) -> bool:
        """Whether init_from names layers that are inserted into the base, not its weights."""
        return False

    @property
    def own_metrics(self) -> list[str]:
        """The functions that `metrics` names."""
        return [self.metrics] if isinstance(self.metrics, str) else list(self.metrics or ())

    @property
    def is_driven(self) -> bool:
        """Whether a client sends the operations of the run, in place of rows in files."""
        return False

    @property
    def unshared(self) -> str | None:
        """Why neighbouring ranks cannot share the tokens of a row; None: nothing in the dictionary
        speaks against it.
        """
        return f"task {self.task!r} reads each row on one rank"

    @property
    def freezes_base(self) -> bool:
        """Whether the base's own weights stay as they are."""
        return self.lora is not None

    @property
    def package(self) -> str:
        """The package in trainer/tasks/ that holds the code of this experiment (task.py,
        trained.py): the task, or one of its forms.
        """
        return self.task

    @property
    def exports_adapters(self) -> bool:
        """Whether best/ and final/ hold adapters without their base."""
        return self.lora is not None and self.lora.export == "adapter"
