"""A block of a dictionary: frozen, strict about its keys and types, with errors that a person can
act on. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.config.mistakes import mistakes, secrets
from trainer.config.synonyms import Synonym
from trainer.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Strict(BaseModel):
    """A frozen block that refuses unknown keys and does not coerce types ("5" is not 5). The text
    under a key is its description.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    # Of a whole dictionary: what other libraries call its keys.
    synonyms: ClassVar[Mapping[str, Synonym]] = {}
    # Whether the token ids or the stored length of a given raw row depend on a key: each key stands
    # in one of the two lists, or holds a block that has lists of its own (docs/add-a-key.md).
    encoded: ClassVar[frozenset[str]] = frozenset()
    not_encoded: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def with_current_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`values` with keys of earlier versions where they are now."""
        return values

    @classmethod
    def list_of(cls, key: str) -> Literal["encoded", "not_encoded"] | None:
        """The list that a key of this block stands in; None: in none, so it holds a block that has
        its own lists. ValueError when it stands in both.
        """
        blocks = [one for one in cls.__mro__ if issubclass(one, Strict)]
        is_read = any(key in block.encoded for block in blocks)
        is_unread = any(key in block.not_encoded for block in blocks)
        if is_read and is_unread:
            raise ValueError(f"{cls.__name__}.{key} stands in encoded and in not_encoded")
        return "encoded" if is_read else "not_encoded" if is_unread else None

    def encoded_values(self, always: Collection[str]) -> dict[str, Any]:
        """The keys of this block that encoding reads, with their values as JSON: all of `always`,
        and each other one where it differs from its default.

        So a key that is new leaves the ids of before as they were, as long as nobody sets it.
        """
        values = self.model_dump(mode="json")
        unset = type(self).model_fields
        return {
            key: value
            for key, value in values.items()
            if self.list_of(key) == "encoded"
            and (key in always or getattr(self, key) != unset[key].get_default())
        }

    def without_unread(self) -> dict[str, Any]:
        """This block as JSON, without the keys that stand in `not_encoded`, at any depth."""
        values: dict[str, Any] = {}
        for key, value in self.model_dump(mode="json").items():
            kind, block = self.list_of(key), getattr(self, key)
            if kind is None and isinstance(block, Strict):
                values[key] = block.without_unread()
            elif kind != "not_encoded":
                values[key] = value
        return values


C = TypeVar("C", bound=Strict)


def validate(schema: type[C], values: dict[str, Any], *, source: str = "experiment") -> C:
    """`values` as a frozen `schema`; ConfigError names every mistake at once, with the nearest
    legal key.
    """
    if lines := list(secrets(values)):  # no other message may show them
        raise ConfigError(f"{source}: {len(lines)} mistake(s)\n  " + "\n  ".join(lines))
    try:
        return schema.model_validate_json(json.dumps(schema.with_current_keys(values)), strict=True)
    except TypeError as error:
        raise ConfigError(
            f"{source}: {error}. Use strings, numbers, booleans, None, lists and dictionaries."
        ) from None
    except ValidationError as error:
        lines = mistakes(schema, error, schema.synonyms)
        raise ConfigError(
            f"{source}: {len(lines)} mistake(s)\n" + "\n".join(f"  {line}" for line in lines)
        ) from None
