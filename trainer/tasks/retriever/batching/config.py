"""What data.batches states. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from trainer.config.block import Positive, Strict

TOPIC = "topic"  # the field of a row


class Topics(Strict):
    """What the topic of a row is."""

    encoded = frozenset({"by"})
    not_encoded = frozenset({"clusters", "model"})

    by: Literal["words", "model", "field"] = "words"
    """words: clusters of the queries' words (TF-IDF). model: clusters of the queries' vectors, by
    `model`. field: what each row says under "topic", which data.columns may map.
    """
    clusters: Positive | None = None
    """The number of clusters; None: one for every 200 rows, as TAS-B has them."""
    model: str | None = None
    """The folder of a trained retriever, such as best/, below the folder of --data_path or from
    the root; None: the weights that this run starts from.
    """

    @model_validator(mode="after")
    def _each_kind_has_its_keys(self) -> Topics:
        if self.by == "field" and self.clusters is not None:
            raise ValueError('by="field" forms no clusters: leave `clusters` out')
        if self.by != "model" and self.model is not None:
            raise ValueError(f'by="{self.by}" reads no model: leave `model` out, or use by="model"')
        return self


class Batching(Strict):
    """Which rows stand together in a step. They are each other's negatives there."""

    encoded = frozenset({"distinct"})
    not_encoded = frozenset({"source"})

    source: Literal["mixed", "one"] = "mixed"
    """Of a mix. mixed: a step has rows of every source. one: all rows of a step are of one source,
    and the weights say how many steps each source has.
    """
    distinct: bool = False
    """No two rows of a step have a query or a positive in common: passages are compared by the ids
    that rows give, and by their tokens.
    """
    topics: Topics | None = None
    """The rows of a step are of one topic, so that negatives are hard; None: of any topic. What
    fills no step of its topic shares steps with the rest of other topics.
    """

    @property
    def reads_topics(self) -> bool:
        """Whether rows say their topic."""
        return self.topics is not None and self.topics.by == "field"
