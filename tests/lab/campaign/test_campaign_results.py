"""Results as CSV, Parquet and plots; what contradicts the fault model, and what does not."""

import csv
from dataclasses import replace
from pathlib import Path

from case_loops import for_each
from pyarrow import parquet

from holdfast.inject.statistics import rule_of_three, wilson_interval
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.plan import SITES, Cell
from holdfast_lab.campaign.plots import plot_bits
from holdfast_lab.campaign.results import (
    CSV_NAME,
    PARQUET_NAME,
    broken_claims,
    group_of,
    row_of,
    summed,
    total,
    write_results,
)
from holdfast_lab.campaign.runner import CellResult

CELL = Cell("mm", "bf16", (128, 1024, 256), "n01", "output", "flip-7-up")
GOOD = Counts(
    trials=100,
    detected=60,
    masked=1,
    below_rounding=9,
    harmless=30,
    would_harm=55,
    replayed=10,
    replayed_detected=8,
    replayed_corrected=8,
    clean_rows=300,
)


def result(fault: str = "flip-7-up", site: str = "output", **counts: int) -> CellResult:
    return CellResult(replace(CELL, fault=fault, site=site), replace(GOOD, **counts))


def test_a_row_has_the_axes_the_counts_and_the_rates():
    row = row_of(result())
    assert (row["m"], row["k"], row["n"]) == (128, 1024, 256)
    assert (row["bit"], row["direction"]) == (7, "up")
    assert row["detection_rate"] == 0.6
    assert (row["detection_low"], row["detection_high"]) == wilson_interval(60, 100)
    assert row["correction_rate"] == 1.0
    assert row["correction_low"] == wilson_interval(8, 8)[0]
    assert row["harmful_upper"] == rule_of_three(100) == 0.03
    assert row["false_alarm_upper"] == 0.01
    assert {name: row[name] for name in GOOD.as_dict()} == GOOD.as_dict()


def test_csv_and_parquet_hold_every_row(tmp_path):
    results = [result(), result("inf", detected=100), CellResult(CELL, Counts())]
    paths = write_results(results, tmp_path, parquet=True)
    assert paths == [tmp_path / CSV_NAME, tmp_path / PARQUET_NAME]
    rows = [row_of(each) for each in results]
    assert parquet.read_table(tmp_path / PARQUET_NAME).to_pylist() == rows
    with (tmp_path / CSV_NAME).open() as file:
        read = list(csv.DictReader(file))
    texts = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
    assert read == texts


def test_sums_are_over_all_cells_of_a_key():
    results = [result(), result("flip-8-up"), result("inf")]
    sums = summed(results, lambda cell: (group_of(cell), cell.dtype))
    assert sums == {("flip exponent", "bf16"): GOOD + GOOD, ("inf", "bf16"): GOOD}
    assert total(results) == GOOD + GOOD + GOOD
    assert total([]) == Counts()


def test_flips_are_grouped_by_the_field_of_the_struck_dtype():
    assert group_of(replace(CELL, fault="flip-20-up", site="accumulator")) == "flip mantissa"
    assert group_of(replace(CELL, fault="flip-51-up", site="checksum")) == "flip mantissa"
    assert group_of(replace(CELL, fault="flip-15-down")) == "flip sign"


@for_each("site", SITES)
@for_each("fault", ["flip-7-up", "inf", "near_inf"])
def test_what_the_fault_model_claims_holds(site, fault):
    assert broken_claims([result(fault, site)]) == []


@for_each(
    ("broken", "what"),
    [
        (result(false_alarms=2), "2 false alarms"),
        (result("inf", harmful=1), "1 extreme values not found"),
        (result("near_inf", "accumulator", harmful=1), "1 extreme values not found"),
        (result("nan", "operand_b", harmful=3), "3 extreme values not found"),
        (result(replayed_corrected=7), "1 reported faults not repaired"),
        (result(site="cached_checksum", replayed_corrected=6), "2 reported faults not repaired"),
        (result(site="operand_a_memory", false_alarms=1), "1 false alarms"),
    ],
)
def test_what_contradicts_the_fault_model_is_named(broken, what):
    assert broken_claims([result(), broken]) == [(what, broken)]


@for_each(
    "allowed",
    [
        result(harmful=5),  # a measured rate, not a claim
        result("near_inf", "operand_a", harmful=1),  # may cancel within its row
        result("inf", "operand_a_memory", harmful=1),  # not covered
        result(site="operand_b", replayed_corrected=0),  # beyond repair by computing again
    ],
)
def test_what_is_not_claimed_contradicts_nothing(allowed):
    assert broken_claims([allowed]) == []


def test_a_plot_for_every_site_with_flips(tmp_path):
    results = [
        result(),
        result("flip-14-down"),
        result("flip-60-up", "checksum"),
        result("inf", "operand_a"),
        CellResult(replace(CELL, site="operand_b"), Counts()),
    ]
    results.append(CellResult(replace(results[0].cell, dtype="fp32"), GOOD))
    paths = plot_bits(results, tmp_path)
    assert paths == [tmp_path / "bits-output.png", tmp_path / "bits-checksum.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert height(paths[0]) > 1.5 * height(paths[1])  # two panels and one
    assert plot_bits([result("inf")], tmp_path) == []


def height(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[20:24], "big")
