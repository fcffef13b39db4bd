"""Classes of the effect of a fault: none, below rounding errors, harmless, or harmful."""

from dataclasses import dataclass
from math import sqrt

import torch

EFFECTS = {
    "masked": "no value of the product changes",
    "below_rounding": "no element changes by more than the largest true rounding error of its row",
    "harmless": "every row changes by at most √u of its norm, u the unit roundoff of the dtype",
    "harmful": "anything more",
}
MASKED, BELOW_ROUNDING, HARMLESS, HARMFUL = range(len(EFFECTS))
SAMPLED_COLUMNS = 8


@dataclass(frozen=True)
class Scale:
    """The scales of a clean product's rows, by which effects are classified; fp64 [batch, M].

    Attributes:
        rounding: Largest true rounding error of an element of the row.
        norm: 2-norm of the row, at least that of the smallest normal numbers.
        bar: Largest relative change of a row that is harmless.
    """

    rounding: torch.Tensor
    norm: torch.Tensor
    bar: float

    @classmethod
    def of(cls, rows: torch.Tensor, rounding: torch.Tensor) -> "Scale":
        """Return the scale of rows [.., N] with these largest rounding errors [..]."""
        info = torch.finfo(rows.dtype)
        floor = sqrt(rows.shape[-1]) * info.smallest_normal
        return cls(rounding, rows.double().norm(dim=-1).clamp_min(floor), sqrt(info.eps / 2))

    def worst(self, new: torch.Tensor, old: torch.Tensor) -> int:
        """Return the worst class of all rows of a matrix that changed from ``old`` to ``new``."""
        moved = change(new, old)
        rows = (torch.arange(len(moved)),)
        return int(self.classify(moved.amax(-1), moved.norm(dim=-1), rows).amax())

    def classify(
        self, largest: torch.Tensor, norm: torch.Tensor, rows: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Return the class of each change, uint8, as its index in ``EFFECTS``.

        ``largest`` is the largest |change| of an element of each changed row and ``norm`` the
        2-norm of the row's changes, fp64; NaN where a value became NaN. ``rows`` are the indices
        (batch, row) of these rows, which broadcast against ``largest``.
        """
        effect = torch.full_like(largest, HARMFUL, dtype=torch.uint8)
        effect[norm <= self.bar * self.norm[rows]] = HARMLESS
        effect[largest <= self.rounding[rows]] = BELOW_ROUNDING
        effect[largest == 0] = MASKED
        return effect


def change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return |new − old| in fp64; 0 also where both are the same INF or both NaN."""
    difference = (new.double() - old.double()).abs()
    return torch.where((new == old) | (new.isnan() & old.isnan()), 0.0, difference)


def scale_of(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None
) -> Scale:
    """Return the scale of a clean product ``c = a b + added`` of batches of matrices."""
    return Scale.of(c, _largest_rounding_error(c, a, b, added))


def scale_against(computed: torch.Tensor, exact: torch.Tensor) -> Scale:
    """Return the scale of a result's rows, with its errors measured against the exact result.

    Both tensors are [1, 1, M, N].
    """
    rows = computed[0, 0]
    error = (rows.double() - exact[0, 0]).abs()
    return Scale.of(rows, error.nan_to_num(0.0, 0.0, 0.0).amax(-1))


def _largest_rounding_error(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None
) -> torch.Tensor:
    """Return the largest rounding error per row, against fp64 or, for fp64, twice its precision."""
    if c.dtype == torch.float64:
        sample = slice(None, None, max(1, c.shape[-1] // SAMPLED_COLUMNS))
        c, added = c[..., sample], None if added is None else added[..., sample]
        high, low = _accurate_product(a, b[..., sample])
    else:
        high = a.double() @ b.double()
        low = torch.zeros_like(high)
    if added is not None:
        high, lost = _two_sum(high, added.double())
        low = low + lost
    error = ((c.double() - high) - low).abs()
    return error.nan_to_num(0.0, 0.0, 0.0).amax(-1)


def _accurate_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute A B as an unevaluated sum of two fp64 tensors, one row at a time.

    Source: Ogita, Rump and Oishi, Accurate sum and dot product (Dot2), summed pairwise.
    """
    rows = [_accurate_row(a[:, i], b) for i in range(a.shape[1])]
    high, low = zip(*rows, strict=True)
    return torch.stack(high, 1), torch.stack(low, 1)


def _accurate_row(row: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply a row [batch, K] by b [batch, K, N]; return sum and rounding error [batch, N]."""
    terms, low = _two_product(row.unsqueeze(-1).expand(b.shape), b)
    error = low.sum(-2)
    while terms.shape[-2] > 1:
        half = terms.shape[-2] // 2
        rest = terms[..., 2 * half :, :]
        terms, low = _two_sum(terms[..., :half, :], terms[..., half : 2 * half, :])
        error = error + low.sum(-2)
        terms = torch.cat([terms, rest], -2)
    return terms.squeeze(-2), error


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded a + b and its exact rounding error (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _two_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded a b and its exact rounding error (Dekker, with Veltkamp's splitting)."""
    product = a * b
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _upper_half(value: torch.Tensor) -> torch.Tensor:
    scaled = value * 134217729.0  # 2**27 + 1
    return scaled - (scaled - value)
