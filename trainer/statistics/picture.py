"""The lengths of every field as one PNG file; it reads without colour.

Drawn on a figure of its own, never through pyplot: no window, no state shared with whoever else
draws.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files.atomic import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT, _DOTS_PER_INCH = 9.0, 2.4, 100  # inches, the height of each field
_LOOKS = (
    ("#0072B2", "-"),
    ("#E69F00", "--"),
    ("#666666", ":"),
)  # of Okabe & Ito's palette, and a line style each


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Write a histogram of token lengths for each field, splits as lines, limits marked.

    StorageError when the disk refuses.
    """
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    splits = report["splits"]
    fields = list(dict.fromkeys(name for found in splits.values() for name in found["fields"]))
    with style.context("default"):
        figure = Figure(
            figsize=(_WIDTH, _HEIGHT * len(fields)), dpi=_DOTS_PER_INCH, layout="constrained"
        )
        FigureCanvasAgg(figure)
        for axes, name in zip(
            figure.subplots(len(fields), squeeze=False)[:, 0], fields, strict=True
        ):
            _draw_field(
                axes, name, {split: found["fields"].get(name) for split, found in splits.items()}
            )
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=_DOTS_PER_INCH)
    replace_file(path, image.getvalue(), is_durable=False)


def _draw_field(axes: Axes, name: str, by_split: Mapping[str, Any]) -> None:
    limit = None
    for (color, line), (split, found) in zip(
        _LOOKS * len(by_split), by_split.items(), strict=False
    ):
        if not found or not found["texts"]:
            continue
        limit = found["limit"] if limit is None else limit
        edges = found["histogram"]["edges"]
        share_of_one = 1 / (found["texts"] * (edges[1] - edges[0]))
        shares = [count * share_of_one for count in found["histogram"]["counts"]]
        said = (
            f"{split}: {found['texts']:,}, median {found['p50']:,}, 95 % below {found['p95']:,}, "
            f"max {found['max']:,}"
        )
        axes.stairs(shares, edges, color=color, linestyle=line, linewidth=1.6, label=said)
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1.0, label=f"limit {limit:,}")
    axes.set(xlabel=f"{name}: tokens", ylabel="share per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
