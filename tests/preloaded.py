"""What the server of tests/ranks.py has imported before it forks: whatever a rank would import for
itself otherwise.
"""

from __future__ import annotations

import gc
import importlib

# Engines of ZeRO 1 to 3 import these late: 600 modules of torch's compiler come with them, 1.5 CPU
# seconds a process.
import deepspeed
import deepspeed.comm.mori
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.muon.muon_optimizer
import pytest
import sklearn.metrics
import torch
import torch.distributed
import transformers.models.bert.modeling_bert
import transformers.models.gpt_bigcode.modeling_gpt_bigcode
import transformers.models.llama.modeling_llama
import transformers.models.t5.modeling_t5
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import trainer.evaluation.run
import trainer.training.run
from trainer import tasks

__all__ = ["deepspeed", "pytest", "sklearn", "torch", "trainer", "transformers"]

for _name in tasks.names():
    importlib.import_module(f"trainer.tasks.{_name}.task")
# A table of 900 regular expressions that every from_pretrained of transformers 5.23 compiles first.
get_checkpoint_conversion_mapping("t5")
# ZeRO 3 collects garbage when it is set up, which looks at all that has been imported: 0.4 s.
gc.collect()
gc.freeze()
