"""Trouble with snapshots, which costs protection and never the training."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from holdfast import config, events
from holdfast.errors import SnapshotError
from holdfast.events import EventKind
from holdfast.snapshot.node.launch import LOG_NAME
from holdfast.snapshot.node.session import NotEnoughMemory

TROUBLE = (SnapshotError, NotEnoughMemory, OSError, MemoryError, torch.OutOfMemoryError)
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 600.0
# Snapshots in a row without a commit after which that is said, if they took long enough; a few
# commits late are normal on several nodes.
MANY_UNCOMMITTED = 8
FEW_UNCOMMITTED = 2
_SHARE_OF_PATIENCE = 1 / 12  # of the timeout, for many snapshots
_TIMES_PATIENCE = 2  # the timeout, for few

_logger = logging.getLogger("holdfast.snapshot")


class Outage:
    """A time in which no snapshot is committed: said once, and ended as soon as one is.

    After an error none is tried for a while, and a lost connection is made again in the background.
    Each further failure doubles the pause, up to ten minutes. With ``strict`` errors are raised.

    Attributes:
        reason: why no snapshot is committed; empty while they are.
        broken: true after an error, until the connection to the SMP is known to work again.
        connected: false if it has to be made again.
    """

    def __init__(self, run_dir: Path, strict: bool) -> None:
        self.reason, self.broken, self.connected = "", False, True
        self._run_dir, self._strict = run_dir, strict
        self._pause_s, self._retry_s = FIRST_PAUSE_S, 0.0
        self._recovery: Future[None] | None = None
        self._uncommitted, self._commits, self._since_s = 0, 0, time.monotonic()

    @contextmanager
    def tolerated(self) -> Iterator[None]:
        """Turn trouble inside the context into an outage, unless it is to be raised."""
        try:
            yield
        except TROUBLE as error:
            if self._strict:
                raise
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self.broken, self.connected = True, isinstance(error, NotEnoughMemory)
        self._retry_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._say(str(error) or type(error).__name__)

    def may_begin(self, reconnect: Callable[[], Future[None]]) -> bool:
        """Return true if a snapshot may be tried now; ``reconnect`` connects to the SMP again."""
        if not self.broken:
            return True
        if self._recovery is None and time.monotonic() < self._retry_s:
            return False
        if not self.connected:
            self._recovery = self._recovery or reconnect()
            if not self._recovery.done():
                return False
            error, self._recovery = self._recovery.exception(), None
            if error is not None:
                self._failed(error)
                return False
        self.broken = False
        return True

    def settle(self) -> None:
        """Wait until no thread connects in the background any more."""
        if self._recovery is not None:
            wait([self._recovery], 3 * config.timeout_s())
            self._recovery = None

    def watch(self, commits: int, refusal: str) -> None:
        """Note that a snapshot is due, after so many commits; ``refusal`` is that of the last."""
        now_s = time.monotonic()
        if commits > self._commits:
            self._pause_s = FIRST_PAUSE_S
            if self.reason:
                detail, self.reason = {"reason": self.reason}, ""
                events.record(EventKind.SNAPSHOTS_RESUMED, detail=detail)
            self._uncommitted, self._commits, self._since_s = 0, commits, now_s
        patience_s, waited_s = config.timeout_s(), now_s - self._since_s
        many = self._uncommitted >= MANY_UNCOMMITTED and waited_s > _SHARE_OF_PATIENCE * patience_s
        few = self._uncommitted >= FEW_UNCOMMITTED and waited_s > _TIMES_PATIENCE * patience_s
        if many or few:
            why = f"the last: {refusal}" if refusal else "no other node or rank has answered"
            self._say(
                f"of {self._uncommitted} snapshots in {waited_s:.0f} s none was committed ({why}); "
                f"check the addresses of the nodes ({config.ADDRESS_VARIABLE}) and `holdfast "
                "snapshots status`"
            )
        self._uncommitted += 1

    def _say(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        detail = {"reason": reason, "remedy": f"see {self._run_dir / LOG_NAME}"}
        events.record(EventKind.SNAPSHOTS_SUSPENDED, detail=detail)
        with suppress(Warning):  # where warnings are errors
            warnings.warn(
                f"training goes on without new snapshots: {reason}. Snapshots are tried again in "
                f"growing intervals; see {self._run_dir / LOG_NAME}. strict=True raises instead",
                RuntimeWarning,
                stacklevel=4,
            )
