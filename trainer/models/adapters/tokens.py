"""Rows of an embedding that train beside adapters, while its other rows stay as they are.

peft keeps them in a ParameterDict, which ZeRO-3 does not gather, and copies the whole matrix in
every forward. Here they are a parameter of a module around the embedding, which puts them where
their tokens stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.optimizer.lora import Lora

# N tokens whose rows train, V vocabulary, D width


class RowsOfEmbedding(nn.Module):
    """An embedding whose rows for some tokens are those of a parameter."""

    places: Tensor  # (V,): of a token, its row of the parameter; -1 of all others

    def __init__(self, base_layer: Any, tokens_N: Tensor, token_rows: nn.Parameter) -> None:
        super().__init__()
        self.base_layer, self.token_rows = base_layer, token_rows
        places_V = torch.full((base_layer.num_embeddings,), -1, device=tokens_N.device)
        places_V[tokens_N] = torch.arange(len(tokens_N), device=tokens_N.device)
        self.register_buffer("places", places_V, persistent=False)

    @property
    def weight(self) -> nn.Parameter:
        """That of the embedding, whose rows for these tokens are not read."""
        return self.base_layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.base_layer(ids)
        places = self.places[ids]
        own = F.embedding(places.clamp(min=0), self.token_rows)
        scale = getattr(self.base_layer, "embed_scale", None)  # of Gemma, behind its embedding
        own = own if scale is None else own * scale.to(own.dtype)
        return torch.where((places >= 0).unsqueeze(-1), own, hidden)

    def merge(self) -> Any:
        """The embedding with these rows in it."""
        tokens_N = (self.places >= 0).nonzero()[:, 0]
        rows = self.token_rows.detach()[self.places[tokens_N]]
        self.base_layer.weight.data[tokens_N] = rows.to(self.base_layer.weight.dtype)
        return self.base_layer


class RowsOfOutput(nn.Module):
    """An output layer that shares its matrix with such an embedding: the tokens' logits come from
    the same rows.
    """

    def __init__(self, base_layer: Any, tokens_N: Tensor, token_rows: nn.Parameter) -> None:
        super().__init__()
        self.base_layer, self.token_rows = base_layer, token_rows
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.register_buffer("tokens", tokens_N, persistent=False)

    @property
    def weight(self) -> nn.Parameter:
        """That of the layer, whose rows for these tokens are not read."""
        return self.base_layer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.base_layer(hidden)
        own = F.linear(hidden, self.token_rows)
        return logits.index_copy(-1, self.tokens, own.to(logits.dtype))

    def merge(self) -> Any:
        """The layer itself: its matrix is the embedding's."""
        return self.base_layer


def put_in(base: Any, how: Lora) -> None:
    """Put trainable rows around the embedding of a base, and around the output layer that shares
    its matrix. They begin as the embedding's. The base may be on the meta device, or partitioned.

    ConfigError for tokens that it does not have.
    """
    if not how.tokens:
        return
    from peft.utils.integrations import gather_params_ctx

    embedding = base.get_input_embeddings()
    beyond = [token for token in how.tokens if token >= embedding.num_embeddings]
    if beyond:
        raise ConfigError(
            f"lora.tokens: got {', '.join(map(str, beyond))}, but the base has embeddings for the "
            f"ids 0 to {embedding.num_embeddings - 1}. Give ids of its tokenizer."
        )
    matrix = embedding.weight
    tokens_N = torch.tensor(how.tokens, device=matrix.device)
    with gather_params_ctx([matrix], modifier_rank=None):
        rows = nn.Parameter(matrix.detach()[tokens_N].clone())
    output = base.get_output_embeddings()
    for name, module in list(base.named_modules()):
        if getattr(module, "weight", None) is not matrix:
            continue
        if isinstance(module, nn.Embedding):
            base.set_submodule(name, RowsOfEmbedding(module, tokens_N, rows))
        elif module is output:
            base.set_submodule(name, RowsOfOutput(module, tokens_N, rows))


def take_out(base: nn.Module, *, merges: bool) -> None:
    """Put the plain layers back, with the rows in them if `merges`."""
    for name, module in list(base.named_modules()):
        if isinstance(module, (RowsOfEmbedding, RowsOfOutput)):
            plain = module.merge() if merges else module.base_layer
            base.set_submodule(name, plain)  # pyright: ignore[reportCallIssue]
