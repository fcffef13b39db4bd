"""Random fault schedules with only such faults as ``docs/fault_model.md`` claims to cover."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast.inject.schedule import NO_RANK, Fault, tiles_of

# fp32 bits: sign, exponent, and the mantissa bits whose flips a checksum detects.
FLIPPED_BITS = (31, *range(23, 31), *range(18, 23))
TOP_EXPONENT_BIT = 30
LOW_MANTISSA_BITS = range(4)
PLACE_DRAWS = 1000
LATE_STEPS = 3  # the launcher ends a lost host at its step or a few steps later
_PARTS = ("model.", "optimizer.")
CHECKSUM_BITS = range(52, 62)  # exponent bits of the fp64 checksum


def random_storm(
    seed: int,
    *,
    ops: Sequence[str],
    modules: Sequence[str],
    state: Sequence[str] = (),
    steps: int,
    ranks: int,
    nodes: int = 1,
    flips: int = 24,
    low_flips: int = 0,
) -> list[Fault]:
    """Draw a random schedule with faults of every kind, in the order of their steps.

    It has bit flips, INF, NaN and near-INF in GEMM outputs, faults in an operand and in a checksum,
    a fault outside matmuls, a weight and a moment of the optimizer that change at rest, a kill of
    every rank within a step, and the loss of a host.

    Args:
        seed: The same seed draws the same schedule.
        ops: Matmul names of the model; fused attention is not used.
        modules: Paths of the modules whose outputs may get a fault.
        state: Paths of weights (``model.…``) and moments (``optimizer.…``) in a snapshot; without
            them none changes at rest.
        steps: Number of steps of the run.
        ranks: Number of ranks.
        nodes: Number of hosts, one of which is lost if there are several.
        flips: Number of bit flips in GEMM outputs (sign, exponent and upper mantissa bits).
        low_flips: Number of additional flips of the lowest mantissa bits, which no checksum finds
            and only an audit of every step repairs.

    Raises:
        ValueError: The run has fewer than 12 steps, or too few ops for all faults.
    """
    if steps < 12:
        raise ValueError(f"steps = {steps}: a storm needs at least 12 steps")
    draw = random.Random(f"storm/{seed}")
    ops, modules = sorted(op for op in ops if not tiles_of(op)), sorted(modules)
    # A fault in the step of a kill may be gone before any event records a reaction to it.
    kill_step, kill_op = draw.randrange(steps // 3, 2 * steps // 3), draw.choice(ops)
    lost = [] if nodes == 1 else [_lost_node(draw, steps, nodes)]
    quiet = {kill_step, *(loss.step + late for loss in lost for late in range(LATE_STEPS))}
    calm = [step for step in range(1, steps - 1) if step not in quiet]
    places = _Places(draw, calm, range(ranks))
    forward = [op for op in ops if op.endswith("/forward")]

    def flip(among: Sequence[str], bits: Sequence[int], site: str = "output") -> Fault:
        return Fault(**places.draw(among), kind="bitflip", site=site, bit=draw.choice(bits))

    drawn = [
        flip(forward, [TOP_EXPONENT_BIT], "operand"),
        flip(ops, CHECKSUM_BITS, "checksum"),
        flip(modules, [TOP_EXPONENT_BIT], "module"),
        *(Fault(**places.draw(ops), kind=kind) for kind in ("inf", "nan", "near_inf")),
        *(flip(ops, FLIPPED_BITS) for _ in range(flips)),
        *(flip(ops, LOW_MANTISSA_BITS) for _ in range(low_flips)),
        *(flip(some, range(32), "rest") for some in _of_each_part(state)),
        *(Fault(kill_step, rank, "kill_trainer", op=kill_op) for rank in range(ranks)),
        *lost,
    ]
    return numbered(drawn)


def _of_each_part(state: Sequence[str]) -> list[list[str]]:
    parts = ([path for path in sorted(state) if path.startswith(p)] for p in _PARTS)
    return [paths for paths in parts if paths]


def _lost_node(draw: random.Random, steps: int, nodes: int) -> Fault:
    step = draw.randrange(2 * steps // 3, steps - LATE_STEPS)
    return Fault(step, NO_RANK, "lose_node", host=draw.randrange(nodes))


class _Places:
    """Draws places of faults, no two at one step, rank and op, so that events stay distinct."""

    def __init__(self, draw: random.Random, steps: Sequence[int], ranks: Sequence[int]) -> None:
        self._draw, self._steps, self._ranks = draw, steps, ranks
        self._taken: set[tuple[object, ...]] = set()

    def draw(self, ops: Sequence[str]) -> dict[str, Any]:
        """Draw a step, rank and op that were not drawn before, or raise ValueError."""
        for _ in range(PLACE_DRAWS):
            place = tuple(map(self._draw.choice, (self._steps, self._ranks, ops)))
            if place not in self._taken:
                self._taken.add(place)
                return dict(zip(("step", "rank", "op"), place, strict=True))
        raise ValueError(f"no place is left for {len(self._taken) + 1} faults")


def numbered(faults: Sequence[Fault]) -> list[Fault]:
    """Sort faults by their steps and number them by their position."""
    ordered = sorted(faults, key=lambda fault: (fault.step, fault.rank, fault.op))
    return [replace(fault, identifier=position) for position, fault in enumerate(ordered)]
