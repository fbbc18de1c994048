"""One adapter for each published set, by the name that Vera's author gave it."""

from trainer.recipes.vera.adapters import cloze, questions, statements
from trainer.recipes.vera.adapters.adapter import Adapter

ADAPTERS: dict[str, Adapter] = cloze.ADAPTERS | questions.ADAPTERS | statements.ADAPTERS
