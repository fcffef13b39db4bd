"""Plots of the detection rate by bit, a figure for each site and a panel for each dtype."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.inject.faults import bit_width, mantissa_bits
from holdfast.inject.statistics import Rate
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.models import DIRECTIONS
from holdfast_lab.campaign.plan import CHECKSUM_SITES, DTYPES, injected_dtype
from holdfast_lab.campaign.results import total
from holdfast_lab.campaign.runner import CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"up": ("tab:red", "^"), "down": ("tab:blue", "v"), "any": ("black", "o")}


def bit_rates(results: Iterable[CellResult], direction: str) -> dict[int, Rate]:
    """Return the detection rate of each bit flipped in a direction, over all given cells."""
    counts: defaultdict[int, Counts] = defaultdict(Counts)
    for result in results:
        kind, *flip = result.cell.fault.split("-")
        if kind == "flip" and flip[1] == direction and result.counts.trials:
            counts[int(flip[0])] += result.counts
    return {bit: Rate(counts[bit].detected, counts[bit].trials) for bit in sorted(counts)}


def plot_bits(results: Iterable[CellResult], directory: Path) -> list[Path]:
    """Write ``bits-SITE.png`` for every site where single bits were flipped; return the paths."""
    by_site: defaultdict[str, list[CellResult]] = defaultdict(list)
    for result in results:
        if result.cell.fault.startswith("flip-") and result.counts.trials:
            by_site[result.cell.site].append(result)
    return [_plot_site(site, by_site[site], directory) for site in by_site]


def _plot_site(site: str, results: list[CellResult], directory: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes = [name for name in DTYPES if any(result.cell.dtype == name for result in results)]
    figure = Figure(figsize=(10, 2.4 * len(dtypes)), layout="constrained")
    panels = figure.subplots(len(dtypes), 1, squeeze=False)[:, 0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        _plot_panel(panel, site, dtype, [r for r in results if r.cell.dtype == dtype])
    panels[-1].set_xlabel("bit")
    figure.suptitle(f"Single bit flips in {site}: share detected, 95 % Wilson intervals")
    path = directory / f"bits-{site}.png"
    FigureCanvasAgg(figure).print_png(path)
    return path


def _plot_panel(panel: "Axes", site: str, dtype: str, results: list[CellResult]) -> None:
    struck = injected_dtype(DTYPES[dtype], site)
    for direction, (colour, marker) in STYLES.items():
        rates = bit_rates(results, direction)
        if not rates:
            continue
        values = [rate.value for rate in rates.values()]
        below = [rate.value - rate.interval[0] for rate in rates.values()]
        above = [rate.interval[1] - rate.value for rate in rates.values()]
        bars = panel.errorbar(list(rates), values, [below, above], color=colour, marker=marker)
        bars.set_label(DIRECTIONS[direction])
    for border in (mantissa_bits(struck) - 0.5, bit_width(struck) - 1.5):
        panel.axvline(border, color="grey", lw=0.8)
    panel.set(xlim=(-0.7, bit_width(struck) - 0.3), ylim=(-0.04, 1.04), ylabel="detected")
    kept = " (struck in fp64)" if site in CHECKSUM_SITES else ""
    panel.set_title(
        f"{dtype}{kept}: mantissa | exponent | sign, {total(results).trials:,} flips", fontsize=9
    )
    panel.legend(loc="center left", fontsize=8)
