"""A trained model of late interaction: programs that load its export, and its scores for the
passages of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.models.adapters import are_in, loading
from trainer.protocol.abilities import Prediction, Usage
from trainer.tasks.retriever.config import Config
from trainer.tasks.retriever.late.export import DENSE
from trainer.tasks.retriever.sentence_folder import MODULES
from trainer.tasks.retriever.trained import cut_row, row_to_predict

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

# a row of any form that reads both sides apart is predicted and cut alike
__all__ = ["cut_row", "predict", "row_to_predict", "usage"]

_SENTENCES = """\
from sentence_transformers import MultiVectorEncoder

FOLDER = "."  # of this card
model = MultiVectorEncoder(FOLDER, device="cpu")
queries = model.encode_query(["Where is the red key?"])
passages = model.encode_document(["Ada keeps the red key in the cellar."])
print(model.similarity(queries, passages))
"""
_PLAIN = """\
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
projection = load_file(f"{{FOLDER}}/{dense}/model.safetensors")["linear.weight"]
text = tokenizer({passage!r}, return_tensors="pt")
with torch.no_grad():
    states = model(**text)[0].float()
vectors = torch.nn.functional.normalize(states @ projection.float().T, dim=-1)
print(vectors.shape)  # one for each token
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    data, how = cfg.data, cfg.late
    passage = f"{data.passage_prefix}Ada keeps the red key in the cellar."
    program = loading("AutoModel", folder)
    plain = ("In plain transformers", _PLAIN.format(loading=program, dense=DENSE, passage=passage))
    filled = ", filled up to that with mask tokens" if how.expand else ""
    scored = "their mean" if how.mean else "their sum"
    limits = [
        f"Of a query it reads the first {data.query_tokens} tokens{filled}, of a passage the first "
        f"{data.passage_tokens}.",
        "Relevance compares vectors of this model alone: for each vector of the query the largest "
        f"dot product with one of the passage, and {scored}.",
    ]
    if (folder / MODULES).is_file():
        sentences = ("In sentence-transformers", _SENTENCES)
        return Usage("sentence-transformers", [sentences, plain], limits)
    limits.append(
        "sentence-transformers has no words for it: adapters without their base, or an end that "
        "its tokenizer does not add."
    )
    return Usage("peft" if are_in(folder) else "transformers", [plain], limits)


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"scores"} of a query with passages, one for each; {"vectors"} of a query without passages,
    one for each of its tokens.
    """
    predictions: list[dict[str, Any]] = []
    for row in rows:
        lists = task.lists_of([(row["query"], row["ctxs"] or [])])
        if row["ctxs"] is None:
            found = task.token_vectors(model, [lists[0][0]], side="query")
            predictions.append({"vectors": found.vectors.tolist()})
        else:
            scores = task.relevance(model, lists).double().tolist()
            predictions.append({"scores": scores})
    return predictions
