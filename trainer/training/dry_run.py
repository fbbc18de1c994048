"""What --dry_run shows.

Id, dictionary with defaults, DeepSpeed dictionary, batch arithmetic, parameter counts, rows as the
model gets them, and what a run would refuse.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainer.config import deepspeed_config
from trainer.statistics.examples import Segment
from trainer.training.preflight import Findings
from trainer.training.schedule import warmup_steps

if TYPE_CHECKING:
    from trainer.training.run_plan import RunPlan


def show(plan: RunPlan, findings: Findings) -> str:
    """The preview as text."""
    train = plan.cfg.train
    rows = [
        ("experiment", plan.id),
        ("folder", str(plan.folder)),
        ("task", plan.cfg.task),
        (
            "steps",
            f"{train.steps}, of which {warmup_steps(plan.cfg.schedule, train.steps)} warm-up",
        ),
        *deepspeed_config.summary(plan.ds),
        ("parameters", findings.parameters),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += ["", "resolved.json", json.dumps(plan.cfg.model_dump(mode="json"), indent=2)]
    lines += ["", "ds_config.json", json.dumps(plan.ds, indent=2)]
    for number, texts in enumerate(findings.rows, start=1):
        is_over_tokens = any(one["in_loss"] is not None for text in texts.values() for one in text)
        mark = "; «in the loss»" if is_over_tokens else ""
        lines += ["", f"training row {number}, as the model gets it{mark}"]
        lines += [f"  {name}: {_marked(segments)}" for name, segments in texts.items()]
    lines += ["", *(f"warning: {text}" for text in findings.warnings)] if findings.warnings else []
    lines += ["", *(f"refused: {text}" for text in findings.problems)] if findings.problems else []
    return "\n".join(lines) + "\n"


def _marked(segments: list[Segment]) -> str:
    return "".join(
        f"«{segment['text']}»" if segment["in_loss"] else segment["text"] for segment in segments
    )
