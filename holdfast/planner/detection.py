"""How often checks, audits and shadow replicas have to run to leave few enough silent faults.

As in Algorithm 1 (``holdfast.planner.frequencies``), but for the whole step, each detector has a
cost and a share of steps in which it runs. A fault is missed if every detector misses it::

    inside a matmul    (1 − f c) (1 − a) (1 − s g)
    outside            (1 − a) (1 − s g)
    of a faulty device (m (1 − f c) + 1 − m) (1 − a (1 − ρ)) (1 − s g)

with the shares f of steps that are checked, a that are audited and s that are shadowed; c is the
checks' coverage, g the share of devices that a shadowed step computes again, m the share of a
faulty device's faults inside matmuls, and ρ the share that a repetition on the same device
repeats. A faulty device errs until K of its faults have been found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import exp, lgamma, log

from holdfast.planner.fleet import LadderQuestion

MONTH_S = 730 * 3600.0
_GRID = 8
_ZOOMS = 8
_HALVINGS = 40


@dataclass(frozen=True)
class Looks:
    """The shares of steps, from 0 to 1, in which each detector runs."""

    check: float
    audit: float
    shadow: float

    def cost_s(self, question: LadderQuestion) -> float:
        """Return the seconds that the detectors add to a step on average."""
        costs = question.costs
        return (
            self.check * costs.check_s_per_step
            + self.audit * costs.audit_s_per_step
            + self.shadow * costs.shadow_s_per_step
        )


@dataclass(frozen=True)
class Missed:
    """The shares of silent faults that every detector misses, by where the faults occur.

    ``checked`` is the share of the faults inside matmuls that checks find and repair in the op, and
    ``checked_faulty`` that share of all faults of a faulty device. For other faults that are found,
    the step is repeated.
    """

    matmul: float
    outside: float
    faulty_device: float
    checked: float
    checked_faulty: float


def missed(question: LadderQuestion, looks: Looks) -> Missed:
    """Return the shares of silent faults that are missed with these shares of steps."""
    device, detection = question.faulty_device, question.detection
    checked = looks.check * detection.check_coverage
    unshadowed = 1 - looks.shadow * detection.shadowed_share
    unaudited = 1 - looks.audit
    repeats = 1 - looks.audit * (1 - device.repeats_share)
    inside = device.matmul_share
    return Missed(
        matmul=(1 - checked) * unaudited * unshadowed,
        outside=unaudited * unshadowed,
        faulty_device=(inside * (1 - checked) + 1 - inside) * repeats * unshadowed,
        checked=checked,
        checked_faulty=inside * checked,
    )


@dataclass(frozen=True)
class SilentFaults:
    """The expected numbers of silent faults in a month.

    ``repaired`` faults are corrected in the op by checks, and ``rerun`` faults by repeating the
    step. ``evictions`` counts devices that are replaced after repeated faults.
    """

    undetected: float
    repaired: float
    rerun: float
    evictions: float


def silent_faults(
    question: LadderQuestion, looks: Looks, step_s: float, window_s: float = MONTH_S
) -> SilentFaults:
    """Return the expected faults of a month that begins without faulty devices.

    Faults occur only in the ``window_s`` seconds of the month in which steps are computed.
    """
    share, device = missed(question, looks), question.faulty_device
    inside, outside = (question.per_s(kind) * window_s for kind in ("matmul", "outside"))
    turned = question.per_s("faulty_device") * MONTH_S
    per_s = device.faults_per_step / step_s
    found_per_s = per_s * (1 - share.faulty_device)
    erring_s, evicted = erring(found_per_s, device.evict_after, window_s)
    repaired = inside * share.checked + turned * erring_s * per_s * share.checked_faulty
    found = inside * (1 - share.matmul) + outside * (1 - share.outside)
    found += turned * erring_s * found_per_s
    return SilentFaults(
        undetected=inside * share.matmul
        + outside * share.outside
        + turned * erring_s * per_s * share.faulty_device,
        repaired=repaired,
        rerun=max(0.0, found - repaired),
        evictions=turned * evicted,
    )


def erring(found_per_s: float, evict_after: int, window_s: float) -> tuple[float, float]:
    """Return the mean time that a device errs which turns faulty in a window, and P(replaced).

    It is replaced when its K-th fault is found; faults are found as a Poisson process of rate r.
    With x = r · window, averaged over the times at which it may turn faulty, it errs for ``Σ_{i<K}
    [P(N_x > i) − (i + 1) P(N_x > i + 1) / x] / r``, and for x / 2r if nothing is found.
    """
    mean = found_per_s * window_s
    if mean < 1e-6:
        return window_s / 2, 0.0
    total = sum(
        at_least(i + 1, mean) - (i + 1) * at_least(i + 2, mean) / mean for i in range(evict_after)
    )
    unfound = sum(at_least(i + 1, mean) for i in range(evict_after)) / mean
    return total / found_per_s, max(0.0, 1 - unfound)


def undone_by_eviction(
    question: LadderQuestion, looks: Looks, step_s: float, cycle_s: float, delay_s: float
) -> float:
    """Return the undetected faults of a device that are undone by its own eviction.

    Training returns to a save that began between ``delay_s`` and ``delay_s + cycle_s`` ago, with
    equal probability. If the device has erred for less time, all of its faults are undone.
    """
    missed_share, device = missed(question, looks).faulty_device, question.faulty_device
    per_s = device.faults_per_step / step_s

    def until(window_s: float) -> float:
        """Integrate E[min(x, time to eviction)] over x; ``erring`` is its mean."""
        found_per_s = per_s * (1 - missed_share)
        return window_s * erring(found_per_s, device.evict_after, window_s)[0] if window_s else 0.0

    return per_s * missed_share * ((until(delay_s + cycle_s) - until(delay_s)) / cycle_s)


def at_least(count: int, mean: float) -> float:
    """Return P(N ≥ count) of a Poisson variable N, to full relative precision."""
    if mean > count:
        return 1.0 - sum(_exactly(i, mean) for i in range(count))
    term = total = _exactly(count, mean)
    while term > 1e-17 * total:
        count += 1
        term *= mean / count
        total += term
    return total


def _exactly(count: int, mean: float) -> float:
    return exp(count * log(mean) - mean - lgamma(count + 1))


def least_looks(question: LadderQuestion) -> Looks:
    """Return the cheapest shares of steps whose undetected faults meet the target.

    A grid over checks and shadows, each point with the smallest share of audits that suffices, is
    refined around its best point until shares are known to 1e-5. If no shares suffice, the result
    is that every detector runs in every step.
    """
    target = question.undetected_target

    def excess(looks: Looks) -> float:
        step_s = question.model.step_s + looks.cost_s(question)
        return silent_faults(question, looks, step_s).undetected - target

    if excess(Looks(0, 0, 0)) <= 0:
        return Looks(0, 0, 0)
    if excess(Looks(1, 1, 1)) > 0:
        return Looks(1, 1, 1)
    best, width = Looks(1, 1, 1), 1.0
    for _ in range(_ZOOMS):
        for check, shadow in _around(best, width):
            spare_s = best.cost_s(question) - Looks(check, 0, shadow).cost_s(question)
            if spare_s <= 0:
                continue
            most = min(1.0, spare_s / max(question.costs.audit_s_per_step, 1e-300))
            audit = _least(lambda share: excess(Looks(check, share, shadow)), most)  # noqa: B023
            if audit is not None and audit < most:
                best = Looks(check, audit, shadow)
        width *= 2 / _GRID
    return best


def _around(centre: Looks, width: float) -> list[tuple[float, float]]:
    def points(value: float) -> list[float]:
        low = max(0.0, min(value - width / 2, 1 - width))
        return sorted({0.0, 1.0, *(min(1.0, low + width * i / _GRID) for i in range(_GRID + 1))})

    return list(product(points(centre.check), points(centre.shadow)))


def _least(excess: Callable[[float], float], most: float) -> float | None:
    """Return the smallest share without an excess; None if even ``most`` has one."""
    if excess(most) > 0:
        return None
    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
