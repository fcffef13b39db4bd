"""The wrong values of an unhealthy device in one tensor: their number, places and sizes.

A call has a severity s of its own, the mean |f' - f| / |f| of its wrong values: three decades below
the node's worst and up to it, evenly in the logarithm, as the paper prints only the worst of all
calls. A value's own is between s/2 and 3s/2.

A relative error far above 1 can be a large error or a small value. Taken as errors the printed ones
(9.63e12 on node 9) would make gradients explode, yet the paper's were at most 5.1 % off (figure 5).
So an error is at most ``bound_rms`` times the tensor's rms, and a call of greater severity strikes
values small enough for it, as far as the tensor has them; without a bound they are struck evenly.
"""

from dataclasses import dataclass
from hashlib import blake2b
from math import inf, isfinite

import torch

from holdfast.inject.faults import flip_bit

SEVERITY_DECADES = 3.0
CHOICE = 4  # values of the right size to choose each struck one from


@dataclass(frozen=True)
class Wrong:
    """The wrong values of one call.

    Args:
        places: int64 [n], in the flattened tensor; before, after: [n], its dtype.
    """

    places: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    @property
    def severity(self) -> float:
        """Mean |after - before| / |before| of those that were not 0; 0 if all were."""
        before, after = self.before.double(), self.after.double()
        known = before != 0
        ratios = (after - before).abs()[known] / before[known].abs()
        return float(ratios.mean()) if ratios.numel() else 0.0


def generator(*key: object) -> torch.Generator:
    """Return a generator that depends on the key alone."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


def count_wrong(values: int, frequency: float, draw: torch.Generator) -> int:
    """Draw the binomial number of wrong values."""
    share = torch.tensor(min(1.0, frequency), dtype=torch.float64)
    return int(torch.binomial(torch.tensor(float(values)).double(), share, generator=draw))


def wrong_values(
    values: torch.Tensor, count: int, worst: float, bound_rms: float | None, draw: torch.Generator
) -> Wrong:
    """Draw the wrong values of one call, without changing the tensor.

    Args:
        values: Tensor of any shape, fp64, fp32, fp16 or bf16.
        count: Number of values that become wrong, at least 1.
        worst: Severity of the worst call.
        bound_rms: Largest error in units of the rms of ``values``; None for no bound.
        draw: Source of random numbers.
    """
    flat = values.detach().reshape(-1)
    exponent = -SEVERITY_DECADES * float(torch.rand((), generator=draw))
    severity = worst * 10**exponent
    size = flat.double().abs()
    rms = float(size.square().mean().sqrt())
    rms = rms if isfinite(rms) else 1.0
    places = _places(size, count, severity, rms, bound_rms, draw).to(flat.device)
    before = flat[places]
    factors = (0.5 + torch.rand(count, generator=draw, dtype=torch.float64)).to(flat.device)
    errors = severity * factors * torch.where(size[places] > 0, size[places], rms)
    if bound_rms is not None:
        errors = errors.clamp_max(bound_rms * rms)
    signs = torch.randint(2, (count,), generator=draw).to(flat.device) * 2 - 1
    after = (before.double() + signs * errors).to(flat.dtype)
    # Below the dtype's resolution an error is its last bit.
    return Wrong(places, before, torch.where(after == before, flip_bit(before, 0), after))


def _places(
    size: torch.Tensor,
    count: int,
    severity: float,
    rms: float,
    bound_rms: float | None,
    draw: torch.Generator,
) -> torch.Tensor:
    if bound_rms is None or severity <= bound_rms or rms == 0:
        return distinct(size.numel(), count, draw)
    wanted = bound_rms * rms / severity
    distance = torch.where(size > 0, (size - wanted).abs(), inf)
    among = min(CHOICE * count, size.numel())
    nearest = distance.topk(among, largest=False).indices
    return nearest[distinct(among, count, draw)]


def distinct(values: int, count: int, draw: torch.Generator) -> torch.Tensor:
    """Draw ``count`` different numbers below ``values``, int64 [count]."""
    if 16 * count > values:
        return torch.randperm(values, generator=draw)[:count]
    picked = torch.empty(0, dtype=torch.int64)
    while len(picked) < count:
        more = torch.randint(values, (count - len(picked),), generator=draw)
        picked = torch.unique(torch.cat((picked, more)))
    return picked
