"""Emulated faulty units: a worker whose results are wrong as those of a faulty core would be.

It strikes at the sites that the ops pass (``holdfast.sites``), and at one that each workload
without matmuls passes, so that what finds it is what would find a real fault.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod

import torch

from holdfast import sites
from holdfast.errors import ConfigError
from holdfast.inject.faults import flip_bit, flip_integer, write_element

ANY = "*"
# Of fused attention its accumulators: tiles of scores are no results yet.
STAGES = ("output", "accumulator", "grad_query")


@dataclass(frozen=True)
class Emulated:
    """A fault of one unit.

    Args:
        unit: its name, e.g. "core 3".
        op: the workload that is struck, e.g. "gemm.fp32"; "*" is each.
        bit: that is flipped, modulo the width of the element.
        every: one in so many operations is struck, at random; 1 strikes each, always at the same
            element, so that the same wrong result repeats.
        seed: of the element, and of when and where an intermittent fault strikes.
    """

    unit: str
    op: str = ANY
    bit: int = 20
    every: int = 1
    seed: int = 0


def parse_fault(text: str) -> Emulated:
    """``unit=core 1,op=gemm.fp32,bit=20,every=1000``: of these only unit is needed.

    Raises:
        ConfigError: a word is not understood, with those that would be.
    """
    known = {field.name: field.type for field in fields(Emulated)}
    values: dict[str, str | int] = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ConfigError(
                f"--emulate {text}: {word!r} is not understood; give "
                f"{', '.join(f'{each}=…' for each in known)}, separated by commas"
            )
        values[name] = value if name in ("unit", "op") else _number(text, name, value)
    if "unit" not in values:
        raise ConfigError(f"--emulate {text}: unit is missing, e.g. unit=core 1")
    return Emulated(**values)  # type: ignore[arg-type]


def _number(text: str, name: str, value: str) -> int:
    least = 1 if name == "every" else 0
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"--emulate {text}: {name}={value} is not a number of at least {least}")
    return int(value)


class FaultyUnit:
    """Strikes what its unit computes; counts how often."""

    def __init__(self, faults: Sequence[Emulated]) -> None:
        self._faults = [(fault, random.Random(f"{fault}")) for fault in faults]
        self.strikes = 0

    @contextmanager
    def computing(self, op: str) -> Iterator[None]:
        """While one execution of a workload runs."""
        due = [each for each in self._faults if each[0].op in (ANY, op)]
        if not due:
            yield
            return

        def hook(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
            if stage in STAGES and output is not None and output.numel():
                for fault, generator in due:
                    if fault.every == 1 or generator.randrange(fault.every) == 0:
                        self._strike(fault, generator, output)

        sites.arm(hook)
        try:
            yield
        finally:
            sites.disarm()

    def _strike(self, fault: Emulated, generator: random.Random, output: torch.Tensor) -> None:
        drawn = random.Random(fault.seed) if fault.every == 1 else generator
        index = _unravelled(drawn.randrange(prod(output.shape)), output.shape)
        # The injector flips floating bits and narrow integers; a long is 64 bits all the same.
        target = output.view(torch.float64) if output.dtype is torch.int64 else output
        flip = flip_bit if target.is_floating_point() else flip_integer
        bit = fault.bit % (8 * target.element_size())
        write_element(target, index, flip(target.data[index], bit))
        self.strikes += 1


def _unravelled(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def pass_site(op: str, values: torch.Tensor) -> None:
    """Show the result of something that is no matmul to whoever injects faults."""
    if sites.armed():
        nothing = torch.empty(0, dtype=torch.float64)
        gemm = sites.Gemm(None, values, values, 0.0, 1.0, nothing, nothing)
        sites.visit_named("output", f"screen/{op}", gemm, values)
