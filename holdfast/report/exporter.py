"""A live run's counters for Prometheus, read when they are requested.

It needs ``prometheus_client`` (extra ``metrics``). ``METRICS`` lists all names.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from holdfast.errors import ConfigError
from holdfast.report import sources
from holdfast.report.sources import Record
from holdfast.report.tally import Tally

SMP_PATIENCE_S = 2.0  # a scrape must not wait for the timeout of a trainer
BUCKETS_S = tuple(float(f"1e{power}") * nice for power in range(-3, 3) for nice in (1, 2, 5))

# name: (kind, description, labels); counters are exported with _total.
METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "holdfast_events": ("counter", "events in the ledger", ("kind", "rung", "rank")),
    "holdfast_op_faults": ("counter", "faults found, by op", ("op",)),
    "holdfast_host_faults": ("counter", "faults found, by host", ("host",)),
    "holdfast_answer_seconds": ("counter", "time that rungs took", ("rung",)),
    "holdfast_step": ("gauge", "newest step done", ()),
    "holdfast_steps_wanted": ("gauge", "length of the run in steps", ()),
    "holdfast_loss": ("gauge", "loss of the newest step", ()),
    "holdfast_grad_norm": ("gauge", "gradient norm of the newest step", ()),
    "holdfast_step_seconds": ("histogram", "wall time of steps", ()),
    "holdfast_steps_repeated": ("counter", "steps done again after a restart", ()),
    "holdfast_last_sign_seconds": ("gauge", "when the run last wrote, seconds since 1970", ()),
    "holdfast_snapshot_age_seconds": ("gauge", "age of the newest clean snapshot", ("node",)),
    "holdfast_snapshot_step": ("gauge", "step of the newest clean snapshot", ("node",)),
    "holdfast_snapshot_commits": ("counter", "snapshots committed by this SMP", ("node",)),
    "holdfast_snapshot_stall_seconds": ("counter", "time training waited for them", ("node",)),
    "holdfast_snapshot_bytes": ("gauge", "memory that holds snapshots", ("node",)),
    "holdfast_ranks_connected": ("gauge", "ranks connected to the SMP", ("node",)),
    "holdfast_smp_answers": ("gauge", "1 if every SMP found answered in time, else 0", ()),
    "holdfast_matmul_sites": ("gauge", "matmul sites by coverage", ("covered",)),
    "holdfast_run_readable": ("gauge", "1 if the run directory could be read, else 0", ()),
}
_OF_SMP = {
    "holdfast_snapshot_age_seconds": "age_s",
    "holdfast_snapshot_step": "newest",
    "holdfast_snapshot_commits": "commits",
    "holdfast_snapshot_stall_seconds": "stall_s",
    "holdfast_snapshot_bytes": "bytes",
}
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class RunCollector(Collector):
    """Metrics of a run directory; each scrape reads what was written since the previous one.

    Args:
        run_dir: Directory of a run that may not have begun yet.
        coverage: Returns the coverage of matmuls, in the training process ``lambda:
            protection.report().as_dict()``. By default it is read from the results once the run has
            ended.

    Guarantees: counters never fall while the directory stays the same; the number of labels is
    bounded (``tally.MANY``); a scrape waits at most two seconds for an SMP that hangs.
    """

    def __init__(self, run_dir: Path, coverage: Callable[[], Record] | None = None) -> None:
        self._run_dir, self._coverage = run_dir, coverage
        self._lines, self._ledgers = sources.MetricsTail(run_dir), sources.Ledgers(run_dir)
        self._tally = Tally()
        self._latest: sources.StepLine | None = None
        self._repeated = self._furthest = 0
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._seconds = 0.0
        self._asked: Future[list[Record]] | None = None
        self._lock = Lock()  # two scrapes may come at once

    def describe(self) -> list[Metric]:
        """Return nothing, so that a registry does not scrape when it registers the collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of all metrics."""
        with self._lock:
            values = dict(self._collect())
        for name, rows in values.items():
            yield _family(name, rows)

    def _collect(self) -> Iterator[tuple[str, Any]]:
        facts: list[tuple[str, Any]] = []
        try:
            self._read()
            facts = list(self._facts())
        except (ConfigError, OSError):
            pass  # holdfast_run_readable is then 0
        yield "holdfast_run_readable", {(): int(bool(facts))}
        yield "holdfast_events", self._tally.events
        yield "holdfast_op_faults", {(op,): n for op, n in self._tally.ops.items()}
        yield "holdfast_host_faults", {(host,): n for host, n in self._tally.hosts.items()}
        yield "holdfast_answer_seconds", {(r,): s for r, s in self._tally.seconds.items()}
        yield from self._steps()
        yield from self._smp_values()
        yield from facts

    def _read(self) -> None:
        if not sources.is_run(self._run_dir):
            raise ConfigError(f"{self._run_dir} holds no run (yet)")
        for event in self._ledgers.read():
            self._tally.add(event)
        for line in self._lines.read():
            self._repeated += line.again(self._furthest)
            self._latest, self._furthest = line, max(line.step, self._furthest)
            self._buckets[sum(line.seconds > bound for bound in BUCKETS_S)] += line.steps
            self._seconds += line.seconds * line.steps

    def _steps(self) -> Iterator[tuple[str, Any]]:
        yield "holdfast_steps_repeated", {(): self._repeated}
        yield "holdfast_step_seconds", (self._buckets, self._seconds)
        if self._latest is not None:
            yield "holdfast_step", {(): self._latest.step}
            yield "holdfast_loss", {(): self._latest.loss}
            yield "holdfast_grad_norm", {(): self._latest.grad_norm}

    def _facts(self) -> Iterator[tuple[str, Any]]:
        """Yield the values in small files that are read again at each scrape."""
        yield "holdfast_last_sign_seconds", {(): sources.last_sign_s(self._run_dir)}
        settings = sources.read_settings(self._run_dir)
        if "steps" in settings:
            yield "holdfast_steps_wanted", {(): settings["steps"]}
        report = self._coverage() if self._coverage else self._coverage_read()
        if report is not None:
            covered = sum(site["covered"] for site in report["sites"])
            counts = {("true",): covered, ("false",): len(report["sites"]) - covered}
            yield "holdfast_matmul_sites", counts

    def _coverage_read(self) -> Record | None:
        ended = sources.read_results(self._run_dir)
        return sources.coverage_of(ended or sources.read_summaries(self._run_dir))

    def _smp_values(self) -> Iterator[tuple[str, Any]]:
        found = self._ask()
        answered = found is not None and not any("error" in smp for smp in found)
        yield "holdfast_smp_answers", {(): int(answered)}
        living = [(smp["node"], smp) for smp in found or [] if "error" not in smp]
        for name, key in _OF_SMP.items():
            yield name, {(node,): smp[key] for node, smp in living if smp.get(key) is not None}
        connected = {(node,): sum(smp["connected"]) for node, smp in living}
        yield "holdfast_ranks_connected", connected

    def _ask(self) -> list[Record] | None:
        """Ask the SMPs for their status; return None if one has not answered in time.

        A question that is not answered yet is not asked again.
        """
        if self._asked is None:
            self._asked = Future()
            # A daemon, as a hanging SMP must not keep this process from ending.
            Thread(target=_answer, args=(self._asked, self._run_dir), daemon=True).start()
        try:
            found = self._asked.result(SMP_PATIENCE_S)
        except TimeoutError:
            return None
        self._asked = None
        return found


def _answer(asked: "Future[list[Record]]", run_dir: Path) -> None:
    try:
        asked.set_result(sources.read_smps(run_dir))
    except Exception as error:  # whatever it is, a question without an answer blocks all later ones
        asked.set_result([{"error": str(error) or repr(error)}])


def _family(name: str, rows: Any) -> Metric:
    kind, text, labels = METRICS[name]
    if kind == "histogram":
        return _histogram(name, text, *rows)
    family: Any = _FAMILIES[kind](name, text, labels=labels)
    for values, number in rows.items():
        family.add_metric(values, number)
    assert isinstance(family, Metric)
    return family


def _histogram(name: str, text: str, counts: list[int], total_s: float) -> Metric:
    bounds = (*(f"{bound:g}" for bound in BUCKETS_S), "+Inf")
    buckets = list(zip(bounds, accumulate(map(float, counts)), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total_s)


@contextmanager
def serving(run_dir: Path, port: int, address: str = "127.0.0.1") -> Iterator[str]:
    """Serve a run's metrics at ``/metrics`` while the context is open; its value is the address.

    Port 0 chooses a free one.

    Raises:
        ConfigError: The directory does not exist, or the port is not available.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}: give that of a run")
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dir))
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve on {address}:{port}: {error.strerror}; give another port, or 0"
        ) from error
    try:
        yield f"http://{address}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(SMP_PATIENCE_S)
