"""Names and markers of points."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.path import Path

from inlinevit.report import STYLES, Point, points_figure
from inlinevit.report.plots import spread
from inlinevit.report.style import marker_look


@given(st.lists(st.floats(-1e3, 1e3), max_size=12), st.floats(0, 50))
def test_places_are_spread_as_little_as_needed(places: list[float], gap: float) -> None:
    found = spread(sorted(places), gap)
    assert all(after - before >= gap - 1e-6 for before, after in itertools.pairwise(found))
    # The sum of the shifts is 0, and places that are far enough from each other stay.
    assert sum(found) == pytest.approx(sum(places), abs=1e-6)
    apart = [2 * gap * number for number in range(len(places))]
    assert spread(apart, gap) == pytest.approx(apart)


def test_letters_are_drawn_as_such() -> None:
    """A text in dollar signs would be drawn with them."""
    letters = [style.marker for style in STYLES.values() if style.marker.startswith("$")]
    assert len(letters) > 5
    for marker in letters:
        shape = marker_look(marker)["marker"]
        assert isinstance(shape, Path)
        box = shape.get_extents()
        # One letter, higher than wide, around the point.
        assert 0.3 < box.width / box.height < 1.3
        assert np.allclose((box.x0 + box.x1, box.y0 + box.y1), 0, atol=1e-6)
    assert marker_look("s") == {"marker": "s"}


def test_names_of_points_do_not_overlap() -> None:
    points = [
        Point(style.name, style, 100.0 + 2 * (number % 2), 60.0 + 0.01 * number)
        for number, style in enumerate(STYLES.values())
    ]
    figure = points_figure({"one": points, "two": points[:1]}, "x", "y")
    figure.draw_without_rendering()
    crowded, single = (axes.texts for axes in figure.axes)
    assert [text.get_text() for text in single] == [points[0].name]
    boxes = [text.get_window_extent() for text in crowded]
    assert len(boxes) == len(points)
    places = sorted((box.y0 + box.y1) / 2 for box in boxes)
    assert min(np.diff(places)) > 8
