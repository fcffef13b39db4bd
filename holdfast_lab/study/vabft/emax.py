"""``vabft.emax``: the largest relative error of a row checksum (V-ABFT, tables 1, 2 and 7)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2, sqrt
from statistics import correlation, fmean, pstdev

import torch

from holdfast_lab.study.plots import over_size
from holdfast_lab.study.registry import Figure, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.paper import E_MAX, E_MAX_OVER_U, E_MAX_ROOT_N, E_MAX_VARIATION, SIZES
from holdfast_lab.study.vabft.residuals import DTYPES

MARGIN = 1.2
BY_SIZE, SUMMARY = "e_max / u by size", "e_max over all sizes"
APART, COLUMN, WIDE = "e_max / u", "as a column of the GEMM", "residual in fp64"


@dataclass(frozen=True)
class RelativeErrors:
    """The largest |E| / |checksum| of a product's rows, in units of u.

    Attributes:
        apart: ``A (B e)`` is computed as a separate product, all in the product's dtype.
        column: ``B e`` is appended as a column to B in the same GEMM (the paper's equation 2).
        wide: The product is in its dtype, its row sum and ``A (B e)`` in fp64, as holdfast
            verifies.
    """

    apart: float = 0.0
    column: float = 0.0
    wide: float = 0.0

    def joined(self, other: "RelativeErrors") -> "RelativeErrors":
        """Combine two measurements by the larger value of each."""
        pairs = {name: max(value, vars(other)[name]) for name, value in vars(self).items()}
        return RelativeErrors(**pairs)


def relative_errors(a: torch.Tensor, b: torch.Tensor) -> RelativeErrors:
    """Verify ``A B`` of positive operands, [M, K] and [K, N], in three ways."""
    row_sum = b.sum(-1, keepdim=True)
    with_column = a @ torch.cat([b, row_sum], dim=1)
    product = a @ b
    exact = a.double() @ b.double().sum(-1)
    unit = torch.finfo(a.dtype).eps / 2

    def largest(sums: torch.Tensor, checksum: torch.Tensor) -> float:
        return float(((sums.double() - checksum.double()).abs() / exact).max()) / unit

    return RelativeErrors(
        apart=largest(product.sum(-1), (a @ row_sum).squeeze(-1)),
        column=largest(with_column[:, :-1].sum(-1), with_column[:, -1]),
        wide=largest(product.double().sum(-1), exact),
    )


def positive_operands(
    size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw A and B of |N(1, 1)|, [size, size]; A is smaller in fp16 to avoid overflow."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = ((torch.randn(size, size, generator=generator, dtype=wide) + 1).abs() for _ in range(2))
    if dtype == torch.float16:
        a *= 2.0 ** -max(0, round(log2(size * size)) - 13)
    return a.to(dtype), b.to(dtype)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    sizes = settings.choose(SIZES[:3:2], SIZES[:4], SIZES)
    trials = settings.choose(24, 30, 500)
    progress.begin(float(trials * len(DTYPES) * sum(size**2 for size in sizes)))
    found: dict[str, dict[int, RelativeErrors]] = {}
    for name, dtype in DTYPES.items():
        found[name] = {}
        for size in sizes:
            generator, worst = settings.generator("emax", name, size), RelativeErrors()
            for _ in range(trials):
                worst = worst.joined(relative_errors(*positive_operands(size, dtype, generator)))
                progress.advance(size**2)
            found[name][size] = worst
            yield _size_row(name, size, worst)
    for name, dtype in DTYPES.items():
        unit = torch.finfo(dtype).eps / 2
        yield _summary_row(name, unit, {size: e.apart for size, e in found[name].items()})
    yield from _not_measured()


def _size_row(name: str, size: int, worst: RelativeErrors) -> Row:
    return Row(
        BY_SIZE,
        {"platform": "CPU", "precision": name, "N": size},
        {APART: worst.apart, COLUMN: worst.column, WIDE: worst.wide},
        {APART: E_MAX_OVER_U[_reference(name), name]},
        _note(name),
    )


def _summary_row(name: str, unit: float, by_size: dict[int, float]) -> Row:
    values, key = list(by_size.values()), (_reference(name), name)
    straight = correlation([sqrt(size) for size in by_size], values) if pstdev(values) else 0.0
    measured = {
        "e_max, 20 % margin": MARGIN * unit * max(values),
        "variation": pstdev(values) / fmean(values),
        "R² with √N": straight**2,
    }
    tables = (E_MAX, E_MAX_VARIATION, E_MAX_ROOT_N)
    published = {q: t[key] for q, t in zip(measured, tables, strict=True) if key in t}
    return Row(SUMMARY, {"platform": "CPU", "precision": name}, measured, published, _note(name))


def _reference(name: str) -> str:
    """Return the paper's platform with which a CPU's precision is compared."""
    return "CPU" if ("CPU", name) in E_MAX_OVER_U else "GPU H100"


def _note(name: str) -> str:
    return "" if _reference(name) == "CPU" else "the paper's value is the H100's: it has no CPU's"


def _not_measured() -> Iterator[Row]:
    for platform, name in E_MAX_OVER_U:
        if platform != "CPU":
            tables = {APART: E_MAX_OVER_U, "e_max, 20 % margin": E_MAX}
            published = {
                quantity: table[platform, name]
                for quantity, table in tables.items()
                if (platform, name) in table and table[platform, name].kind == "elsewhere"
            }
            case = {"platform": platform, "precision": name}
            if published:  # the others are those with which a CPU's are compared
                yield Row("other platforms", case, {}, published, "not measured")


def _plot(rows: list[Row], figure: Figure) -> None:
    """Draw a panel for each precision with the three ways to verify."""
    grid = figure.subplots(1, len(DTYPES), sharey=True)
    for axes, name in zip(grid, DTYPES, strict=True):
        chosen = [row for row in rows if row.table == BY_SIZE and row.case["precision"] == name]
        over_size(axes, chosen, "N", {APART: "o-", COLUMN: "s:", WIDE: "^--"})
        axes.set(title=name, yscale="log", ylabel="largest relative error / u")
        axes.label_outer()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)


STUDY = Study(
    name="vabft.emax",
    paper="V-ABFT, section 3.6, tables 1, 2 and 7",
    reproduces="e_max, the largest relative error of a row checksum on |N(1, 1)|, and its growth",
    run=_run,
    plot=_plot,
)
