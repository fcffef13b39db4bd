"""``vabft.fp8``: e_max of fp8 operands, added up in fp32 and rounded to fp16 (V-ABFT, table 2).

The formats are emulated: operands are rounded to fp8 and multiplied in fp32, which is exact for
each pair; sums and checksums are rounded to fp16, as the tensor cores of the paper's H100 do.
"""

from collections.abc import Iterator
from itertools import product as every
from math import log2
from statistics import fmean, pstdev

import torch

from holdfast_lab.study.registry import Progress, Row, Settings, Study, watched
from holdfast_lab.study.vabft.emax import positive_operands
from holdfast_lab.study.vabft.paper import FP8, FP8_VARIATION, SIZES

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
UNIT = torch.finfo(torch.float16).eps / 2
ERROR, VARIATION = "e_max / u of fp16", "variation"


def relative_error(a: torch.Tensor, b: torch.Tensor, output: torch.dtype) -> float:
    """Return the largest |E| / |checksum| of a product's rows, in units of fp16's roundoff.

    A and B are fp32 and hold values of fp8; the product is scaled so that its sums fit into fp16.
    """
    scale = 2.0 ** -max(0, round(log2(b.numel())) - 13)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(output).float()

    product = rounded(scale * (a @ b))
    checksum = rounded(scale * (a @ rounded(b.sum(-1))))
    exact = scale * (a.double() @ b.double().sum(-1))
    return float(((rounded(product.sum(-1)) - checksum).abs() / exact).max()) / UNIT


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    sizes = settings.choose(SIZES[:3:2], SIZES[:4], SIZES)
    trials = settings.choose(24, 30, 500)
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    for name, size in watched(list(every(FORMATS, sizes)), progress):
        generator, worst = settings.generator("fp8", name, size), 0.0
        for _ in range(trials):
            drawn = positive_operands(size, torch.float32, generator)
            a, b = (each.to(FORMATS[name]).float() for each in drawn)
            worst = max(worst, relative_error(a, b, torch.float16))
        found[name].append(worst)
        yield Row(
            "e_max by size",
            {"format": name, "N": size},
            {ERROR: worst},
            {ERROR: FP8},
            trials={ERROR: trials * size},
        )
    for name, values in found.items():
        measured = {VARIATION: pstdev(values) / fmean(values)}
        yield Row("over all sizes", {"format": name}, measured, {VARIATION: FP8_VARIATION})


STUDY = Study(
    name="vabft.fp8",
    paper="V-ABFT, section 3.6, table 2",
    reproduces="e_max of fp8 products with fp16 outputs, in units of fp16's roundoff, emulated",
    run=_run,
)
