"""A trained model: programs that load its export, and its predictions for unlabelled rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.readers.questions import question_row
from trainer.models import adapters
from trainer.protocol.abilities import CutRow, Prediction, Usage
from trainer.protocol.task import Cut
from trainer.runtime import distributed
from trainer.tasks.cross_attention.config import Config
from trainer.tasks.cross_attention.decoder.generation import most_prompt_tokens
from trainer.tasks.cross_attention.text.prompts import Prompts
from trainer.tasks.generated import predictions

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_AUTO = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # of this card
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""
# transformers 4.57, AutoModelForCausalLM: where a folder holds adapters, it loads their base alone.
_CLASS = """\
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

FOLDER = "."  # of this card
name = "modeling_cross_attention.LatheCrossAttentionForCausalLM"
model = get_class_from_dynamic_module(name, FOLDER).from_pretrained(FOLDER)
"""
_READ = """\
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
question = "Where is the red key?"
context = model.read(tokenizer, ["Ada keeps the red key in the cellar."]{asked})
print(model.answer(tokenizer, question, context)){again}
"""
_AGAIN = """
print(model.answer(tokenizer, "Who has a key?", context))  # the context is not read again"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    is_asked = cfg.data.question_on_context
    loaded = _CLASS if adapters.are_in(folder) else _AUTO
    code = loaded + _READ.format(
        asked=", question=question" if is_asked else "", again="" if is_asked else _AGAIN
    )
    limits = [
        "`modeling_cross_attention.py` in this folder is the model's code, and the program above "
        "runs it. Read it first.",
        "It answers from the contexts that it is given, and knows of no others; what it "
        "says may be wrong.",
    ]
    if not (folder / "base").is_dir():
        limits.append(
            "The base is not in this folder: `config.json` says where it is expected. "
            "`python -m trainer export cross_attention FOLDER --out NEW --merge` writes a folder "
            "that holds it."
        )
    if adapters.are_in(folder):
        limits.append(
            "Adapters beside the layers belong to the decoder; loading them needs peft, and a "
            "local folder: download one from the Hub with `huggingface_hub.snapshot_download`."
        )
    return Usage("transformers", [("Load it", code)], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """A question with its contexts, from context, contexts or ctxs."""
    own = {name: value for name, value in raw.items() if name not in ("answer", "answers")}
    return {**question_row({**own, "answers": ["?"]}, place), "answers": [""]}


def _prompts(task: Any) -> Prompts:
    """Those of prediction: no answer stands behind a prompt, so none is lost with its end."""
    data = task.cfg.data.model_copy(update={"loss_on": "all"})
    return Prompts(task.tokenizer, data, ends=lambda: task.ends)


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What the limits cut off the contexts, and off the prompt: data.decoder_tokens, or the
    positions that the answer leaves.
    """
    prompts, data = _prompts(task), task.cfg.data
    room = most_prompt_tokens(model, how.max_tokens or data.answer_tokens)
    setting, limit = "data.decoder_tokens", data.decoder_tokens
    if room < limit:
        setting, limit = "the room before the answer", room
    question = Cut(setting, limit, [prompts.prompt_tokens(row)])
    doubts = [f"questions of more than {limit} tokens ({setting} cuts them)"]
    cuts = {"contexts": prompts.encode(row).cuts["contexts"], "questions": question}
    return CutRow(cuts, doubts if any(question.lost) else ())


def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """Answers as generated.predictions returns them. The model encodes the contexts, for the states
    that the experiment prepared belong to other contexts.
    """
    prompts = _prompts(task)
    encoded = [prompts.encode(row) for row in rows]
    options: dict[str, Any] = {"max_tokens": how.max_tokens, "device": distributed.device()}
    answers = prompts.answers(model, encoded, search=how.search, **options)
    return predictions([[one.text for one in of_row] for of_row in answers])
