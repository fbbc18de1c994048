"""What the server of tests/ranks.py has imported before it forks: whatever a rank would import for
itself otherwise.
"""

from __future__ import annotations

import gc
import importlib

import deepspeed
import pytest
import rouge_score.rouge_scorer
import sklearn.metrics
import torch
import torch.distributed
import transformers.models.bert.modeling_bert
import transformers.models.gpt_bigcode.modeling_gpt_bigcode
import transformers.models.llama.modeling_llama
import transformers.models.t5.modeling_t5

import trainer.evaluation.run
import trainer.launch.rank
import trainer.plan.memory.fake_device
import trainer.plan.memory.fake_step
from trainer import tasks
from trainer.data import stdlib_docs

__all__ = ["deepspeed", "pytest", "rouge_score", "sklearn", "torch", "trainer", "transformers"]

for _name in tasks.names():
    importlib.import_module(f"trainer.tasks.{_name}.task")
stdlib_docs.docstrings()  # 2 CPU seconds of every run on the embedded corpus
# ZeRO 3 collects garbage when it is set up, which looks at all that has been imported: 0.4 s.
gc.collect()
gc.freeze()
