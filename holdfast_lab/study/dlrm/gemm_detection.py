"""``dlrm.gemm-detection``: the bit flips that the checks of the int8 product detect (table II).

As in the paper, a bit of the packed weight or of the int32 accumulators is flipped, for the paper's
encoding and for ours on the same operands. With ours the fault must also be repaired, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from holdfast import events
from holdfast.abft.int8_gemm.op import OUTSIDE
from holdfast.abft.int8_gemm.suspects import SuspectRows, resolve
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.inject.statistics import Rate
from holdfast_lab.study.dlrm.gemm_shapes import BENCHMARK, SHAPES, TINY, UNIFORM, Data
from holdfast_lab.study.published import Published, at_least, counted, none_of
from holdfast_lab.study.registry import Progress, Row, Settings, Study

ENCODINGS = ("mod127", "digits")
DETECTED, EFFECTIVE = "detected, %", "detected of those that change C, %"
CORRECTED, ALARMS = "put right bit for bit, %", "clean rows suspected, %"
TOGETHER = 100  # number of flips with the same activations
SCALES = (0.02, 3, 5.0, 100)
ANY = ", to any value"
KINDS = ("B", "C", f"B{ANY}", f"C{ANY}")

_ACTIVATIONS = "the paper does not say how it draws A: the share of zeros decides"


# Section IV-C1 has a bound for single rows of activations drawn evenly from all of uint8.
PAPER = {
    ("B", BENCHMARK.name): Published(95.11, "table II, B", counted(Rate(2663, 2800)), _ACTIVATIONS),
    ("C", BENCHMARK.name): Published(100.0, "table II, C", counted(Rate(2800, 2800))),
    ("B", UNIFORM.name): Published(98.83, "section IV-C1", at_least("98.83"), _ACTIVATIONS),
    # The second fault model: an element becomes any other value.
    (f"B{ANY}", UNIFORM.name): Published(96.89, "section IV-C1, any value", at_least("96.89")),
    (f"C{ANY}", UNIFORM.name): Published(99.21, "section IV-C2, any value", at_least("99.21")),
}
NO_ALARM = Published(0.0, "table II, no error", none_of(2800))


@dataclass
class Counts:
    """Counts of injected bit flips and of those that each check detected."""

    runs: int = 0
    effective: int = 0
    detected: int = 0
    corrected: int = 0


class Target:
    """A layer, into whose weight or accumulators faults are injected."""

    def __init__(
        self, shape: tuple[int, int, int], data: Data, encoding: str, generator: torch.Generator
    ) -> None:
        self.m, self.n, self.k = shape
        self.data, self.generator = data, generator
        self.weights: Int8Weights = data.pack(self.n, self.k, encoding, generator)
        self.scales = self.weights.scales(*SCALES)
        self.out = torch.empty((self.m, self.n), dtype=torch.uint8)
        self.renew()

    def renew(self) -> None:
        """Draw new activations."""
        self.a = self.data.draw_a(self.m, self.k, self.generator)
        self.c = self.weights.gemm.accumulate(self.a)
        self.weights.gemm.finish(self.c, self.a, self.out, self.scales, False)
        self.expected = self.out.clone()

    def multiply(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the rows whose check fails now, and their accumulators."""
        found: tuple[torch.Tensor, torch.Tensor] | None
        found = self.weights.gemm.multiply(self.a, self.out, self.scales, True)
        return found

    def strike_b(self, counts: Counts, draws: list[int], *, any_value: bool = False) -> None:
        """Flip a bit of B, or several, multiply, and restore B."""
        k, j = draws[0] % self.k, draws[1] % self.n
        buffer, at = self.weights.gemm.buffer, self.weights.gemm.address(k, j)
        true = int(buffer[at])
        buffer[at] ^= _mask(draws[2], 8, any_value)
        suspects = self.multiply()
        self._count(counts, suspects, bool(self.a[:, k].any()))
        buffer[at] = true

    def strike_c(self, counts: Counts, draws: list[int], *, any_value: bool = False) -> None:
        """Flip a bit of an accumulator, or several, check, and flip it back."""
        i, j = draws[0] % self.m, draws[1] % self.n
        flip = _mask(draws[2], 32, any_value)
        self.c[i, j] ^= flip
        suspects = self.weights.gemm.finish(self.c, self.a, self.out, self.scales, True)
        self._count(counts, suspects, True)
        self.c[i, j] ^= flip

    def _count(
        self,
        counts: Counts,
        suspects: tuple[torch.Tensor, torch.Tensor] | None,
        effective: bool,
    ) -> None:
        counts.runs += 1
        counts.effective += effective
        counts.detected += suspects is not None
        if suspects is None or self.weights.encoding != "digits":
            return
        resolve(SuspectRows(OUTSIDE, self.weights, self.a, self.out, self.scales, *suspects))
        counts.corrected += torch.equal(self.out, self.expected) and self.weights.intact()


