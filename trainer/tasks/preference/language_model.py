"""A model that learnt from preferences, asked as the language model that it is."""

from __future__ import annotations

from typing import Any

from trainer.errors import ConfigError

_OF_DATA = ("source", "max_tokens", "chat_template")


def as_language_model(values: dict[str, Any]) -> dict[str, Any]:
    """The dictionary of the task causal_lm with which the export of a preference run answers.

    values: the dictionary of that run. ConfigError for a reward model, which writes no texts.
    """
    preference: dict[str, Any] = values.get("preference", {})
    if preference.get("loss") == "reward":
        raise ConfigError(
            'preference.loss="reward": a reward model scores answers and writes none. Use '
            "`lathe predict`, or ask another model."
        )
    rest = {key: one for key, one in values.items() if key != "preference"}
    data = {key: values["data"][key] for key in _OF_DATA if key in values["data"]}
    return {**rest, "task": "causal_lm", "data": data}
