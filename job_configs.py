"""JOB_CONFIGS: group -> where its experiments run; "default" holds for every group. Never part of
an experiment's id.

Keys as haven and Slurm users know them; jobs/config.py says what each one means, docs/jobs.md shows
whole examples. `{user}` in a mount of `data` stands for the name that EAI_ACCOUNT_ID_TO_USER gives
to $EAI_ACCOUNT_ID.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from trainer.config import userfile
from trainer.errors import ConfigError

Values = dict[str, Any]

# The account of each user of the toolkit, as `echo $EAI_ACCOUNT_ID` shows it there: {"<account
# id>": "<user>"}.
EAI_ACCOUNT_ID_TO_USER: dict[str, str] = {}

EIGHT_GPUS: Values = {"resources": {"cpu": 64, "mem": 512, "gpu": 8, "gpu_mem": 80}}

JOB_CONFIGS: dict[str, Values] = {
    "default": {},
    "crossattn_starcoder": EIGHT_GPUS,
    "crossattn_starcoderbase-7b": EIGHT_GPUS,
    "crossattn_starchat-alpha": EIGHT_GPUS,
    "crossattn_tulu-7b": EIGHT_GPUS,
    "crossattn_tulu-13b": EIGHT_GPUS,
    "crossattn_llama-7b": EIGHT_GPUS,
    "crossattn_llama-13b": EIGHT_GPUS,
    "crossattn_mistral-7b": EIGHT_GPUS,
}


def job_values(
    group: str, file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Values:
    """The job dictionary of a group: "default" with the group's own keys over it (`resources` key
    by key).

    file: a Python file with JOB_CONFIGS (or JOB_CONFIG, and "base" for "default", as published)
    instead of this one. ConfigError when it cannot be read or holds anything but dictionaries, and
    when a mount needs a user that EAI_ACCOUNT_ID_TO_USER does not name.
    """
    configs, users = (JOB_CONFIGS, EAI_ACCOUNT_ID_TO_USER) if file is None else _read(file)
    values = copy.deepcopy(configs.get("default", configs.get("base", {})))
    for key, value in copy.deepcopy(configs.get(group, {})).items():
        is_block = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = {**values[key], **value} if is_block else value
    if isinstance(values.get("data"), list):
        values["data"] = [_with_user(mount, users, environ) for mount in values["data"]]
    if "account_id" not in values and environ.get("EAI_ACCOUNT_ID") in users:
        values["account_id"] = environ["EAI_ACCOUNT_ID"]
    return values


def _with_user(mount: Any, users: Mapping[str, str], environ: Mapping[str, str]) -> Any:
    if not isinstance(mount, str) or "{user}" not in mount:
        return mount
    account = environ.get("EAI_ACCOUNT_ID")
    if account is None or account not in users:
        raise ConfigError(
            f"data mount {mount!r} names a user, but EAI_ACCOUNT_ID={account!r} is not in "
            "EAI_ACCOUNT_ID_TO_USER "
            f"({', '.join(sorted(users)) or 'empty'}). Add it there."
        )
    return mount.replace("{user}", users[account])


def _read(file: Path) -> tuple[dict[str, Values], dict[str, str]]:
    names = userfile.execute(file, flag="--job_configs", defines="JOB_CONFIGS")
    name = "JOB_CONFIG" if "JOB_CONFIG" in names and "JOB_CONFIGS" not in names else "JOB_CONFIGS"
    configs, users = names.get(name), names.get("EAI_ACCOUNT_ID_TO_USER", {})
    if not isinstance(configs, dict):
        raise ConfigError(
            f"{file}: {name} is {userfile.kind(configs)}. Want a dictionary: group -> job "
            "dictionary."
        )
    mistakes = [
        mistake
        for item in cast("dict[Any, Any]", configs).items()
        for mistake in _mistakes(name, *item)
    ]
    if not isinstance(users, dict) or not all(
        isinstance(text, str) for pair in users.items() for text in pair
    ):
        mistakes.append(
            "EAI_ACCOUNT_ID_TO_USER: want a dictionary: account id -> user, both strings."
        )
    if mistakes:
        raise ConfigError("\n".join(f"{file}: {mistake}" for mistake in mistakes))
    return cast("dict[str, Values]", configs), cast("dict[str, str]", users)


def _mistakes(name: str, group: Any, values: Any) -> list[str]:
    """What is wrong with one entry, as far as its keys can be told from their values:
    jobs/config.py checks those.
    """
    if not isinstance(group, str):
        return [f"{name}[{group!r}]: want the name of a group, a string."]
    if not isinstance(values, dict):
        got = "None" if values is None else userfile.kind(values)
        return [f"{name}[{group!r}] is {got}. Want a dictionary."]
    wrong = [key for key in cast("dict[Any, Any]", values) if not isinstance(key, str)]
    return [f"{name}[{group!r}]: {key!r} is no key, want a string." for key in wrong]


if __name__ == "__main__":
    userfile.leave("Send a group: lathe submit -e GROUP -sb results -j BACKEND.")
