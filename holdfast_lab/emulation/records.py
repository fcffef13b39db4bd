"""Records of an emulated unhealthy device: each call with wrong values, and sums by submodule."""

from dataclasses import dataclass

import torch

from holdfast import events
from holdfast.events import EventKind
from holdfast_lab.emulation.strike import Wrong

KEPT_VALUES = 8
# In events of scheduled faults this is the fault's number in the schedule, which is never -1.
UNSCHEDULED = -1


@dataclass(frozen=True)
class Strike:
    """The wrong values of one tensor in one call.

    Attributes:
        step: Training step of the call.
        op: Site of the matmul, or path of the module.
        layer, part, direction: Submodule whose profile the errors follow, and the pass.
        inside: True if the output of a matmul was corrupted before its checksums were computed.
        count: Number of wrong values.
        severity: Mean relative error of the wrong values.
        index, before, after: Indices, right values and wrong values of the eight largest errors,
            the largest first.
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
        """Record the call as an ``injected`` event."""
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

    Attributes:
        calls, values: Number of calls of the submodule, and of values that they computed.
        expected: Number of wrong values to be expected among them.
        struck: Number of wrong values.
        wrong_calls: Number of tensors with a wrong value.
        severity: Largest severity of a tensor.
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
    """Make the record of wrong values, given a tensor of indices for each dimension."""
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
