"""A trained reader: programs that load its export, and its predictions for unlabelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.readers import retrieved
from trainer.models.adapters import loading
from trainer.protocol.abilities import CutRow, Prediction, Usage
from trainer.protocol.task import Cut
from trainer.tasks import generated
from trainer.tasks.fid.config import Config
from trainer.tasks.generated import predict as predict

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_FUSE = """\
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)


@torch.no_grad()
def answer(question, passages):
    def tokens(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    asked = tokens(f"question: {{question}}")
    states = []
    for title, text in passages:  # the encoder reads one passage at a time, ...
        ids = (asked + tokens(f" title: {{title}} context: {{text}}"))[:{passage_tokens}]
        states.append(model.get_encoder()(input_ids=torch.tensor([ids])).last_hidden_state)
    fused = torch.cat(states, dim=1)  # ... and the decoder reads all of them together
    mask = torch.ones(fused.shape[:2], dtype=torch.long)
    encoded = BaseModelOutput(last_hidden_state=fused)
    made = model.generate(encoder_outputs=encoded, attention_mask=mask)
    ends = model.generation_config.eos_token_id  # of generation_config.json: one id, or several
    ends = ends if isinstance(ends, list) else [ends]
    new = made[0, 1:].tolist()
    new = new[: next((at for at, token in enumerate(new) if token in ends), len(new))]
    return tokenizer.decode(
        new, skip_special_tokens=True, clean_up_tokenization_spaces={cleans_up_spaces}
    )


passages = [("Ada", "Ada keeps the red key in the cellar."), ("attic", "The attic is empty.")]
print(answer("Where does Ada keep the red key?", passages))
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    reader, data = cfg.reader, cfg.data
    limits = [
        f"It was trained on at most {data.contexts} passages a question, each with its question at "
        f"most {data.passage_tokens} tokens; what it answers may be wrong.",
    ]
    if (folder / "pytorch_model.bin").is_file():
        limits.append("This folder is for facebookresearch/FiD: FiDT5.from_pretrained(FOLDER).")
        return Usage("transformers", [], limits)
    if reader.cross_attention_every > 1 or reader.cross_attention_multi_query:
        limits.append(
            "Plain transformers cannot load it: its decoder has less cross-attention than a T5 "
            "(FiDO). `python -m trainer predict FOLDER` runs it."
        )
        return Usage("transformers", [], limits)
    if reader.compat_cross_bias:
        limits.append(
            "Its cross-attention has a table of position biases, as transformers before 4.0 had; "
            "later ones leave it out, and their answers differ."
        )
    code = _FUSE.format(
        loading=loading("AutoModelForSeq2SeqLM", folder),
        passage_tokens=data.passage_tokens,
        cleans_up_spaces=data.clean_up_spaces,
    )
    return Usage("transformers", [("Load it, and fuse the passages", code)], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """A question with its passages, from ctxs or contexts."""
    data = task.cfg.data
    return retrieved.question_with_passages(
        raw, place, contexts=data.contexts, sort_by_score=data.sort_by_score
    )


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What data.passage_tokens cuts off the passages, each with its question."""
    cuts = dict(generated.cut_row(task, model, row, how).cuts)
    limit, length = task.cfg.data.passage_tokens, len(task.prompts.question(row["question"]))
    if not row["ctxs"]:
        cuts["questions"] = Cut("data.passage_tokens", limit, [length])
    is_full = length + bool(row["ctxs"]) > limit
    doubts = [f"questions that leave no room for a passage (data.passage_tokens {limit})"]
    return CutRow(cuts, doubts if is_full else ())
