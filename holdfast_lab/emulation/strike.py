"""The wrong values of an unhealthy device in one tensor: their number, places and sizes.

Each call has a severity s, the mean |f' - f| / |f| of its wrong values. It is drawn from three
decades up to the node's worst severity, evenly in the logarithm, as the paper prints only the worst
of all calls. The relative error of each value lies between s/2 and 3s/2.

A relative error far above 1 means a large error or a small value. If the printed ones (9.63e12 on
node 9) were large errors, gradients would explode, but the paper's were at most 5.1 % off (figure
5). An error is therefore at most ``bound_rms`` times the tensor's rms, and a call of greater
severity corrupts small values, as far as the tensor has them. Without a bound all values are
corrupted with equal probability.
"""

from dataclasses import dataclass
from hashlib import blake2b
from math import inf, isfinite

import torch

from holdfast.inject.faults import flip_bit

SEVERITY_DECADES = 3.0
CHOICE = 4  # number of values of suitable size from which each corrupted one is drawn


@dataclass(frozen=True)
class Wrong:
    """The wrong values of one call.

    Attributes:
        places: Indices in the flattened tensor, int64 [n].
        before: The right values, [n].
        after: The wrong values, [n].
    """

    places: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    @property
    def severity(self) -> float:
        """Mean |after - before| / |before| of the values that were not 0; 0 if all were."""
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

    ``count``, at least 1, is the number of wrong values, and ``worst`` the severity of the node's
    worst call. ``bound_rms`` is the largest error in units of the rms of ``values``, or None.
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
    # An error below the dtype's resolution becomes a flip of the last bit.
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
