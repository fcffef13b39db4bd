"""What was not covered, committed, restored, verified or recorded, each with its remedy."""

from report_dom import parse
from report_runs import coverage, event, write_run

from holdfast.events import EventKind
from holdfast.report.gaps import MISSING, gaps_of
from holdfast.report.gather import gather, page

KINDS = [kind for kinds in MISSING.values() for kind in kinds]


def test_every_known_kind_of_gap_has_a_remedy():
    known = [kind for kind in KINDS if kind in {*EventKind}]
    assert len(known) >= 10
    gaps = gaps_of([event(kind, 1.0) for kind in known], None)
    assert [gap.remedy for gap in gaps if not gap.remedy] == []
    assert len(gaps) == len(known)


def test_a_healthy_run_has_no_such_section(tmp_path):
    report = gather(write_run(tmp_path / "run"))
    assert report.gaps == []
    assert "Not protected" not in page(report)


def test_each_gap_is_a_line_with_its_count_reason_and_remedy(tmp_path):
    failed = [event("persist_failed", at, detail={"error": f"disk {at}"}) for at in (2, 1)]
    dropped = event("events_dropped", 3.0, rank=-1, detail={"count": 7})
    run = write_run(tmp_path / "run", [*failed, dropped], covered=coverage("head/mm"))
    rows = parse(page(gather(run))).section("Not protected").rows()
    assert [(row["missing"], row["times"]) for row in rows] == [
        ("not covered", "1"),
        ("not committed", "2"),
        ("not recorded", "7"),
    ]
    assert "in a compiled graph" in rows[0]["what"]
    assert rows[1]["what"] == "checkpoint failed: disk 2"
    assert "free or repair the disk" in rows[1]["remedy"]
