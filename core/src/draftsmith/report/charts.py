"""Lines and bars as SVG: sized for a phone, scaled up elsewhere, in colours that follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from attrs import frozen

from draftsmith.progress import format_count
from draftsmith.report.html import COLOURS, el

__all__ = ["Bar", "Series", "bars", "lines", "thinned", "ticks"]

_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 8, 34
#: Lines differ by their strokes too, for those who cannot tell the colours apart.
_DASHES = (None, "6 3", "2 2", "8 3 2 3")
#: Height of a bar with its label above it.
_BAR = 34
#: Room of a bar's value.
_VALUE = 50
#: Most points that a line is drawn of.
POINTS = 300

Point = tuple[float, float]


@frozen(kw_only=True)
class Series:
    """A line through *points* (x, y), ascending in x."""

    name: str
    points: Sequence[Point]


@frozen(kw_only=True)
class Bar:
    """A bar, with the lowest and the highest where they are known."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About *count* round numbers that span [low, high]; *whole* ones where nothing lies in between."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = max(span / count, 1.0) if whole else span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """At most *most* points: means of neighbours, in order."""
    if len(points) <= most:
        return list(points)
    found = []
    for index in range(most):
        group = points[index * len(points) // most : (index + 1) * len(points) // most]
        found.append((sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)))
    return found


def lines(
    series: Sequence[Series], *, x: str, y: str, title: str, from_zero: bool = True, points: bool = False
) -> Element:
    """A figure of lines over one pair of axes, with its legend.

    Args:
        x, y: what the axes are of.
        from_zero: the y axis begins at 0.
        points: mark each point, with its values.
    """
    drawn = [
        Series(name=each.name, points=thinned([p for p in each.points if all(map(math.isfinite, p))]))
        for each in series
    ]
    everything = [point for each in drawn for point in each.points]
    if not everything:
        return el("p", f"{title}: nothing was recorded.", class_="note")
    xs, ys = ([point[place] for point in everything] for place in (0, 1))
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    x_ticks = ticks(min(xs), max(xs), whole=all(float(value).is_integer() for value in xs))
    across, up = _scale(x_ticks, _LEFT, _WIDTH - _RIGHT), _scale(y_ticks, _HEIGHT - _BOTTOM, _TOP)
    svg = el("svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title)
    for value in y_ticks:
        svg.append(_axis(_LEFT, up(value), _WIDTH - _RIGHT, up(value)))
        svg.append(el("text", _number(value), x=_LEFT - 5, y=round(up(value) + 4, 1), text_anchor="end"))
    for value in x_ticks:
        svg.append(el("text", _number(value), x=round(across(value), 1), y=_HEIGHT - 20, text_anchor="middle"))
    svg.append(el("text", x, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 5, text_anchor="middle"))
    for place, each in enumerate(drawn):
        at = [(round(across(px), 1), round(up(py), 1)) for px, py in each.points]
        path = " ".join(f"{px},{py}" for px, py in at)
        style = f"s{place % COLOURS}"
        svg.append(el("polyline", points=path, class_=f"curve {style}", stroke_dasharray=_dash(place)))
        if points or len(at) == 1:
            for (px, py), (value_x, value_y) in zip(at, each.points, strict=True):
                label = el("title", f"{each.name}: {x} {_number(value_x)}, {y} {value_y:.4g}")
                svg.append(el("circle", label, cx=px, cy=py, r=2.6, class_=f"dot {style}"))
    return el(
        "figure",
        el("figcaption", title if y.lower() == title.lower() else f"{title} ({y})"),
        svg,
        _legend([each.name for each in drawn]),
    )


def bars(values: Sequence[Bar], *, title: str, unit: str = "", mark: float | None = None) -> Element:
    """A figure of horizontal bars, each with its name above and its value behind it.

    Args:
        mark: a value with a line through all bars, such as that of the baseline.
    """
    if not values:
        return el("p", f"{title}: nothing was measured.", class_="note")
    height = _BAR * len(values) + 4
    most = max([each.high or each.value for each in values] + [mark or 0.0, 1e-12])
    scale = (_WIDTH - 90) / most
    svg = el("svg", viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=title)
    for place, each in enumerate(values):
        top = place * _BAR
        name = each.name if len(each.name) <= 52 else f"…{each.name[-51:]}"
        svg.append(el("text", name, x=0, y=top + 12))
        width = max(each.value * scale, 0.5)
        label = el("title", f"{each.name}: {each.value:.4g} {unit}".rstrip())
        svg.append(el("rect", label, x=0, y=top + 17, width=round(width, 1), height=12, class_="bar s0"))
        end = width
        if each.low is not None and each.high is not None and each.high > each.low:
            end = max(end, each.high * scale)
            svg.append(_line(each.low * scale, top + 23, each.high * scale, top + 23, "whisker"))
        if mark is not None and end <= mark * scale < end + _VALUE:
            end = mark * scale  # or the line would go through the figure
        svg.append(el("text", f"{each.value:.3g} {unit}".rstrip(), x=round(end + 5, 1), y=top + 27))
    if mark is not None:
        svg.append(_line(mark * scale, 0, mark * scale, height, "whisker"))
    return el("figure", el("figcaption", title), svg)


def _scale(marks: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low, span = marks[0], (marks[-1] - marks[0]) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def _axis(x1: float, y1: float, x2: float, y2: float) -> Element:
    return _line(x1, y1, x2, y2, "axis")


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    return el("line", x1=round(x1, 1), y1=round(y1, 1), x2=round(x2, 1), y2=round(y2, 1), class_=kind)


def _dash(place: int) -> str | None:
    return _DASHES[(place // COLOURS + place) % len(_DASHES)]


def _legend(names: Sequence[str]) -> Element:
    entries = []
    for place, name in enumerate(names):
        curve = el("line", x1=0, y1=5, x2=24, y2=5, class_=f"curve s{place % COLOURS}", stroke_dasharray=_dash(place))
        entries.append(el("li", el("svg", curve, viewBox="0 0 24 10"), name))
    return el("ul", *entries, class_="legend")


def _number(value: float) -> str:
    return format_count(value) if abs(value) >= 1e4 else f"{value:.6g}"
