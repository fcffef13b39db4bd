"""Metrics of a live run: what they say, that they only grow, and that they stay few."""

import json
import re
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import torch
from report_runs import corrected, coverage, event, repeated, write_events, write_metrics, write_run

from holdfast.cli.main import main
from holdfast.errors import ConfigError
from holdfast.report import sources
from holdfast.report.run_files import METRICS_NAME, SETTINGS_NAME
from holdfast.report.tally import MANY, OTHER, Tally
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.protocol.roster import ProtocolViolation
from holdfast.snapshot.transport import frames, local

prometheus = pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from holdfast.report import exporter  # noqa: E402
from holdfast.report.exporter import METRICS, RunCollector, serving  # noqa: E402

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _scrape(collector: RunCollector) -> Samples:
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    return _samples(prometheus.generate_latest(registry).decode())


def _samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_the_counters_are_those_of_the_ledger(tmp_path):
    nasty = 'a"b\\c\nd{}'
    events = [corrected(n, step=n, rank=n % 2) for n in range(5)] + [repeated(9.0, "transient")]
    events.append(event("operand_fault", 9.5, op=nasty))
    samples = _scrape(RunCollector(write_run(tmp_path / "run", events)))
    labels = {"kind": "gemm_fault", "rung": "correct"}
    assert _value(samples, "holdfast_events_total", rank="0", **labels) == 3
    assert _value(samples, "holdfast_events_total", rank="1", **labels) == 2
    assert _value(samples, "holdfast_op_faults_total", op=corrected(0).op) == 5
    assert _value(samples, "holdfast_op_faults_total", op=nasty) == 1
    assert _value(samples, "holdfast_host_faults_total", host="node-a") == 6
    answers = {
        rung: _value(samples, "holdfast_answer_seconds_total", rung=rung)
        for rung in ("correct", "recompute")
    }
    assert answers == {"correct": pytest.approx(0.1), "recompute": 1.0}


def test_the_steps_are_those_of_the_metrics(tmp_path):
    run = write_run(tmp_path / "run", done=0)
    write_metrics(run, [1, 2, 3, 4, 3, 4, 5], seconds=0.05)
    samples = _scrape(RunCollector(run))
    assert _value(samples, "holdfast_step") == 5
    assert _value(samples, "holdfast_steps_wanted") == 10
    assert _value(samples, "holdfast_loss") == 1.0
    assert _value(samples, "holdfast_grad_norm") == 0.2
    assert _value(samples, "holdfast_steps_repeated_total") == 2
    assert _value(samples, "holdfast_step_seconds_count") == 7
    assert _value(samples, "holdfast_step_seconds_sum") == pytest.approx(0.35)
    assert _value(samples, "holdfast_step_seconds_bucket", le="0.02") == 0
    assert _value(samples, "holdfast_step_seconds_bucket", le="0.05") == 7
    assert _value(samples, "holdfast_step_seconds_bucket", le="+Inf") == 7


def test_each_scrape_reads_only_what_is_new(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [corrected(n, step=n) for n in range(50)])
    collector, read = RunCollector(run), []
    add = Tally.add
    monkeypatch.setattr(Tally, "add", lambda tally, event: (read.append(event), add(tally, event)))
    first = _scrape(collector)
    assert len(read) == 50
    write_events(run, [corrected(90.0, step=60)])
    second = _scrape(collector)
    assert len(read) == 51
    falling = [key for key in first if "_total" in key[0] and second[key] < first[key]]
    assert falling == []
    assert sum(second.values()) > sum(first.values())


def test_labels_are_bounded_and_stay_with_their_value(tmp_path):
    run = write_run(tmp_path / "run")
    collector = RunCollector(run)
    limit = MANY["op"]
    for start in (0, limit):
        fresh = range(start, start + limit)
        write_events(run, [corrected(n, step=n, rank=n % 3000, op=f"op{n}") for n in fresh])
    ranks = [event("gemm_fault", n, rank=n, op="op0") for n in range(2000)]
    write_events(run, ranks)
    samples = _scrape(collector)
    ops = {
        dict(labels)["op"]: value
        for (name, labels), value in samples.items()
        if "op_faults" in name
    }
    assert len(ops) == limit + 1
    assert (ops["op0"], ops[OTHER]) == (2001, limit)
    assert sum(name == "holdfast_events_total" for name, _ in samples) <= 2 * (MANY["rank"] + 1)


def test_coverage_is_known_at_the_end_or_from_the_process_itself(tmp_path):
    over = write_run(tmp_path / "over", covered=coverage("head/mm"))
    going = write_run(tmp_path / "going", done=3)
    for collector in (RunCollector(over), RunCollector(going, lambda: coverage("head/mm"))):
        samples = _scrape(collector)
        assert _value(samples, "holdfast_matmul_sites", covered="true") == 1
        assert _value(samples, "holdfast_matmul_sites", covered="false") == 1
    assert "holdfast_matmul_sites" not in {name for name, _ in _scrape(RunCollector(going))}


def test_a_directory_is_not_readable_before_it_has_begun_nor_when_it_is_damaged(tmp_path):
    collector = RunCollector(tmp_path)
    assert _value(_scrape(collector), "holdfast_run_readable") == 0
    write_run(tmp_path, [corrected(1.0)])
    samples = _scrape(collector)
    assert _value(samples, "holdfast_run_readable") == 1
    assert _value(samples, "holdfast_step") == 10
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write("no metrics\n")
    samples = _scrape(collector)
    assert _value(samples, "holdfast_run_readable") == 0
    assert _value(samples, "holdfast_step") == 10
    (tmp_path / SETTINGS_NAME).write_text("{")
    assert _value(_scrape(collector), "holdfast_run_readable") == 0


