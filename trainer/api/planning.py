"""`lathe plan` as a function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.api.arguments import dictionary, refuse_below_one
from trainer.api.process_state import as_found

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from trainer.plan.forecast import Forecast


def plan(
    values: Mapping[str, Any],
    data: str | Path | None = None,
    *,
    device: str | Path | None = None,
    world: int | None = None,
    nodes: int = 1,
    deepspeed: str | Path | None = None,
    strict: bool = False,
    savedir_base: str | Path = "results",
    cache_dir: str | Path = "tmp-cache",
) -> Forecast:
    """Predict the memory and the time of a run before it starts, as `lathe plan` does. Its steps
    run on tensors without storage.

    values: the experiment's dictionary.
    data: the folder of its data; None: rows as long as the limits allow are planned.
    device: h200, 8xh100-80, a size such as 24GiB, or the file of `lathe calibrate-device`; None:
        the GPU here.
    world: how many devices train together.
    nodes: on how many machines they are.
    deepspeed: another DeepSpeed file than that of the experiment.
    strict: refuse data of which anything is left out or doubted.
    savedir_base: the folder of all runs, one of which may be the base.
    cache_dir: the folder of token caches and tokenizers.

    Printed, the forecast is the text of the command; `.plain()` is what `--json` prints, in bytes
    and seconds.

    Raises ConfigError for a wrong dictionary or an unknown device, DataError for wrong data.
    """
    experiment = dictionary(values)
    refuse_below_one(world=world, nodes=nodes)
    with as_found():
        from trainer.commands.plan import subject_for
        from trainer.data import left_out
        from trainer.plan.forecast import forecast
        from trainer.plan.memory.measure import measuring
        from trainer.plan.time.target import target_of
        from trainer.training.options import Options

        device = None if device is None else str(device)
        target = target_of(device, world=world, nodes=nodes)
        options = Options(
            savedir_base=Path(savedir_base),
            data_path=None if data is None else Path(data),
            cache_dir=Path(cache_dir),
            deepspeed=None if deepspeed is None else str(deepspeed),
        )
        with left_out.settling(None, strict=strict):
            subject = subject_for(experiment, options, target.cluster.world)
        with measuring():  # in a process of its own: a notebook's threads forbid a fork of it
            return forecast(subject, target)
