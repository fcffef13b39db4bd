"""Runs gathered: finished, going on, interrupted, failed; and what is said first."""

import math

import pytest
import torch
from report_runs import (
    DIGESTS,
    corrected,
    event,
    repeated,
    restored,
    struck,
    write_events,
    write_metrics,
    write_run,
)

from holdfast.errors import ConfigError
from holdfast.report import gather, page
from holdfast.report.run import INCIDENTS_SHOWN, POINTS, gather_run
from holdfast.report.run_files import FATAL_NAME, METRICS_NAME
from holdfast.report.verdict import ATTENTION, BAD, GOOD, verdict_of
from holdfast.snapshot.client.ownership import RunFiles
from holdfast.snapshot.client.snapshots import Snapshots


def test_a_finished_run_with_every_fault_answered_is_good(tmp_path):
    report = gather_run(write_run(tmp_path / "run", [struck(1.0), corrected(1.1)]))
    assert (report.state.kind, report.steps_done, report.ranks) == ("finished", 10, 2)
    assert report.tally["by_kind"] == {"injected": 1, "gemm_fault": 1}
    assert report.statuses == {"answered": 1}
    (use,) = report.rungs
    assert (use.rung, use.incidents, use.total_s) == ("correct", 1, pytest.approx(0.02))
    assert (report.stall_s, report.snapshot_bytes) == (0.25, 4_000_000)
    verdict = verdict_of(report)
    assert (verdict.level, verdict.headline) == (GOOD, "1 incident, every one answered.")


def test_a_run_whose_state_changed_at_rest_says_what_was_repaired(tmp_path):
    op = "optimizer.state.8.exp_avg_sq"
    mended = {"detector": "digest", "rung": "correct", "duration_s": 0.01}
    events = [
        struck(1.0, op=op, site="rest"),
        event("state_fault", 1.1, op=op, **mended),
        event("weight_changed_unseen", 1.2, 2, op="model.fc.weight", detector="at rest"),
    ]
    report = gather_run(write_run(tmp_path / "run", events))
    assert report.statuses == {"answered": 1}
    assert [incident.kinds for incident in report.incidents] == [["state changed at rest"]]
    verdict = verdict_of(report)
    assert (verdict.level, verdict.headline) == (GOOD, "1 incident, every one answered.")
    text = page(report)
    assert "state changed at rest" in text
    assert op in text
    (gap,) = report.gaps
    assert (gap.missing, gap.count) == ("not verified", 1)


def test_equal_final_states_are_the_best_news(tmp_path):
    calm = write_run(tmp_path / "calm", mode="bare")
    storm = write_run(tmp_path / "storm", [struck(1.0), corrected(1.1)])
    report = gather(tmp_path)
    assert report.name == "storm"
    assert report.baseline.equal is True
    assert verdict_of(report).level == GOOD
    assert "as if none had struck" in verdict_of(report).headline
    assert gather(storm).baseline is None
    assert gather(storm, calm).baseline == report.baseline


def test_other_or_unfinished_final_states(tmp_path):
    write_run(tmp_path / "calm", mode="bare")
    run = write_run(tmp_path / "storm", [corrected(1.1)], digests=DIGESTS | {"model": "other"})
    verdict = verdict_of(gather(tmp_path))
    assert (verdict.level, verdict.headline) == (BAD, "The final state is not that of calm.")
    write_run(run, digests=DIGESTS | {"finite": False})
    assert verdict_of(gather_run(run)).headline == "The weights hold NaN or INF."
    write_run(tmp_path / "early" / "calm", mode="bare")
    write_run(tmp_path / "early" / "storm", done=4)
    assert gather(tmp_path / "early").baseline.equal is None


@pytest.mark.parametrize(
    ("events", "mode", "level", "words"),
    [
        ([struck(1.0)], "guarded", BAD, "1 injected fault not seen."),
        ([struck(1.0)], "unprotected", BAD, "Unprotected: 1 fault struck"),
        (
            [struck(1.0, below_line=True)],
            "guarded",
            ATTENTION,
            "too small to be told from rounding",
        ),
        (
            [event("gemm_persistent", 1.0, op="a")],
            "guarded",
            BAD,
            "1 fault found and not repaired.",
        ),
        (
            [event("snapshots_lost", 1.0, step=-1)],
            "guarded",
            BAD,
            "1 fault found and not repaired.",
        ),
        ([event("persist_failed", 1.0, rank=-1)], "guarded", ATTENTION, "1 event persist_failed"),
        ([corrected(n, step=n) for n in range(12)], "guarded", ATTENTION, "rank 0 on node-a (cpu)"),
        ([repeated(1.0, "genuine")], "guarded", GOOD, "1 incident, every one answered."),
        ([], "guarded", GOOD, "No fault in 10 steps."),
    ],
)
def test_what_is_said_first(tmp_path, events, mode, level, words):
    verdict = verdict_of(gather_run(write_run(tmp_path / "run", events, mode=mode)))
    assert verdict.level == level
    assert words in verdict.headline
    if not events:
        assert "fewer than 0.3 faults a step (rule of three)" in verdict.lines[0]


