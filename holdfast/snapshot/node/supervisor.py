"""The supervisor of the persister, a child process of the SMP that is restarted when it dies."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from holdfast.errors import ConfigError
from holdfast.snapshot.protocol.roster import Count, fitted
from holdfast.snapshot.transport.log import log

SETTINGS_NAME = "persist.json"
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_SETTLED_S = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent(on: bool = True) -> None:
    """Have the kernel send SIGTERM when the parent ends, also after ``exec``; or no longer."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM) if on else 0, 0, 0, 0)


@dataclass(frozen=True)
class PersistSettings:
    """The place of this node's checkpoints, the steps between them, and how many are kept.

    ``world_size`` is the number of ranks of the run on all nodes; this node's begin at
    ``first_rank``.
    """

    directory: Annotated[str, Meta(pattern=r"^[^\0]+\Z", max_length=4096)]
    every: Count
    keep: Count
    world_size: Count
    first_rank: Count


def read_settings(run_dir: Path) -> PersistSettings | None:
    """Return the settings that the SMP of a run directory received last; None if there are none."""
    path = run_dir / SETTINGS_NAME
    try:
        given = json.loads(path.read_text()).get("settings")
        return fitted(given, PersistSettings) if given is not None else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give --persist-dir") from error


class Supervisor:
    """Starts the persister of a run directory, and starts it again when it dies.

    The persister ends with this process, or after the checkpoint that it is writing then.
    """

    def __init__(self, run_dir: Path) -> None:
        self.restarts = 0
        self._run_dir = run_dir
        self._settings: PersistSettings | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        self._pause_s = _FIRST_PAUSE_S
        self._started_s = self._retry_s = 0.0

    def assign(self, settings: PersistSettings | None, now: float) -> bool:
        """Persist with these settings from now on; None stops the persister.

        Return false if they were in force already.
        """
        if settings == self._settings:
            return False
        if self._process is not None:
            # The checkpoint that it was writing stays hidden; the next writer removes it.
            self._process.kill()
            self._dying.append(self._process)
            self._process = None
        self._settings = settings
        path = self._run_dir / SETTINGS_NAME
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            draft.write_text(json.dumps({"settings": settings and asdict(settings)}) + "\n")
            draft.replace(path)
        if settings is not None:
            self._start(settings, now)
        return True

    def tend(self, now: float) -> None:
        """Collect the processes that have ended, and restart the persister if it should run."""
        self._dying = [process for process in self._dying if process.poll() is None]
        if self._process is not None and self._process.poll() is not None:
            log(f"the persister ended: {self._process.returncode}")
            if now - self._started_s > _SETTLED_S:
                self._pause_s = _FIRST_PAUSE_S
            self._retry_s = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._process = None
        if self._process is None and self._settings is not None and now >= self._retry_s:
            self.restarts += 1
            self._start(self._settings, now)

    def status(self) -> dict[str, object] | None:
        """Return the persister's settings, process id and number of restarts; None without one."""
        if self._settings is None:
            return None
        pid = self._process.pid if self._process is not None else None
        return {**asdict(self._settings), "pid": pid, "restarts": self.restarts}

    def _start(self, settings: PersistSettings, now: float) -> None:
        command = [sys.executable, "-m", "holdfast.snapshot.disk.persister"]
        for name, value in {"run_dir": self._run_dir, **asdict(settings)}.items():
            command.append(f"--{name.replace('_', '-')}={value}")
        self._started_s = now
        try:
            # Set before its first instruction, because a run may end while it still imports torch.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, cwd="/", preexec_fn=end_with_parent
            )
        except OSError as error:
            log(f"the persister cannot be started: {error}")
            self._retry_s = now + _LONGEST_PAUSE_S
