"""Records of an emulated unhealthy device: each faulty call, and sums by submodule."""

from dataclasses import dataclass

import torch

from holdfast import events
from holdfast.events import EventKind
from holdfast_lab.emulation.strike import Wrong

KEPT_VALUES = 8
# No identifier of a schedule: the ledger's other readers tell scheduled faults by theirs.
UNSCHEDULED = -1


@dataclass(frozen=True)
class Strike:
    """The wrong values of one tensor in one call.

    Args:
        step: of training; op: the matmul's site, or the path of the module.
        layer, part, direction: the submodule whose profile it followed.
        inside: whether a matmul's own output was struck, before its checksums see it.
        count: wrong values; severity: their mean relative error.
        index, before, after: of the eight largest errors, the largest first.
    """

    step: int
    op: str
    layer: int
    part: str
    direction: str
    inside: bool
    count: int
    severity: float
    index: tuple[tuple[int, ...], ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def log(self, node: int) -> None:
        """Record it as an ``injected`` event."""
        detail = {
            "fault": UNSCHEDULED,
            "kind": f"unhealthy_node_{node}",
            "site": "output" if self.inside else "module",
            "bit": None,
            "direction": self.direction,
            "count": self.count,
            "severity": self.severity,
            "index": list(self.index[0]),
            "true": self.before[0],
            "corrupted": self.after[0],
        }
        events.record(EventKind.INJECTED, op=self.op, step=self.step, detail=detail)


@dataclass
class Tally:
    """The sums over one submodule's calls in one direction.

    Args:
        calls, values: of the submodule; expected: wrong values expected of them.
        struck: wrong values; wrong_calls: tensors with any; severity: of the worst of these.
    """

    calls: int = 0
    values: int = 0
    expected: float = 0.0
    struck: int = 0
    wrong_calls: int = 0
    severity: float = 0.0

    @property
    def frequency(self) -> float:
        """The share of values that were made wrong."""
        return self.struck / self.values if self.values else 0.0

    def add(self, strike: Strike) -> None:
        """Add the wrong values of one call to the sums."""
        self.struck += strike.count
        self.wrong_calls += 1
        self.severity = max(self.severity, strike.severity)


def make_strike(
    wrong: Wrong, where: tuple[torch.Tensor, ...], key: tuple[int, str, str], op: str, inside: bool
) -> Strike:
    """Record wrong values at ``where``, a tensor of indices for each dimension."""
    layer, direction, part = key
    errors = (wrong.after.double() - wrong.before.double()).abs()
    kept = errors.topk(min(KEPT_VALUES, len(errors))).indices
    return Strike(
        step=events.current_step(),
        op=op,
        layer=layer,
        part=part,
        direction=direction,
        inside=inside,
        count=len(errors),
        severity=wrong.severity,
        index=tuple(zip(*(axis[kept].tolist() for axis in where), strict=True)),
        before=tuple(wrong.before[kept].double().tolist()),
        after=tuple(wrong.after[kept].double().tolist()),
    )
