"""A checkpoint on demand: asked of the SMP, written by the persister, waited for here."""

import time
from pathlib import Path

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotError
from holdfast.snapshot import launch
from holdfast.snapshot.persist import Checkpoints

_SLOWEST_BYTES_S = 25 * 10**6
_POLL_S = 0.05


def persist_now(settings: launch.SmpSettings, step: int | None) -> Path:
    """Wait until ``step``, or a newer one, is on disk; its folder.

    Raises:
        ConfigError: nothing is to be persisted. SnapshotError: it could not be written; says why.
        SmpUnavailable: no SMP runs, or it was not written in time.
    """
    if settings.persist is None:
        raise ConfigError("nothing can be persisted: give Snapshots a persist_dir")
    if step is None:
        raise SnapshotError("nothing can be persisted: no snapshot was committed yet")
    status = launch.ask_persist(settings.run_dir)
    limit_s = config.timeout_s() + (status or {}).get("bytes", 0) / _SLOWEST_BYTES_S
    deadline = time.monotonic() + limit_s
    while status is not None:
        done, failed = status["persisted"], status["persist_failed"]
        if done is not None and done >= step:
            return Checkpoints(Path(settings.persist.directory)).path(done)
        if failed is not None and failed["step"] >= step:
            raise SnapshotError(f"step {failed['step']} was not persisted: {failed['error']}")
        if time.monotonic() > deadline:
            raise SmpUnavailable(
                f"step {step} was not on disk within {limit_s:g} s: see "
                f"{settings.run_dir / launch.LOG_NAME} or raise {config.TIMEOUT_VARIABLE}"
            )
        time.sleep(_POLL_S)
        status = launch.smp_status(settings.run_dir)
    raise SmpUnavailable(f"no SMP runs in {settings.run_dir}: it was lost or stopped")
