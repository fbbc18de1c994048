"""Pictures of scores: the files that are written, and what must be drawn in them."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from tests.wording import refused
from trainer.tasks.vera.calibration import scores_of
from trainer.tasks.vera.pictures import reliability_diagram, score_histogram

CHANCE = np.random.default_rng(0)
LOGITS = CHANCE.normal(0.0, 4.0, 300)
LABELS = (CHANCE.random(300) < 1 / (1 + np.exp(-LOGITS / 2))).astype(np.int64)
BEFORE, AFTER = scores_of(LOGITS), scores_of(LOGITS, temperature=2.0)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def has_color(image: np.ndarray, code: str) -> bool:
    wanted = [int(code[place : place + 2], 16) for place in (1, 3, 5)]
    return bool((np.abs(image - wanted).max(axis=2) < 8).sum() > 50)


@pytest.fixture
def diagram(tmp_path: Path) -> Path:
    reliability_diagram(tmp_path / "reliability.png", BEFORE, AFTER, LABELS)
    return tmp_path / "reliability.png"


@pytest.fixture
def histogram(tmp_path: Path) -> Path:
    score_histogram(tmp_path / "scores.png", BEFORE, LABELS)
    return tmp_path / "scores.png"


@pytest.mark.parametrize("picture", ["diagram", "histogram"])
def test_a_picture_is_800_by_600_on_white_and_shows_both_colors(
    picture: str, request: pytest.FixtureRequest
) -> None:
    image = pixels(request.getfixturevalue(picture))
    assert image.shape == (600, 800, 3)
    assert (image[0, 0] == 255).all()
    assert has_color(image, "#0072B2")
    assert has_color(image, "#E69F00")


def test_nothing_is_left_beside_the_picture(diagram: Path) -> None:
    assert [path.name for path in diagram.parent.iterdir()] == ["reliability.png"]


def test_the_same_scores_make_the_same_file(diagram: Path) -> None:
    again = diagram.with_name("again.png")
    reliability_diagram(again, BEFORE, AFTER, LABELS)
    assert again.read_bytes() == diagram.read_bytes()


def test_a_dark_style_of_the_user_changes_nothing_and_stays(diagram: Path) -> None:
    with mpl.rc_context(
        {"axes.facecolor": "black", "text.color": "white", "figure.facecolor": "black"}
    ):
        again = diagram.with_name("again.png")
        reliability_diagram(again, BEFORE, AFTER, LABELS)
        assert mpl.rcParams["axes.facecolor"] == "black"
    assert again.read_bytes() == diagram.read_bytes()


def test_counts_that_calibration_leaves_alone_are_drawn_once(tmp_path: Path) -> None:
    reliability_diagram(tmp_path / "alike.png", BEFORE, AFTER, LABELS)
    tied = np.where(BEFORE > 0.5, 1.0, BEFORE)
    reliability_diagram(tmp_path / "tied.png", tied, AFTER, LABELS)
    bars = slice(470, 560)
    assert not has_color(pixels(tmp_path / "alike.png")[bars], "#0072B2")
    assert has_color(pixels(tmp_path / "tied.png")[bars], "#0072B2")


def test_a_class_without_statements_is_drawn_as_none(tmp_path: Path) -> None:
    score_histogram(tmp_path / "true.png", [0.2, 0.7], [1, 1])
    assert has_color(pixels(tmp_path / "true.png"), "#0072B2")


def test_a_diagram_of_nothing_is_refused_and_not_written(tmp_path: Path) -> None:
    with refused("nothing_to_calibrate"):
        reliability_diagram(tmp_path / "nothing.png", [], [], [])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("file_unwritable", at=re.compile(".*absent.*")):
        score_histogram(tmp_path / "absent" / "scores.png", BEFORE, LABELS)
