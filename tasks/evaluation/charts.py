"""Line charts as inline SVG: no script, no font, no colour of their own (the page's style sheet).

Hand-made because a report must follow the reader's light or dark scheme and name each point on
hovering, which a picture out of a plotting library does not. Equal input gives equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 12, 38
_MARKERS = 40  # with more points than that, the line alone is more legible


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) by ascending x, and perhaps an interval (low, high) around each."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] | None = None

    def finite(self) -> Series:
        """Without the points that are NaN or infinite."""
        keep = [i for i, (_, y) in enumerate(self.points) if math.isfinite(y)]
        intervals = [self.intervals[i] for i in keep] if self.intervals else None
        return Series(self.name, [self.points[i] for i in keep], intervals)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: title, axis labels with their units, and series; y_range None fits the data."""

    title: str
    y_label: str
    series: Sequence[Series]
    x_label: str = "step"
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}"


def figure(chart: Chart) -> Markup:
    """The chart as a `<figure>`; one that says so where there is nothing to draw."""
    series = [one for one in (s.finite() for s in chart.series) if one.points]
    head = Markup("<figure><figcaption>{}</figcaption>").format(chart.title)
    if not series:
        return head + Markup('<p class="none">not recorded in this run</p></figure>')
    return head + _legend(series) + _svg(chart, series) + Markup("</figure>")


def _legend(series: Sequence[Series]) -> Markup:
    entries = Markup("").join(
        Markup('<li class="c{}">{}</li>').format(number, one.name)
        for number, one in enumerate(series)
    )
    return Markup('<ul class="legend">{}</ul>').format(entries)


def _svg(chart: Chart, series: Sequence[Series]) -> Markup:
    xs = sorted({x for one in series for x, _ in one.points})
    values = [y for one in series for _, y in one.points]
    values += [bound for one in series for pair in one.intervals or () for bound in pair]
    low, high = chart.y_range or (min(0.0, *values, 0.0), max(values))
    x_ticks, y_ticks = ticks(xs[0], xs[-1], 6, whole=True), ticks(low, high, 6)
    x = _Scale(*_span(xs[0], xs[-1]), _LEFT, WIDTH - _RIGHT)
    y = _Scale(*_span(min(low, y_ticks[0]), max(high, y_ticks[-1])), HEIGHT - _BOTTOM, _TOP)
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, HEIGHT, f"{chart.title}: {', '.join(one.name for one in series)}"
        ),
        _axes(chart, x, y, x_ticks, y_ticks),
        *(_drawn(number, one, x, y) for number, one in enumerate(series)),
        *(_column(chart, series, value, xs, x) for value in xs),
        Markup("</svg>"),
    ]
    return Markup("").join(parts)


def _axes(
    chart: Chart, x: _Scale, y: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]
) -> Markup:
    floor, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    made = [
        Markup('<path class="grid" d="M{} {}H{}"/><text class="y" x="{}" y="{}">{}</text>').format(
            _LEFT, y(tick), right, _LEFT - 6, y(tick), number(tick)
        )
        for tick in y_ticks
    ]
    made += [
        Markup('<text class="x" x="{}" y="{}">{}</text>').format(x(tick), floor + 14, number(tick))
        for tick in x_ticks
    ]
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + floor) / 2
    made += [
        Markup('<text class="label" x="{}" y="{}">{}</text>').format(
            middle_x, HEIGHT - 6, chart.x_label
        ),
        Markup('<text class="label" transform="translate(11 {}) rotate(-90)">{}</text>').format(
            middle_y, chart.y_label
        ),
    ]
    return Markup("").join(made)


def _drawn(number_: int, series: Series, x: _Scale, y: _Scale) -> Markup:
    at = [(x(a), y(b)) for a, b in series.points]
    made = Markup("")
    if series.intervals:
        pairs = list(zip(series.points, series.intervals, strict=True))
        upper = [f"{x(point[0])} {y(high)}" for point, (_, high) in pairs]
        lower = [f"{x(point[0])} {y(low)}" for point, (low, _) in reversed(pairs)]
        made += Markup('<path class="band c{}" d="M{}Z"/>').format(
            number_, "L".join([*upper, *lower])
        )
        if len(pairs) == 1:  # a band of no width
            (point, (low, high)) = pairs[0]
            made += Markup('<path class="line c{}" d="M{} {}V{}"/>').format(
                number_, x(point[0]), y(low), y(high)
            )
    made += Markup('<path class="line c{}" d="M{}"/>').format(
        number_, "L".join(f"{a} {b}" for a, b in at)
    )
    if len(at) <= _MARKERS:
        made += Markup("").join(
            Markup('<circle class="c{}" cx="{}" cy="{}" r="2.6"/>').format(number_, a, b)
            for a, b in at
        )
    return made


def _column(
    chart: Chart, series: Sequence[Series], value: float, xs: Sequence[float], x: _Scale
) -> Markup:
    """What is shown where the pointer is nearest to this x: a rule, and the values as a title."""
    lines = [f"{chart.x_label} {number(value)}"]
    for one in series:
        for place, (a, b) in enumerate(one.points):
            if a == value:
                pair = one.intervals[place] if one.intervals else None
                around = f" [{exact(pair[0])}, {exact(pair[1])}]" if pair else ""
                lines.append(f"{one.name} {exact(b)}{around}")
    place = xs.index(value)
    left = (xs[place - 1] + value) / 2 if place else value
    right = (xs[place + 1] + value) / 2 if place + 1 < len(xs) else value
    start, end = float(x(left)), float(x(right))
    if len(xs) == 1:
        start, end = float(_LEFT), float(WIDTH - _RIGHT)
    return Markup(
        '<g class="column"><path class="rule" d="M{} {}V{}"/>'
        '<rect x="{}" y="{}" width="{}" height="{}"/><title>{}</title></g>'
    ).format(
        x(value),
        _TOP,
        HEIGHT - _BOTTOM,
        f"{start:.1f}",
        _TOP,
        f"{max(end - start, 4):.1f}",
        HEIGHT - _BOTTOM - _TOP,
        "\n".join(lines),
    )


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most so many round values (1, 2 or 5 times a power of ten apart) around [low, high]: the
    first not above low (for whole numbers: within), the last not below high likewise."""
    low, high = _span(low, high)
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while math.ceil(high / step - 1e-9) - math.floor(low / step + 1e-9) + 1 > most:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _span(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def number(value: float) -> str:
    """A tick's label: 0, 0.25, 40, 2e-5."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.6g}"
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def exact(value: float) -> str:
    """A value in a title, four digits."""
    return f"{value:.4g}"
