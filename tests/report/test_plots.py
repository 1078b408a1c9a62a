"""Names and markers of points."""

import itertools

import numpy as np
from matplotlib.path import Path

from inlinevit.report import STYLES, Point, points_figure
from inlinevit.report.style import marker_look


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
        Point(style.name, style, 100.0 + 2 * (number % 2), 60.0 + 0.01 * number, 0.02 * (number % 3))
        for number, style in enumerate(STYLES.values())
    ]
    figure = points_figure({"one": points, "two": points[:1]}, "x", "y")
    figure.draw_without_rendering()
    crowded, single = figure.axes
    assert [text.get_text() for text in single.texts] == [points[0].name]
    boxes = [text.get_window_extent() for text in crowded.texts]
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    marks = crowded.transData.transform([(point.x, point.y) for point in points])
    assert not any(box.contains(*mark) for box in boxes for mark in marks)
    assert all(crowded.get_window_extent().count_contains(np.array([box.min, box.max])) == 2 for box in boxes)
