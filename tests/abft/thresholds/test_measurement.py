"""The measurements: known errors come out as they went in; no fault is taken for rounding."""

import math
from collections.abc import Callable

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds import measurement
from holdfast.abft.thresholds.measurement import (
    DTYPES,
    Effort,
    Kernel,
    Tally,
    measure,
    unit_roundoff,
)
from holdfast.errors import UncorrectableFault

CPU = torch.device("cpu")
EFFORT = Effort("tiny", (16,), products=12, depth=12 * 16, seconds=60.0)
Wrong = Callable[[torch.Tensor], torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


def kernel_of(name: str) -> Kernel:
    return Kernel(DTYPES[name], DTYPES[name])


def positive(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, inner), (inner, columns))
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return (drawn[0] + 1).abs(), (drawn[1] + 1).abs()


def spoil(monkeypatch: pytest.MonkeyPatch, wrong: Wrong, *, calls: range) -> None:
    """Let some calls of every kernel give a wrong product."""
    counter = iter(range(10**9))
    right = Kernel.multiply

    def multiply(self: Kernel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = right(self, a, b)
        return wrong(product) if next(counter) in calls else product

    monkeypatch.setattr(Kernel, "multiply", multiply)


ALWAYS = range(10**9)


def scaled_row(factor: float) -> Wrong:
    return lambda product: torch.cat([product[:3], product[3:4] * factor, product[4:]])


def test_a_known_relative_error_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, scaled_row(1.01), calls=ALWAYS)
    tally = Tally(kernel_of("fp64"), 32)
    tally.compare_checksums(positive(8, 32, 16))
    assert tally.e_max == pytest.approx(0.01, rel=1e-9)
    assert tally.rows == 8


def test_a_known_residual_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of each row off by 1e6 u‖C_i‖, which no rounding comes near."""
    shift = 1e6

    def wrong(product: torch.Tensor) -> torch.Tensor:
        product = product.clone()
        product[:, 5] += shift * unit_roundoff("fp64") * product.norm(dim=-1)
        return product

    spoil(monkeypatch, wrong, calls=ALWAYS)
    tally = Tally(kernel_of("fp64"), 32)
    signs = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)
    tally.compare_signed({"n11": positive(8, 32, 16)}, signs)
    growth = tally.bucket().growth["n11"]
    assert growth.rms == pytest.approx(shift, rel=1e-4)
    assert growth.largest == pytest.approx(shift, rel=1e-4)
    assert growth.rows == 8


@for_each("name", ["fp16", "bf16"])
def test_two_roundings_are_all_that_a_short_low_precision_product_shows(name: str) -> None:
    tally = Tally(kernel_of(name), 16)
    list(measure([tally], EFFORT, 0, CPU))
    unit = unit_roundoff(name)
    # Each checksum is rounded once, from sums that are far finer.
    assert unit < tally.e_max <= 2.05 * unit
    # Rounding is uniform within half a spacing, which is u to 2u of the element: an rms of
    # u/√3 at most and of half that at least.
    for growth in tally.bucket().growth.values():
        assert 0.5 / math.sqrt(3) < growth.rms < 1 / math.sqrt(3)


@for_each("name", ["fp64", "fp32"])
def test_full_precision_shows_more_than_a_rounding_and_less_than_the_worst_case(name: str) -> None:
    tally = Tally(kernel_of(name), 16)
    list(measure([tally], EFFORT, 0, CPU))
    columns = max(shape[1] for shape in measurement.SHAPES)
    assert 1 < tally.e_max / unit_roundoff(name) < 2 * (columns + 16)
    assert set(tally.bucket().growth) == {"n01", "n11", "u01"}


def test_the_counts_are_those_of_the_products() -> None:
    tally = Tally(kernel_of("fp32"), 16)
    fractions = list(measure([tally], EFFORT, 0, CPU))
    rows = [shape[0] for shape in measurement.SHAPES]
    assert tally.rows == 4 * sum(rows)
    assert tally.growth_rows == sum(rows)  # products 0, 4 and 8: each shape once
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_a_time_limit_leaves_one_product_of_each_shape() -> None:
    tally = Tally(kernel_of("fp32"), 16)
    hurried = Effort("hurried", (16,), products=1000, depth=10**6, seconds=0.0)
    list(measure([tally], hurried, 0, CPU))
    assert tally.rows == sum(shape[0] for shape in measurement.SHAPES)


def test_no_fp16_checksum_overflows_and_nothing_else_is_scaled() -> None:
    a, b = positive(4, 16384, 512)
    low = kernel_of("fp16")
    small_a, small_b = low.cast((a, b))
    assert torch.isfinite(low.multiply(small_a, small_b).sum(-1)).all()
    for name in ("fp64", "fp32", "bf16"):
        kept_a, kept_b = kernel_of(name).cast((a, b))
        assert torch.equal(kept_a, a.to(DTYPES[name]))
        assert torch.equal(kept_b, b.to(DTYPES[name]))


def of_checksums(tally: Tally) -> float:
    tally.compare_checksums(positive(8, 32, 16))
    return tally.e_max


def of_growth(tally: Tally) -> float:
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0] * 4, dtype=torch.float64)
    tally.compare_signed({"n11": positive(8, 32, 16)}, signs)
    return tally.bucket().growth["n11"].rms


@pytest.mark.parametrize("measured", [of_checksums, of_growth])
@pytest.mark.parametrize("factor", [1.0 + 1e-4, 100.0, math.inf, math.nan])
def test_a_transient_fault_is_caught_and_would_be_measured(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[Tally], float], factor: float
) -> None:
    clean = measured(Tally(kernel_of("fp32"), 32))
    spoil(monkeypatch, scaled_row(factor), calls=range(1))
    with pytest.raises(UncorrectableFault, match="fp32 product of 8 × 32 × 16"):
        measured(Tally(kernel_of("fp32"), 32))
    monkeypatch.setattr(measurement, "confirm", lambda *arguments: None)
    spoil(monkeypatch, scaled_row(factor), calls=range(1))
    assert not measured(Tally(kernel_of("fp32"), 32)) < 100 * clean


def test_a_fault_in_the_checksums_is_caught_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**9))
    right = torch.Tensor.sum

    def total(self: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        result = right(self, *arguments, **options)
        return result * 1.5 if next(calls) == 0 else result

    operands = positive(8, 32, 16)
    monkeypatch.setattr(torch.Tensor, "sum", total)
    with pytest.raises(UncorrectableFault, match="does not repeat"):
        Tally(kernel_of("fp32"), 32).compare_checksums(operands)


def test_a_product_that_stays_infinite_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, scaled_row(math.inf), calls=ALWAYS)
    with pytest.raises(UncorrectableFault, match="is not finite"):
        Tally(kernel_of("fp32"), 32).compare_checksums(positive(8, 32, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_accumulator_is_finer_than_the_product() -> None:
    device = torch.device("cuda", 0)
    kernels = measurement.kernels_of(device, ("bf16",))
    tallies = [Tally(kernel, 16) for kernel in kernels]
    list(measure(tallies, EFFORT, 0, device))
    assert [tally.kernel.name for tally in tallies] == ["bf16", "bf16-online"]
    assert tallies[1].e_max < 0.01 * tallies[0].e_max
