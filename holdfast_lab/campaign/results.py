"""Tables of results: one row for each cell in CSV and Parquet, and sums over cells."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.inject.faults import bit_field
from holdfast.inject.models import fault_model
from holdfast.inject.results import Results
from holdfast.inject.statistics import Rate
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.models import EXTREME_FAULTS
from holdfast_lab.campaign.plan import ATTENTION, CHECKSUM_SITES, DTYPES, Cell, injected_dtype
from holdfast_lab.campaign.runner import CellResult

CSV_NAME, PARQUET_NAME = "results.csv", "results.parquet"
# Claims of docs/fault_model.md: the extreme values that are always detected, by site, and the sites
# where a detected fault must leave the result of a clean run, bit for bit.
ALWAYS_FOUND = {
    "output": EXTREME_FAULTS,
    "accumulator": EXTREME_FAULTS,
    "operand_a": ("inf", "nan"),
    "operand_b": ("inf", "nan"),
}
REPAIRED_SITES = ("output", "accumulator", *CHECKSUM_SITES)
# The backward pass detects rows of P that sum to more than one, after forward's output was used.
REPORTED_TILES = ("exponentials",)


def summed(
    results: Iterable[CellResult], key: Callable[[Cell], tuple[str, ...]]
) -> dict[tuple[str, ...], Counts]:
    """Add up the counts of all cells with the same key."""
    sums: defaultdict[tuple[str, ...], Counts] = defaultdict(Counts)
    for result in results:
        sums[key(result.cell)] += result.counts
    return dict(sums)


def total(results: Iterable[CellResult]) -> Counts:
    """Add up the counts of several cells."""
    return sum((result.counts for result in results), Counts())


def group_of(cell: Cell) -> str:
    """Return the group of a cell's fault: its kind, or the field of the bit of a flip."""
    dtype = injected_dtype(DTYPES[cell.dtype], cell.site)
    bit = fault_model(cell.fault, dtype).bit
    return cell.fault if bit is None else f"flip {bit_field(dtype, bit)}"


def broken_claims(results: Iterable[CellResult]) -> list[tuple[str, CellResult]]:
    """List the contradictions to ``docs/fault_model.md``: a description and the cell of each.

    Contradictions are: an event on clean data; a harmful INF or NaN in a product, or near-INF in
    one of its elements, that was not detected; and a reported fault in an element of a product or
    in a checksum that was not repaired bit for bit. The last two also hold for the tiles of fused
    attention, except that repair is not claimed for exponentials.
    """
    broken = []
    for result in results:
        cell, counts = result.cell, result.counts
        unrepaired = counts.replayed_detected - counts.replayed_corrected
        fused = cell.operator == ATTENTION
        always = EXTREME_FAULTS if fused else ALWAYS_FOUND.get(cell.site, ())
        repaired = cell.site not in REPORTED_TILES if fused else cell.site in REPAIRED_SITES
        if counts.false_alarms:
            broken.append((f"{counts.false_alarms} false alarms", result))
        if cell.fault in always and counts.harmful:
            broken.append((f"{counts.harmful} extreme values not found", result))
        if repaired and unrepaired:
            broken.append((f"{unrepaired} reported faults not repaired", result))
    return broken


def row_of(result: CellResult) -> dict[str, object]:
    """Return a cell as plain values: its axes, its counts, and its rates with their intervals."""
    cell, counts = result.cell, result.counts
    model = fault_model(cell.fault, injected_dtype(DTYPES[cell.dtype], cell.site))
    m, k, n = cell.shape
    detected = Rate(counts.detected, counts.trials)
    corrected = Rate(counts.replayed_corrected, counts.replayed_detected)
    return {
        "operator": cell.operator,
        "dtype": cell.dtype,
        "m": m,
        "k": k,
        "n": n,
        "distribution": cell.distribution,
        "site": cell.site,
        "fault": cell.fault,
        "bit": model.bit,
        "direction": None if model.bit is None else model.direction,
        **counts.as_dict(),
        **_rate("detection", detected),
        **_rate("correction", corrected),
        "harmful_upper": Rate(counts.harmful, counts.trials).upper,
        "false_alarm_upper": Rate(counts.false_alarms, counts.clean_rows).upper,
    }


def parquet_available() -> bool:
    """Return whether pyarrow is installed, which the extra ``lab`` contains."""
    return find_spec("pyarrow") is not None


def check_parquet() -> None:
    """Raise ConfigError if pyarrow is missing, so that Parquet files cannot be written."""
    if not parquet_available():
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed: pip install 'torch-holdfast[lab]', or "
            "do without, as the same rows are written as CSV"
        )


def write_results(
    results: Sequence[CellResult], directory: Path, *, parquet: bool | None = None
) -> list[Path]:
    """Write ``results.csv`` and ``results.parquet`` with one row for each cell; return the files.

    Nothing is written without results. The second file is written if ``parquet`` is True, or if it
    is None and pyarrow is installed.

    Raises:
        ConfigError: A file cannot be written, or Parquet is requested without pyarrow.
    """
    if parquet:
        check_parquet()
    rows = [row_of(result) for result in results]
    if not rows:
        return []
    table = Results(rows)
    writers = {CSV_NAME: table.to_csv}
    if parquet_available() if parquet is None else parquet:
        writers[PARQUET_NAME] = table.to_parquet
    paths = [directory / name for name in writers]
    try:
        for path, write in zip(paths, writers.values(), strict=True):
            write(path)
    except OSError as error:
        raise ConfigError(f"cannot write results to {directory}: {error}") from error
    return paths


def _rate(name: str, rate: Rate) -> dict[str, float | None]:
    """Return a rate and its interval as columns; None without trials."""
    low, high = rate.interval
    known = rate.trials > 0
    return {
        f"{name}_rate": rate.value if known else None,
        f"{name}_low": low if known else None,
        f"{name}_high": high if known else None,
    }
