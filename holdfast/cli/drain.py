"""A command of the user that runs when a device is named as faulty, to drain its node."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from holdfast import config
from holdfast.cli.tables import say
from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind
from holdfast.report import sources

POLL_S = 1.0
PATIENCE_S = 60.0


class Drain:
    """Reads the ledger of a run, and runs a command for each device that an event evicts.

    The command runs in a shell, once for each host and rank, with ``HOLDFAST_HOST``,
    ``HOLDFAST_RANK``, ``HOLDFAST_DEVICE``, ``HOLDFAST_STEP`` and ``HOLDFAST_RUN_DIR`` in its
    environment. If it fails, or takes longer than a minute, that is said, and the run goes on.
    Of several nodes one runs it: that whose rank recorded the event.

    Args:
        run_dir: Directory of the run; events that are in it already are passed over.
        command: The command.
    """

    def __init__(self, run_dir: Path, command: str) -> None:
        self._run_dir, self._command = run_dir, command
        self._ledgers = sources.Ledgers(run_dir)
        self._done: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._evicted()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S + config.timeout_s())

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(POLL_S)  # and once more for what was recorded just before it
            for event in self._evicted():
                if (event.host, event.rank) not in self._done:
                    self._done.add((event.host, event.rank))
                    self._run(event)

    def _evicted(self) -> list[Event]:
        try:
            found = list(self._ledgers.read()) if self._run_dir.is_dir() else []
        except ConfigError:  # it is being renamed or made; the next look finds it
            return []
        return [event for event in found if event.kind == EventKind.EVICT]

    def _run(self, event: Event) -> None:
        told = {name: getattr(event, name.lower()) for name in ("HOST", "RANK", "DEVICE", "STEP")}
        told["RUN_DIR"] = self._run_dir
        environment = os.environ | {f"HOLDFAST_{name}": str(told[name]) for name in told}
        try:
            done = subprocess.run(self._command, shell=True, env=environment, timeout=PATIENCE_S)
            ended = f"ended with {done.returncode}" if done.returncode else "was run"
        except (OSError, subprocess.TimeoutExpired) as error:
            ended = f"failed: {error}"
        named = f"rank {event.rank} on {event.host or 'an unknown host'} was named as faulty"
        say(f"holdfast run: {named}; --on-evict {ended}", file=sys.stderr)
