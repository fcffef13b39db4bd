"""The trace of a finished run in its run directory, so that none begins there again unsaid."""

import warnings
from contextlib import suppress
from pathlib import Path

from holdfast import config, events
from holdfast.events import EventKind

FINISHED_NAME = "run-finished"
_REMEDY = (
    "to continue it, give Snapshots a persist_dir and call snapshots.persist() before the run "
    "ends; for another run, use another run_dir"
)


class FinishLine:
    """The file of a run directory that holds the last step of a finished run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FINISHED_NAME

    def draw(self, step: int) -> None:
        """Note that the run ended well after ``step``."""
        if config.local_rank() == 0:
            with suppress(OSError):  # it only serves a later message
                self._path.write_text(f"{step}\n")

    def remove(self) -> None:
        """Forget the finished run, because another one has snapshots."""
        self._path.unlink(missing_ok=True)

    def say_begun_again(self, run_dir: Path) -> None:
        """Say that a run begins at step 0 where another one was finished, if one was."""
        try:
            step = int(self._path.read_text())
        except (OSError, ValueError):
            return
        if config.local_rank() > 0:
            return
        detail = {"finished_step": step, "remedy": _REMEDY}
        events.record(EventKind.BEGUN_AGAIN, detail=detail)
        warnings.warn(
            f"the run of {run_dir} was finished at step {step}, which ended the process with its "
            f"snapshots, and no checkpoint is left: training begins at step 0; {_REMEDY}",
            stacklevel=4,
        )
