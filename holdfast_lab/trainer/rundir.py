"""Run directories, each of which one run at a time may use."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from holdfast import events
from holdfast.errors import ConfigError
from holdfast.events.ledger import try_lock
from holdfast.inject.schedule import Fault, dump_schedule, load_schedule
from holdfast.report.run_files import LOCK_NAME, METRICS_NAME, SCHEDULE_NAME, SETTINGS_NAME
from holdfast.snapshot.node.launch import smp_status
from holdfast_lab.trainer.gpt import GPT
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.worker import CHECKPOINTS_NAME, result_path

RESERVE_BYTES = 8 * 2**20  # for the ledger, metrics and logs, beside the weights


@contextmanager
def claimed(
    run_dir: Path, settings: Settings, faults: Sequence[Fault], *, resume: bool
) -> Iterator[list[Fault]]:
    """Hold a run directory for one run at a time, and yield the schedule in force.

    A new directory is filled before other processes can see it. With ``resume`` the schedule is the
    run's own, otherwise ``faults``.

    Raises:
        ConfigError: The directory is in use, holds a run already or none to resume, lacks space, or
            cannot be written. It is left as it was, except for an empty lock file.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise _unusable(run_dir, error) from error
    try:
        if not try_lock(descriptor):
            raise ConfigError(
                f"another run is using {run_dir}: wait for it, or give another --run-dir"
            )
        if resume:
            _check_resumable(run_dir, settings, faults)
        else:
            _check_free(run_dir, settings)
            _fill(run_dir, settings, faults)
        schedule = run_dir / SCHEDULE_NAME
        yield load_schedule(schedule) if schedule.exists() else []
    finally:
        os.close(descriptor)


def _check_resumable(run_dir: Path, settings: Settings, faults: Sequence[Fault]) -> None:
    if not (run_dir / SETTINGS_NAME).exists():
        raise ConfigError(f"{run_dir} holds no run to resume: start it without --resume")
    ours, theirs = asdict(settings), asdict(Settings.load(run_dir))
    for name, value in ours.items():
        if value != theirs[name]:
            raise ConfigError(
                f"{run_dir} holds a run with other settings, {name} = {theirs[name]!r} and not "
                f"{value!r}: resume it with its own"
            )
    schedule = run_dir / SCHEDULE_NAME
    stored = load_schedule(schedule) if schedule.exists() else []
    if faults and dump_schedule(faults) != dump_schedule(stored):
        raise ConfigError(f"{run_dir} holds a run with another schedule: resume without --schedule")
    if all(result_path(run_dir, rank).exists() for rank in range(settings.ranks)):
        raise ConfigError(f"the run in {run_dir} is finished: start another in another --run-dir")
    if settings.nodes > 1:
        raise ConfigError(
            f"the hosts of the run in {run_dir} ended with its launcher, and their memory with "
            "them: start it anew in another --run-dir"
        )
    held = smp_status(run_dir) is not None or _persisted(run_dir, settings)
    if settings.mode != "guarded" or not held:
        raise ConfigError(
            f"no snapshots of the {settings.mode} run in {run_dir} are held, for an SMP ends some "
            "time after its trainer: start it anew in another --run-dir"
        )


def _persisted(run_dir: Path, settings: Settings) -> bool:
    return bool(settings.persist_every and any((run_dir / CHECKPOINTS_NAME).glob("step-*")))


def _check_free(run_dir: Path, settings: Settings) -> None:
    """Check that the directory has no other run and that there is room for this one."""
    if (run_dir / SETTINGS_NAME).exists():
        raise ConfigError(f"{run_dir} already holds a run: give another --run-dir, or --resume it")
    for name in (SCHEDULE_NAME, events.LEDGER_NAME, METRICS_NAME):
        if (run_dir / name).exists():
            raise ConfigError(
                f"{run_dir} holds {name} of something else: give another --run-dir, or remove it"
            )
    for path in run_dir.glob("host-*"):
        raise ConfigError(f"{path} is of another run: give another --run-dir, or remove it")
    status = smp_status(run_dir)
    if status is not None:
        raise ConfigError(
            f"an SMP (process {status['pid']}) with snapshots of {len(status['clean'])} ranks "
            f"serves {run_dir}: give another --run-dir, or end it"
        )
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in GPT(settings.model).parameters())
    free, needed = shutil.disk_usage(run_dir).free, weights + RESERVE_BYTES
    if free < needed:
        raise ConfigError(
            f"{run_dir} has {free} bytes of disk left and a run needs about {needed}: free some, "
            "or give another --run-dir"
        )


def _fill(run_dir: Path, settings: Settings, faults: Sequence[Fault]) -> None:
    try:
        if faults:
            (run_dir / SCHEDULE_NAME).write_text(dump_schedule(faults))
        events.Ledger(run_dir / events.LEDGER_NAME).close()
        settings.save(run_dir)  # must be last: with settings, the directory counts as a run
    except (OSError, ConfigError) as error:
        _empty(run_dir)
        raise error if isinstance(error, ConfigError) else _unusable(run_dir, error) from error


def _empty(run_dir: Path) -> None:
    ledger = [events.LEDGER_NAME + suffix for suffix in ("", "-wal", "-shm", "-journal")]
    for name in (SCHEDULE_NAME, f"{SETTINGS_NAME}.part", *ledger):
        with suppress(OSError):
            (run_dir / name).unlink(missing_ok=True)


def _unusable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {run_dir} as run directory: {error.strerror}; give another --run-dir"
    )
