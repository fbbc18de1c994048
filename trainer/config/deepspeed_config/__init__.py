"""DeepSpeed's dictionary, complete and checked, without importing deepspeed.

DeepSpeed ignores unknown top-level keys, drops "auto" and clips at 1.0 when nothing is said. So
every name and type is checked here against a table, every "auto" gets its value here, and two
numbers that disagree are refused with both sources.
"""

from trainer.config.deepspeed_config.build import build
from trainer.config.deepspeed_config.check import Config, sequence_ranks
from trainer.config.deepspeed_config.engine import (
    for_engine,
    num_ranks,
    offload_device,
    precision,
    summary,
)
from trainer.config.deepspeed_config.files import PRESETS, read

__all__ = [
    "PRESETS",
    "Config",
    "build",
    "for_engine",
    "num_ranks",
    "offload_device",
    "precision",
    "read",
    "sequence_ranks",
    "summary",
]
