"""What a rank's Guard tells reports: its progress, its coverage, and where its time went."""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import nn

from holdfast.events.steps import write_summary
from holdfast.protection import coverage_of
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.step.optimizer_check import OptimizerCheck
from holdfast.step.spot_check import SpotCheck

EVERY_S = 5.0

_logger = logging.getLogger("holdfast.guard")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def timed(method: _Method) -> _Method:
    """Count the time of a Guard's method for the Guard."""

    @functools.wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._summary.timing("guard"):
            return method(self, *args, **kwargs)

    return cast(_Method, counted)


class Summary:
    """Times the parts of a Guard's steps, and writes a summary of the rank beside the ledger.

    Args:
        model: The guarded model, whose protection is reported.
        snapshots: Snapshots of the run, of which the waiting time is reported.
        optimizer_check: The check of the optimizer's updates, whose coverage is reported.
        spot: The check of the model's modules, whose coverage is reported.

    Times are those of the host: on a device, which computes meanwhile, the time of a pass is
    partly found where the Guard waits for its result.
    """

    def __init__(
        self,
        model: nn.Module,
        snapshots: Snapshots | None,
        optimizer_check: OptimizerCheck,
        spot: SpotCheck,
    ) -> None:
        self._model, self._snapshots, self._updates = model, snapshots, optimizer_check
        self._spot = spot
        self._seconds = {"guard": 0.0, "passes": 0.0, "repeats": 0.0, "optimizer": 0.0}
        self._inside: list[str] = []
        self._at_s = self._written_s = time.perf_counter()
        self._steps = 0
        self._fails = False

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time of the context for a part of the step, and not for the one around it."""
        self._count()
        self._inside.append(part)
        try:
            yield
        finally:
            self._count()
            self._inside.pop()

    def _count(self) -> None:
        now_s = time.perf_counter()
        if self._inside:
            self._seconds[self._inside[-1]] += now_s - self._at_s
        self._at_s = now_s

    def step_done(self, steps_done: int) -> None:
        """Note that a step was done, and write the summary if the last one is old."""
        self._steps += 1
        if time.perf_counter() - self._written_s >= EVERY_S:
            self.write(steps_done)

    def write(self, steps_done: int) -> None:
        """Write the summary; after a failure, of which one warning was logged, do nothing."""
        self._written_s = time.perf_counter()
        if not self._steps or self._fails:
            return
        try:
            write_summary(self._values(steps_done))
        except Exception as error:  # whatever it is, it must not cost the training
            self._fails = True
            _logger.warning("no summary for reports can be written: %s", error)

    def _values(self, steps_done: int) -> Mapping[str, object]:
        coverage, snapshots = coverage_of(self._model), self._snapshots
        values: dict[str, object] = {"step": steps_done, "steps": self._steps}
        values |= {"seconds": dict(self._seconds), "optimizers": self._updates.coverage()}
        values["modules"] = self._spot.coverage()
        if coverage is not None:
            values["coverage"] = coverage.as_dict()
        if snapshots is not None:
            values["snapshot_stall_s"] = snapshots.stall_s
            values["snapshot_bytes"] = snapshots.copied_bytes
        return values
