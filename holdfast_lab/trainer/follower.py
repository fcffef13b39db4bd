"""Reading of a run's metrics and of the ledgers of its hosts while it is running."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast import config, events
from holdfast.events import Event
from holdfast.report.run_files import METRICS_NAME
from holdfast_lab.trainer.worker import host_ledgers

POLL_S = 0.1

Watcher = Callable[[dict[int, float], list[Event]], None]


class Follower:
    """Follows a run in a thread of its own, beside the thread that waits for the run.

    The events of several hosts are copied into the run's own ledger as they are written, so that
    those of a lost host are kept.

    Attributes:
        losses, step_seconds: Loss and duration of each step, by the number of steps done.
        steps_done: Largest number of steps that the run has reported, over all restarts.
        events: All events in the order in which they were read.
    """

    def __init__(self, run_dir: Path, watch: Watcher | None) -> None:
        self.losses: dict[int, float] = {}
        self.step_seconds: dict[int, float] = {}
        self.steps_done = 0
        self.events: list[Event] = []
        self._run_dir, self._watch = run_dir, watch
        self._metrics, self._offset = run_dir / METRICS_NAME, 0
        self._ledger = events.Ledger(run_dir / events.LEDGER_NAME)
        self._last_ids: dict[Path, int] = {}
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(config.timeout_s())
        self._ledger.close()
        if self._error is not None and kind is None:
            raise self._error

    def _follow(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self.read()
            self.read()
        except Exception as error:  # raised again when the context ends
            self._error = error

    def read(self) -> None:
        """Read the metrics and events written since the last call."""
        self._read_metrics()
        for path in host_ledgers(self._run_dir):
            for event in self._unread(path):
                self._ledger.append(event)
        fresh = self._unread(self._ledger.path)
        self.events += fresh
        if self._watch is not None:
            self._watch(self.losses, fresh)

    def _unread(self, path: Path) -> list[Event]:
        found = list(events.read_ledger(path, after_id=self._last_ids.get(path, 0)))
        if found:
            self._last_ids[path] = found[-1][0]
        return [event for _, event in found]

    def _read_metrics(self) -> None:
        if not self._metrics.exists():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        self._offset += len(complete) + 1 if complete else 0
        for line in complete.splitlines():
            values = json.loads(line)
            self.losses[values["step"]] = values["loss"]
            self.step_seconds[values["step"]] = values["seconds"]
            self.steps_done = max(self.steps_done, values["step"])
