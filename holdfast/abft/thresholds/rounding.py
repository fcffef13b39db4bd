"""The threshold ``rounding``: a model of rounding errors in signed checksums of a GEMM.

The residual of a healthy row is a signed sum of rounding errors, ``D_i = Σ_j r_j ε_ij``, with the
random signs r of ``abft.checksums.weights``. Whatever the errors are, coherent ones included,
Hoeffding bounds it by a multiple of ‖ε_i‖₂; what is left is to bound that norm:

``T_i² = (λ u_out ‖C_i‖)² + (σ u_acc)²/6 · (Σ_k A_ik² z_k + 2 m P_i + h ‖C_i‖² + …) + floor²``

- The stored value is off by at most ``u_out |C_ij|`` when the output is rounded once more than the
  accumulator. This is a bound, so that λ = 5 leaves at most 2 exp(−λ²/2) = 7.5e-6 of all rows over
  it for any data, and far fewer for data whose roundings are spread over the interval.
- Each partial sum ``S_k`` rounds by ``u_acc |S_k|`` at most, by its square over 6 on average. ``z``
  bounds ``Σ_k S_k²`` from B alone: a random walk through the products, and the drift that the mean
  of each row of B gives it; ``h`` adds the drift that ended in ‖C_i‖.
- What the rows of B have in common, their mean μ with ``m = ‖μ‖²``, carries the partial sums along
  with those of A's row alone, whose squares add up to ``P_i``. They may drift up and back without a
  trace in ‖C_i‖: gradients do (each row of dS sums to zero, and the keys share a mean).
"""

import math
from dataclasses import dataclass

import torch

from holdfast.abft.thresholds.chains import UNBOUNDED, longest_chain
from holdfast.abft.thresholds.protocol import Product, Weights

OUTPUT_SIGMAS = 5.0  # λ: Hoeffding's 2 exp(−λ²/2) at the worst-case rounding of the output
ACCUMULATION_SIGMAS = 8.0  # σ: of a normal sum of independent roundings
NARROW = 16  # rows or columns below which kernels for small and for vector products are taken
CHECK_STEPS = 24  # additions of the checksums themselves, each as good as one of the product's
MEAN_NOISE = 4.0  # variances of a row's mean that are no drift


@dataclass(frozen=True)
class Growth:
    """Sums of the squared partial sums of K products, divided by the final sum squared."""

    walk: float  # products of independent sign, and the additions of A's checksum
    drift: float  # products of one sign: checksums are signed, and do not drift
    repeated: float  # products all alike, whose roundings all point the same way
    steps: float  # additions in a row

    @property
    def ended(self) -> float:
        """Return the growth of sums that end in C, including the additions of C's checksum."""
        return self.drift + CHECK_STEPS


def growth(inner: int, panel: int) -> Growth:
    """Compute the growth of one element's rounding error over K = ``inner`` products.

    ``panel`` products are summed before a kernel starts afresh; the panels are then added up.
    """
    panel = min(inner, panel)
    panels = math.ceil(inner / panel)
    return Growth(
        walk=(panel + panels) / 2 + CHECK_STEPS,
        drift=(panel * panel / inner + panels) / 3,
        repeated=(panel + panels) ** 2 / 4,
        steps=float(panel + panels),
    )


def unbroken(inner: int, rows: int, columns: int, panel: int) -> float:
    """Return the factor by which errors are larger in a narrow product, summed in one chain."""
    if rows >= NARROW and columns >= NARROW:
        return 1.0
    chain, panels = growth(inner, UNBOUNDED), growth(inner, panel)
    return max(chain.walk / panels.walk, chain.ended / panels.ended, chain.steps / panels.steps)


def b_statistics(b: torch.Tensor) -> torch.Tensor:
    """Compute what the threshold needs of B [.., K, N]: ``z`` and ``h``, fp64 [.., K + 1].

    ``z_k = walk · q_k + drift · K · N · m_k²`` with ``q_k = Σ_j B_kj²`` and ``m_k`` the mean of row
    k beyond its own noise; of a 16-bit B, whose products' accumulation hardly counts, the largest
    mean that ``q_k`` allows. Where rows of B repeat, so do their roundings: ``drift`` is then
    ``repeated``.
    """
    return statistics(b.double(), b.dtype)