def _mask(drawn: int, bits: int, any_value: bool) -> int:
    """Return a signed mask of one bit, or of any bits, by which an integer is changed."""
    mask = 1 + drawn % ((1 << bits) - 1) if any_value else 1 << drawn % bits
    return mask - (1 << bits) if mask >> (bits - 1) else mask


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    shapes = settings.choose(TINY, SHAPES, SHAPES)
    runs = settings.choose(3, 100, 3600)
    rounds = settings.choose(2, 200, 20400)
    progress.begin(len(shapes) * len(ENCODINGS) * (2 * len(KINDS) * runs + rounds))
    for data in (BENCHMARK, UNIFORM):
        counts = {(kind, encoding): Counts() for kind in KINDS for encoding in ENCODINGS}
        for shape, encoding in product(shapes, ENCODINGS):
            generator = settings.generator("gemm-detection", data.name, shape)
            target = Target(shape, data, encoding, generator)
            for kind in KINDS:
                _strike(target, kind, counts[kind, encoding], runs)
                progress.advance(runs)
        for (kind, encoding), found in counts.items():
            yield _row(kind, data, encoding, found)
    for encoding in ENCODINGS:
        rows = alarms = 0
        for shape in shapes:
            generator = settings.generator("gemm-detection", "clean", shape)
            target = Target(shape, UNIFORM, encoding, generator)
            for _ in range(rounds):
                target.a.random_(0, 256, generator=generator)
                suspects = target.multiply()
                alarms += 0 if suspects is None else len(suspects[0])
            rows += rounds * target.m
            progress.advance(rounds)
        yield _clean(encoding, rows, alarms)


def _strike(target: Target, kind: str, counts: Counts, runs: int) -> None:
    for begin in range(0, runs, TOGETHER):
        count = min(TOGETHER, runs - begin)
        draws = torch.randint(0, 1 << 40, (count, 3), generator=target.generator).tolist()
        target.renew()
        for drawn in draws:
            strike = target.strike_b if kind.startswith("B") else target.strike_c
            strike(counts, drawn, any_value=kind.endswith(ANY))
    events.clear()  # the study's faults are not left in this process's events


def _row(kind: str, data: Data, encoding: str, counts: Counts) -> Row:
    rates = {
        DETECTED: Rate(counts.detected, counts.runs),
        EFFECTIVE: Rate(counts.detected, counts.effective),
    }
    if encoding == "digits":
        rates[CORRECTED] = Rate(counts.corrected, counts.effective)
    known = PAPER.get((kind, data.name))
    return Row.of_rates(
        f"flips in {kind}",
        {"operands": data.name, "encoding": encoding, "flips": counts.runs},
        rates,
        {DETECTED: known} if known and encoding == "mod127" else {},
    )


def _clean(encoding: str, rows: int, alarms: int) -> Row:
    rate = Rate(alarms, rows)
    return Row(
        "no fault",
        {"operands": UNIFORM.name, "encoding": encoding, "rows": rows},
        {ALARMS: 100 * rate.value},
        {ALARMS: NO_ALARM} if encoding == "mod127" else {},
        intervals={ALARMS: (0.0 if not alarms else 100 * rate.interval[0], 100 * rate.upper)},
        trials={ALARMS: rows},
    )


def _verdict(rows: list[Row]) -> str:
    """Check that digit checksums repair every flip that changes C and give no false alarm."""
    for row in rows:
        if row.case["encoding"] != "digits":
            continue
        for name in (EFFECTIVE, CORRECTED):
            if row.measured.get(name, 100.0) < 100.0:
                return f"{row.table}: {name} is {row.measured[name]:.4f} in {dict(row.case)}"
        if row.measured.get(ALARMS, 0.0) > 0:
            return f"clean rows were suspected in {dict(row.case)}"
    return ""


STUDY = Study(
    name="dlrm.gemm-detection",
    paper="DLRM, sections IV-C and VI-B, table II",
    reproduces="which flips of one bit the check of an int8 product sees, in the packed weight and "
    "in the int32 result: the paper's sum modulo 127 beside exact digits",
    run=_run,
    verdict=_verdict,
)
