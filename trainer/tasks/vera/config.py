"""What a plausibility verifier's experiment states. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Positive, Strict
from trainer.config.formats.layouts import STATEMENTS, Layout, Purpose
from trainer.config.own_rows import OwnRows
from trainer.config.schema import Experiment
from trainer.errors import nearest

Part = Literal["seen", "unseen1", "unseen2"]


class Data(OwnRows):
    """Statement groups and how they become tokens."""

    encoded = frozenset(
        {"train_tasks", "valid_tasks", "test_tasks", "boolean", "max_tokens", "statements"}
    )
    not_encoded = frozenset(
        {"source", "format", "unseen1", "unseen2", "sample_distractors", "valid_limit", "order"}
    )

    purposes: ClassVar[tuple[Purpose, ...]] = ("statement",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {"train_tasks"}

    source: Literal["groups", "files", "stdlib_docs", "lookup"]
    """groups: --data_path holds <task>/train.json and <task>/dev.json, as `python -m trainer
    convert` writes them, or the same as any other kind of file. files: your own rows of one task
    (docs/own-data.md). stdlib_docs: the embedded corpus, tasks docs_choice and docs_boolean.
    lookup: the made-up one, tasks arithmetic, order and membership.
    """
    train_tasks: Annotated[list[str], Field(min_length=1)]
    """Names of the sets that train."""
    valid_tasks: Annotated[list[str], Field(min_length=1)]
    """Names of the sets that are evaluated on the way."""
    test_tasks: tuple[str, ...] = ()
    """Names of the sets that are evaluated at last."""
    unseen1: tuple[str, ...] = ()
    """Valid and test tasks unlike the training's by kind: their metrics are averaged apart."""
    unseen2: tuple[str, ...] = ()
    """Those further away: averaged apart as well."""
    boolean: tuple[str, ...] = ()
    """Tasks whose statements are true or false by themselves, beside the published ones."""
    max_tokens: Annotated[int, Field(ge=2)] = 128
    """The most tokens of a statement with its end token."""
    statements: Annotated[int, Field(ge=1)] = 4
    """The most statements of a group in training: the gold and some distractors."""
    sample_distractors: bool = True
    """Train on other distractors in every epoch; False: always on the first, as published."""
    valid_limit: Positive | None = 2000
    """The most groups of a valid task, sampled as published; None: all."""
    order: Literal["reshuffled", "legacy"] = "reshuffled"
    """legacy: one shuffle for all epochs, as published."""

    def layout(self) -> Layout | None:
        return STATEMENTS if self.source in ("groups", "files") else None

    def names_files(self) -> bool:
        return self.source == "files"

    def place_of(self, name: str) -> dict[str, Any]:
        return super().place_of(name) if self.source == "files" else {"train_tasks": [name]}

    def has_own_rows(self, split: str) -> bool:
        """No source has: valid_tasks and test_tasks say what is evaluated, each by itself."""
        return self.source == "files" and super().has_own_rows(split)

    @model_validator(mode="after")
    def _sources_of_a_mix_are_tasks(self) -> Data:
        if not self.mix:
            return self
        if self.order == "legacy":
            raise ValueError(
                'order="legacy" shuffles all groups once, as published, and a mix draws them by '
                "source: leave one of the two out"
            )
        mixed = [task for name in self.mix for task in self.part(name).train_tasks]
        lost = [task for task in self.train_tasks if task not in mixed]
        more = [task for task in mixed if task not in self.train_tasks]
        if lost or more:
            raise ValueError(
                f"mix trains on {', '.join(dict.fromkeys(mixed))}, and train_tasks are "
                f"{', '.join(self.train_tasks)}: name the same tasks in both"
            )
        return self

    @model_validator(mode="after")
    def _own_files_are_one_task(self) -> Data:
        tasks = sorted({*self.train_tasks, *self.valid_tasks, *self.test_tasks})
        if self.source == "files" and len(tasks) > 1:
            raise ValueError(
                f'source="files" is one task, got {", ".join(tasks)}: name the same one in '
                'train_tasks and valid_tasks, or use source="groups", a folder for each'
            )
        if self.source == "groups" and (self.dataset or self.valid_share):
            raise ValueError(
                'source="groups" has a folder and a valid split for each task: leave dataset and '
                'valid_share out, or use source="files"'
            )
        return self

    @model_validator(mode="after")
    def _tasks_are_named_once(self) -> Data:
        lists = {
            name: list(getattr(self, name)) for name in ("train_tasks", "valid_tasks", "test_tasks")
        }
        lists["unseen1 and unseen2"] = [*self.unseen1, *self.unseen2]
        for name, tasks in lists.items():
            twice = sorted({task for task in tasks if tasks.count(task) > 1})
            if twice:
                raise ValueError(
                    f"{name}: {', '.join(twice)} stands there twice. Name each task once"
                )
        task_names = sorted({*self.train_tasks, *self.valid_tasks, *self.test_tasks})
        for task in (*self.unseen1, *self.unseen2, *self.boolean):
            if task not in task_names:
                raise ValueError(
                    f"{task!r} is none of the tasks that are trained on or evaluated. "
                    f"{nearest(task, task_names)}"
                )
        return self


class Loss(Strict):
    """What is minimised. The defaults are the published terms, normalised over the global batch."""

    mode: Literal["corrected", "original"] = "corrected"
    """original: the published program on every rank and micro-batch by itself: keys of other ranks
    without gradient, cross-entropies over the rank's own multiple-choice groups, classes by column,
    infinite for lonely anchors.
    """
    terms: Literal["margin", "bce", "mce", "mce+bce"] = "mce+bce"
    """Which terms are added up."""
    ce_norm: Literal["mc", "all_problems"] = "all_problems"
    """What divides the cross-entropies: the multiple-choice groups, or all problems."""
    contrastive: Literal[0, 1, 2, 3, 4] = 4
    """Which form of the contrastive term (docs/tasks/vera.md); 0: none."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """The temperature of the contrastive term."""
    coefficient: Annotated[float, Field(ge=0)] = 0.1
    """The factor of the contrastive term in the loss."""
    classes: Literal["label", "column"] = "label"
    """label: true and false statements are two classes. column: the first of a group and the
    others, as published, which takes a false boolean statement for a true one.
    """

    @model_validator(mode="after")
    def _original_has_no_choice(self) -> Loss:
        if self.mode == "original" and (self.ce_norm, self.classes) != ("all_problems", "label"):
            raise ValueError('mode="original" fixes ce_norm and classes: leave both out')
        return self


class Config(Experiment):
    """A verifier's experiment; without `lora` every weight of the encoder and its head trains."""

    not_encoded = frozenset({"loss", "dropout"})

    task: Literal["vera"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A verifier of statements."""
    data: Data
    """Rows, and how they become tokens."""
    loss: Loss = Loss()
    """What is minimised."""
    dropout: Fraction | None = None
    """None: the base's own."""

    @model_validator(mode="after")
    def _legacy_order_is_kept(self) -> Config:
        if self.data.order == "legacy" and self.train.order != "as_given":
            raise ValueError(
                'data.order="legacy" is one order for all epochs: set train.order="as_given" too'
            )
        return self
