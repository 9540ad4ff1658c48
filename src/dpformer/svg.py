"""Small plots as inline SVG. Colours come from the page's style sheet, so that one plot suits light, dark and paper.

`alone` makes a file of plots, with a style sheet of its own. Everything that is text is escaped here; what a function returns
is safe to put into a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 250
_STYLE = """
svg{background:#fff}text{fill:#444;font:12px system-ui,"DejaVu Sans",sans-serif}.grid,.whisker{stroke:#ddd;fill:none}
.line{fill:none;stroke-width:2.2}.dashed{stroke-dasharray:5 4}
.s0{stroke:#2f8a57}.s1{stroke:#1f77b4}.s2{stroke:#c2571a}.s3{stroke:#888}.bar{fill-opacity:.5}.bar.s0{fill:#2f8a57}.bar.s1{fill:#1f77b4}
@media(prefers-color-scheme:dark){svg{background:#1b1e22}text{fill:#ccc}.grid,.whisker{stroke:#444}
.s0{stroke:#7fd1a0}.s1{stroke:#7db8ee}.s2{stroke:#f0a268}.bar.s0{fill:#7fd1a0}.bar.s1{fill:#7db8ee}}
"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 30, 42
_POINTS = 400


@dataclass(frozen=True)
class Series:
    """A named line; points are (x, y), finite, in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: its label, whether it is logarithmic, its ends if they are not those of the data, how ticks are written."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    tick: Callable[[float], str] = "{:g}".format


@dataclass(frozen=True)
class Bar:
    """A value with its interval, in one of several series."""

    value: float
    low: float | None = None
    high: float | None = None


def lines(label: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """Lines over two axes. `label` is what a screen reader says."""
    xs = [point[0] for one in series for point in one.points]
    ys = [point[1] for one in series for point in one.points]
    across = _Scale(x, xs, _LEFT, WIDTH - _RIGHT)
    up = _Scale(y, ys, HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(up), _x_axis(across)]
    for number, one in enumerate(series):
        path = "L".join(f"{across(a):.1f},{up(b):.1f}" for a, b in _thinned(one.points, x.log))
        parts.append(Markup('<path class="line s{}{}" d="M{}"/>').format(number, " dashed" if one.dashed else "", path))
    parts.append(_legend([one.name for one in series], [one.dashed for one in series]))
    return _svg(label, parts)


def bars(label: str, groups: Sequence[str], series: Mapping[str, Sequence[Bar]], y: Axis, base: float = 0.0) -> Markup:
    """Bars from `base` for each group and series, with intervals; a value that is not finite is a dash."""
    drawn = [b for row in series.values() for b in row if math.isfinite(b.value)]
    ends = [v for b in drawn for v in (b.value, b.low, b.high) if v is not None and math.isfinite(v)]
    up = _Scale(y, [*ends, base], HEIGHT - _BOTTOM, _TOP)
    room = (WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    wide = min(46.0, 0.7 * room / max(len(series), 1))
    parts = [_grid(up)]
    for place, group in enumerate(groups):
        middle = _LEFT + room * (place + 0.5)
        for number, (name, row) in enumerate(series.items()):
            bar = row[place]
            x = middle + (number - len(series) / 2) * wide
            if not math.isfinite(bar.value):
                parts.append(_text(x + wide / 2, up(base) - 4, "–", "middle", "value"))
                continue
            top, bottom = sorted((up(bar.value), up(base)))
            parts.append(
                Markup(
                    '<rect class="bar s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
                ).format(number, x + 1, top, wide - 2, max(bottom - top, 0.5), f"{group}, {name}: {y.tick(bar.value)}")
            )
            edge = top
            if bar.low is not None and bar.high is not None and math.isfinite(bar.low + bar.high):
                edge = up(bar.high)
                whisker = '<path class="whisker" d="M{0:.1f},{1:.1f}V{2:.1f}M{3:.1f},{1:.1f}h6M{3:.1f},{2:.1f}h6"/>'
                parts.append(Markup(whisker).format(x + wide / 2, up(bar.low), edge, x + wide / 2 - 3))
            parts.append(_text(x + wide / 2, edge - 4, y.tick(bar.value), "middle", "value"))
        parts.append(_text(middle, HEIGHT - _BOTTOM + 16, group, "middle"))
    if len(series) > 1:
        parts.append(_legend(list(series), [False] * len(series)))
    parts.append(_text(_LEFT, 14 if len(series) == 1 else HEIGHT - 8, y.label, "start", "quiet"))
    return _svg(label, parts)


def intervals(label: str, rows: Sequence[tuple[str, Bar]], x: Axis) -> Markup:
    """One dot with its interval a row: for runs side by side."""
    ends = [v for _, b in rows for v in (b.value, b.low, b.high) if v is not None]
    height = _TOP + 44 * len(rows) + _BOTTOM
    across = _Scale(x, [*ends, 0.0], 16, WIDTH - 24)
    parts = [_x_axis(across, height, top=_TOP - 10)]
    for place, (name, bar) in enumerate(rows):
        y = _TOP + 44 * place + 22
        low, high = (across(bar.value if end is None else end) for end in (bar.low, bar.high))
        parts.append(_text(16, y - 9, name if len(name) <= 52 else name[:51] + "…", "start"))
        parts.append(Markup('<path class="whisker" d="M{:.1f},{}H{:.1f}"/>').format(low, y + 4, high))
        parts.append(
            Markup('<circle class="dot s0" cx="{:.1f}" cy="{}" r="5"><title>{}</title></circle>').format(
                across(bar.value), y + 4, f"{name}: {x.tick(bar.value)}"
            )
        )
        # Beside the interval, where the drawing has room for it.
        at, anchor = (high + 8, "start") if high < WIDTH - 60 else (low - 8, "end")
        parts.append(_text(at, y + 8, x.tick(bar.value), anchor, "value"))
    return _svg(label, parts, height)


def alone(*plots: Markup) -> str:
    """A file of its own, with these plots side by side; light or dark by the reader's setting."""
    placed = "".join(
        str(plot).replace("<svg ", f'<svg x="{place * WIDTH}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        for place, plot in enumerate(plots)
    )
    wide = len(plots) * WIDTH
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{HEIGHT}" viewBox="0 0 {wide} {HEIGHT}">'
    return f"{start}<style>{_STYLE}</style>{placed}</svg>\n"


class _Scale:
    """From values to places on the page."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis = axis
        low = min(values, default=0.0) if axis.low is None else axis.low
        high = max(values, default=1.0) if axis.high is None else axis.high
        if high <= low:
            high = low * 10 if axis.log and low > 0 else low + 1
        if axis.log:
            self.ticks = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
            self.ticks = [t for t in self.ticks if low * 0.999 <= t <= high * 1.001]
        else:
            self.ticks = _ticks(low, high)
            low = low if axis.low is not None else min(low, self.ticks[0])
            if axis.high is None and high > self.ticks[-1]:
                step = self.ticks[1] - self.ticks[0]
                self.ticks.append(self.ticks[-1] + step)
                high = self.ticks[-1]
        self.low, self.high, self.start, self.end = self._at(low), self._at(high), start, end

    def _at(self, value: float) -> float:
        return math.log10(value) if self.axis.log else value

    def __call__(self, value: float) -> float:
        # Two values may be apart and their logarithms equal.
        share = (self._at(value) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers from below `low` to `high`.

    >>> _ticks(0, 8)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, max(last, first + 1) + 1)]


def _thinned(points: Sequence[tuple[float, float]], log: bool) -> list[tuple[float, float]]:
    """At most a few hundred of the points, evenly along the axis, both ends kept."""
    last = len(points) - 1
    if last < _POINTS:
        return list(points)
    at = ((last + 1) ** (k / _POINTS) - 1 if log else last * k / _POINTS for k in range(_POINTS + 1))
    return [points[k] for k in sorted({min(round(a), last) for a in at})]


def _grid(up: _Scale) -> Markup:
    rows = [
        Markup('<path class="grid" d="M{},{:.1f}H{}"/>').format(_LEFT, up(t), WIDTH - _RIGHT)
        + _text(_LEFT - 6, up(t) + 4, up.axis.tick(t), "end")
        for t in up.ticks
    ]
    return Markup("").join(rows)


def _x_axis(across: _Scale, height: float = HEIGHT, top: float = _TOP) -> Markup:
    bottom = height - _BOTTOM
    rows = [
        Markup('<path class="grid" d="M{:.1f},{}V{}"/>').format(across(t), bottom, top)
        + _text(across(t), bottom + 16, across.axis.tick(t), "middle")
        for t in across.ticks
    ]
    return Markup("").join(
        [*rows, _text((across.start + across.end) / 2, height - 8, across.axis.label, "middle", "quiet")]
    )


def _legend(names: Sequence[str], dashed: Sequence[bool]) -> Markup:
    parts, x = [], float(_LEFT)
    for number, (name, dash) in enumerate(zip(names, dashed, strict=True)):
        parts.append(
            Markup('<path class="line s{}{}" d="M{:.0f},11h16"/>').format(number, " dashed" if dash else "", x)
            + _text(x + 21, 15, name, "start")
        )
        x += 40 + 6.4 * len(name)
    return Markup("").join(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>').format(x, y, anchor, kind, text)


def _svg(label: str, parts: Sequence[Markup], height: float = HEIGHT) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, escape(label), Markup("").join(parts)
    )
