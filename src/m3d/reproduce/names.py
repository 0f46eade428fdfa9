"""Names beside the points of a figure, out of each other's way."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top

_TURNS = 10  # of moving names, at most
_MARKER = 3.0  # half its side


def name_points(figure: Figure, axes: Axes, points: Mapping[str, Point], size: float) -> None:
    """Write each point's name, ``size`` high, where it lies least on other points, names and beyond the frame."""
    figure.draw_without_rendering()  # settles the layout, so that places on the page are known
    scale = figure.dpi / 72  # pixels of a point of print, in which all below is measured
    frame, far = axes.get_window_extent(), 1e4
    left, right = frame.x0 / scale, frame.x1 / scale
    page = {
        name: (x / scale, y / scale) for name, point in points.items() for x, y in [axes.transData.transform(point)]
    }
    fixed: list[Box] = [(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in page.values()]
    fixed += [(-far, -far, left, far), (right, -far, far, far)]
    labels = {
        name: axes.annotate(name, point, (0, 0), textcoords="offset points", fontsize=size, va="bottom")
        for name, point in points.items()
    }
    extents = {name: label.get_window_extent() for name, label in labels.items()}
    choices = {
        name: _places(page[name], extent.width / scale, extent.height / scale, left, right)
        for name, extent in extents.items()
    }
    for name, box in choose(choices, fixed).items():
        labels[name].xyann = (box[0] - page[name][0], box[1] - page[name][1])


def choose(choices: Mapping[str, list[Box]], fixed: list[Box]) -> dict[str, Box]:
    """Of each name's boxes the one that shares least with the others' and the ``fixed`` ones; the first of equals.

    Short names choose first, long ones find a place around them; then all choose again until none moves.
    """
    chosen: dict[str, Box] = {}
    for _ in range(_TURNS):
        before = dict(chosen)
        for name in sorted(choices, key=len):
            taken = [*fixed, *(box for other, box in chosen.items() if other != name)]
            shared = [sum(_overlap(box, other) for other in taken) for box in choices[name]]
            chosen[name] = choices[name][shared.index(min(shared))]
        if chosen == before:
            break
    return chosen


def _places(point: Point, width: float, height: float, left: float, right: float) -> list[Box]:
    """Where a name may stand, the nicest first: beside its point, above, below, and at its corners."""
    x, y = point
    middle = min(max(x - width / 2, left), right - width)  # above and below, as far aside as the frame needs it
    corners = (
        (x + 5, y - height / 2), (x - 5 - width, y - height / 2), (middle, y + 4), (middle, y - 4 - height),
        (x + 3, y + 2), (x - 3 - width, y + 2), (x + 3, y - 2 - height), (x - 3 - width, y - 2 - height),
    )  # fmt: skip
    return [(low, bottom, low + width, bottom + height) for low, bottom in corners]


def _overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
