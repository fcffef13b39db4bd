"""``dlrm.algorithm-2``: the check of embedding bags as printed, in fp32, on several kinds of rows.

The paper does not say what its rows hold. Here the bag, its sum and the checksums are added up in
fp32, one row after another, as Algorithm 2 has them.
"""

from collections.abc import Callable, Iterator
from itertools import product as every

import torch

from holdfast.inject.statistics import Rate
from holdfast_lab.study.dlrm.embedding_detection import PAPERS_BOUND, TABLE_III
from holdfast_lab.study.dlrm.embedding_subject import DIMS, POOLING
from holdfast_lab.study.published import Published, counted, exactly, percent_interval
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study, watched

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes [bags, m, d], α and β [bags, m]
FAULTS = {"upper 4": range(4, 8), "lower 4": range(4), "none": range(0)}
MET = "rates of table III met"
_ALL_THREE = Published(
    3.0,
    "table III, Algorithm 2",
    exactly(3.0, "all three rates by rows of one kind"),
    "false alarms in 9.5 % of bags need sums that cancel, and then every low bit is seen; 47 % of "
    "the low bits need rows with a mean of their own, and then sums do not cancel",
    best=True,
)


def quantised(values: torch.Tensor) -> Rows:
    """Quantise rows between their smallest and largest value."""
    low, high = values.amin(-1), values.amax(-1)
    scale = (high - low) / 255
    return ((values - low[..., None]) / scale[..., None]).round(), scale, low


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Rows:
    scale, bias = torch.rand(2, *shape[:-1], generator=generator)
    codes = torch.randint(0, 256, shape, generator=generator).float()
    return codes, 0.02 * scale, -2.0 * bias


def _heavy(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    squares = torch.randn(3, *shape, generator=generator).square()
    return torch.randn(shape, generator=generator) / squares.mean(0).sqrt()


DATA: dict[str, Callable[[tuple[int, ...], torch.Generator], Rows]] = {
    "N(0, 1)": lambda shape, g: quantised(torch.randn(shape, generator=g)),
    "U(0, 1)": lambda shape, g: quantised(torch.rand(shape, generator=g)),
    "N(μ, 1), μ of N(0, 5²)": lambda shape, g: quantised(
        torch.randn(shape, generator=g) + 5 * torch.randn((*shape[:-1], 1), generator=g)
    ),
    "t of 3 degrees": lambda shape, g: quantised(_heavy(shape, g)),
    "widths e^N(0, 1) of each row": lambda shape, g: quantised(
        torch.randn(shape, generator=g) * torch.randn((*shape[:-1], 1), generator=g).exp()
    ),
    "N(0.1, 1)": lambda shape, g: quantised(torch.randn(shape, generator=g) + 0.1),
    "any codes, α to 0.02, β to -2": _drawn,
}


def alarms(rows: Rows, sums: torch.Tensor) -> int:
    """Count the bags that Algorithm 2 calls faulty; ``sums`` are the rows' own, [bags, m]."""
    codes, scale, bias = rows
    pooled, expected = torch.zeros_like(codes[:, 0]), torch.zeros_like(scale[:, 0])
    for row in range(codes.shape[1]):
        pooled += scale[:, row, None] * codes[:, row] + bias[:, row, None]
        expected += scale[:, row] * sums[:, row] + codes.shape[-1] * bias[:, row]
    return int((~((pooled.sum(-1) - expected).abs() <= PAPERS_BOUND * expected.abs())).sum())


def struck(codes: torch.Tensor, bits: range, generator: torch.Generator) -> torch.Tensor:
    """Flip one of these bits of one code in every bag."""
    bags, _, dim = codes.shape
    place = torch.arange(bags), 0, torch.randint(dim, (bags,), generator=generator)
    bit = torch.randint(bits.start, bits.stop, (bags,), generator=generator)
    wrong = codes.clone()
    wrong[place] = (codes[place].int() ^ (1 << bit).int()).float()
    return wrong


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    bags = settings.choose(400, 4000, 40_000)
    for (name, draw), dim in watched(list(every(DATA.items(), DIMS)), progress):
        generator = settings.generator("algorithm 2", name, dim)
        counts = dict.fromkeys(FAULTS, 0)
        for _ in range(bags // 400):
            codes, scale, bias = draw((400, POOLING, dim), generator)
            sums = codes.sum(-1)  # below 2²⁴, and so exact
            for fault, bits in FAULTS.items():
                wrong = struck(codes, bits, generator) if bits else codes
                counts[fault] += alarms((wrong, scale, bias), sums)
        rates = {fault: Rate(count, bags) for fault, count in counts.items()}
        ends = {fault: percent_interval(rate) for fault, rate in rates.items()}
        met = sum(counted(rate).meets(*ends[fault]) is True for fault, rate in TABLE_III.items())
        measured = {f"{fault}, %": 100 * rate.value for fault, rate in rates.items()}
        case: Case = {"rows": name, "dim": dim, "trials": bags}
        yield Row("bags called faulty", case, measured | {MET: float(met)}, {MET: _ALL_THREE})


STUDY = Study(
    name="dlrm.algorithm-2",
    paper="DLRM-ABFT, algorithm 2 and table III",
    reproduces="which rows give the paper's rates of flips seen and false alarms, in fp32",
    run=_run,
)
