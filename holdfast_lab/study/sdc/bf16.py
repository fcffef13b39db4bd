"""``sdc.bf16``: the norm-wise bound of the ABFT trial in reduced precision (appendix D.4).

The paper ran the check at bf16 as it was and saw false positives on healthy nodes, and none at
fp32. Here clean products of the paper's width are checked, everything in the product's own dtype,
with the induced norms that its equation 7 prints, and with largest elements in their place.
"""

from collections.abc import Callable, Iterator
from itertools import product as every

import torch

from holdfast.inject.statistics import Rate
from holdfast_lab.study.published import percent_interval
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study, watched
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.wide import WEIGHT_STD

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLAGGED, SHARE = "clean products flagged, %", "largest residual / bound"
PRINTED, ELEMENTS = "induced norms, as printed", "largest elements"
Operands = tuple[torch.Tensor, torch.Tensor]


def _normal(rows: int, width: int, generator: torch.Generator) -> Operands:
    a = torch.randn(rows, width, generator=generator)
    return a, WEIGHT_STD * torch.randn(width, width, generator=generator)


def _outlier(rows: int, width: int, generator: torch.Generator) -> Operands:
    a, b = _normal(rows, width, generator)
    a[:, width // 3] += 50
    return a, b


def _mean(rows: int, width: int, generator: torch.Generator) -> Operands:
    a, b = _normal(rows, width, generator)
    return a + 1, b + WEIGHT_STD


OPERANDS: dict[str, Callable[[int, int, torch.Generator], Operands]] = {
    "N(0, 1) · N(0, 0.02²)": _normal,
    "with an outlier channel of 50": _outlier,
    "N(1, 1) · N(0.02, 0.02²)": _mean,
}
NORMS: dict[str, Callable[[torch.Tensor], float]] = {
    PRINTED: lambda matrix: float(matrix.double().abs().sum(-1).max()),
    ELEMENTS: lambda matrix: float(matrix.abs().max()),
}


def residual(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ‖C w − A (B w)‖_∞ with w of ones, all of it in the dtype of A and B."""
    ones = torch.ones(b.shape[-1], 1, dtype=b.dtype)
    return float(((a @ b) @ ones - a @ (b @ ones)).double().abs().max())


def bound(a: torch.Tensor, b: torch.Tensor, norm: str) -> float:
    """Return τ ‖A‖ ‖B‖ with τ = k u, where u is torch's ``eps``, as the paper has it."""
    return b.shape[0] * torch.finfo(b.dtype).eps * NORMS[norm](a) * NORMS[norm](b)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    rows, width = settings.choose((8, 2048), (32, 4096), (512, 4096))
    products = settings.choose(3, 5, 40)
    for precision, operands in watched(list(every(PRECISIONS, OPERANDS)), progress):
        flagged, most = dict.fromkeys(NORMS, 0), dict.fromkeys(NORMS, 0.0)
        for number in range(products):
            generator = settings.generator("D.4", operands, number)
            a, b = (m.to(PRECISIONS[precision]) for m in OPERANDS[operands](rows, width, generator))
            wrong = residual(a, b)
            for norm in NORMS:
                share = wrong / bound(a, b, norm)
                flagged[norm] += not share <= 1
                most[norm] = max(most[norm], share)
        for norm in NORMS:
            rate = Rate(flagged[norm], products)
            case: Case = {"precision": precision, "operands": operands, "norms": norm}
            measured = {FLAGGED: 100 * rate.value, SHARE: most[norm]}
            published = paper.reduced_precision(precision, norm if norm == ELEMENTS else "")
            yield Row(
                "clean products of the paper's width",
                case,
                measured,
                {FLAGGED: published} if published else {},
                intervals={FLAGGED: percent_interval(rate)} if flagged[norm] else {},
                trials={FLAGGED: products},
            )


STUDY = Study(
    name="sdc.bf16",
    paper="SDC study, appendix D.4",
    reproduces="whether the bound of equation 7 flags clean products at bf16 and not at fp32",
    run=_run,
)
