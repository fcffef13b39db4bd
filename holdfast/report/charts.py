"""Charts as SVG: the timeline of events, curves over steps, and bars of shares."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from holdfast.report.markup import Markup, tag
from holdfast.report.quantities import duration, number
from holdfast.report.timeline import LANES, Mark, Timeline

WIDTHS = {"wide": 900, "narrow": 360}  # in CSS pixels; the page shows one of them
LANE_HEIGHT = 26
_TIMES_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600 * hours for hours in (1, 2, 3, 6, 12, 24, 48, 168, 720)),
)


@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates in a chart."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


@dataclass(frozen=True)
class Line:
    """A curve with its style; values that are not finite leave gaps, intervals are optional."""

    style: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def responsive(draw: Callable[[int], Markup]) -> Markup:
    """Draw a chart twice, for a wide and a narrow page, because text must not shrink with it."""
    parts = (tag("div", draw(width), class_=name) for name, width in WIDTHS.items())
    return tag("div", *parts, class_="chart")


def svg(width: int, height: float, label: str, *parts: object) -> Markup:
    """Make an SVG element that scales to the page width, with ``label`` as its description."""
    box = f"0 0 {width} {height:g}"
    return tag("svg", tag("title", label), *parts, viewBox=box, role="img", aria_label=label)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Choose about ``count`` round values between two numbers."""
    span = high - low
    if not span > 0 or not isfinite(span):
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** floor(log10(raw))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    last = floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def time_ticks(span_s: float, count: int) -> list[float]:
    """Choose ticks from 0 at whole seconds, minutes or hours."""
    if span_s < _TIMES_S[0] * count:
        return ticks(0.0, span_s, count)
    raw = span_s / count
    step = next((step for step in _TIMES_S if step >= raw), _TIMES_S[-1])
    return [place * float(step) for place in range(int(span_s / step) + 1)]


def glyph(name: str, x: float, y: float, text: str = "", radius: float = 5.0) -> Markup:
    """Draw the mark of a lane; lanes differ in the shape of their marks as well as in colour."""
    r = radius
    circle = f"M{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0"
    shapes = {
        "struck": f"M{-r} {-r}L{r} {r}M{-r} {r}L{r} {-r}",
        "found": circle,
        "correct": circle,
        "recompute": f"M0 {-1.3 * r}L{1.3 * r} 0L0 {1.3 * r}L{-1.3 * r} 0Z",
        "rollback": f"M0 {-1.2 * r}L{1.2 * r} {r}L{-1.2 * r} {r}Z",
        "rebuild": f"M{-r} {-r}H{r}V{r}H{-r}Z",
        "reload": f"M0 {1.2 * r}L{1.2 * r} {-r}L{-1.2 * r} {-r}Z",
        "note": f"M0 {-r}V{r}",
    }
    place = f"translate({x:.1f} {y:.1f})"
    title = tag("title", text) if text else None
    return tag("path", title, d=shapes[name], transform=place, class_=f"mark {name}")


def timeline_chart(timeline: Timeline, width: int) -> Markup:
    """Draw a lane for injections, one for findings and one for each rung, over wall time."""
    left, right, top = (118, 16, 8) if width > 600 else (94, 10, 8)
    bottom = top + LANE_HEIGHT * len(timeline.lanes)
    scale = Scale(0.0, timeline.span_s, left, width - right)
    grid = time_ticks(timeline.span_s, 8 if width > 600 else 4)
    parts = [_vertical(scale(at), top, bottom, duration(at)) for at in grid]
    for place, (lane, marks) in enumerate(timeline.lanes.items()):
        middle = top + LANE_HEIGHT * (place + 0.5)
        parts.append(tag("text", LANES[lane], x=left - 12, y=f"{middle + 4:g}", class_="lane"))
        parts.append(_horizontal(left, width - right, middle))
        if not timeline.column_s[lane]:
            parts += [_lasted(mark, lane, scale, middle) for mark in marks if mark.lasted_s]
            parts += [glyph(lane, scale(mark.at_s), middle, mark.text) for mark in marks]
            continue
        most, base = max(mark.count for mark in marks), middle + LANE_HEIGHT / 2 - 3
        half = (scale(timeline.column_s[lane]) - scale(0.0)) / 2
        for mark in marks:
            # With the square root a column of one event is visible beside one of a thousand.
            high = max(2.0, (LANE_HEIGHT - 6) * (mark.count / most) ** 0.5)
            parts.append(
                _bar(scale(mark.at_s) - half, base - high, 2 * half, high, lane, mark.text)
            )
    lanes = ", ".join(LANES[name] for name in timeline.lanes)
    return svg(width, bottom + 24, f"Timeline of {duration(timeline.span_s)}: {lanes}", *parts)


