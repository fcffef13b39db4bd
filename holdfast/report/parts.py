"""The parts of a page: sections, tables, lists, tiles, badges and legends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.report.charts import glyph
from holdfast.report.kinds import RUNG_TITLES
from holdfast.report.markup import Markup, tag

ICONS = {"good": "✓", "attention": "!", "bad": "✕"}


@dataclass(frozen=True)
class Column:
    """A column of a table; two ``short`` columns share a line on a phone."""

    name: str
    numeric: bool = False
    short: bool = False

    @property
    def style(self) -> str | None:
        """The style class of the column's cells."""
        return " ".join(name for name in ("numeric", "short") if getattr(self, name)) or None


def columns(*names: str, numeric: bool = False, short: bool = False) -> tuple[Column, ...]:
    """Make columns of one style."""
    return tuple(Column(name, numeric, short) for name in names)


def section(title: str, *parts: object, note: str = "") -> Markup:
    """Make a titled section; the note says how to read it."""
    said = tag("p", note, class_="note") if note else None
    return tag("section", tag("h2", title), said, *parts)


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> Markup:
    """Make a table whose rows become cards on a phone; without rows it is one sentence."""
    head = (tag("th", c.name, class_=c.style, scope="col") for c in columns)
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, class_=column.style, data_label=column.name)
                for column, cell in zip(columns, row, strict=True)
            ),
        )
        for row in rows
    ]
    if not body:
        return tag("p", "None.", class_="none")
    return tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))


def pairs(rows: Iterable[tuple[str, object]]) -> Markup:
    """Make a list of names and their values, one pair in a line."""
    return tag("dl", *((tag("dt", name), tag("dd", value)) for name, value in rows))


def tiles(rows: Iterable[tuple[str, object, object]]) -> Markup:
    """Make the tiles of the most important numbers: title, number, and a value for comparison."""
    drawn = (
        tag(
            "div",
            tag("div", title, class_="what"),
            tag("div", value, class_="number"),
            tag("div", against, class_="against"),
            class_="tile",
        )
        for title, value, against in rows
    )
    return tag("div", *drawn, class_="tiles")


def badge(rung: str, status: str) -> Markup:
    """Show by shape, colour and words the rung that repaired an incident, or its status."""
    if rung in RUNG_TITLES:
        mark = tag("svg", glyph(rung, 8, 8), viewBox="0 0 16 16", aria_hidden="true")
        return tag("span", mark, RUNG_TITLES[rung], class_="badge")
    level = "bad" if status in ("not seen", "open") else "attention"
    words = "not repaired" if status == "open" else status
    return tag("span", ICONS[level], " ", words, class_=f"badge {level}")


def legend(items: Iterable[tuple[str, str]]) -> Markup:
    """Make a legend from pairs of a style and its name."""
    drawn = (
        tag("span", tag("i", class_=f"key {style}"), name, class_="item") for style, name in items
    )
    return tag("p", *drawn, class_="legend")
