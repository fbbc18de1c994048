"""A base that is another run's adapters: they are folded into their own base when it is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.errors import ConfigError
from trainer.files.atomic import read_json
from trainer.files.build_once import build_once
from trainer.models import adapters, base_source
from trainer.runtime import rng

if TYPE_CHECKING:
    from trainer.config.schema import Experiment
    from trainer.protocol.task import Places

_RECORD = "lathe.json"  # of an export: the dictionary that was trained, and more
log = logging.getLogger(__name__)


def make(cfg: Experiment, places: Places) -> None:
    """Build the whole model of an experiment's base once, where the base is adapters without
    theirs, in the folder of the cache in which base_source looks for it. Random state stays.

    ConfigError for adapters that no run of ours wrote.
    """
    adapters = base_source.adapters_of(cfg.base, places)
    if adapters is None or base_source.is_whole(adapters.whole):
        return
    folder = adapters.folder
    record = read_json(folder / _RECORD)
    if record is None:
        raise ConfigError(
            f"{folder} holds adapters without a {_RECORD}, which says what they were trained on. "
            "Merge them with peft, and name the whole model: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload()."
        )
    log.info("base: the adapters in %s are merged into their base, once", folder)
    state = rng.capture()

    def build(out: Path) -> None:
        write_whole(record["experiment"], folder, out, places)

    try:
        build_once(adapters.whole, build, is_whole=base_source.is_whole)
    finally:
        rng.restore(state)


def write_whole(
    experiment: dict[str, Any], folder: Path, out: Path, places: Places
) -> dict[str, Any]:
    """Write the whole model of an export with adapters to `out`, as a run with
    "lora": {"export": "merged"} would have written it, and return the dictionary of that run.

    experiment: the dictionary that was trained. ConfigError for an export that holds no adapters.
    """
    cfg = tasks.parse(experiment, source=str(folder / _RECORD))
    if cfg.lora is None or not cfg.exports_adapters:
        raise ConfigError(f"{folder} holds a whole model and no adapters: nothing is to be merged.")
    weights = {
        name: parameter.detach()
        for name, parameter in tasks.load(cfg, places).load_export(folder).named_parameters()
        if parameter.requires_grad
    }
    values = {**experiment, "lora": {**experiment["lora"], "export": "merged"}}
    merging = tasks.parse(values)
    if adapters.changes_base(cfg.lora):  # its export belongs beside the base as it was
        lora = adapters.beside_the_whole_base_as(cfg.lora)
        merging = merging.model_copy(update={"lora": lora.model_copy(update={"export": "merged"})})
    tasks.load(merging, places).export(weights, out)
    return values
