"""The picture of a run: its losses and scores over its steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.config.scores.direction import is_of_validation

_WIDTH, _HEIGHT, _DOTS_PER_INCH = 4.6, 3.0, 100  # inches of one curve's axes
_MOST_COLUMNS = 3
_TRAINED, _VALID = ("#0072B2", "-"), ("#D55E00", "--")  # Okabe & Ito's palette
_VALID_LOSS = "valid/loss"


class Chart(Figure):
    """A figure of matplotlib that a notebook shows; `savefig(path)` writes it. It is no figure of
    pyplot, so it shares no state with other pictures.
    """

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=_DOTS_PER_INCH)
        return image.getvalue()


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Chart:
    """The loss of training and of validation in one place, and every other score of the validation
    in a place of its own, over the steps.

    rows: of Run.metrics(); there must be one.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    scores = [name for name in names if is_of_validation(name) and name != _VALID_LOSS]
    count = 1 + len(scores)
    columns = min(count, _MOST_COLUMNS)
    lines = -(-count // columns)
    with style.context("default"):
        figure = Chart(figsize=(_WIDTH * columns, _HEIGHT * lines), layout="constrained")
        FigureCanvasAgg(figure)
        all_axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for axes in all_axes[count:]:
            axes.set_axis_off()
        first, *others = all_axes[:count]
        _draw(first, rows, "loss", *_TRAINED)
        _draw(first, rows, _VALID_LOSS, *_VALID)
        first.set(xlabel="step", ylabel="loss")
        first.legend(fontsize=8, frameon=False)
        for axes, name in zip(others, scores, strict=True):
            _draw(axes, rows, name, *_VALID)
            axes.set(xlabel="step", ylabel=name)
        figure.suptitle(title, fontsize=9)
    return figure


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, color: str, line: str) -> None:
    points = [(row["step"], row[name]) for row in rows if name in row]
    if points:
        mark = "o" if len(points) < 30 else ""
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, linestyle=line, marker=mark, markersize=3, label=name)
    axes.grid(alpha=0.3)
