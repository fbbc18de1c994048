"""The model of a sparse retriever: a body with its masked-LM head, whose logits become the weights
of words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.models.masks import of_right_padded
from trainer.models.packed.replaced import replaced
from trainer.protocol.abilities import Side
from trainer.tasks.retriever.config import Encoder, Sparse
from trainer.tasks.retriever.model import Retriever
from trainer.tasks.retriever.sparse import heads
from trainer.tasks.retriever.sparse.pooling import TextCells, pooled

if TYPE_CHECKING:
    from trainer.models.decoder.streams import Read

# N texts, L tokens of the longest, M tokens of all of them, D width of a state, V vocabulary


class SparseRetriever(Retriever):
    """Token ids of queries, of passages, or of both, to weights of words whose dot product is
    relevance. Batches and chunks are those of a Retriever.
    """

    def __init__(
        self, base: Any, read: Read | None, *, how: Sparse, around: Sequence[int] = ()
    ) -> None:
        """base: a model of transformers that fills masks. read: how its body reads streams
        (streams.reader_of); None: rows are padded. around: the tokens around a text, which are no
        words of a query that no model reads.
        """
        super().__init__(base, None, how=Encoder(), read={"query": read, "passage": read})
        self._sparse, self._around = how, list(around)
        heads.output_of(base)

    def _of_layers(self, side: Side, piece: Mapping[str, Tensor]) -> Tensor:
        """(N, 1, V) of the texts of one piece."""
        if side == "query" and self._sparse.queries == "tokens":
            return self._of_tokens(piece)[:, None]
        base: Any = self.query_model
        places, states_MD = self._laid_out(base, piece)
        output = heads.output_of(base)

        def of_states(states_MD: Tensor) -> Tensor:
            return pooled(states_MD, output.weight, output.bias, places, self._sparse.pooling)

        # inside of a call of the layer, where ZeRO-3 has gathered its weight
        with replaced(output, "forward", of_states):
            return output(heads.transform_of(base)(states_MD))[:, None]

    def _laid_out(self, base: Any, piece: Mapping[str, Tensor]) -> tuple[TextCells, Tensor]:
        """Where tokens lie, and their states: (M, D) of a stream, (N * L, D) of padded rows."""
        if "tokens" in piece:
            read = self._read["passage"]
            assert read is not None
            return TextCells.of_stream(piece), read(piece)
        mask_NL = piece["mask"]
        states_NLD = base.base_model(
            input_ids=piece["ids"], attention_mask=of_right_padded(mask_NL, base.config)
        ).last_hidden_state
        return TextCells([mask_NL.bool()]), states_NLD.flatten(0, 1)

    def _of_tokens(self, piece: Mapping[str, Tensor]) -> Tensor:
        """(N, V) fp32: 1 for each token that a text has, but for those around it."""
        width: int = self.query_model.config.vocab_size
        if "tokens" in piece:
            count = len(piece["starts"]) - 1
            cells = piece["passage"] * width + piece["tokens"]
            ones = torch.ones(len(cells), device=cells.device)
        else:
            ids_NL, count = piece["ids"], len(piece["ids"])
            rows = torch.arange(count, device=ids_NL.device)[:, None] * width
            cells, ones = (rows + ids_NL).flatten(), piece["mask"].flatten().float()
        flat = torch.zeros(count * width, device=cells.device)
        weights_NV = flat.scatter_reduce(0, cells, ones, "amax").view(count, width)
        around = torch.tensor(self._around, dtype=torch.int64, device=cells.device)
        return weights_NV.index_fill(1, around, 0.0)
