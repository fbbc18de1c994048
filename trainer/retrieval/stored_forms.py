"""The forms in which vectors lie on the disk: float16 and float32 as they are, int8 and binary with
a scale for each vector.

int8: the scale times D whole numbers from -127 to 127; the largest number of a vector becomes 127.
binary: the scale times D signs, eight in a byte. The scale is the vector's squared length over the
sum of its absolute numbers, so that the product of a vector with its own stored form is exact
(RaBitQ, Gao & Long 2024, section 3.2, without its rotation). Searches multiply with the questions'
exact vectors, so a stored form costs nothing on their side.
"""

# N vectors, D numbers

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from trainer.errors import ConfigError

Form = Literal["float16", "float32", "int8", "binary"]
FORMS: tuple[str, ...] = get_args(Form)
SMALL: tuple[str, ...] = ("int8", "binary")  # their recall is measured
SAMPLE_VECTORS = 64  # whose neighbours are compared
DEPTHS = (10, 100)


def file_dtype(form: Form, dim: int) -> np.dtype:
    """numpy's type of a stored vector, or of its numbers for float16 and float32. ConfigError for a
    binary vector whose numbers do not fill bytes.
    """
    if form not in SMALL:
        return np.dtype(form)
    if form == "int8":
        return np.dtype([("scale", "<f4"), ("values", "i1", (dim,))])
    if dim % 8:
        raise ConfigError(
            f"--dtype binary: the vectors have {dim} numbers, want a multiple of 8. Use int8."
        )
    return np.dtype([("scale", "<f4"), ("bits", "u1", (dim // 8,))])


def store(exact_ND: np.ndarray, form: Form) -> np.ndarray:
    """Vectors in a form: (N, D) floats, or (N,) records of int8 or binary."""
    dtype = file_dtype(form, exact_ND.shape[1])
    if form not in SMALL:
        with np.errstate(over="ignore"):
            return exact_ND.astype(dtype, order="C")
    stored, sizes_ND = np.empty(len(exact_ND), dtype), np.abs(exact_ND)
    if form == "int8":
        scales = sizes_ND.max(axis=1) / 127
        stored["values"] = np.rint(exact_ND / np.where(scales > 0, scales, 1)[:, None])
    else:
        sums = sizes_ND.sum(axis=1)
        scales = np.square(exact_ND).sum(axis=1) / np.where(sums > 0, sums, 1)
        stored["bits"] = np.packbits(exact_ND > 0, axis=1)
    stored["scale"] = scales
    return stored


def floats(stored: np.ndarray) -> np.ndarray:
    """(N, D) float32 numbers of vectors in any form."""
    names = stored.dtype.names or ()
    if not names:
        return stored.astype(np.float32, copy=False)
    if "values" in names:
        return stored["values"] * stored["scale"][:, None]
    signs_ND = np.unpackbits(stored["bits"], axis=1).astype(np.float32)
    signs_ND *= 2
    signs_ND -= 1
    return signs_ND * stored["scale"][:, None]


def width(stored: np.ndarray) -> int:
    """D of vectors in any form."""
    names = stored.dtype.names or ()
    if not names:
        return stored.shape[1]
    return 8 * stored["bits"].shape[1] if "bits" in names else stored["values"].shape[1]


def recalls(exact_ND: np.ndarray, stored: np.ndarray) -> dict[str, float]:
    """How many of a vector's K nearest others are among the K nearest of the stored form, by K.

    Some vectors of exact_ND are the questions, all of it is the corpus; a vector is no neighbour of
    its own. A depth is left out when the vectors are not twice as many.
    """
    rows = np.linspace(0, len(exact_ND) - 1, min(SAMPLE_VECTORS, len(exact_ND))).astype(int)
    rows = np.unique(rows)
    questions_QD, orders = exact_ND[rows], []
    for vectors_ND in (exact_ND, floats(stored)):
        scores_QN = questions_QD @ vectors_ND.T
        scores_QN[np.arange(len(rows)), rows] = -np.inf
        orders.append(np.argsort(-scores_QN, axis=1, kind="stable"))
    shares_Q = {
        depth: [overlap(exact, other, depth) for exact, other in zip(*orders, strict=True)]
        for depth in DEPTHS
        if len(exact_ND) >= 2 * depth
    }
    return {str(depth): float(np.mean(shares)) for depth, shares in shares_Q.items()}


def overlap(exact: np.ndarray, other: np.ndarray, depth: int) -> float:
    """The share of the first `depth` rows of one order that are among those of the other. -1 is no
    row.
    """
    wanted = exact[:depth][exact[:depth] >= 0]
    return len(np.intersect1d(wanted, other[:depth])) / max(1, len(wanted))


def mean_recalls(parts: list[dict[str, float]], counts: list[int]) -> dict[str, float]:
    """The mean of the recalls of several files of `counts` vectors, over those that have it."""
    means: dict[str, float] = {}
    for depth in map(str, DEPTHS):
        pairs = [
            (part[depth], count) for part, count in zip(parts, counts, strict=True) if depth in part
        ]
        if pairs:
            weight = sum(count for _, count in pairs)
            means[depth] = sum(recall * count for recall, count in pairs) / weight
    return means
