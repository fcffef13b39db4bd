"""Emulated faulty units, with which a user tests that a screening finds faulty hardware.

The worker of such a unit corrupts results at the fault sites of the ops (``holdfast.sites``) and
at one site of each workload without matmuls. Everything after that is what runs for a real fault.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch

from holdfast import sites
from holdfast.errors import ConfigError
from holdfast.inject.faults import flip_bit, flip_integer, write_element

ANY = "*"
# Of fused attention only accumulators are corrupted, because tiles of scores are not results.
STAGES = ("output", "accumulator", "grad_query")


@dataclass(frozen=True)
class Emulated:
    """An emulated fault of one unit: a bit that is flipped in the results of a workload, or of all.

    One in ``every`` operations is corrupted, at random; ``seed`` decides which ones and the
    element. With 1 every operation is, at the same element, so that the same wrong result repeats.
    ``bit`` is taken modulo the width of the element.
    """

    unit: str
    op: str = ANY
    bit: int = 20
    every: int = 1
    seed: int = 0


def parse_fault(text: str) -> Emulated:
    """Read a fault such as ``unit=core 1,op=gemm.fp32,bit=20,every=9``; only unit is required."""
    known = {field.name: field.type for field in fields(Emulated)}
    values: dict[str, str | int] = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            wanted = ", ".join(f"{each}=…" for each in known)
            raise ConfigError(
                f"--emulate {text}: {word!r} is not understood; give {wanted}, separated by commas"
            )
        values[name] = value
        if known[name] is int:
            least = 1 if name == "every" else 0
            if not value.isdecimal() or int(value) < least:
                wrong = f"{name}={value} is not a number of at least {least}"
                raise ConfigError(f"--emulate {text}: {wrong}")
            values[name] = int(value)
    if "unit" not in values:
        raise ConfigError(f"--emulate {text}: unit is missing, e.g. unit=core 1")
    return Emulated(**values)  # type: ignore[arg-type]


class FaultyUnit:
    """Corrupts the results of the unit that has these faults."""

    def __init__(self, faults: Sequence[Emulated]) -> None:
        self._faults = [(fault, random.Random(f"{fault}")) for fault in faults]

    @contextmanager
    def computing(self, op: str) -> Iterator[None]:
        """Corrupt results while one execution of a workload runs."""
        due = [each for each in self._faults if each[0].op in (ANY, op)]
        if not due:
            yield
            return

        def hook(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
            if stage in STAGES and output is not None and output.numel():
                for fault, generator in due:
                    if fault.every == 1 or generator.randrange(fault.every) == 0:
                        _corrupt(fault, generator, output)

        with sites.injecting(hook):
            yield


def _corrupt(fault: Emulated, generator: random.Random, output: torch.Tensor) -> None:
    """Flip the fault's bit in one element of a result."""
    drawn = random.Random(fault.seed) if fault.every == 1 else generator
    place = np.unravel_index(drawn.randrange(output.numel()), tuple(output.shape))
    index = tuple(int(each) for each in place)
    # Bits of int64 elements are flipped in the float64 of the same 64 bits.
    target = output.view(torch.float64) if output.dtype is torch.int64 else output
    flip = flip_bit if target.is_floating_point() else flip_integer
    bit = fault.bit % (8 * target.element_size())
    write_element(target, index, flip(target.data[index], bit))


def pass_site(op: str, values: torch.Tensor) -> None:
    """Pass the result of a workload without matmuls through a fault site."""
    if sites.armed():
        nothing = torch.empty(0, dtype=torch.float64)
        gemm = sites.Gemm(None, values, values, 0.0, 1.0, nothing, nothing)
        sites.visit("output", f"screen/{op}", gemm, values)