def test_an_smp_that_hangs_costs_a_scrape_little(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(exporter, "SMP_PATIENCE_S", 0.05)
    monkeypatch.setattr(sources.launch, "smp_status", lambda _: answer.wait(20) and None)
    collector = RunCollector(write_run(tmp_path / "run"))
    started_s = time.monotonic()
    for _ in range(3):
        assert _value(_scrape(collector), "holdfast_smp_answers") == 0
    assert time.monotonic() - started_s < 10
    assert sum("_answer" in thread.name for thread in threading.enumerate()) <= 1
    answer.set()
    monkeypatch.setattr(exporter, "SMP_PATIENCE_S", 10)
    assert _value(_scrape(collector), "holdfast_smp_answers") == 1


@pytest.mark.parametrize("error", [ProtocolViolation("rubbish"), ValueError(), RecursionError()])
def test_a_scrape_goes_on_after_any_failure_of_asking_the_smp(tmp_path, monkeypatch, error):
    def fail(_: Path) -> None:
        raise error

    collector = RunCollector(write_run(tmp_path / "run"))
    healthy = sources.launch.smp_status
    monkeypatch.setattr(sources.launch, "smp_status", fail)
    monkeypatch.setattr(exporter, "SMP_PATIENCE_S", 20)
    started_s = time.monotonic()
    for _ in range(3):
        assert _value(_scrape(collector), "holdfast_smp_answers") == 0
    assert time.monotonic() - started_s < 10
    monkeypatch.setattr(sources.launch, "smp_status", healthy)
    assert _value(_scrape(collector), "holdfast_smp_answers") == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9,
        frames.encode({"verb": "status"}),
        frames.encode({"verb": "status", "pid": "\x1b[31m", "newest": [], "connected": 7}),
        b"",
    ],
)
def test_an_smp_that_answers_nonsense_is_told_and_the_scrape_goes_on(tmp_path, capsys, answer):
    run = write_run(tmp_path / "run", [corrected(1.0)])
    with local.listen(run) as listener:
        listener.setblocking(True)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.recv(4096)
                        peer.sendall(answer)

        Thread(target=serve, daemon=True).start()
        samples = _scrape(RunCollector(run))
        assert main(["snapshots", "status", "--run-dir", str(run)]) == 1
        told = capsys.readouterr()
        assert main(["report", str(run)]) == 0
        listener.shutdown(socket.SHUT_RDWR)
    assert _value(samples, "holdfast_smp_answers") == int(not answer)
    assert _value(samples, "holdfast_run_readable") == 1
    assert len(told.err.splitlines()) == int(bool(answer))
    assert "\x1b" not in told.err + told.out
    assert ("is no SMP" in told.err) == bool(answer)


@pytest.mark.processes
@pytest.mark.representative
def test_a_living_run_is_served_over_http_with_every_metric_of_the_dashboard(tmp_path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    run = write_run(tmp_path / "run", [corrected(1.0)], covered=coverage("head/mm"))
    with Snapshots(model, optimizer, run_dir=run) as snapshots, serving(run, 0) as url:
        snapshots.begin(3)
        assert snapshots.wait_committed() == 3
        with urllib.request.urlopen(url, timeout=30) as answer:
            samples = _samples(answer.read().decode())
        assert url.startswith("http://127.0.0.1:")
    assert _value(samples, "holdfast_snapshot_step", node="0") == 3
    assert _value(samples, "holdfast_snapshot_age_seconds", node="0") < 60
    assert _value(samples, "holdfast_ranks_connected", node="0") == 1
    assert _value(samples, "holdfast_smp_answers") == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)
    used, suffixes = _in_dashboard(), r"_(total|bucket|sum|count)$"
    assert {re.sub(suffixes, "", name) for name in used} >= set(METRICS)
    assert used.keys() - {name for name, _ in samples} == set()
    for name, labels in used.items():
        known = {label for found, pairs in samples if found == name for label, _ in pairs}
        assert labels <= known, name


def test_what_cannot_be_served_is_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match="there is no run directory"),
        serving(tmp_path / "none", 0),
    ):
        pass
    with serving(tmp_path, 0) as url:
        port = int(url.split(":")[2].split("/")[0])
        refused = f"cannot serve on 127.0.0.1:{port}: .* give another port"
        with pytest.raises(ConfigError, match=refused), serving(tmp_path, port):
            pass


def test_two_scrapes_at_once_count_each_event_once(tmp_path):
    run = write_run(tmp_path / "run", [corrected(n, step=n) for n in range(500)])
    collector, found = RunCollector(run), []
    threads = [threading.Thread(target=lambda: found.append(_scrape(collector))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counts = {_value(s, "holdfast_op_faults_total", op=corrected(0).op) for s in found}
    assert (len(found), counts) == (4, {500.0})


def _expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [item["query"] for item in dashboard["templating"]["list"]]
    return found + [query["query"] for query in queries if isinstance(query, dict)]


def _in_dashboard() -> dict[str, set[str]]:
    """Metrics of the dashboard and the labels that it selects or groups by."""
    used: dict[str, set[str]] = {}
    for expression in _expressions():
        grouped = set(re.findall(r"by \((\w+)\)", expression))
        for name, selected in re.findall(r"(holdfast_\w+)(?:\{([^}]*)\})?", expression):
            labels = set(re.findall(r"(\w+)[!=]", selected)) | grouped
            used.setdefault(name, set()).update(labels - {"instance", "le"})
    return used


def test_the_dashboards_panels_do_not_overlap():
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
