"""A trained cross-encoder: programs that load its export, and its scores for the passages of a
query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import DataError
from trainer.models.adapters import are_in, loading
from trainer.models.head import HEAD_FILE
from trainer.protocol.abilities import CutRow, Prediction, Usage
from trainer.tasks.retriever import trained as of_vectors
from trainer.tasks.retriever.config import Config

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_SENTENCES = """\
from sentence_transformers import CrossEncoder

FOLDER = "."  # of this card
model = CrossEncoder(FOLDER, device="cpu")
query = {query!r}
passages = [{passage!r}]
print(model.predict([(query, passage) for passage in passages]))
"""
_PLAIN = """\
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

FOLDER = "."  # of this card
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER).eval()
pair = tokenizer({query!r}, {passage!r}, return_tensors="pt")
with torch.no_grad():
    print(float(model(**pair).logits))  # the score
"""
_ADAPTERS = """\
import torch
from transformers import AutoModel, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
pair = tokenizer({query!r}, {passage!r}, return_tensors="pt")
with torch.no_grad():
    states = model(**pair)[0].float()
print(states.shape)  # their score is what {head} makes of one of them
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    data = cfg.data
    texts = {
        "query": f"{data.query_prefix}Where is the red key?",
        "passage": f"{data.passage_prefix}Ada keeps the red key in the cellar.",
    }
    limits = [
        f"Of a query it reads the first {data.query_tokens} tokens, of a passage the first "
        f"{data.passage_tokens}. Other programs cut the longer one of the two.",
        "A score orders the passages of one query; scores of different queries say nothing "
        "together, and none is a probability.",
    ]
    if are_in(folder):
        code = _ADAPTERS.format(loading=loading("AutoModel", folder), head=HEAD_FILE, **texts)
        limits.append('With lora.export="merged" it would be a classifier of transformers.')
        return Usage("peft", [("Load it", code)], limits)
    plain = ("In plain transformers", _PLAIN.format(**texts))
    if data.append_eos:
        return Usage("transformers", [plain], limits)
    sentences = ("In sentence-transformers", _SENTENCES.format(**texts))
    return Usage("sentence-transformers", [sentences, plain], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """{"query", "ctxs"}: ctxs are the passages to score (ctxs, contexts or context)."""
    row = of_vectors.row_to_predict(task, raw, place)
    if not row["ctxs"]:
        raise DataError(
            f"{place}: want passages to score (ctxs, contexts or context) beside the query (keys: "
            f"{', '.join(raw) or 'none'}).",
            place=place,
        )
    return row


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What the limits of both sides cut off a query and its passages."""
    pairs = task.pairs
    query = pairs.plain([row["query"]], "query")
    passages = pairs.plain(row["ctxs"], "passage")
    return CutRow(
        {"queries": pairs.cut_of(query, "query"), "passages": pairs.cut_of(passages, "passage")}
    )


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"scores"} of each query's passages, in their order."""
    lists = task.lists_of([(row["query"], row["ctxs"]) for row in rows])
    scores = iter(task.relevance(model, lists).double().tolist())
    return [{"scores": [next(scores) for _ in row["ctxs"]]} for row in rows]
