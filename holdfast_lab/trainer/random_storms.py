"""Randomly drawn storms, out of the faults that ``docs/fault_model.md`` claims to cover."""

import random
from collections.abc import Sequence
from typing import Any

from holdfast.inject.schedule import NO_RANK, Fault, tiles_of

# fp32 bits: sign, the exponent, and the mantissa bits that stand above the checksum's line.
FLIPPED_BITS = (31, *range(23, 31), *range(18, 23))
TOP_EXPONENT_BIT = 30
LOW_MANTISSA_BITS = range(4)
PLACE_DRAWS = 1000
LATE_STEPS = 3  # a host is lost from outside, at its step or a little later
CHECKSUM_BITS = range(52, 62)  # exponent bits of the fp64 checksum


def random_storm(
    seed: int,
    *,
    ops: Sequence[str],
    modules: Sequence[str],
    steps: int,
    ranks: int,
    nodes: int = 1,
    flips: int = 24,
    low_flips: int = 0,
) -> list[Fault]:
    """Draw a storm: flips in GEMM outputs, INF, NaN, near-INF, a damaged operand and checksum,
    a fault outside any matmul, a kill of every rank in mid-step, and the loss of a host.

    Args:
        seed: the same seed draws the same storm.
        ops: matmul names of the model, of which fused attention is left alone; modules: paths of
            the modules whose outputs may be struck.
        steps: length of the run; ranks: its size; nodes: its hosts, of which one is lost if there
            are several.
        flips: bit flips in GEMM outputs (sign, exponent and upper mantissa bits).
        low_flips: additional flips of the lowest mantissa bits, which no checksum sees and only
            a full audit repairs.

    Returns:
        Faults in order of their steps; which elements they strike is drawn by the injector.

    Raises:
        ValueError: the run is too short (12 steps at least) or has too few ops for all of them.
    """
    if steps < 12:
        raise ValueError(f"steps = {steps}: a storm needs at least 12 steps")
    draw = random.Random(f"storm/{seed}")
    ops, modules = sorted(op for op in ops if not tiles_of(op)), sorted(modules)
    # A fault that a kill overtakes within its step is gone before anything could answer it.
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
        *(Fault(kill_step, rank, "kill_trainer", op=kill_op) for rank in range(ranks)),
        *lost,
    ]
    return numbered(drawn)


def _lost_node(draw: random.Random, steps: int, nodes: int) -> Fault:
    step = draw.randrange(2 * steps // 3, steps - LATE_STEPS)
    return Fault(step, NO_RANK, "lose_node", host=draw.randrange(nodes))


class _Places:
    """No two faults at one step, rank and op, so that each can be told from the next."""

    def __init__(self, draw: random.Random, steps: Sequence[int], ranks: Sequence[int]) -> None:
        self._draw, self._steps, self._ranks = draw, steps, ranks
        self._taken: set[tuple[Any, ...]] = set()

    def draw(self, ops: Sequence[str]) -> dict[str, Any]:
        """A step, rank and op that were not drawn before; raises ValueError if there is none."""
        for _ in range(PLACE_DRAWS):
            place = tuple(map(self._draw.choice, (self._steps, self._ranks, ops)))
            if place not in self._taken:
                self._taken.add(place)
                return dict(zip(("step", "rank", "op"), place, strict=True))
        raise ValueError(f"no place is left for {len(self._taken) + 1} faults")


def numbered(faults: Sequence[Fault]) -> list[Fault]:
    """The faults in order of their steps, identified by their position."""
    ordered = sorted(faults, key=lambda fault: (fault.step, fault.rank, fault.op))
    return [_with_identifier(fault, position) for position, fault in enumerate(ordered)]


def _with_identifier(fault: Fault, identifier: int) -> Fault:
    values = {name: getattr(fault, name) for name in fault.__dataclass_fields__}
    return Fault(**values | {"identifier": identifier})
