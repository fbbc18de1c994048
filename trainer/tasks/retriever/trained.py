"""A trained retriever: programs that load its export, and its scores for the passages of a
query.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.data import vocabulary
from trainer.data.readers import fields
from trainer.models import adapters
from trainer.models.families import T5
from trainer.protocol.abilities import CutRow, Prediction, Usage
from trainer.tasks.retriever import export, sentence_folder
from trainer.tasks.retriever.config import Config
from trainer.tasks.retriever.tokens import Tokens

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_SENTENCES = """\
from sentence_transformers import SentenceTransformer

FOLDER = "."  # of this card
model = SentenceTransformer(FOLDER, device="cpu")
queries = model.encode_query(["Where is the red key?"])
passages = model.encode_document(["Ada keeps the red key in the cellar."])
print(model.similarity(queries, passages))
"""
_PLAIN = """\
import torch
from torch.nn.functional import linear, normalize
from transformers import {kind}, AutoTokenizer

FOLDER = "."  # of this card
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
{models}
prefix = {prefixes!r}
most = {limits!r}
pooler = {pooler}


@torch.no_grad()
def embed(texts, side):
    room = most[side]{less}
    ids = [tokenizer(prefix[side] + text, truncation=True, max_length=room)["input_ids"]
           for text in texts]
    rows = [torch.tensor(row{ended}) for row in ids]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    states = models[side](input_ids=padded, attention_mask=mask).last_hidden_state.float()
    vectors = {pooled}
{projected}    return {vectors}


queries = embed(["Where is the red key?"], "query")
passages = embed(["Ada keeps the red key in the cellar."], "passage")
print(queries @ passages.T)
"""
_POOLED = {
    "cls": "states[:, 0]",
    "mean": "(states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
    "eos": "states[torch.arange(len(rows)), lengths - 1]",
}
_PROJECTED = """\
    layer = "linear_q" if side == "query" else "linear_p"
    weight, bias = (pooler[f"{layer}.{name}"].float() for name in ("weight", "bias"))
    vectors = linear(vectors, weight, bias)
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    data = cfg.data
    tokenizer = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=Path("tmp-cache"))
    tokens = Tokens(tokenizer, data)
    plain = ("In plain transformers", _plain(cfg, folder, appends_end=tokens.appends_end))
    limits = [
        f"Of a query it reads the first {data.query_tokens} tokens, of a passage the first "
        f"{data.passage_tokens}. A passage with a title was read as title, {tokens.separator!r}, "
        "text.",
        "Relevance is the dot product of two vectors of this model, and of no other.",
    ]
    if not (folder / sentence_folder.MODULES).is_file():
        limits.append(
            "sentence-transformers has no words for it: adapters without their base, an encoder "
            "or a projection for each side, or an end that its tokenizer does not add."
        )
        library = "peft" if cfg.exports_adapters else "transformers"
        return Usage(library, [plain], limits)
    if data.query_tokens != data.passage_tokens:
        limits.append(
            "sentence-transformers knows one limit for both sides: the longer one of the two."
        )
    return Usage("sentence-transformers", [("In sentence-transformers", _SENTENCES), plain], limits)


def _plain(cfg: Config, folder: Path, *, appends_end: bool) -> str:
    how, data = cfg.encoder, cfg.data
    has_pooler = (folder / export.POOLER).is_file()
    config = folder / "config.json"
    is_t5 = config.is_file() and json.loads(config.read_text()).get("model_type") in T5
    kind = "AutoModelForTextEncoding" if is_t5 else "AutoModel"
    return _PLAIN.format(
        kind=kind,
        models=_models(cfg, folder, kind),
        prefixes={"query": data.query_prefix, "passage": data.passage_prefix},
        limits={"query": data.query_tokens, "passage": data.passage_tokens},
        pooler=f'torch.load(f"{{FOLDER}}/{export.POOLER}")' if has_pooler else "None",
        less=" - 1" if appends_end else "",
        ended=" + [tokenizer.eos_token_id]" if appends_end else "",
        pooled=_POOLED[how.pooling],
        projected=_PROJECTED if has_pooler else "",
        vectors="normalize(vectors, dim=-1)" if how.normalize else "vectors",
    )


def _models(cfg: Config, folder: Path, kind: str) -> str:
    if cfg.encoder.tied:
        return adapters.loading(kind, folder) + '\nmodels = {"query": model, "passage": model}'
    lines = ["models = {}"]
    for side, name in (("query", export.QUERY), ("passage", export.PASSAGE)):
        program = adapters.loading(kind, folder / name)
        of_side = f'f"{{FOLDER}}/{name}"'
        lines += [program.replace("FOLDER", of_side), f'models["{side}"] = model']
    return "\n".join(lines)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """{"query", "ctxs"}: ctxs are the passages to score (ctxs, contexts or context), or None."""
    name, query = fields.first_given(raw, fields.QUESTIONS)
    row: Row = {"query": fields.text(query, place, name)}
    if raw.get("ctxs") is None:
        return {**row, "ctxs": fields.contexts(raw, place)}
    passages = fields.passages(raw["ctxs"], place, "ctxs")
    for number, passage in enumerate(passages):
        fields.text(passage.get("text"), place, f"ctxs[{number}].text")
    return {**row, "ctxs": passages or None}


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What the limits of both sides cut off a query and its passages."""
    tokens = task.tokens
    query = tokens.plain_ids([{"text": row["query"]}], "query")
    passages = tokens.plain_ids(row["ctxs"] or [], "passage")
    return CutRow(
        {"queries": tokens.cut_of(query, "query"), "passages": tokens.cut_of(passages, "passage")}
    )


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"scores"} of a query with passages, one for each; {"vector"} of a query without passages."""
    queries = task.ids([{"text": row["query"]} for row in rows], side="query")
    passages = [passage for row in rows for passage in row["ctxs"] or ()]
    vectors = task.embed(model, queries, side="query").cpu()
    vectors_of_passages = iter(())
    if passages:
        ids = task.ids(passages, side="passage")
        vectors_of_passages = iter(task.embed(model, ids, side="passage").cpu())
    predictions: list[dict[str, Any]] = []
    for row, vector in zip(rows, vectors, strict=True):
        if row["ctxs"] is None:
            predictions.append({"vector": vector.tolist()})
        else:
            predictions.append(
                {"scores": [float(vector @ next(vectors_of_passages)) for _ in row["ctxs"]]}
            )
    return predictions
