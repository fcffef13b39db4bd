"""The threshold ``rounding``: a model of rounding errors in signed checksums of a GEMM.

The residual of a healthy row is a signed sum of rounding errors, ``D_i = Σ_j r_j ε_ij``, with the
random signs r of ``abft.checksums.weights``. For any errors, also coherent ones, Hoeffding bounds
it by a multiple of ‖ε_i‖₂, and that norm is bounded by the model

``T_i² = (λ u_out ‖C_i‖)² + (σ u_acc)²/6 · (Σ_k A_ik² z_k + 2 m P_i + h ‖C_i‖² + …) + floor²``

- Rounding the accumulator to the dtype of C changes an element by at most ``u_out |C_ij|``. As
  this is a bound, at most 2 exp(−λ²/2) = 7.5e-6 of all rows exceed it with λ = 5 for any data, and
  far fewer if the roundings are spread over the interval.
- Rounding a partial sum ``S_k`` changes it by at most ``u_acc |S_k|``, and the mean square of this
  error is ``(u_acc S_k)² / 6``. ``z`` bounds ``Σ_k S_k²`` from B alone, as a random walk over the
  products plus the drift that the mean of each row of B causes; ``h`` adds the drift that ended in
  ‖C_i‖.
- The mean row μ of B, with ``m = ‖μ‖²``, makes the partial sums follow those of A's row alone,
  whose squares add up to ``P_i``. They may drift up and back and leave no trace in ‖C_i‖, as in
  gradients of attention, where each row of dS sums to zero and the keys share a mean. As few
  products have such rows, the term is computed only where a residual exceeds T without it, and it
  never lifts T above the bound that rounding cannot exceed at all (``analytic.row_bound``).
"""

import math
from dataclasses import dataclass

import torch

from holdfast.abft.thresholds.analytic import Analytic
from holdfast.abft.thresholds.chains import UNBOUNDED, longest_chain
from holdfast.abft.thresholds.protocol import Product, Weights

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUT_SIGMAS = 5.0  # λ in Hoeffding's 2 exp(−λ²/2), for the worst-case rounding of the output
ACCUMULATION_SIGMAS = 8.0  # σ, standard deviations of a sum of independent roundings
NARROW = 16  # rows or columns below which torch uses kernels for small and for vector products
CHECK_STEPS = 24  # roundings of the checksums, in additions of the product
MEAN_NOISE = 4.0  # number of variances up to which a row's mean is noise and no drift


@dataclass(frozen=True)
class Growth:
    """Sums of the squared partial sums of K products, divided by the final sum squared."""

    walk: float  # products of independent sign, with the additions of A's checksum
    drift: float  # products of one sign
    repeated: float  # equal products, whose roundings all have the same direction
    steps: float  # number of additions

    @property
    def ended(self) -> float:
        """The growth ``drift`` and the additions of C's checksum together."""
        return self.drift + CHECK_STEPS


def growth(inner: int, panel: int) -> Growth:
    """Compute the growth of an element's rounding error over K = ``inner`` products.

    A kernel sums ``panel`` products at a time and then adds these sums.
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
    """Return the factor by which errors grow in a narrow product, which is summed in one chain."""
    if rows >= NARROW and columns >= NARROW:
        return 1.0
    chain, panels = growth(inner, UNBOUNDED), growth(inner, panel)
    return max(chain.walk / panels.walk, chain.ended / panels.ended, chain.steps / panels.steps)


def statistics(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute what the threshold needs of B [.., K, N]: ``z`` and ``h``, fp64 [.., K + 1].

    ``z_k = walk · q_k + drift · K · N · m_k²`` with ``q_k = Σ_j B_kj²`` and ``m_k`` the mean of row
    k beyond its own noise; for a 16-bit B, whose products' accumulation hardly counts, the largest
    mean that ``q_k`` allows. Where rows of B repeat, so do their roundings: ``drift`` is then
    ``repeated``. ``rows`` is B in fp64, and ``dtype`` the one in which B is multiplied.
    """
    equal = (rows[..., 1:, :] == rows[..., :-1, :]).all(-1)
    sums = rows.square().sum(-1), rows.sum(-1)
    return statistics_of_sums(*sums, rows.shape[-1], dtype, equal)


