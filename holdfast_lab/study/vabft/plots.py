"""A line plot over the size of a matrix product, which three of the studies share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast_lab.study.registry import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_size(axes: "Axes", rows: Sequence[Row], size: str, styles: Mapping[str, str]) -> None:
    """Draw a line for each quantity over the size that the rows' cases name.

    Args:
        axes: Where the lines are drawn.
        rows: The rows.
        size: Key of the size in the rows' cases.
        styles: Matplotlib format of the line by quantity.
    """
    sizes = [int(row.case[size]) for row in rows]
    for name, style in styles.items():
        axes.plot(sizes, [row.measured[name] for row in rows], style, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(one) for one in sizes], fontsize="small")
    axes.minorticks_off()
    axes.set_xlabel(size)
