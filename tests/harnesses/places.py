"""A retrieval task of MTEB on rows of a folder that LATHE_PLACES names: corpus.jsonl, queries.jsonl
and qrels/test.tsv, as BEIR writes them. It is a file for --include_path.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from mteb.abstasks.retrieval import (  # pyright: ignore[reportMissingImports]
    AbsTaskRetrieval,
)
from mteb.abstasks.task_metadata import (  # pyright: ignore[reportMissingImports]
    TaskMetadata,
)

UNKNOWN = ("date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
UNKNOWN += ("sample_creation", "bibtex_citation", "reference")


class PlacesRetrieval(AbsTaskRetrieval):
    """Which passage says where somebody keeps something."""

    metadata = TaskMetadata(
        name="PlacesRetrieval",
        description="Made-up people and the places of their things.",
        dataset={"path": "none", "revision": "1"},
        type="Retrieval",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
        **dict.fromkeys(UNKNOWN),
    )

    def load_data(self, **_: Any) -> None:
        folder = Path(os.environ["LATHE_PLACES"])
        passages, queries = (
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("corpus", "queries")
        )
        relevant: dict[str, dict[str, int]] = {}
        for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
            query, passage, score = line.split("\t")
            relevant.setdefault(query, {})[passage] = int(score)
        corpus = [
            {"id": one["_id"], "title": one["title"], "text": one["text"]} for one in passages
        ]
        asked = [{"id": one["_id"], "text": one["text"]} for one in queries]
        self.dataset = {
            "default": {
                "test": {
                    "corpus": Dataset.from_list(corpus),
                    "queries": Dataset.from_list(asked),
                    "relevant_docs": relevant,
                    "top_ranked": None,
                }
            }
        }
        self.data_loaded = True
