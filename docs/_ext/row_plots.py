"""Blocks of `{row-plot}`: a plot that the build draws from rows of `bench/results`, never by hand.

The argument names a function below, the content is the caption. Each plot is drawn for a light and
for a dark page. A row that a plot expects and does not find is an error of the build.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[2] / "bench" / "results"
Row = dict[str, Any]
# Colours that differ in lightness as well as in hue, on both grounds.
COLOURS = ("#3b6fd4", "#e08a3c", "#3fa06f", "#b05fc0", "#c94f4f", "#8a8f99")
INK = {"light": "#1c2740", "dark": "#e8ecf5"}


def rows(name: str, **wanted: object) -> list[Row]:
    """Read the rows of a bench, oldest first, that have the wanted values."""
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    found = [
        row for row in map(json.loads, lines) if all(row.get(k) == v for k, v in wanted.items())
    ]
    if not found:
        raise LookupError(f"bench/results/{name}.jsonl has no row with {wanted}")
    return found


def study(name: str, table: str) -> list[Row]:
    """Read the rows of one table of a study."""
    stored = json.loads((RESULTS / "studies" / f"{name}.json").read_text())
    found = [row for row in stored["rows"] if row["table"] == table]
    if not found:
        raise LookupError(f"bench/results/studies/{name}.json has no table {table!r}")
    return found


def _bars(axes: Axes, bars: Iterable[tuple[str, float, tuple[float, float] | None]]) -> None:
    """Draw horizontal bars with their values and, where known, their quartiles."""
    listed = list(bars)[::-1]
    for place, (_, value, quartiles) in enumerate(listed):
        axes.barh(place, value, color=COLOURS[0], height=0.62)
        if quartiles is not None:
            axes.plot(quartiles, (place, place), color=COLOURS[1], linewidth=3)
    axes.set_yticks(range(len(listed)), [label for label, _, _ in listed])


def _percent(row: Row) -> tuple[float, tuple[float, float]]:
    low, high = row["ratio_quartiles"]
    return 100 * (row["ratio"] - 1), (100 * (low - 1), 100 * (high - 1))


def step_cost(axes: Axes) -> None:
    """Draw what protection adds to a training step, of the latest rows."""
    steps = [
        (f"protect, {d}", rows("training_step", dtype=d, variant="protect")[-1])
        for d in ("fp32", "bf16")
    ]
    ladders = [
        (f"whole ladder, {d}", rows("ladder", dtype=d, variant="planned", width=512)[-1])
        for d in ("fp32", "bf16")
    ]
    _bars(axes, [(label, *_percent(row)) for label, row in (*steps, *ladders)])
    axes.axvline(0, color="gray", linewidth=1)
    axes.set_xlabel("a step takes longer by, % (bar: median, line: quartiles)")


def attention_cost(axes: Axes) -> None:
    """Draw the time of verified fused attention over torch's own, by length and dtype."""
    for colour, dtype in zip(COLOURS, ("fp32", "bf16"), strict=False):
        latest = {row["length"]: row for row in rows("attention_fused", dtype=dtype, what="both")}
        lengths = sorted(latest)
        axes.plot(lengths, [latest[n]["ratio"] for n in lengths], "o-", color=colour, label=dtype)
        low, high = zip(*(latest[n]["ratio_quartiles"] for n in lengths), strict=True)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.2)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(xscale="log", xlabel="tokens", ylabel="time, of torch's own kernel")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend()


def int8_cost(axes: Axes) -> None:
    """Draw the median and the worst overhead of verified int8 products over the 28 shapes."""
    latest = rows("int8_gemm", kind="summary", native="avx512bf16")[-1]["overhead_percent"]
    labels = {"digits": "exact, corrects", "mod127": "the paper's check", "checks": "checks alone"}
    for shift, (colour, which) in enumerate(zip(COLOURS, ("median", "worst"), strict=False)):
        places = [k + 0.36 * shift for k in range(len(labels))]
        axes.bar(places, [latest[k][which] for k in labels], 0.34, color=colour, label=which)
    axes.set_xticks([k + 0.18 for k in range(len(labels))], list(labels.values()))
    axes.set_ylabel("overhead over FBGEMM, %")
    axes.legend()


def thresholds(axes: Axes) -> None:
    """Draw threshold / largest rounding error of every threshold, in fp32 and bf16."""
    names = ("rounding", "vabft", "aabft", "analytic", "norm", "sea")
    for shift, (colour, dtype) in enumerate(zip(COLOURS, ("fp32", "bf16"), strict=False)):
        table = study(f"vabft.tightness-{dtype}", "threshold / largest true error")
        measured = [row["measured"] for row in table if row["case"]["precision"] == dtype]
        for place, name in enumerate(names):
            values = [row[name] for row in measured]
            spot = place + 0.24 * shift - 0.12
            axes.plot(
                [spot, spot], [min(values), max(values)], color=colour, linewidth=5, alpha=0.45
            )
            axes.plot([spot] * len(values), values, "_", color=colour, label="" if place else dtype)
    axes.set(yscale="log", ylabel="threshold / largest error")
    axes.set_xticks(range(len(names)), ["ours" if n == "rounding" else n for n in names])
    axes.axhline(1, color="gray", linewidth=1)
    axes.legend()


