"""What is read of a run directory, as it grows, and what cannot be read."""

import fcntl
import json
from pathlib import Path

import pytest
from report_runs import corrected, event, write_events, write_metrics, write_run

from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.report import sources
from holdfast.report.run_files import LOCK_NAME, METRICS_NAME
from holdfast.snapshot.protocol.roster import ProtocolViolation


def test_each_line_of_metrics_is_handed_out_once_and_when_it_is_complete(tmp_path):
    tail = sources.MetricsTail(tmp_path)
    assert list(tail.read()) == []
    write_metrics(tmp_path, [1, 2])
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('{"step": 3, "loss": 1.0, ')
    assert [line.step for line in tail.read()] == [1, 2]
    assert list(tail.read()) == []
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('"grad_norm": NaN, "seconds": 0.1}\n')
    (line,) = tail.read()
    assert (line.step, line.loss) == (3, 1.0)
    assert line.grad_norm != line.grad_norm


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"step": 1}', '{"step": "x", "loss": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / METRICS_NAME).write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"metrics.jsonl is damaged: .* remove that line"):
        list(sources.MetricsTail(tmp_path).read())


def test_each_event_is_handed_out_once_from_all_hosts(tmp_path):
    write_run(tmp_path, [corrected(1.0)])
    write_events(tmp_path / "host-1", [corrected(2.0, rank=1)])
    ledgers = sources.Ledgers(tmp_path)
    assert [event.rank for event in ledgers.read()] == [0, 1]
    assert list(ledgers.read()) == []
    write_events(tmp_path / "host-1", [corrected(3.0, rank=1)])
    assert [event.rank for event in ledgers.read()] == [1]


def test_an_event_in_several_ledgers_is_one_and_equal_events_in_one_are_several(tmp_path):
    twice = [corrected(1.0), corrected(1.0)]
    write_run(tmp_path, twice)
    write_events(tmp_path / "host-1", [*twice, corrected(2.0, rank=1)])
    ledgers = sources.Ledgers(tmp_path)
    assert [event.rank for event in ledgers.read()] == [0, 0, 1]
    write_events(tmp_path, [corrected(2.0, rank=1), corrected(3.0, rank=1)])
    assert [event.time_s for event in ledgers.read()] == [corrected(3.0).time_s]


def test_a_run_inside_a_run_is_not_its_host(tmp_path):
    write_run(tmp_path, [corrected(1.0)])
    write_run(tmp_path / "other", [corrected(2.0, rank=1)])
    assert sources.places(tmp_path) == [tmp_path]


def test_a_held_lock_is_seen_and_left_alone(tmp_path):
    assert not sources.is_locked(tmp_path)
    with (tmp_path / LOCK_NAME).open("w") as file:
        assert not sources.is_locked(tmp_path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert sources.is_locked(tmp_path)
        fcntl.flock(file, fcntl.LOCK_UN)
    assert not sources.is_locked(tmp_path)


def test_an_smp_that_does_not_answer_is_reported(tmp_path, monkeypatch):
    def silent(run_dir: Path) -> None:
        raise SmpUnavailable("is it stopped?")

    monkeypatch.setattr(sources.launch, "smp_status", silent)
    assert sources.read_smps(tmp_path) == [{"node": "0", "error": "is it stopped?"}]


def test_rubbish_at_the_socket_is_reported(tmp_path, monkeypatch):
    def rubbish(place: Path) -> None:
        raise ProtocolViolation("a frame of 2 GB")

    monkeypatch.setattr(sources.launch, "smp_status", rubbish)
    (smp,) = sources.read_smps(write_run(tmp_path / "run"))
    assert "is no SMP: a frame of 2 GB" in smp["error"]


def test_smps_are_told_by_node_whichever_of_them_live(tmp_path, monkeypatch):
    write_run(tmp_path)
    for host in ("host-0", "host-1", "host-2"):
        write_events(tmp_path / host, [])
    status = {"host-1": {"cluster": {"node": 1}}, "host-2": {"cluster": None}}
    monkeypatch.setattr(sources.launch, "smp_status", lambda place: status.get(place.name))
    assert [smp["node"] for smp in sources.read_smps(tmp_path)] == ["1", "host-2"]


def test_results_come_by_rank_and_those_and_settings_that_are_none_are_named(tmp_path):
    for rank in (10, 2, 0):
        (tmp_path / f"result-{rank}.json").write_text(json.dumps({"rank": rank}))
    assert [result["rank"] for result in sources.read_results(tmp_path)] == [0, 2, 10]
    (tmp_path / "result-0.json").write_text("{")
    with pytest.raises(ConfigError, match=r"result-0\.json"):
        sources.read_results(tmp_path)
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(ConfigError, match="not the record of a run"):
        sources.read_settings(tmp_path)


def test_the_last_sign_is_the_newest_write(tmp_path):
    assert sources.last_sign_s(tmp_path) == 0.0
    write_events(tmp_path, [event("rerun", 1.0)])
    assert sources.last_sign_s(tmp_path) > 1.6e9
