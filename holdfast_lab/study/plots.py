"""Line plots of the rows of studies."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast_lab.study.registry import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def line(
    axes: "Axes",
    rows: Sequence[Row],
    x: str,
    quantity: str,
    style: str,
    *,
    label: str = "",
    **settings: Any,
) -> None:
    """Draw a quantity over the parameter ``x`` of the cases, of the rows that have the quantity."""
    points = [row for row in rows if quantity in row.measured]
    places: list[Any] = [row.case[x] for row in points]
    values = [row.measured[quantity] for row in points]
    axes.plot(places, values, style, label=label or quantity, **settings)


def over_size(axes: "Axes", rows: Sequence[Row], size: str, styles: Mapping[str, str]) -> None:
    """Draw quantities over the size of a matrix product, each in a style of its own."""
    for name, style in styles.items():
        line(axes, rows, size, name, style, markersize=4)
    sizes = [int(row.case[size]) for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(one) for one in sizes], fontsize="small")
    axes.minorticks_off()
    axes.set_xlabel(size)
