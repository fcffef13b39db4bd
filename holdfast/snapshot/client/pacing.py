"""``Snapshots(interval="auto")``: how often to snapshot, by what snapshots were measured to cost.

All ranks count their calls alike. For a window of calls they take a snapshot at every second step,
so that steps with and without one can be compared; then rank 0 works out the interval and leaves it
in the run's store, and at their next call all ranks, rank 0 too, take it from there::

    settle: 4 calls | measure: 16 calls, every 2nd step | rank 0 decides | all: every N steps | …

No rank waits: between two calls is a training step, whose gradients rank 0 was needed for. No rank
decides by what it alone knows, so all take the same steps whatever they measure.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from math import isfinite
from statistics import median
from typing import Any, Protocol

from torch import distributed as dist

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.planner.intervals import every as best_interval

# The first copies touch memory that nobody has touched, the first steps compile and warm up.
SETTLING_CALLS = 4
WINDOW_CALLS = 16
MIN_GAP_CALLS = 100
# Snapshots of a window are at most a tenth of those between two windows.
GAP_INTERVALS = 5 * WINDOW_CALLS
MEASURING = 2
# 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, Dubey et al. 2024, 3.3.4), and
# for small jobs, which people and schedulers interrupt more often than hardware does: one a day.
RANK_MTTF_S = 54 * 86_400 * 16_384 / 419
JOB_MTTF_S = 86_400.0

_serial = count()


def assumed_mttf_s(ranks: int) -> float:
    """Return a job's mean time to a failure, in seconds, if nobody knows better.

    One day, or 2,111 days / ranks if that is less: an assumption, not a measurement.
    """
    return min(JOB_MTTF_S, RANK_MTTF_S / ranks)


class Board(Protocol):
    """The place where rank 0 leaves texts for all ranks; each name is written once."""

    def post(self, name: str, text: str) -> None:
        """Leave ``text``, unless there is one of that name."""

    def read(self, name: str) -> str:
        """Wait, bounded, for a text."""


class LocalBoard:
    """The board of a run of one rank."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        """Leave ``text``."""
        self._texts.setdefault(name, text)

    def read(self, name: str) -> str:
        """Return a text, which is there."""
        return self._texts[name]


class StoreBoard:
    """The board of several ranks: the store by which their process group found together.

    Args:
        store: a ``torch.distributed`` store.
        prefix: of the names; the same on all ranks, another for each ``Snapshots``.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def post(self, name: str, text: str) -> None:
        """Leave ``text`` in the store."""
        self._store.compare_set(f"{self._prefix}/{name}", "", text)

    def read(self, name: str) -> str:
        """Wait for a text in the store.

        Raises:
            SmpUnavailable: nothing was left in time.
        """
        key, limit_s = f"{self._prefix}/{name}", config.timeout_s()
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
            return str(self._store.get(key).decode())
        except RuntimeError as error:
            raise SmpUnavailable(
                f"rank 0 left no snapshot interval in the store within {limit_s:g} s: it is gone, "
                f"or does not call begin() at every step as this rank does ({error})"
            ) from error


@dataclass(frozen=True)
class Sample:
    """One step as a rank saw it: how long it took, with the stall of a snapshot if it had one."""

    duration_s: float
    stall_s: float
    saved: bool


@dataclass(frozen=True)
class Choice:
    """An interval and what it was chosen by: O_save, a step without it, both in seconds."""

    every: int
    save_s: float
    step_s: float


def choose(samples: list[Sample], mttf_s: float) -> Choice | None:
    """Return the interval that costs least, by the medians of measured steps; None: too few.

    ``O_save = stall + max(0, (step with a snapshot − stall) − step without)``.
    """
    saved = [sample for sample in samples if sample.saved]
    plain = [sample.duration_s for sample in samples if not sample.saved]
    if not saved or not plain or median(plain) <= 0:
        return None
    stall_s, step_s = median(sample.stall_s for sample in saved), median(plain)
    slowed_s = median(sample.duration_s - sample.stall_s for sample in saved) - step_s
    save_s = stall_s + max(0.0, slowed_s)
    return Choice(best_interval(save_s, step_s, mttf_s), save_s, step_s)


