"""Every export of every family in transformers 4.57, against the same export in today's version."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING

from tests import exported
from tests.bases import OF_TASK
from tests.contract.runs import from_folder
from tests.families import experiment_on
from tests.ranks import run_on_ranks
from tests.transformers_457.environment import python
from trainer.models.weights.model_folder import for_all_versions

# transformers 4.57 has no such model
UNKNOWN = {"t5gemma2"}
ADAPTERS = {"r": 4, "targets": "all-linear"}
# As the exports of their bases: one family for each way of positions.
ADAPTED = {
    "causal_lm": ("gpt_bigcode", "llama 3.2", "gemma3"),
    "cross_attention": ("llama 3.2",),
    "retriever": ("bert",),
    "summariser": ("t5",),
    "fid": ("t5",),
    "vera": ("llama", "mt5"),
}
MERGED = ("llama 3.2", "phi3", "gemma3")  # causal_lm with its adapters merged


def experiments(folder: Path) -> dict[str, dict[str, Any]]:
    """By name: two steps of each task on each of its families, none of whose thetas is 10,000."""
    found: dict[str, dict[str, Any]] = {}
    for task, families in OF_TASK.items():
        for family in families:
            if family not in UNKNOWN:
                found[f"{task} on {family}"] = _experiment(task, family, folder)
    for task, names in ADAPTED.items():
        for family in names:
            values = _experiment(task, family, folder, in_folder=True)
            found[f"{task} on {family} with adapters"] = {**values, "lora": ADAPTERS}
    for family in MERGED:
        values = _experiment("causal_lm", family, folder, in_folder=True)
        lora = {**ADAPTERS, "export": "merged"}
        found[f"causal_lm on {family}, merged"] = {**values, "lora": lora}
    return found | {"causal_lm on starcoder2": _starcoder2(found["causal_lm on llama"])}


def _starcoder2(of_llama: dict[str, Any]) -> dict[str, Any]:
    """A family that has no row in the table, and trains all the same."""
    config = {**of_llama["base"]["config"], "model_type": "starcoder2", "sliding_window": None}
    config.pop("tie_word_embeddings")
    return {**of_llama, "base": {"config": config, "seed": 1}}


def _experiment(task: str, family: str, folder: Path, *, in_folder: bool = False) -> dict[str, Any]:
    values = experiment_on(task, family, folder)
    values = {**values, "train": {**values["train"], **exported.SHORT}}
    if task == "retriever":
        values["data"] = {**values["data"], **exported.LIMIT}
    config = with_another_theta(values["base"]["config"])
    if family == "t5gemma":  # whose encoder has windows of another size in transformers 4
        for side in ("encoder", "decoder"):
            config[side]["sliding_window"] = 128
    values["base"] = {**values["base"], "config": config}
    if task != "cross_attention" and not in_folder:
        return values
    # the weights of a random base are drawn otherwise in another version
    values = from_folder(values, folder / "bases")
    file = Path(values["base"]) / "config.json"
    file.write_text(json.dumps(for_all_versions(json.loads(file.read_text()))))
    return values


def with_another_theta(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same base with rotations by other thetas; unchanged where it has none."""
    changed = copy.deepcopy(dict(config))
    parts = [
        changed[side] for side in ("encoder", "decoder") if isinstance(changed.get(side), dict)
    ]
    family = changed.get("model_type")
    default = {} if parts or family is None else CONFIG_MAPPING[family]().to_dict()
    for part in parts or ([changed] if "rope_parameters" in default else []):
        stated = part.setdefault("rope_parameters", copy.deepcopy(default.get("rope_parameters")))
        if stated is None:
            part["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
            continue
        of_each = [one for one in stated.values() if isinstance(one, dict)] or [stated]
        for number, one in enumerate(of_each):
            one["rope_theta"] = (5e5, 3e4)[number]
    return changed


def sides(
    values: Mapping[str, dict[str, Any]], folder: Path, place: Path
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: what today's transformers makes of a run's export, and what 4.57 makes of it."""
    place.mkdir()
    how: Any = {"timeout_s": 60 + 20 * len(values)}
    (trained,) = run_on_ranks(1, exported.trained, values, folder, place / "runs", **how)
    asked: dict[str, Any] = {}
    for name, (run, _) in trained.items():
        task, _model = exported.loaded(values[name], folder, run / "final")
        asked[name] = (values[name]["task"], run / "final", exported.asked(task))
    today = exported.told(asked, place / "today")
    earlier = exported.told(asked, place / "earlier", python=python())
    return {name: (today[name], earlier[name]) for name in values}


def difference(today: dict[str, Any], earlier: dict[str, Any]) -> tuple[float, str]:
    """The largest difference of two sides, as a share of the largest number or of 1, and of what;
    infinity and the reason where one
    of them failed or says other texts.
    """
    for side, name in ((today, "today"), (earlier, "4.57")):
        if "error" in side:
            return float("inf"), f"{name}: {side['error']}"
    if today.keys() != earlier.keys():
        return float("inf"), f"{sorted(today)} and {sorted(earlier)}"
    found: dict[str, float] = {}
    for of, x in today.items():
        if isinstance(x, Tensor):
            is_like = x.shape == earlier[of].shape
            apart = float((x - earlier[of]).abs().max()) if is_like else float("inf")
            found[of] = apart / max(1.0, float(x.abs().max()))
    worst = max(found, key=lambda of: found[of])
    return found[worst], worst
