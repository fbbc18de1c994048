"""Draws two pictures of a verifier's scores, as PNG files of 800 x 600 pixels that can be read
without colour.

Each has a figure of its own and does not use pyplot, so it opens no window and shares no state with
other code that draws.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.files.atomic import replace_file
from trainer.tasks.vera.calibration import Values, ece, quantile_bins

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES, DOTS_PER_INCH = (8.0, 6.0), 100
GREY, LIGHT_GREY = "#666666", "#CCCCCC"
BLUE, ORANGE = "#0072B2", "#E69F00"  # of Okabe & Ito's palette, for every kind of colour vision
SCORE = "score (probability that the statement is true)"
WIDTH = 0.05  # of a bar of the histogram


def reliability_diagram(
    path: Path, scores_before: Values, scores_after: Values, labels: Values
) -> None:
    """Plot the share of true statements over the mean score, before and after calibration.

    Points are the 10 quantile bins of `ece`; bars below show how many statements each bin holds.
    DataError without statements; StorageError when the disk refuses.
    """
    lines = (
        ("before", quantile_bins(scores_before, labels), ece(scores_before, labels)),
        ("after", quantile_bins(scores_after, labels), ece(scores_after, labels)),
    )
    with _default_style():
        figure = _figure()
        upper, lower = figure.subplots(2, 1, height_ratios=(4, 1))
        upper.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="perfect calibration")
        looks = ((ORANGE, "--", "o", "white"), (BLUE, "-", "s", BLUE))
        for (when, bins, error), (color, line, marker, face) in zip(lines, looks, strict=True):
            upper.plot(
                bins.mean_score, bins.share_true, color=color, linestyle=line, marker=marker,
                markersize=8,
                markerfacecolor=face, label=f"{when} calibration, ECE {error:.3f}",
            )  # fmt: skip
        upper.set(
            xlim=(-0.03, 1.03),
            ylim=(-0.04, 1.04),
            xlabel=f"mean {SCORE}",
            ylabel="share of true statements",
        )
        upper.grid(alpha=0.3)
        _draw_counts(lower, *(bins.count for _, bins, _ in lines))
        figure.legend(
            *upper.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
        )
        _save(figure, path)


def score_histogram(path: Path, scores: Values, labels: Values) -> None:
    """Plot how many true and how many false statements got each score.

    StorageError when the disk refuses.
    """
    scores_N, is_true_N = np.asarray(scores, dtype=np.float64), np.asarray(labels) > 0.5
    of_class = [scores_N[is_true_N], scores_N[~is_true_N]]
    with _default_style():
        figure = _figure()
        axes = figure.subplots()
        axes.hist(
            of_class, bins=round(1 / WIDTH), range=(0, 1), color=[BLUE, ORANGE], hatch=["", "////"],
            edgecolor="black", linewidth=0.6,
            label=[
                f"{name} ({len(own):,} statements)"
                for name, own in zip(("true", "false"), of_class, strict=True)
            ],
        )  # fmt: skip
        axes.axvline(0.5, color=GREY, linestyle=":", label="threshold 0.5")
        axes.set(xlim=(-0.02, 1.02), xlabel=SCORE, ylabel=f"statements per {WIDTH} of score")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        _save(figure, path)


def _draw_counts(axes: Axes, before: np.ndarray, after: np.ndarray) -> None:
    """Draw a bar with its number for each occupied bin: one bar if calibration changed no count,
    which only ties can do, else one before and one after calibration.

    The numbers of neighbouring bars stand at two heights, so that five digits find room.
    """
    which, most = "", max(len(before), len(after))
    if np.array_equal(before, after):
        series = ((before, 0.0, 0.8, LIGHT_GREY, "", 1),)
    else:
        series = ((before, -0.2, 0.4, ORANGE, "////", 1), (after, 0.2, 0.4, BLUE, "", 10))
        which = " (left bar before, right bar after)"
    for count, shift, width, color, hatch, padding in series:
        places = np.arange(1, len(count) + 1) + shift
        bars = axes.bar(
            places, count, width, color=color, hatch=hatch, edgecolor="black", linewidth=0.6
        )
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=padding, bbox=plate)
    axes.set(
        xticks=range(1, most + 1),
        xlabel=f"occupied bin, lowest scores first{which}",
        ylabel="statements",
    )
    axes.margins(y=0.4)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _default_style() -> AbstractContextManager[None]:
    """Uses matplotlib's default style instead of the user's for as long as it is open."""
    from matplotlib import style

    return style.context("default")


def _figure() -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DOTS_PER_INCH)
    replace_file(path, image.getvalue(), is_durable=False)
