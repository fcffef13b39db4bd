"""``attnchecker.scale``: overhead of checked attention in models of 30 to 100 B (figure 12)."""

from collections.abc import Iterator
from itertools import product as every

from holdfast_lab.study.attnchecker.paper import NEARLY_CONSTANT
from holdfast_lab.study.attnchecker.scaled_overhead import (
    Cluster,
    Decoder,
    ScaledOverhead,
    scaled_overhead,
)
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study, watched

# The paper names the sizes only; layers and widths are ours, with heads of 128.
DECODERS = (
    Decoder("30B", 48, 7168, 56),
    Decoder("60B", 60, 9216, 72),
    Decoder("100B", 80, 10240, 80),
)
# Devices of an A100's speed, four sequences of 2,048 tokens each, 25 GB/s between them.
CLUSTERS = {
    "gradients travel beside backward": Cluster(overlap=1.0),
    "gradients travel after backward": Cluster(overlap=0.0),
}
PRICES = {"share": "11 % of attention", "reads": "reading their matrices"}
STEP, SPREAD = "one step on 1,024 devices", "over the three models"
OVERHEAD, RATIO = "overhead, %", "largest / smallest overhead"
_MAY_GROW = 1.05


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    spreads = []
    pairs = list(every(CLUSTERS.items(), PRICES.items()))
    for (network, cluster), (price, words) in watched(pairs, progress):
        case: Case = {"checks take": words, "network": network}
        found = [scaled_overhead(decoder, cluster, price) for decoder in DECODERS]
        for decoder, one in zip(DECODERS, found, strict=True):
            yield _row(decoder, one, case)
        overheads = [one.overhead for one in found]
        ratio = max(overheads) / min(overheads)
        spreads.append(Row(SPREAD, case, {RATIO: ratio}, {RATIO: NEARLY_CONSTANT}))
    yield from spreads


def _row(decoder: Decoder, found: ScaledOverhead, case: Case) -> Row:
    measured = {
        "parameters, 1e9": decoder.parameters / 1e9,
        "compute, s": found.compute_s,
        "all-reduce, s": found.all_reduce_s,
        "step, s": found.step_s,
        "checks, s": found.checks_s,
        OVERHEAD: 100 * found.overhead,
    }
    return Row(STEP, {"model": decoder.name, **case}, measured)


def _overheads(rows: list[Row], words: str, network: str) -> list[float]:
    return [
        row.measured[OVERHEAD]
        for row in rows
        if row.table == STEP and (row.case["checks take"], row.case["network"]) == (words, network)
    ]


def _verdict(rows: list[Row]) -> str:
    """Check that the overhead does not grow with the model."""
    for network in CLUSTERS:
        for words in PRICES.values():
            small, *_, large = _overheads(rows, words, network)
            if large > _MAY_GROW * small:
                return f"the overhead grows from {small:.3g} to {large:.3g} %: {words}, {network}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the overhead with a line for each cost model of the checks and each network."""
    axes = figure.subplots()
    sizes = [decoder.parameters / 1e9 for decoder in DECODERS]
    for network, style in zip(CLUSTERS, ("o-", "o--"), strict=True):
        for words, colour in zip(PRICES.values(), ("tab:blue", "tab:red"), strict=True):
            label = f"checks take {words}, {network}"
            axes.plot(sizes, _overheads(rows, words, network), style, color=colour, label=label)
    axes.set(xlabel="parameters, 1e9", ylabel=OVERHEAD, ylim=(0, None))
    axes.legend(fontsize="small")


STUDY = Study(
    name="attnchecker.scale",
    paper="ATTNChecker, section 5.6, figure 12",
    reproduces="overhead on 1,024 devices, data parallel, as models grow to 100 billion parameters "
    "(a model of times, nothing is run)",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)