class Pacing:
    """Says at every step which interval holds; all ranks must ask at the same steps.

    Args:
        mttf_s: the job's mean time to a failure, in seconds; rank 0's counts.
        board: of all ranks.
        decides: whether this is rank 0.
        clock: seconds.
    """

    def __init__(
        self,
        mttf_s: float,
        board: Board,
        decides: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mttf_s, self.choice = mttf_s, Choice(MEASURING, 0.0, 0.0)
        self._board, self._decides, self._clock = board, decides, clock
        self._every, self._calls, self._decisions = MEASURING, 0, 0
        self._window = SETTLING_CALLS
        self._samples: list[Sample] = []
        self._before: tuple[int, float, float] | None = None

    def every(self, step: int, stall_s: float) -> int:
        """Return the interval at ``step``; training has waited ``stall_s`` in all so far.

        Raises:
            SmpUnavailable: rank 0 left no interval.
        """
        self._measure(step, stall_s)
        end = self._window + WINDOW_CALLS
        if self._calls == self._window:
            self._every, self._samples = MEASURING, []
        if self._calls == end and self._decides:
            choice = choose(self._samples, self.mttf_s) or self.choice
            self._board.post(str(self._decisions), json.dumps(asdict(choice)))
        if self._calls == end + 1:
            self._adopt(Choice(**json.loads(self._board.read(str(self._decisions)))))
        self._calls += 1
        self._before = step, self._clock(), stall_s
        return self._every

    def _measure(self, step: int, stall_s: float) -> None:
        if self._before is None:
            return
        last, then_s, stalled_s = self._before
        # After a roll-back, or where begin() is not called at every step, it says nothing.
        if step == last + 1 and self._calls > self._window:
            saved = last % self._every == 0
            self._samples.append(Sample(self._clock() - then_s, stall_s - stalled_s, saved))

    def _adopt(self, choice: Choice) -> None:
        self.choice, self._every = choice, choice.every
        self._decisions += 1
        gap = min(self._calls, GAP_INTERVALS * choice.every)
        self._window = self._calls + max(MIN_GAP_CALLS, gap)
        self._samples = []

    def status(self) -> dict[str, object]:
        """Return the last choice, its reasons, and how many there were."""
        chosen = {**asdict(self.choice), "mttf_s": self.mttf_s, "rounds": self._decisions}
        return {"auto": True, **chosen}


def resolved(
    every: int | None, interval: str | None, mttf_s: float | None
) -> tuple[int, str | None, float | None]:
    """Return the values in force: given ones, else the config file's, else every step.

    A number of steps that was given leaves the file's interval out, and an interval its number.
    """
    if every is None and interval is None and mttf_s is None:
        interval = config.value("snapshots.interval", None, None)
        if interval is None:
            every = config.value("snapshots.every", None, 1)
    if interval is not None:
        mttf_s = config.value("snapshots.mttf_s", mttf_s, None)
    return 1 if every is None else every, interval, mttf_s


def of(interval: str | None, every: int, mttf_s: float | None) -> Pacing | None:
    """Return the pacing that was asked for; None: ``every`` steps.

    Raises:
        ConfigError: settings that contradict each other, or several ranks without a process group.
    """
    if interval is None and mttf_s is None:
        return None
    if interval != "auto":
        raise ConfigError(
            f"interval={interval!r}, mttf_s={mttf_s}: interval must be 'auto', or be left out "
            "together with mttf_s; a number of steps is every="
        )
    if every != 1:
        raise ConfigError(f"every={every} with interval='auto': give one of them")
    if mttf_s is not None and not (isfinite(mttf_s) and mttf_s > 0):
        raise ConfigError(f"mttf_s={mttf_s}: must be a finite number of seconds above 0")
    grouped = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if grouped else config.world_size()
    mttf_s = assumed_mttf_s(ranks) if mttf_s is None else mttf_s
    if max(ranks, config.local_world_size()) == 1:
        return Pacing(mttf_s, LocalBoard(), decides=True)
    if not grouped:
        raise ConfigError(
            f"interval='auto' with {ranks} ranks: they agree by the store of torch.distributed; "
            "call init_process_group first, or give every="
        )
    # Not there where torch was built without it.
    from torch.distributed.distributed_c10d import _get_default_store

    board = StoreBoard(_get_default_store(), f"holdfast/pacing/{next(_serial)}")
    return Pacing(mttf_s, board, decides=dist.get_rank() == 0)