def bits(axes: Axes) -> None:
    """Draw the share of flips that are found, by bit, of the paper's threshold and of ours."""
    table = study("vabft.detection", "detected flips, %, verified offline")
    first = table[0]["case"]
    chosen = [r for r in table if all(r["case"][k] == v for k, v in first.items() if k != "bit")]
    up = {r["case"]["bit"]: r["measured"] for r in chosen}
    for colour, name, label in zip(
        COLOURS, ("rounding", "vabft"), ("ours", "V-ABFT"), strict=False
    ):
        for style, arrow in (("o-", "0→1"), ("s--", "1→0")):
            shown = [
                (b, up[b][f"{name} {arrow}"]) for b in sorted(up) if f"{name} {arrow}" in up[b]
            ]
            axes.plot(*zip(*shown, strict=True), style, color=colour, label=f"{label}, {arrow}")
    axes.set(xlabel="bit of bf16 (0–6 mantissa, 7–14 exponent, 15 sign)", ylabel="found, %")
    axes.set_title(f"{first['M, K, N']}, {first['distribution']}", fontsize=10)
    axes.legend(loc="center", bbox_to_anchor=(0.72, 0.45), fontsize=8)


def _peers(gb: float) -> dict[str, Row]:
    """Return the latest figures of each candidate beside 128 tokens, of a state of this size."""
    found = rows("snapshot_peers", gb=gb, tokens=128)
    return {row["candidate"]: row for row in found if "ratio" in row}


def snapshot_step(axes: Axes) -> None:
    """Draw how much longer a step takes with a snapshot in every step, of all candidates."""
    latest = sorted(_peers(2.0).items(), key=lambda item: item[1]["ratio"])
    _bars(axes, [(name, *_percent(row)) for name, row in latest])
    axes.set_xlabel("a step takes longer by, % (bar: median, line: quartiles)")


def snapshot_stall(axes: Axes) -> None:
    """Draw how long training waits for a snapshot, of all candidates."""
    latest = sorted(_peers(2.0).items(), key=lambda item: item[1]["stall_s"])
    _bars(axes, [(name, 1e3 * row["stall_s"], None) for name, row in latest])
    axes.set(xscale="log", xlabel="training waits, ms")


def recovery(axes: Axes) -> None:
    """Draw the phases from a host's death to the first new step."""
    phases = {
        "detection_s": "detection",
        "rendezvous_s": "rendezvous",
        "start_s": "start of the ranks",
        "find_s": "finding the state",
        "load_s": "loading",
        "again_s": "steps again",
    }
    ways = {way: row for row in rows("recovery") for way in [row["way"]]}
    for place, row in enumerate(ways.values()):
        begin = 0.0
        for colour, (key, label) in zip(COLOURS, phases.items(), strict=True):
            axes.barh(place, row[key], left=begin, color=colour, label="" if place else label)
            begin += row[key]
    axes.set_yticks(range(len(ways)), list(ways))
    axes.set_xlabel("seconds since the host died, medians")
    axes.set_ylim(-0.6, len(ways) + 0.3)
    axes.legend(ncols=3, fontsize=8, loc="upper left")


PLOTS: dict[str, tuple[Callable[[Axes], None], tuple[str, ...]]] = {
    "step-cost": (step_cost, ("training_step.jsonl", "ladder.jsonl")),
    "attention-cost": (attention_cost, ("attention_fused.jsonl",)),
    "int8-cost": (int8_cost, ("int8_gemm.jsonl",)),
    "thresholds": (
        thresholds,
        ("studies/vabft.tightness-fp32.json", "studies/vabft.tightness-bf16.json"),
    ),
    "bits": (bits, ("studies/vabft.detection.json",)),
    "snapshot-step": (snapshot_step, ("snapshot_peers.jsonl",)),
    "snapshot-stall": (snapshot_stall, ("snapshot_peers.jsonl",)),
    "recovery": (recovery, ("recovery.jsonl",)),
}


def draw(plot: Callable[[Axes], None], mode: str, path: Path) -> None:
    """Draw a plot on a transparent ground, with ink for a light or a dark page."""
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK[mode])
    quiet = {"legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context({**ink, **quiet, "axes.edgecolor": INK[mode], "svg.hashsalt": path.name}):
        figure = Figure(figsize=(5.6, 3.3), layout="constrained")
        plot(figure.subplots())
        figure.savefig(path, transparent=True, metadata={"Date": None})


class RowPlot(SphinxDirective):
    """A plot, light and dark, with its caption and with the rows that it was drawn from."""

    required_arguments = 1
    has_content = True
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012 - docutils declares it so

    def run(self) -> list[nodes.Node]:
        """Draw the plot and return the figure."""
        name = self.arguments[0]
        plot, sources = PLOTS[name]
        folder = Path(self.env.doctreedir).parent / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        here = Path(self.env.doc2path(self.env.docname)).parent
        figure = nodes.figure("", classes=["row-plot"])
        for mode in INK:
            path = folder / f"{name}-{mode}.svg"
            draw(plot, mode, path)
            uri = Path(os.path.relpath(path, here)).as_posix()
            figure += nodes.image(
                uri=uri, alt=self.options.get("alt", name), classes=[f"plot-{mode}"]
            )
        caption = nodes.caption()
        inline, messages = self.state.inline_text(" ".join(self.content), self.lineno)
        caption += inline
        figure += caption
        for source in (__file__, *(str(RESULTS / source) for source in sources)):
            self.env.note_dependency(source)
        return [figure, *messages]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("row-plot", RowPlot)
    return {"parallel_read_safe": True}
