"""Names beside the points of a figure: inside the frame, over no point, over no other name."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from m3d.grid.cells import Overrides
from m3d.reproduce import figures
from m3d.reproduce.names import choose
from m3d.reproduce.plans import PLANS
from m3d.reproduce.records import Place, Records


def test_names_of_points_stay_inside_the_axes():
    """A long name of the leftmost point would reach over the numbers of the axis."""
    places = {"a method with a long name": (10.0, 30.0), "near": (25.0, 30.0), "far": (900.0, 60.0)}
    seconds = {name: Place(x) for name, (x, _) in places.items()}
    figure = figures._against_time({name: Place(y) for name, (_, y) in places.items()}, seconds, "title")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    edges = axes.get_window_extent()
    named = [text for text in axes.texts if text.get_text() in places]
    assert len(named) == 3
    for text in named:
        box = text.get_window_extent()
        assert edges.x0 - 1e-6 <= box.x0 and box.x1 <= edges.x1 + 1e-6, text.get_text()


def test_names_cover_no_point_and_no_other_name_where_points_crowd(monkeypatch):
    """The repository's own figures: in one a long name once lay over its neighbour's point, in one over its name."""
    drawn, name_points = [], figures.name_points
    monkeypatch.setattr(figures, "name_points", lambda *given: (drawn.append(given[2]), name_points(*given)))
    results = Path(__file__).parents[2] / "results" / "reproduce"
    made = figures.methods(Records(results, PLANS["methods"], Overrides()))
    assert len(made) == len(drawn) == 2
    for figure, points in zip(made.values(), drawn, strict=True):
        figure.draw_without_rendering()
        (axes,) = figure.axes
        boxes = {t.get_text(): t.get_window_extent() for t in axes.texts if t.get_text() in points}
        assert len(boxes) == len(points) > 10
        for name, box in boxes.items():
            covered = [other for other, point in points.items() if box.contains(*axes.transData.transform(point))]
            assert not covered, (name, covered)
        assert not [(a, b) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]


def test_a_name_makes_room_for_one_that_has_no_choice():
    """ "a" chooses first and takes its nicest place, which is the only one of "bb": it must choose again."""
    left, right = (0.0, 0.0, 1.0, 1.0), (2.0, 0.0, 3.0, 1.0)
    assert choose({"a": [left, right], "bb": [left]}, []) == {"a": right, "bb": left}
    assert choose({"a": [left, right], "bb": [left]}, [right]) == {"a": left, "bb": left}  # nowhere better: the nicest
