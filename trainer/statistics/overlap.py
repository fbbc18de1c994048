"""Rows of a split that are training rows as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore


def shared_rows(train: TokenStore, valid: TokenStore) -> list[tuple[int, int]]:
    """(row, training row) of the validation rows that are training rows as well: their tokens are
    the same, in the fields of both, or their raw rows say the same up to the normal form.
    """
    fields = sorted(set(train.meta["fields"]) & set(valid.meta["fields"]))
    shared = _rows_in_both(train.row_hashes(fields), valid.row_hashes(fields))
    trained, validated = train.raw_hashes(), valid.raw_hashes()
    if trained is not None and validated is not None:
        shared = _rows_in_both(trained, validated) | shared
    return sorted(shared.items())


def _rows_in_both(train_N: np.ndarray, valid_M: np.ndarray) -> dict[int, int]:
    """Row -> training row, from the hashes of both."""
    order_N = np.argsort(train_N, kind="stable")
    place_M = np.minimum(np.searchsorted(train_N, valid_M, sorter=order_N), len(train_N) - 1)
    rows = np.flatnonzero(train_N[order_N[place_M]] == valid_M)
    return dict(zip(rows.tolist(), order_N[place_M[rows]].tolist(), strict=True))
