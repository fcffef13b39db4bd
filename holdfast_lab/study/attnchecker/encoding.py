"""``attnchecker.encoding``: how fast checksums are computed, by our pass and by a GEMM (figure 9).

Activations of BERT's width are encoded for growing batches. The GEMM multiplies them with the
paper's two columns of weights; our pass also computes the statistics that thresholds need. So many
batches are encoded one after another that they do not fit into any cache and are read from memory.
The read speed is that of torch's sum of an array of the same size. All are timed in turn.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as every
from statistics import median

import torch

from holdfast.abft.gemm.cpu import encode
from holdfast_lab.study.attnchecker.paper import ENCODER_BANDWIDTH, GEMM_BANDWIDTH, TIMES_GEMM
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study, watched
from holdfast_lab.study.timing import seconds

TABLE = "encoding of activations on this CPU"
OURS, GEMM, TIMES = "encoder, GB/s", "GEMM, GB/s", "times the GEMM"
SHARE, GEMM_SHARE = "encoder, % of read speed", "GEMM, % of read speed"
WIDTH, LENGTH = 768, 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def position_weights(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the paper's weights [width, 2]: a column of ones and the column 1, 2, 3, …."""
    ones = torch.ones(width)
    return torch.stack([ones, ones.cumsum(0)], 1).to(dtype)


def in_turn(runs: list[Callable[[], object]], pairs: int) -> list[float]:
    """Time all functions in turn and return the median seconds of each."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(pairs + 1):
        for run, found in zip(runs, times, strict=True):
            taken_s = seconds(run)
            if turn:  # the first warms up
                found.append(taken_s)
    return [median(found) for found in times]


def throughput(
    x: torch.Tensor, total: int, encoders: list[Callable[[torch.Tensor], object]], pairs: int
) -> list[float]:
    """Return the bytes per second that each encoder reads, and last the read speed of memory.

    The matrix is copied until all copies have ``total`` bytes.
    """
    size = x.numel() * x.itemsize
    copies = [x.clone() for _ in range(max(1, total // size))]
    large = torch.ones(len(copies) * size // 4)

    def over_all(encoder: Callable[[torch.Tensor], object]) -> None:
        for copy in copies:
            encoder(copy)

    runs = [partial(over_all, encoder) for encoder in encoders]
    return [len(copies) * size / taken_s for taken_s in in_turn([*runs, large.sum], pairs)]


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    batches = settings.choose((1, 2), (1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64, 128))
    pairs = settings.choose(2, 7, 30)
    length = settings.choose(8, LENGTH, LENGTH)
    total = settings.choose(1, 256, 1024) * 2**20
    for (name, dtype), batch in watched(list(every(DTYPES.items(), batches)), progress):
        generator = settings.generator("encoding", name, batch)
        x = torch.randn(batch * length, WIDTH, generator=generator).to(dtype)
        by_gemm = partial(torch.mm, mat2=position_weights(WIDTH, dtype))
        ours, gemm, reading = throughput(x, total, [encode, by_gemm], pairs)
        case: Case = {"dtype": name, "batch": batch, "kB": x.numel() * x.itemsize // 1000}
        yield _row(case, ours, gemm, reading)


def _row(case: Case, ours: float, gemm: float, reading: float) -> Row:
    measured = {
        OURS: ours / 1e9,
        GEMM: gemm / 1e9,
        TIMES: ours / gemm,
        SHARE: 100 * ours / reading,
        GEMM_SHARE: 100 * gemm / reading,
        "read speed, GB/s": reading / 1e9,
    }
    published = {TIMES: TIMES_GEMM, SHARE: ENCODER_BANDWIDTH, GEMM_SHARE: GEMM_BANDWIDTH}
    return Row(TABLE, case, measured, published)


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the throughput of each encoder over the batch size."""
    axes = figure.subplots()
    for name in DTYPES:
        chosen = [row for row in rows if row.case.get("dtype") == name]
        for quantity, style in ((OURS, "o-"), (GEMM, "s--")):
            line(axes, chosen, "batch", quantity, style, label=f"{quantity}, {name}")
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="GB/s")
    figure.legend(loc="outside upper center", ncols=2)


STUDY = Study(
    name="attnchecker.encoding",
    paper="ATTNChecker, section 5.3, figure 9",
    reproduces="an encoder of its own outruns a matrix product with the checksums' weights, and "
    "comes near the speed of memory",
    run=_run,
    plot=_plot,
)