def statistics(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``b_statistics`` of rows [.., K, N] converted to fp64 from ``dtype``."""
    return statistics_of_sums(rows.square().sum(-1), rows.sum(-1), rows.shape[-1], dtype)


def statistics_of_sums(
    square: torch.Tensor, plain: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute ``statistics`` from the rows' sums of squares and of elements [.., K]."""
    inner, mean = square.shape[-1], plain / columns
    means = dtype.itemsize > 2
    beyond = square / columns
    if means:
        beyond = (mean.square() - MEAN_NOISE * square / columns**2).clamp_min(0)
    terms = growth(inner, longest_chain(dtype))
    same = square[..., 1:] == square[..., :-1]
    if means:
        same = same & (mean[..., 1:] == mean[..., :-1])
    repeats = (same & (square[..., 1:] != 0)).any(-1, keepdim=True)
    drift = terms.drift + (terms.repeated - terms.drift) * repeats.double()
    spread = terms.walk * square + drift * inner * columns * beyond
    return torch.cat([spread, drift + CHECK_STEPS], -1)


def walked(a: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return the variance term of the threshold of each row i, ``Σ_k A_ik² z_k``, fp64 [.., M]."""
    return (a.double().square() @ spread.unsqueeze(-1)).squeeze(-1)


def common_energy(b: torch.Tensor) -> torch.Tensor:
    """Compute the squared norm of B's mean row, ``‖Σ_k B_k / K‖²``, less its mean, fp64 [..].

    That part is the drift of the rows' means, which ``z`` bounds already. Of a 16-bit B, whose
    products' accumulation hardly counts, zero.
    """
    if b.dtype.itemsize <= 2:
        return torch.zeros(b.shape[:-2], dtype=torch.float64, device=b.device)
    common = b.double().mean(-2)
    return (common - common.mean(-1, keepdim=True)).square().sum(-1)


def prefix_energy(a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``P_i``, the sum of squared partial sums of A's rows by panel, fp64 [.., M]."""
    length = longest_chain(dtype)
    total = torch.zeros(a.shape[:-1], dtype=torch.float64, device=a.device)
    before = torch.zeros_like(total)
    for panel in a.double().split(length, -1):
        sums = panel.cumsum(-1)
        before = before + sums[..., -1]
        total = total + sums.square().sum(-1)
        if a.shape[-1] > length:
            total = total + before.square()
    return total


def threshold(
    walk: torch.Tensor,
    energy: torch.Tensor,
    drift: torch.Tensor,
    columns: int,
    inner: int,
    verified: torch.dtype,
    accumulator: torch.dtype,
    added: torch.Tensor | float = 0.0,
    scale: float = 1.0,
    common: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Compute the threshold T_i of each row, fp64 [.., M], from sums over the operands.

    Args:
        walk: alpha² Σ_k A_ik² z_k [.., M].
        energy: ‖C_i‖² [.., M].
        drift: h [.., 1].
        columns: N.
        inner: K.
        verified: dtype of C.
        accumulator: dtype of the partial sums.
        added: beta² ‖D_i‖² [.., M] of the addend.
        scale: |alpha|, for the underflow.
        common: alpha² m P_i [.., M]; left out it is taken as zero.
    """
    out, acc = torch.finfo(verified), torch.finfo(accumulator)
    # In units of acc.eps, whose square would take small energies below fp64's range.
    output = 0.0 if verified == accumulator else OUTPUT_SIGMAS * out.eps / 2 / acc.eps
    panel = longest_chain(verified)
    partial = walk + 2 * common + (drift + 1) * energy + growth(inner, panel).steps * added
    partial = partial * unbroken(inner, energy.shape[-1], columns, panel)
    accumulated = (ACCUMULATION_SIGMAS / 2) ** 2 / 6 * partial
    floor = OUTPUT_SIGMAS * math.sqrt(columns) * underflow(inner, verified, accumulator, scale)
    return acc.eps * (output**2 * energy + accumulated).sqrt() + floor


def underflow(
    inner: int, verified: torch.dtype, accumulator: torch.dtype, scale: float = 1.0
) -> float:
    """Bound the error of an element of C from underflow, in K products and one store.

    For fp64 this includes rounding of values below 2⁻⁵¹¹, whose squares underflow.
    """
    out, acc = torch.finfo(verified), torch.finfo(accumulator)
    lost = max(acc.smallest_normal, acc.eps * math.sqrt(torch.finfo(torch.float64).smallest_normal))
    return max(1.0, scale) * (inner + 2) * lost + out.smallest_normal * out.eps


@dataclass(frozen=True)
class Rounding:
    """The threshold ``rounding`` as it is registered by name, see the module's docstring.

    Guarantees: rounding of the output alone exceeds it in at most 7.5e-6 of all rows, whatever
    the data. Not covered: it is a statistical bound, to be confirmed by a second computation; it
    may be exceeded by accumulations that drift and return because a few groups of B's rows are
    alike, each in its own way.
    """

    name: str = "rounding"
    weights: Weights = "signs"

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M].

        Raises:
            ValueError: the product comes without C.
        """
        if product.c is None:
            raise ValueError("rounding needs the product c: pass Product(a, b, c, …)")
        if product.is_empty:
            return product.zeros()
        a, b = product.operands()
        of_b = statistics(b, product.b.dtype)
        return threshold(
            walked(a, of_b[..., :-1]),
            product.c.detach().double().square().sum(-1),
            of_b[..., -1:],
            product.columns,
            product.inner,
            product.verified,
            product.accumulator,
            common=common_energy(product.b.detach()).unsqueeze(-1)
            * prefix_energy(a, product.a.dtype),
        )
