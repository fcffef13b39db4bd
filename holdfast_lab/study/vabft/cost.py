"""``vabft.cost``: the time of the statistics of rows that thresholds need (V-ABFT, section 4.4).

V-ABFT needs the largest, smallest and mean element of each row, A-ABFT the p largest absolute ones.
"""

from collections.abc import Iterator
from itertools import product as every
from statistics import median

import torch

from holdfast_lab.study.registry import Progress, Row, Settings, Study, watched
from holdfast_lab.study.timing import seconds
from holdfast_lab.study.vabft.paper import COST

ROWS, RATIO = 256, "A-ABFT / V-ABFT"


def mean_and_ends(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return V-ABFT's statistics of each row."""
    return a.mean(-1), *torch.aminmax(a, dim=-1)


def largest(a: torch.Tensor, count: int) -> torch.Tensor:
    """Return A-ABFT's statistics of each row, the largest absolute elements."""
    return a.abs().topk(count, sorted=False).values if count > 1 else a.abs().amax(-1)


def cost_ratio(a: torch.Tensor, count: int, pairs: int) -> float:
    """Return the median ratio of the times of pairs, A-ABFT's over V-ABFT's."""
    return median(
        seconds(lambda: largest(a, count)) / seconds(lambda: mean_and_ends(a)) for _ in range(pairs)
    )


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    widths = settings.choose((256,), (1024, 4096), (1024, 4096, 16384))
    pairs = settings.choose(3, 101, 501)
    for width, count in watched(list(every(widths, (1, 2, 8, 32))), progress):
        a = torch.randn(ROWS, width, generator=settings.generator("cost", width))
        cost_ratio(a, count, 3)
        case = {"K": width, "p": count, "pairs": pairs}
        measured = {RATIO: cost_ratio(a, count, pairs)}
        yield Row("statistics of 256 rows, one after another", case, measured, {RATIO: COST})


STUDY = Study(
    name="vabft.cost",
    paper="V-ABFT, section 4.4",
    reproduces="time of the statistics of rows that the thresholds need, on torch's own operators",
    run=_run,
)
