"""Randomly drawn storms, out of the faults that ``docs/fault_model.md`` claims to cover."""

import random
from collections.abc import Sequence
from typing import Any

from holdfast.inject.schedule import Fault

# fp32 bits: sign, the exponent, and the mantissa bits that stand above the checksum's line.
SIGN_BIT = 31
EXPONENT_BITS = range(23, 31)
UPPER_MANTISSA_BITS = range(18, 23)
TOP_EXPONENT_BIT = 30
LOW_MANTISSA_BITS = range(4)
CHECKSUM_BITS = range(52, 62)  # exponent bits of the fp64 checksum


def random_storm(
    seed: int,
    *,
    ops: Sequence[str],
    modules: Sequence[str],
    steps: int,
    ranks: int,
    flips: int = 24,
    low_flips: int = 0,
) -> list[Fault]:
    """Draw a storm: flips in GEMM outputs, INF, NaN, near-INF, a damaged operand and checksum,
    a fault outside any matmul, and a kill of every rank in mid-step.

    Args:
        seed: the same seed draws the same storm.
        ops: matmul names of the model; modules: paths of the modules whose outputs may be struck.
        steps: length of the run; ranks: its size.
        flips: bit flips in GEMM outputs (sign, exponent and upper mantissa bits).
        low_flips: additional flips of the lowest mantissa bits, which no checksum sees and only
            a full audit repairs.

    Returns:
        Faults in order of their steps; which elements they strike is drawn by the injector.

    Raises:
        ValueError: the run is too short for a fault a step (12 steps at least).
    """
    if steps < 12:
        raise ValueError(f"steps = {steps}: a storm needs at least 12 steps")
    draw = random.Random(f"storm/{seed}")
    ops, modules = sorted(ops), sorted(modules)

    # A fault that a kill overtakes within its step is gone before anything could answer it.
    kill_step, kill_op = draw.randrange(steps // 3, 2 * steps // 3), draw.choice(ops)
    calm = [step for step in range(1, steps - 1) if step != kill_step]

    def place() -> dict[str, Any]:
        return {"step": draw.choice(calm), "rank": draw.randrange(ranks)}

    bits = [SIGN_BIT, *EXPONENT_BITS, *UPPER_MANTISSA_BITS]
    drawn = [
        Fault(**place(), kind="bitflip", op=draw.choice(ops), bit=draw.choice(bits))
        for _ in range(flips)
    ]
    drawn += [Fault(**place(), kind=k, op=draw.choice(ops)) for k in ("inf", "nan", "near_inf")]
    forward = [op for op in ops if op.endswith("/forward")]
    operand, checksum = draw.choice(forward), draw.choice(ops)
    bit = TOP_EXPONENT_BIT
    drawn.append(Fault(**place(), kind="bitflip", site="operand", op=operand, bit=bit))
    bit = draw.choice(CHECKSUM_BITS)
    drawn.append(Fault(**place(), kind="bitflip", site="checksum", op=checksum, bit=bit))
    bit = TOP_EXPONENT_BIT
    drawn.append(Fault(**place(), kind="bitflip", site="module", op=draw.choice(modules), bit=bit))
    for _ in range(low_flips):
        bit = draw.choice(LOW_MANTISSA_BITS)
        drawn.append(Fault(**place(), kind="bitflip", op=draw.choice(ops), bit=bit))
    drawn += [Fault(kill_step, rank, "kill_trainer", op=kill_op) for rank in range(ranks)]
    return numbered(_spread(drawn))


def numbered(faults: Sequence[Fault]) -> list[Fault]:
    """The faults in order of their steps, identified by their position."""
    ordered = sorted(faults, key=lambda fault: (fault.step, fault.rank, fault.op))
    return [_with_identifier(fault, position) for position, fault in enumerate(ordered)]


def _spread(faults: list[Fault]) -> list[Fault]:
    """No two faults at one place and step, so that each can be told from the next."""
    taken: set[tuple[int, int, str]] = set()
    spread = []
    for fault in faults:
        key = (fault.step, fault.rank, fault.op)
        if fault.kind == "kill_trainer" or key not in taken:
            spread.append(fault)
        taken.add(key)
    return spread


def _with_identifier(fault: Fault, identifier: int) -> Fault:
    values = {name: getattr(fault, name) for name in fault.__dataclass_fields__}
    return Fault(**values | {"identifier": identifier})
