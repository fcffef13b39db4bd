"""Campaigns gathered from whatever they left behind, and their page."""

import json
from operator import attrgetter

import pytest
from report_dom import parse

from holdfast.errors import ConfigError
from holdfast.inject.statistics import wilson_interval
from holdfast.report import gather, page, verdict
from holdfast_lab.campaign import (
    QUICK,
    CellResult,
    Counts,
    Filters,
    broken_claims,
    make_plan,
    run_campaign,
    total,
    write_results,
)
from holdfast_lab.campaign.journal import JOURNAL_NAME
from holdfast_lab.campaign.page_files import cell_of
from holdfast_lab.campaign.results import parquet_available
from holdfast_lab.cli.campaign_report import report_as_json

FAULTS = ("flip-30-up", "flip-30-down", "flip-2-up", "nan", "row")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    filters = Filters(
        operators=("mm",),
        dtypes=("fp32",),
        sites=("output",),
        faults=FAULTS,
        shapes=((8, 16, 8),),
        distributions=("n01",),
    )
    plan = make_plan(QUICK, filters, trials=12, end_to_end=1, seed=0)
    results = run_campaign(plan, folder, workers=1)
    write_results(results, folder)
    return plan, folder, results


def test_the_directory_says_what_the_campaign_counted(campaign):
    _, folder, results = campaign
    report = gather(folder)
    assert (report.done, report.planned) == (len(FAULTS), len(FAULTS))
    assert report.total == total(results)
    assert report.environment["core"]
    assert [cell_of(result.cell.key) for result in results] == [result.cell for result in results]
    said = verdict(report)
    assert (said.level, said.headline) == ("good", "The fault model holds in all 5 cells.")


def test_curves_have_rates_and_intervals(campaign):
    _, folder, results = campaign
    curves = {curve.direction: curve for curve in gather(folder).curves}
    counts = next(r.counts for r in results if r.cell.fault == "flip-30-up")
    place = curves["up"].bits.index(30)
    assert curves["up"].rate[place] == counts.detected / counts.trials
    interval = curves["up"].low[place], curves["up"].high[place]
    assert interval == wilson_interval(counts.detected, counts.trials)
    assert curves["down"].bits == [30]


def test_csv_and_parquet_say_the_same_as_the_directory(campaign):
    _, folder, _ = campaign
    whole = gather(folder)
    for name in ("results.csv", *(["results.parquet"] if parquet_available() else [])):
        part = gather(folder / name)
        for field in ("total", "broken", "groups", "curves", "worst", "done"):
            assert getattr(part, field) == getattr(whole, field), (name, field)


def test_a_summary_says_the_same_sums(campaign, tmp_path):
    plan, folder, results = campaign
    summary = tmp_path / "campaign.json"
    values = report_as_json(plan, folder, results, broken_claims(results))
    summary.write_text(json.dumps(values))
    whole, part = gather(folder), gather(summary)
    assert (part.total, part.planned) == (whole.total, whole.planned)
    key = attrgetter("dtype", "site", "fault")
    assert sorted(part.groups, key=key) == sorted(whole.groups, key=key)
    assert verdict(part).headline == verdict(whole).headline
    bits = parse(page(part)).section("Detection by bit").text
    assert "curves need the campaign's directory" in bits


def test_a_campaign_that_was_killed_is_unfinished(campaign, tmp_path):
    _, folder, results = campaign
    lines = (folder / JOURNAL_NAME).read_text().splitlines(keepends=True)
    (tmp_path / JOURNAL_NAME).write_text("".join(lines[:3]) + lines[3][:20])
    report = gather(tmp_path)
    assert (report.done, report.total) == (2, total(results[:2]))
    said = verdict(report)
    assert said.level == "attention"
    assert said.headline == "Unfinished: 2 of 5 cells, and no contradiction."


def test_a_contradiction_comes_first(campaign, tmp_path):
    _, _, results = campaign
    wrong = [CellResult(r.cell, r.counts + Counts(false_alarms=2)) for r in results[:1]]
    write_results([*wrong, *results[1:]], tmp_path, parquet=False)
    report = gather(tmp_path)
    said = verdict(report)
    assert (said.level, said.headline) == ("bad", "The fault model is contradicted in 1 cell.")
    (row,) = parse(page(report)).section("Contradictions").rows()
    assert row == {"what": "2 false alarms", "cell": results[0].cell.key}


def test_the_page_shows_sites_curves_and_groups(campaign):
    _, folder, results = campaign
    dom = parse(page(gather(folder)))
    (site,) = dom.section("By site").rows()
    counts = total(results)
    assert (site["site"], site["dtype"], site["injected"]) == (
        "output",
        "fp32",
        f"{counts.trials:,}",
    )
    bars = dom.section("By site").all("rect")
    assert sum(float(bar.attributes["width"]) for bar in bars) == pytest.approx(100, abs=0.1)
    (drawn,) = dom.section("Detection by bit").all("div", "wide")
    assert len(drawn.all("path", "interval")) == 3
    assert len(drawn.all("path", "border")) == 2
    groups = {row["fault"]: row for row in dom.section("By fault").rows()}
    nan = next(r.counts for r in results if r.cell.fault == "nan")
    assert nan.detected == nan.trials
    assert groups["nan"]["detected (95 %)"].startswith("100% (")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.csv", ""),
        ("results.csv", "operator,dtype\nmm,fp32\n"),
        ("results.parquet", "PAR1"),
        ("cells.jsonl", ""),
        ("cells.jsonl", '{"cells": 3}\n{"cell": "mm/fp32", "trials": 1}\n'),
        ("campaign.json", "[]"),
        ("campaign.json", '{"equal": true}'),
    ],
)
def test_what_holds_no_results_is_refused(tmp_path, name, content):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{name} holds no results of holdfast campaign"):
        gather(tmp_path / name)


def test_other_files_and_baselines_are_refused(campaign, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="neither a run nor a campaign: give a directory, or a"):
        gather(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="needs a run to compare with"):
        gather(campaign[1], tmp_path)