def statistics_of_sums(
    square: torch.Tensor,
    plain: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    equal: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``statistics`` from the sums of squares and of elements of B's rows, [.., K].

    Rows repeat where these sums do, unless ``equal``, bool [.., K - 1], says that a row differs
    from the one before it.
    """
    inner, mean = square.shape[-1], plain / columns
    means = dtype.itemsize > 2
    beyond = square / columns
    if means:
        beyond = (mean.square() - MEAN_NOISE * square / columns**2).clamp_min(0)
    terms = growth(inner, longest_chain(dtype))
    same = square[..., 1:] == square[..., :-1]
    if means:
        same = same & (mean[..., 1:] == mean[..., :-1])
    if equal is not None:
        same = same & equal
    repeats = (same & (square[..., 1:] != 0)).any(-1, keepdim=True)
    drift = terms.drift + (terms.repeated - terms.drift) * repeats.double()
    spread = terms.walk * square + drift * inner * columns * beyond
    return torch.cat([spread, drift + CHECK_STEPS], -1)


def walked(a: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Compute the variance term ``Σ_k A_ik² z_k`` of each row's threshold, fp64 [.., M]."""
    return (a.double().square() @ spread.unsqueeze(-1)).squeeze(-1)


def common_energy(b: torch.Tensor) -> torch.Tensor:
    """Compute the squared norm of B's mean row ``Σ_k B_k / K`` without its mean, fp64 [..].

    The mean is the drift that ``z`` bounds already. For a 16-bit B the result is zero, as its
    products' accumulation hardly counts.
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
        walk: alpha² Σ_k A_ik² z_k, [.., M].
        energy: ‖C_i‖², [.., M].
        drift: h, [.., 1].
        columns: N.
        inner: K.
        verified: Dtype of C.
        accumulator: Dtype of the partial sums.
        added: beta² ‖D_i‖² of the addend D, [.., M].
        scale: |alpha|, which scales underflow.
        common: alpha² m P_i, [.., M].
    """
    out, acc = torch.finfo(verified), torch.finfo(accumulator)
    # In units of acc.eps, as its square times a small energy would underflow in fp64.
    output = 0.0 if verified == accumulator else OUTPUT_SIGMAS * out.eps / 2 / acc.eps
    panel = longest_chain(verified)
    partial = walk + 2 * common + (drift + 1) * energy + growth(inner, panel).steps * added
    partial = partial * unbroken(inner, energy.shape[-1], columns, panel)
    accumulated = (ACCUMULATION_SIGMAS / 2) ** 2 / 6 * partial
    floor = OUTPUT_SIGMAS * math.sqrt(columns) * underflow(inner, verified, accumulator, scale)
    return acc.eps * (output**2 * energy + accumulated).sqrt() + floor


def in_force(base: torch.Tensor, drifting: torch.Tensor, worst: torch.Tensor) -> torch.Tensor:
    """Combine T without and with what partial sums may drift, and the worst-case bound."""
    return torch.maximum(base, torch.minimum(drifting, worst))


def underflow(
    inner: int, verified: torch.dtype, accumulator: torch.dtype, scale: float = 1.0
) -> float:
    """Bound the error that underflow causes in an element of C, in K products and one store.

    For fp64 this includes the rounding of values below 2⁻⁵¹¹, whose squares underflow.
    """
    out, acc = torch.finfo(verified), torch.finfo(accumulator)
    lost = max(acc.smallest_normal, acc.eps * math.sqrt(torch.finfo(torch.float64).smallest_normal))
    return max(1.0, scale) * (inner + 2) * lost + out.smallest_normal * out.eps


@dataclass(frozen=True)
class Rounding:
    """The threshold ``rounding``, whose model the module's docstring describes.

    Guarantees: the rounding of the output alone exceeds it in at most 7.5e-6 of all rows, for any
    data. Not covered: it is a statistical bound, and a suspect row has to be confirmed by a second
    computation. Partial sums may exceed it that drift up and back because B consists of a few
    groups of similar rows.
    """

    name: str = "rounding"
    weights: Weights = "signs"

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M].

        Raises:
            ValueError: The product has no C.
        """
        if product.c is None:
            raise ValueError("rounding needs the product c: pass Product(a, b, c, …)")
        if product.is_empty:
            return product.zeros()
        a, b = product.operands()
        of_b = statistics(b, product.b.dtype)
        of_rows = (
            walked(a, of_b[..., :-1]),
            product.c.detach().double().square().sum(-1),
            of_b[..., -1:],
            product.columns,
            product.inner,
            product.verified,
            product.accumulator,
        )
        drift = common_energy(product.b.detach()).unsqueeze(-1)
        drifting = threshold(*of_rows, common=drift * prefix_energy(a, product.a.dtype))
        return in_force(threshold(*of_rows), drifting, Analytic()(product))
