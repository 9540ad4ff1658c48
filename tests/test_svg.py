"""The small plots: scales, ticks, and that text stays text."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.svg import WIDTH, Axis, Bar, Series, _Scale, _thinned, _ticks, alone, bars, intervals, lines

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, st.floats(1e-3, 1e6))
def test_ticks_cover_and_are_few(low, span):
    ticks = _ticks(low, low + span)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + 1e-6 * span
    steps = {round((b - a) / span, 6) for a, b in pairwise(ticks)}
    assert len(steps) == 1


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=20), st.booleans())
def test_a_scale_keeps_order_and_stays_inside(values, log):
    scale = _Scale(Axis("", log=log), values, 0, 100)
    places = [scale(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= p <= 100 for p in places)


@given(st.integers(1, 5000), st.booleans())
@settings(max_examples=30)
def test_thinning_keeps_the_ends(count, log):
    points = [(float(k), 1.0 / k) for k in range(1, count + 1)]
    few = _thinned(points, log)
    assert few[0] == points[0]
    assert few[-1] == points[-1]
    assert len(few) <= 401
    assert [x for x, _ in few] == sorted(x for x, _ in few)


def test_text_is_escaped_and_what_is_no_number_left_out():
    name = "<b>&\"'"
    made = [
        lines(name, [Series(name, [(0, 1), (1, 2)])], Axis(name), Axis("")),
        bars(name, [name, "b"], {name: [Bar(1, 0.5, 1.5), Bar(math.nan, math.nan, math.nan)]}, Axis(name)),
        intervals(name, [(name, Bar(0.5, 0.4, 0.6))], Axis(name, low=0)),
    ]
    for svg in made:
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == name
        assert any(element.text == name for element in root.iter("text"))
        assert "nan" not in svg
        assert f"0 0 {WIDTH}" in root.get("viewBox")
    assert len(ElementTree.fromstring(made[1]).findall("rect")) == 1


def test_plots_side_by_side_are_one_file():
    plot = lines("a < b", [Series("<i>", [(0.0, 1.0), (1.0, 2.0)])], Axis("x"), Axis("y"))
    page = ElementTree.fromstring(alone(plot, plot))
    assert [part.get("x") for part in page if part.tag.endswith("svg")] == ["0", str(WIDTH)]
    assert page.get("width") == str(2 * WIDTH)
    assert "<i>" in "".join(page.itertext())


def test_the_value_of_an_interval_at_the_right_end_stands_left_of_it():
    drawn = str(intervals("runs", [("a", Bar(0.58, 0.56, 0.599)), ("b", Bar(0.1, 0.09, 0.11))], Axis("")))
    places = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(start|end)" class="value">', drawn)
    assert [anchor for _, anchor in places] == ["end", "start"]
    assert all(float(x) < WIDTH - 50 for x, _ in places)
