"""Start and supervision of a host's standby process."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.launch import client

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_END_LIMIT_S = 5.0


class Standby:
    """A context in which ranks are forked from a process that has imported torch already.

    The process is started at once and imports in the background; ranks that are asked for earlier
    wait for it. It is started again if it dies, and its ranks with it. It ends with this process.
    """

    def __init__(self, modules: Sequence[str] = (), folder: Path | None = None) -> None:
        self.modules, self.folder = tuple(modules), folder  # where the socket's own folder is made
        self.path, self.pid = "", 0
        self._lock, self._stop = threading.Lock(), threading.Event()

    def __enter__(self) -> "Standby":
        own = tempfile.mkdtemp(prefix="holdfast-standby-", dir=self.folder)
        self.path = os.path.join(own, "standby.sock")
        self.pid = self.first()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if pid := self.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._thread.join(_END_LIMIT_S)
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Return the interpreter's arguments for the client that stands for ``python *words``.

        torchrun calls a run by its first argument without a hyphen, which remains the script.
        """
        code = f"p={client.__file__!r};m={{'__name__':'client'}};import sys;"
        code += "exec(compile(open(p).read(),p,'exec'),m);"
        return ["-I", "-S", f"-c{code}m['main']({self.path!r},sys.argv[1:])", *words]

    def first(self) -> int:
        """Start the process for the first time; return its id."""
        return self._execute()

    def _execute(self) -> int:
        code = "from holdfast.launch.standby import main; main()"
        command = [sys.executable, "-u", "-c", code, self.path, str(os.getpid()), *self.modules]
        # The object is kept: subprocess would reap the process of a freed one before ``_keep``.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return self._process.pid

    def _keep(self) -> None:
        """Start the process again when it dies."""
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            if self._stop.is_set():
                return
            said = f"the standby process ended ({ended}) and is started again"
            print(f"holdfast run: {said}", file=sys.stderr, flush=True)
            settled = time.monotonic() - started_s > _LONGEST_PAUSE_S
            pause_s = _FIRST_PAUSE_S if settled else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._stop.wait(pause_s)
            with self._lock:
                if self._stop.is_set():
                    return
                self.pid = self._execute()
