"""A trained sparse retriever: programs that load its export, and its scores for the passages of a
query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.models.adapters import are_in, loading
from trainer.protocol.abilities import Prediction, Usage
from trainer.tasks.retriever.config import Config
from trainer.tasks.retriever.sentence_folder import MODULES
from trainer.tasks.retriever.trained import cut_row, row_to_predict

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

# a row of any form that reads both sides apart is predicted and cut alike
__all__ = ["cut_row", "predict", "row_to_predict", "usage"]

_SENTENCES = """\
from sentence_transformers import SparseEncoder

FOLDER = "."  # of this card
model = SparseEncoder(FOLDER, device="cpu")
queries = model.encode_query(["Where is the red key?"])
passages = model.encode_document(["Ada keeps the red key in the cellar."])
print(model.similarity(queries, passages))
print(model.decode(passages[0], top_k=10))
"""
_PLAIN = """\
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
text = tokenizer({passage!r}, return_tensors="pt")
with torch.no_grad():
    logits = model(**text).logits[0].float()  # of each token
weights = logits.relu().log1p(){pooled}
print({{tokenizer.decode([word]): float(weights[word]) for word in weights.topk(10).indices}})
"""
_POOLED = {"max": ".max(0).values", "sum": ".sum(0)"}


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    data, how = cfg.data, cfg.sparse
    passage = f"{data.passage_prefix}Ada keeps the red key in the cellar."
    program = _PLAIN.format(
        loading=loading("AutoModelForMaskedLM", folder),
        passage=passage,
        pooled=_POOLED[how.pooling],
    )
    plain = ("In plain transformers", program)
    limits = [
        f"Of a query it reads the first {data.query_tokens} tokens, of a passage the first "
        f"{data.passage_tokens}.",
        "Relevance is the dot product of the weights of two texts by this model, and by no other.",
    ]
    if how.queries == "tokens":
        limits.append("Each token of a query has the weight 1: no model reads queries.")
    if not (folder / MODULES).is_file():
        limits.append(
            "sentence-transformers has no words for it: adapters without their base, an end that "
            "its tokenizer does not add, or queries of tokens with fewer words than the model has."
        )
        return Usage("peft" if are_in(folder) else "transformers", [plain], limits)
    if data.query_tokens != data.passage_tokens and how.queries == "encoded":
        limits.append(
            "sentence-transformers knows one limit for both sides: the longer one of the two."
        )
    return Usage("sentence-transformers", [("In sentence-transformers", _SENTENCES), plain], limits)


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"scores"} of a query with passages, one for each; of a query without passages {"words"}:
    each word that has a weight, as the tokenizer's vocabulary spells it, the heaviest first.
    """
    predictions: list[dict[str, Any]] = []
    for row in rows:
        (ids,) = task.ids([{"text": row["query"]}], side="query")
        (query_V,) = task.embed_words(model, [ids], side="query").cpu()
        if row["ctxs"] is None:
            weights, words = query_V.sort(descending=True, stable=True)
            count = int((weights > 0).sum())
            names = task.tokenizer.convert_ids_to_tokens(words[:count].tolist())
            pairs = zip(names, weights[:count].tolist(), strict=True)
            predictions.append({"words": dict(pairs)})
            continue
        passages = task.ids(row["ctxs"], side="passage")
        weights_NV = task.embed_words(model, passages, side="passage").cpu()
        predictions.append({"scores": (weights_NV @ query_V).tolist()})
    return predictions
