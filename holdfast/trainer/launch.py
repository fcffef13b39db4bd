"""Starts a training run through torchrun's own API and watches it."""

import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holdfast import config, events
from holdfast.errors import ConfigError, HoldfastError
from holdfast.events import Event
from holdfast.inject.schedule import Fault
from holdfast.snapshot.launch import stop_smp
from holdfast.trainer.rundir import claimed
from holdfast.trainer.settings import Settings
from holdfast.trainer.worker import FATAL_NAME, LAUNCHER_VARIABLE, METRICS_NAME, result_path

POLL_S = 0.1
SPARE_RESTARTS = 3  # beyond those that the schedule's kills need


@dataclass
class RunResult:
    """What a finished run left behind."""

    run_dir: Path
    seconds: float
    ranks: list[dict[str, Any]]
    events: list[Event]
    losses: dict[int, float] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)

    @property
    def digests(self) -> list[tuple[str, str, str]]:
        """Of each rank: model, optimizer and scheduler."""
        return [(r["model"], r["optimizer"], r["scheduler"]) for r in self.ranks]


class RunFailed(HoldfastError):
    """The training processes failed for good; the message names the log to read."""


Watcher = Callable[[dict[int, float], list[Event]], None]


def train(
    run_dir: Path,
    settings: Settings,
    faults: Sequence[Fault] = (),
    *,
    resume: bool = False,
    watch: Watcher | None = None,
) -> RunResult:
    """Run a training to its end, restarting its processes as often as needed.

    Args:
        run_dir: made by this call; must not hold a run unless ``resume``.
        settings: what to train; with ``resume``, must equal the run's own.
        faults: the schedule to inject.
        resume: continue an interrupted run from its SMP's snapshots.
        watch: called about ten times a second with the losses by step and the new events.

    Returns:
        The results of all ranks, the events and the loss curve.

    Raises:
        ConfigError: the directory is in use, holds a run already, or cannot be written; or a rank
            found input that no restart can mend.
        RunFailed: the processes failed more often than they may.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the training processes were ended.

    However a run ends, no training process is left. The SMP of a guarded run ends with it when it
    finishes; else it lingers (ten minutes), so that the run can be resumed.
    """
    with claimed(run_dir, settings, faults, resume=resume) as faults:
        started_s = time.monotonic()
        follower = _Follower(run_dir, watch)
        done = False
        try:
            with follower:
                _launch(run_dir, settings, kills=sum(f.kind == "kill_trainer" for f in faults))
            done = True
        finally:
            if done or settings.mode != "guarded":
                stop_smp(run_dir)
        ranks = [json.loads(result_path(run_dir, r).read_text()) for r in range(settings.ranks)]
        seconds = time.monotonic() - started_s
        return RunResult(
            run_dir, seconds, ranks, follower.events, follower.losses, follower.step_seconds
        )


def _launch(run_dir: Path, settings: Settings, *, kills: int) -> None:
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    (run_dir / FATAL_NAME).unlink(missing_ok=True)  # of an attempt that is now resumed
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": "1", "timeout": config.timeout_s()},
        max_restarts=kills + SPARE_RESTARTS,
        monitor_interval=POLL_S,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        config.RUN_DIR_VARIABLE: str(run_dir),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    with quiet_torchrun(), _environment(environment), _own_signals():
        try:
            launched = elastic_launch(launch_config, sys.executable)
            launched("-u", "-m", "holdfast.trainer.worker", str(run_dir))
        except ChildFailedError as error:
            fatal = run_dir / FATAL_NAME
            if fatal.exists():
                raise ConfigError(fatal.read_text()) from error
            raise RunFailed(_explain(error, logs)) from error
        except SignalException as error:
            raise KeyboardInterrupt from error


def _explain(error: ChildFailedError, logs: Path) -> str:
    rank, failure = error.get_first_failure()
    last = _last_line(logs, rank)
    return f"rank {rank} failed (exit code {failure.exitcode}): {last}; logs are in {logs}"


def _last_line(logs: Path, rank: int) -> str:
    """The last thing a rank said on stderr in its latest life."""
    found = sorted(logs.glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
    lines = found[-1].read_text(errors="replace").split("\n") if found else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


@contextmanager
def quiet_torchrun() -> Iterator[None]:
    """torchrun reports a killed worker on many lines; the ledger says it on one."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, logger.disabled = logger.level, True
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.disabled = False
        logger.setLevel(before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextmanager
def _own_signals() -> Iterator[None]:
    """torchrun's agent takes the signals over and does not give them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Follower:
    """Reads a run's metrics and ledger as they grow, from a thread beside torchrun's agent."""

    def __init__(self, run_dir: Path, watch: Watcher | None) -> None:
        self.losses: dict[int, float] = {}
        self.step_seconds: dict[int, float] = {}
        self.events: list[Event] = []
        self._metrics, self._offset = run_dir / METRICS_NAME, 0
        self._ledger, self._last_id = run_dir / events.LEDGER_NAME, 0
        self._watch = watch
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "_Follower":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(config.timeout_s())
        if self._error is not None and kind is None:
            raise self._error

    def _follow(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self._read()
            self._read()
        except Exception as error:  # raised where the run is waited for
            self._error = error

    def _read(self) -> None:
        if self._metrics.exists():
            with self._metrics.open("rb") as file:
                file.seek(self._offset)
                complete = file.read().rpartition(b"\n")[0]
            self._offset += len(complete) + 1 if complete else 0
            for line in complete.splitlines():
                values = json.loads(line)
                self.losses[values["step"]] = values["loss"]
                self.step_seconds[values["step"]] = values["seconds"]
        fresh = list(events.read_ledger(self._ledger, after_id=self._last_id))
        self._last_id = fresh[-1][0] if fresh else self._last_id
        self.events += [event for _, event in fresh]
        if self._watch is not None:
            self._watch(self.losses, [event for _, event in fresh])


def interruptible() -> None:
    """Let SIGTERM end a run like Ctrl-C does, so that its processes are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
