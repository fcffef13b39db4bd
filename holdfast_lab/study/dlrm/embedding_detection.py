"""``dlrm.embedding-detection``: flips that an embedding bag's check finds (DLRM-ABFT, table III).

Every bag has rows of its own, so that one pass can have one fault in each bag. The paper's own
check, ``|Σ_j R_j − Σ_i (α_i CT_i + d β_i)| ≤ 1e-5`` relative, is measured on the same flips.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from holdfast.abft import policy
from holdfast.abft.embedding_bag import Table
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.cpu import compute
from holdfast.abft.embedding_bag.reference import exact_bags
from holdfast.inject.faults import flip_bits
from holdfast.inject.statistics import Rate
from holdfast_lab.study.dlrm.embedding_clean import CLEAN, clean_bags
from holdfast_lab.study.dlrm.embedding_subject import DIMS, POOLING
from holdfast_lab.study.published import Published, counted
from holdfast_lab.study.registry import Progress, Row, Settings, Study

PAPERS_BOUND = 1e-5
OURS, PAPERS = "ours, %", "the paper's bound, %"
_DATA = (
    "the paper does not say what its rows hold; how much a low bit moves a relative bound depends "
    "on it"
)
TABLES = tuple(
    f"{table}: detected"
    for table in (
        "table III",
        "flips of a code",
        "flips of scale and bias",
        "flips of the output",
    )
)
_FAULTS = {"upper 4": "high bits", "lower 4": "low bits", "none": "no error"}
TABLE_III = {
    "upper 4": Rate(199, 200),
    "lower 4": Rate(94, 200),
    "none": Rate(38, 400),
}


@dataclass(frozen=True)
class Struck:
    """A table, bags with disjoint rows, and the sums of the bags in the clean table."""

    table: Table
    batch: Batch
    sums: torch.Tensor

    @classmethod
    def draw(cls, dim: int, kind: str, bags: int, generator: torch.Generator) -> "Struck":
        """Draw a table with rows of N(0, 1) and bags that use each row once."""
        weight = torch.randn(bags * POOLING, dim, generator=generator)
        table = Table.from_float(weight, kind)
        indices = torch.randperm(len(weight), generator=generator).view(bags, POOLING)
        batch = Batch(indices)
        return cls(table, batch, exact_bags(table, batch).sum(-1))

    def seen(self, site: Callable[[torch.Tensor], None] | None = None) -> tuple[int, int]:
        """Return the numbers of bags that our check and the paper's suspect."""
        output, suspects = compute(self.table, self.batch, site=site)
        residual = (output.sum(-1).double() - self.sums).abs()
        over = ~(residual <= PAPERS_BOUND * self.sums.abs())
        return len(suspects), int(over.sum())

    def strike_rows(self, bits: Callable[[int], torch.Tensor]) -> tuple[int, int]:
        """Flip one bit of one row in every bag, verify all bags, and flip the bit back."""
        rows, at = self.batch.indices[:, 0], bits(len(self.batch.indices))
        mask = (1 << at % 8).to(torch.uint8)
        self.table.data[rows, at // 8] ^= mask
        found = self.seen()
        self.table.data[rows, at // 8] ^= mask
        return found


def _code_bit(
    struck: Struck, bit: int, generator: torch.Generator
) -> Callable[[int], torch.Tensor]:
    width = struck.table.kind.bits

    def draw(count: int) -> torch.Tensor:
        element = torch.randint(0, struck.table.dim, (count,), generator=generator)
        return element * width + bit

    return draw


def _parameter_bit(
    struck: Struck, field: str, generator: torch.Generator
) -> Callable[[int], torch.Tensor]:
    layout = struck.table.layout
    bits = 8 * layout.parameters // 2
    first = 8 * layout.elements + (bits if field == "bias" else 0)
    return lambda count: first + torch.randint(0, bits, (count,), generator=generator)


def _output_bit(bit: int, generator: torch.Generator) -> Callable[[torch.Tensor], None]:
    def strike(pooled: torch.Tensor) -> None:
        columns = torch.randint(0, pooled.shape[1], (len(pooled),), generator=generator)
        bags = torch.arange(len(pooled))
        bits = torch.full((len(pooled),), bit)
        pooled[bags, columns] = flip_bits(pooled[bags, columns], bits)

    return strike


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    bags, rounds = settings.choose(4, 500, 2000), settings.choose(1, 1, 13)
    clean = settings.choose(2000, 200_000, 12_500_000)
    progress.begin(float(len(DIMS) + 1 + len(CLEAN)))
    flips: list[Row] = []
    for dim, kind in [*((dim, "uint8") for dim in DIMS), (64, "uint4")]:
        flips += _flips(dim, kind, bags, rounds, settings.generator("flips", dim, kind))
        progress.advance(1)
    yield from sorted(flips, key=lambda row: TABLES.index(row.table))
    for case in CLEAN:
        yield _clean_row(case, clean // len(CLEAN), settings)
        progress.advance(1)


def _flips(
    dim: int, kind: str, bags: int, rounds: int, generator: torch.Generator
) -> Iterator[Row]:
    counts: dict[tuple[str, str], list[int]] = {}

    def count(table: str, fault: str, found: tuple[int, int]) -> None:
        entry = counts.setdefault((table, fault), [0, 0, 0])
        for place, value in enumerate((*found, bags)):
            entry[place] += value

    for _ in range(rounds):
        struck = Struck.draw(dim, kind, bags, generator)
        width = struck.table.kind.bits
        for bit in range(width):
            found = struck.strike_rows(_code_bit(struck, bit, generator))
            count("flips of a code", str(bit), found)
            if width == 8:
                count("table III", "upper 4" if bit > 3 else "lower 4", found)
        for field in ("scale", "bias"):
            found = struck.strike_rows(_parameter_bit(struck, field, generator))
            count("flips of scale and bias", field, found)
        for bit in range(32):
            found = struck.seen(_output_bit(bit, generator))
            count("flips of the output", str(bit), found)
        count("table III", "none", struck.seen())
    for (table, fault), (ours, papers, trials) in counts.items():
        yield _rates(table, {"dim": dim, "kind": kind, "bit": fault}, ours, papers, trials)


def _rates(table: str, case: dict[str, str | int], ours: int, papers: int, trials: int) -> Row:
    rates = {OURS: Rate(ours, trials), PAPERS: Rate(papers, trials)}
    published = TABLE_III.get(str(case["bit"])) if table == "table III" else None
    return Row.of_rates(
        f"{table}: detected",
        case,
        rates,
        _published(published, str(case["bit"])) if published else {},
        f"{trials} bags",
    )


def _published(rate: Rate, fault: str) -> dict[str, Published]:
    """Return the paper's rate, which its bound has to meet; ours is set beside it."""
    source, value = f"table III, {_FAULTS[fault]}", 100 * rate.value
    return {OURS: Published(value, source), PAPERS: Published(value, source, counted(rate), _DATA)}


def _clean_row(case: str, bags: int, settings: Settings) -> Row:
    generator, before = settings.generator("clean", case), policy.process.false_alarms
    alarms = trials = 0
    for table, batch in clean_bags(case, bags, generator):
        alarms += len(compute(table, batch)[1])
        trials += len(batch.bounds()) - 1
    cleared = policy.process.false_alarms - before
    rate = Rate(alarms, trials)
    return Row(
        "false positives",
        {"data": case},
        {"bags": trials, "false positives": alarms, "cleared by a second opinion": cleared},
        {},
        f"rate ≤ {rate.upper:.1e} with 95 % confidence",
    )


def _verdict(rows: list[Row]) -> str:
    """Check for 99.9 % detection of upper bits, all of scale and bias, and no false positive."""
    problems = [
        f"{row.table} {dict(row.case)}: {row.measured[OURS]:.2f} %"
        for row in rows
        if (row.case.get("bit") == "upper 4" and row.intervals[OURS][1] < 99.9)
        or (row.case.get("bit") in ("scale", "bias") and row.measured[OURS] < 100)
        or (row.case.get("bit") == "none" and row.measured[OURS] > 0)
    ]
    problems += [
        f"{row.case['data']}: {row.measured['false positives']:.0f} false positives"
        for row in rows
        if row.measured.get("false positives")
    ]
    return "; ".join(problems)


STUDY = Study(
    name="dlrm.embedding-detection",
    paper="DLRM-ABFT, section VI-B2, table III",
    reproduces="share of bit flips of an embedding table that the check sees, by bit; and ours "
    "of its output, scale and bias, and on clean data of every shape",
    run=_run,
    verdict=_verdict,
)
