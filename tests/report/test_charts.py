"""Scales, ticks, lines and shares as they are drawn."""

import math
import re

import pytest
from report_dom import parse
from report_runs import corrected, event

from holdfast.report.charts import Line, glyph, line_chart, shares, ticks, time_ticks
from holdfast.report.markup import breakable, tag
from holdfast.report.quantities import LONGEST, counted, duration, number, ranges, share, size
from holdfast.report.timeline import COLUMNS, LANES, MARKS_A_LANE, timeline_of


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (1, 60, 10, [10, 20, 30, 40, 50, 60]),
        (0.0, 1.0, 4, [0, 0.5, 1.0]),
        (5.0, 5.0, 4, [5.0]),
        (-1.0, 1.0, 4, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.0, math.inf, 4, [0.0]),
    ],
)
def test_ticks_are_round_and_inside(low, high, count, expected):
    assert ticks(low, high, count) == pytest.approx(expected)


@pytest.mark.parametrize("span", [0.0, 1e-6, 0.5, 3.0, 59.0, 3600.0, 86_400.0, 3e7])
def test_time_ticks_are_few_and_inside(span):
    found = time_ticks(span, 8)
    assert 1 <= len(found) <= 20
    assert all(0 <= at <= span * (1 + 1e-9) for at in found)


def test_a_curve_has_gaps_where_a_value_is_not_finite():
    line = Line("run", [1, 2, 3, 4], [1.0, math.nan, 2.0, 3.0])
    (path,) = parse(line_chart(900, [line], label="l", x_title="x")).all("path", "line")
    assert re.sub(r"[0-9. ]+", "", path.attributes["d"]) == "MML"


def test_intervals_are_drawn_at_their_points():
    line = Line("up", [0, 1], [0.5, 1.0], [0.25, 0.5], [0.75, 1.0])
    chart = parse(line_chart(900, [line], label="l", x_title="x", y_low=0.0, y_high=1.0))
    first, second = (path.attributes["d"] for path in chart.all("path", "interval"))
    assert first.startswith("M62.0 152.5V57.5")
    assert second.endswith("105.0V10.0")


def test_nothing_to_draw_says_so():
    assert "Nothing to draw" in line_chart(900, [Line("run", [], [])], label="l", x_title="x")
    nan = Line("run", [1], [math.nan])
    assert "Nothing to draw" in line_chart(900, [nan], label="l", x_title="x")


def test_shares_fill_the_bar():
    bars = parse(shares([("detected", 3), ("masked", 1), ("harmful", 0)], "three of four")).all(
        "rect"
    )
    assert [(float(b.attributes["x"]), float(b.attributes["width"])) for b in bars] == [
        (0, 75),
        (75, 25),
        (100, 0),
    ]


def test_each_rung_has_a_shape_of_its_own():
    drawn = {lane: parse(glyph(lane, 0, 0)).all("path")[0] for lane in LANES}
    assert len({mark.attributes["d"] for lane, mark in drawn.items() if lane != "found"}) == 7


def test_columns_count_every_event_where_marks_would_be_too_many():
    events = [corrected(n / 10) for n in range(MARKS_A_LANE + 1)]
    events += [event("persisted", 5.0, rank=-1)]
    timeline = timeline_of(events)
    assert sum(mark.count for mark in timeline.lanes["correct"]) == MARKS_A_LANE + 1
    assert len(timeline.lanes["correct"]) <= COLUMNS
    assert timeline.column_s == {"correct": timeline.span_s / COLUMNS, "note": 0.0}
    timeline = timeline_of([corrected(1.0)] * (MARKS_A_LANE + 1))
    assert [mark.count for mark in timeline.lanes["correct"]] == [MARKS_A_LANE + 1]


def test_markup_escapes_whatever_is_not_markup():
    assert tag("p", "<b>", tag("i", "&"), [1, None], title='"') == (
        '<p title="&quot;">&lt;b&gt;<i>&amp;</i>1</p>'
    )
    assert breakable("a/<b>") == "a/<wbr>&lt;b&gt;"
    assert len(breakable("x" * 5000)) == LONGEST


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (duration(0.0178), "17.8 ms"),
        (duration(0.0), "0 s"),
        (duration(5400), "1.5 h"),
        (duration(None), "–"),
        (duration(math.nan), "–"),
        (duration(123.0), "2.05 min"),
        (duration(2e-9), "2 ns"),
        (size(4_000_000), "4 MB"),
        (size(12), "12 B"),
        (size(None), "–"),
        (number(math.nan), "–"),
        (number(0.03125), "0.0312"),
        (share(1.0), "100%"),
        (share(91.4118), "9,141%"),
        (share(0.9935), "99.35%"),
        (share(0.0012), "0.12%"),
        (share(0.5), "50%"),
        (share(math.nan), "–"),
        (ranges([5, 1, 0, 2]), "0–2, 5"),
        (ranges([]), ""),
        (counted(1, "fault"), "1 fault"),
        (counted(1200, "fault"), "1,200 faults"),
    ],
)
def test_quantities_have_units_and_three_digits(shown, expected):
    assert shown == expected