def line_chart(
    width: int,
    lines: Sequence[Line],
    *,
    label: str,
    x_title: str,
    y_shown: Callable[[float], str] = number,
    y_low: float | None = None,
    y_high: float | None = None,
    faults: Sequence[float] = (),
    borders: Sequence[float] = (),
) -> Markup:
    """Draw curves over a common axis.

    Short strokes at the foot of the chart mark the ``faults``, and dotted lines the ``borders``.
    """
    height = 240 if width > 600 else 200
    left, right, top, bottom = 62, 14, 10, height - 40
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high) if isfinite(y)]
    if not xs or not ys:
        return tag("p", "Nothing to draw yet.", class_="none")
    low = min(ys) if y_low is None else y_low
    high = max(ys) + 0.05 * (max(ys) - low) if y_high is None else y_high
    x = Scale(min(xs), max(xs), left, width - right)
    y = Scale(low, high if high > low else low + (abs(low) or 1.0), bottom, top)
    parts = [_vertical(x(at), top, bottom, f"{at:g}") for at in _whole(x, width)]
    for at in ticks(y.low, y.high, 4):
        parts.append(_horizontal(left, width - right, y(at)))
        parts.append(tag("text", y_shown(at), x=left - 6, y=f"{y(at) + 4:.1f}", class_="lane"))
    parts += [_path(f"M{x(at):.1f} {bottom}v-7", "fault") for at in faults]
    parts += [_path(f"M{x(at):.1f} {top}V{bottom}", "border") for at in borders]
    parts += [part for line in lines for part in _curve(line, x, y)]
    foot = (left + width - right) / 2
    parts.append(tag("text", x_title, x=f"{foot:g}", y=height - 4, class_="axis"))
    return svg(width, height, label, *parts)


def shares(parts: Sequence[tuple[str, int]], label: str) -> Markup:
    """Draw one bar that is divided in proportion to counts; each part has a style and its count."""
    total, at, drawn = sum(count for _, count in parts) or 1, 0.0, []
    for style, count in parts:
        share = 100 * count / total
        drawn.append(_bar(at, 0.0, share, 10.0, style, f"{style.replace('-', ' ')}: {count:,}"))
        at += share
    box = {"viewBox": "0 0 100 10", "preserveAspectRatio": "none", "class_": "shares"}
    return tag("svg", tag("title", label), *drawn, role="img", aria_label=label, **box)


def _lasted(mark: Mark, lane: str, scale: Scale, y: float) -> Markup:
    start, end = scale(max(0.0, mark.at_s - mark.lasted_s)), scale(mark.at_s)
    return _path(f"M{start:.1f} {y:g}H{end:.1f}", f"lasted {lane}")


def _whole(x: Scale, width: int) -> list[float]:
    wanted = ticks(x.low, x.high, 10 if width > 600 else 5)
    return [at for at in wanted if at == int(at)]


def _curve(line: Line, x: Scale, y: Scale) -> Iterator[Markup]:
    path, pen = [], "M"
    for at, value in zip(line.x, line.y, strict=True):
        if not isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{x(at):.1f} {y(value):.1f}")
        pen = "L"
    for at, low, high in zip(line.x, line.low, line.high, strict=bool(line.low)):
        if isfinite(low) and isfinite(high):
            yield _path(f"M{x(at):.1f} {y(low):.1f}V{y(high):.1f}", f"interval {line.style}")
    yield _path("".join(path), f"line {line.style}")


def _path(d: str, style: str) -> Markup:
    return tag("path", d=d, class_=style)


def _vertical(x: float, top: float, bottom: float, text: str) -> Markup:
    line = _path(f"M{x:.1f} {top:g}V{bottom:g}", "grid")
    return Markup(line + tag("text", text, x=f"{x:.1f}", y=f"{bottom + 16:g}", class_="axis"))


def _horizontal(left: float, right: float, y: float) -> Markup:
    return _path(f"M{left:g} {y:.1f}H{right:g}", "grid")


def _bar(x: float, y: float, width: float, height: float, style: str, text: str) -> Markup:
    places = {"x": x, "y": y, "width": width, "height": height}
    shown = {name: f"{value:.2f}" for name, value in places.items()}
    return tag("rect", tag("title", text), class_=f"bar {style}", **shown)