def test_what_the_run_copied_from_its_hosts_counts_once_and_a_lost_host_stays_told(tmp_path):
    hosts = {
        f"host-{rank}": [
            each
            for n in range(1, 6)
            for each in (
                struck(10 * n + rank, step=3 * n + rank, rank=rank),
                corrected(10 * n + rank + 0.5, step=3 * n + rank, rank=rank),
            )
        ]
        for rank in range(3)
    }
    copied = [event for events in hosts.values() for event in events]
    lost = struck(70.0, step=20, rank=-1, op="host-1", site="node", kind="lose_node", bit=None)
    back = [restored(80.0 + rank, rank=rank) for rank in range(3)]
    run = write_run(tmp_path / "run", [*copied, lost, *back], steps=30, ranks=3)
    del hosts["host-1"]  # with its host
    for name, events in hosts.items():
        write_events(run / name, events)
    report = gather_run(run)
    assert report.tally["by_kind"] == {"injected": 16, "gemm_fault": 15, "restored": 3}
    assert report.statuses == {"answered": 16}
    assert verdict_of(report).level == GOOD
    assert [device.stands_out for device in report.devices] == [False] * 3


def test_an_interrupted_run_says_what_is_left_and_a_failed_one_why(tmp_path):
    report = gather_run(write_run(tmp_path / "run", done=4))
    assert (report.state.kind, report.steps_done) == ("interrupted", 4)
    verdict = verdict_of(report)
    assert verdict.level == ATTENTION
    assert verdict.headline == "Interrupted at step 4 of 10."
    assert verdict.lines[0] == "No snapshot is left in memory, and none is on disk."
    (tmp_path / "run" / FATAL_NAME).write_text("no text in the folder\n")
    report = gather_run(tmp_path / "run")
    assert report.state.kind == "failed"
    assert verdict_of(report).headline == "The run failed: no text in the folder"


@pytest.mark.processes
@pytest.mark.representative
def test_a_living_run_has_a_snapshot_with_an_age(tmp_path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    run = write_run(tmp_path / "run", done=3, ranks=1)
    with Snapshots(model, optimizer, run_dir=run) as snapshots:
        snapshots.begin(3)
        assert snapshots.wait_committed() == 3
        report = gather_run(run)
    assert report.state.kind == "running"
    (smp,) = report.smps
    assert smp["newest"] == 3
    assert 0 <= smp["age_s"] < 60
    assert verdict_of(report).headline == "Running: No fault in 3 steps."
    assert gather_run(run).state.kind == "interrupted"


def test_a_ledger_alone_is_a_run_and_an_empty_run_has_no_figures(tmp_path):
    report = gather_run(write_run(tmp_path / "run", done=0))
    assert (report.steps_done, report.timeline, report.devices) == (0, None, [])
    assert verdict_of(report).level == ATTENTION
    write_events(tmp_path, [corrected(1.0, step=7), corrected(2.0, step=9, rank=3)])
    report = gather_run(tmp_path)
    assert (report.state.kind, report.steps_done, report.ranks) == ("unknown", 9, 4)
    assert report.pace is None
    assert report.curve.steps == []
    RunFiles(tmp_path).finished(9)
    assert gather_run(tmp_path).state.kind == "finished"


def test_results_count_from_the_last_start(tmp_path):
    assert gather_run(write_run(tmp_path / "calm")).started_after == 0
    later = restored(9.0, rank=1)
    later.detail["step"] = 3
    events = [restored(5.0), restored(5.1, rank=1), restored(8.9), later]
    assert gather_run(write_run(tmp_path / "run", events)).started_after == 3


def test_steps_done_again_are_told(tmp_path):
    run = write_run(tmp_path / "run", [restored(5.0)], done=6)
    write_metrics(run, range(5, 11))
    pace = gather_run(run).pace
    assert (pace.steps, pace.repeated, pace.repeated_s, pace.total_s) == (10, 2, 1.0, 6.0)


def test_a_long_curve_keeps_the_worst_of_each_group(tmp_path):
    run = write_run(tmp_path / "run", steps=3 * POINTS, done=0)
    write_metrics(run, range(1, 3 * POINTS + 1))
    with (run / METRICS_NAME).open("a") as file:
        file.write('{"step": 700, "loss": NaN, "grad_norm": 1.0, "seconds": 99.0}\n')
    curve = gather_run(run).curve
    assert len(curve.steps) == POINTS
    assert curve.stride == 3
    assert max(curve.seconds) == 99.0
    assert sum(map(math.isnan, curve.loss)) == 1


def test_many_incidents_are_summed_up_and_the_gravest_told(tmp_path):
    events = [corrected(n, step=n) for n in range(INCIDENTS_SHOWN + 50)]
    events.append(event("gemm_persistent", 17.5, step=17, op="bad"))
    report = gather_run(write_run(tmp_path / "run", events))
    assert report.incidents_total == INCIDENTS_SHOWN + 51
    assert len(report.incidents) == INCIDENTS_SHOWN
    assert "bad" in {op for incident in report.incidents for op in incident.ops}
    assert report.fault_steps == list(range(INCIDENTS_SHOWN + 50))
    starts = [incident.start_s for incident in report.incidents]
    assert starts == sorted(starts)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"holds neither a run nor a campaign: give the directory"
    ):
        gather(tmp_path)
    (tmp_path / "trials.jsonl").touch()
    with pytest.raises(ConfigError, match="a script's campaign, which have no page"):
        gather(tmp_path)
    with pytest.raises(ConfigError, match="there is no "):
        gather(tmp_path / "none")
    write_run(tmp_path / "deep")
    with pytest.raises(ConfigError, match="there are runs in it, give one of them: deep"):
        gather(tmp_path)
    with pytest.raises(ConfigError, match="none holds no run"):
        gather(tmp_path / "deep", tmp_path / "none")
