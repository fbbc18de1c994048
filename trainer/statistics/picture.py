"""Draws the lengths of every field into one PNG file that is readable without colour.

It uses a figure of its own and never pyplot, so it opens no window and shares no state with other
code that draws.
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
)  # colours of Okabe & Ito's palette, each with a line style


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Write a histogram of token lengths for each field, with a line for each split and limit.

    StorageError when the disk refuses.
    """
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    splits = report["splits"]
    fields = list(
        dict.fromkeys(name for of_split in splits.values() for name in of_split["fields"])
    )
    with style.context("default"):
        figure = Figure(
            figsize=(_WIDTH, _HEIGHT * len(fields)), dpi=_DOTS_PER_INCH, layout="constrained"
        )
        FigureCanvasAgg(figure)
        for axes, name in zip(
            figure.subplots(len(fields), squeeze=False)[:, 0], fields, strict=True
        ):
            _draw_field(
                axes,
                name,
                {split: of_split["fields"].get(name) for split, of_split in splits.items()},
            )
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=_DOTS_PER_INCH)
    replace_file(path, image.getvalue(), is_durable=False)


def _draw_field(axes: Axes, name: str, by_split: Mapping[str, Any]) -> None:
    limit = None
    for (color, line), (split, of_split) in zip(
        _LOOKS * len(by_split), by_split.items(), strict=False
    ):
        if not of_split or not of_split["texts"]:
            continue
        limit = of_split["limit"] if limit is None else limit
        edges = of_split["histogram"]["edges"]
        share_of_one = 1 / (of_split["texts"] * (edges[1] - edges[0]))
        shares = [count * share_of_one for count in of_split["histogram"]["counts"]]
        label = (
            f"{split}: {of_split['texts']:,}, median {of_split['p50']:,}, "
            f"95 % below {of_split['p95']:,}, max {of_split['max']:,}"
        )
        axes.stairs(shares, edges, color=color, linestyle=line, linewidth=1.6, label=label)
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1.0, label=f"limit {limit:,}")
    axes.set(xlabel=f"{name}: tokens", ylabel="share per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
