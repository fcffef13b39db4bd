"""``Snapshots(interval="auto")``: the number of steps between snapshots, from their measured cost.

All ranks count their calls alike. During a window of calls they take a snapshot at every second
step, to compare steps with and without one. Then rank 0 computes the interval and writes it to the
run's store, where all ranks read it at their next call::

    settle: 4 calls | measure: 16 calls, every 2nd step | rank 0 decides | all: every N steps | …

No rank has to wait, because rank 0 has taken part in the gradients of the step between the calls.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from math import isfinite
from statistics import median
from typing import Any

from torch import distributed as dist

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.planner.intervals import every as best_interval

# The first copies touch new memory, the first steps compile and warm up.
SETTLING_CALLS = 4
WINDOW_CALLS = 16
MIN_GAP_CALLS = 100
# Snapshots of a window are at most a tenth of those between two windows.
GAP_INTERVALS = 5 * WINDOW_CALLS
MEASURING = 2
# 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, Dubey et al. 2024, 3.3.4). Small
# jobs are interrupted more often by people and schedulers than by hardware: once a day.
RANK_MTTF_S = 54 * 86_400 * 16_384 / 419
JOB_MTTF_S = 86_400.0

_serial = count()


def assumed_mttf_s(ranks: int) -> float:
    """Return the mean time to a failure that is assumed of a job, in seconds, if none is given.

    It is one day, or 2,111 days / ``ranks`` if that is less.
    """
    return min(JOB_MTTF_S, RANK_MTTF_S / ranks)


class Board:
    """The place where rank 0 leaves texts for all ranks: the store of their process group.

    Each name is written once. All ranks must give the same ``prefix``, each ``Snapshots`` another.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def post(self, name: str, text: str) -> None:
        """Leave ``text`` under a name, unless there is a text of that name."""
        self._store.compare_set(f"{self._prefix}/{name}", "", text)

    def read(self, name: str) -> str:
        """Wait for the text of a name."""
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
    """A training step as measured: its time, how long it waited for a snapshot, if it had one."""

    duration_s: float
    stall_s: float
    saved: bool


@dataclass(frozen=True)
class Choice:
    """An interval with its reasons: the cost of a snapshot, and the time of a step without one."""

    every: int
    save_s: float
    step_s: float


def choose(samples: list[Sample], mttf_s: float) -> Choice | None:
    """Return the interval that costs least by the medians of measured steps; None if too few."""
    saved = [sample for sample in samples if sample.saved]
    plain = [sample.duration_s for sample in samples if not sample.saved]
    if not saved or not plain or median(plain) <= 0:
        return None
    stall_s, step_s = median(sample.stall_s for sample in saved), median(plain)
    # O_save = stall + max(0, (step with a snapshot − stall) − step without)
    slowed_s = median(sample.duration_s - sample.stall_s for sample in saved) - step_s
    save_s = stall_s + max(0.0, slowed_s)
    return Choice(best_interval(save_s, step_s, mttf_s), save_s, step_s)


class Pacing:
    """The interval between snapshots at every step; all ranks must ask for it at the same steps.

    Args:
        mttf_s: the job's mean time to a failure, in seconds; only that of rank 0 has an effect.
        board: the board of all ranks; None for a run of one.
        decides: true on rank 0.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        mttf_s: float,
        board: Board | None,
        decides: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mttf_s, self.choice = mttf_s, Choice(MEASURING, 0.0, 0.0)
        self._decided = self.choice  # adopted with the next call
        self._board, self._decides, self._clock = board, decides, clock
        self._every, self._calls, self._decisions = MEASURING, 0, 0
        self._window = SETTLING_CALLS
        self._samples: list[Sample] = []
        self._before: tuple[int, float, float] | None = None

    def every(self, step: int, stall_s: float) -> int:
        """Return the interval at ``step``; training has waited ``stall_s`` so far for snapshots."""
        self._measure(step, stall_s)
        end = self._window + WINDOW_CALLS
        if self._calls == self._window:
            self._every, self._samples = MEASURING, []
        number, decided = str(self._decisions), self._decided
        if self._calls == end and self._decides:
            decided = self._decided = choose(self._samples, self.mttf_s) or self.choice
            if self._board is not None:
                self._board.post(number, json.dumps(asdict(decided)))
        if self._calls == end + 1:
            if self._board is not None:
                decided = Choice(**json.loads(self._board.read(number)))
            self._adopt(decided)
        self._calls += 1
        self._before = step, self._clock(), stall_s
        return self._every

    def _measure(self, step: int, stall_s: float) -> None:
        if self._before is None:
            return
        last, then_s, stalled_s = self._before
        # After a rollback, or if begin() is not called at every step, this is no step's time.
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
        """Return the present interval with its reasons, and the number of decisions so far."""
        about = {"auto": True, "mttf_s": self.mttf_s, "rounds": self._decisions}
        return about | asdict(self.choice)


def resolved(
    every: int | None, interval: str | None, mttf_s: float | None
) -> tuple[int, str | None, float | None]:
    """Return the keywords as given, or else as the config file has them; ``every`` is 1 at last.

    If one of them is given, none of the others is taken from the file, except ``mttf_s``.
    """
    if every is None and interval is None and mttf_s is None:
        interval = config.value("snapshots.interval", None, None)
        if interval is None:
            every = config.value("snapshots.every", None, 1)
    if interval is not None:
        mttf_s = config.value("snapshots.mttf_s", mttf_s, None)
    return 1 if every is None else every, interval, mttf_s


def of(interval: str | None, every: int, mttf_s: float | None) -> Pacing | None:
    """Return the pacing for a user's keywords; None if the interval is fixed.

    If they contradict each other, or several ranks have no process group, raise ConfigError.
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
        return Pacing(mttf_s, None, decides=True)
    if not grouped:
        raise ConfigError(
            f"interval='auto' with {ranks} ranks: they agree through the store of "
            "torch.distributed; call init_process_group first, or give every="
        )
    # Imported here, because torch may have been built without it.
    from torch.distributed.distributed_c10d import _get_default_store

    board = Board(_get_default_store(), f"holdfast/pacing/{next(_serial)}")
    return Pacing(mttf_s, board, decides=dist.get_rank() == 0)
