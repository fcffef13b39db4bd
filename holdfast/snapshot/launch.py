"""Finding, starting, asking and stopping the SMP of a run directory."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot import transport
from holdfast.snapshot.locks import locked
from holdfast.snapshot.supervisor import PersistSettings

LOCK_NAME = "smp.lock"
LOG_NAME = "smp.log"
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class SmpSettings:
    """What an SMP is started with; every rank of a node must use the same.

    ``world_size`` counts this node's ranks, ``keep`` the clean snapshots per rank, ``linger_s``
    the seconds the SMP waits for a new trainer; ``persist`` is where its snapshots go to disk.
    """

    run_dir: Path
    world_size: int
    keep: int
    linger_s: float
    persist: PersistSettings | None = None


def find_or_start(settings: SmpSettings) -> transport.Connection:
    """A connection to the run's SMP, which is started if there is none.

    Raises:
        SmpUnavailable: it cannot be started, or does not answer within ``config.timeout_s()``.
        ConfigError: the run directory cannot be used.
    """
    _prepare(settings.run_dir)
    deadline = time.monotonic() + config.timeout_s()
    with _alone(settings.run_dir, deadline):
        connection = _connect(settings.run_dir)
        if connection is None:
            _start(settings)
            connection = _connect(settings.run_dir)
    if connection is None:
        raise SmpUnavailable(f"the SMP ended right after its start: see {_log(settings.run_dir)}")
    return connection


def smp_status(run_dir: Path) -> dict[str, Any] | None:
    """What the run's SMP holds, as JSON-ready values; None if no SMP runs there.

    Raises:
        SmpUnavailable: it does not answer within ``config.timeout_s()``.
    """
    return _ask(run_dir, "status")


def stop_smp(run_dir: Path) -> bool:
    """Ask the run's SMP to free everything and exit; whether there was one.

    Raises:
        SmpUnavailable: it does not answer within ``config.timeout_s()``.
    """
    return _ask(run_dir, "stop") is not None


def ask_persist(run_dir: Path) -> dict[str, Any] | None:
    """Let the run's SMP have its newest clean step persisted now; its status, or None if no SMP.

    Raises:
        SmpUnavailable: it does not answer within ``config.timeout_s()``.
    """
    return _ask(run_dir, "persist")


def connect_reader(run_dir: Path) -> transport.Connection | None:
    """A connection to the run's SMP for reading steps; None if no SMP runs there.

    Raises:
        SmpUnavailable: the socket cannot be used.
    """
    return _connect(run_dir) if run_dir.is_dir() else None


def _ask(run_dir: Path, verb: str) -> dict[str, Any] | None:
    connection = _connect(run_dir) if run_dir.is_dir() else None
    if connection is None:
        return None
    limit_s = config.timeout_s()
    try:
        connection.send({"verb": verb}, timeout_s=limit_s)
        header = connection.receive(timeout_s=limit_s).header
    except ConnectionError:
        return None
    except TimeoutError as error:
        raise SmpUnavailable(
            f"the SMP of {run_dir} did not answer {verb!r} within {limit_s:g} s: is it stopped?"
        ) from error
    finally:
        connection.close()
    return {key: value for key, value in header.items() if key != "verb"}


def _connect(run_dir: Path) -> transport.Connection | None:
    try:
        return transport.connect(run_dir, timeout_s=config.timeout_s())
    except OSError as error:
        raise SmpUnavailable(
            f"cannot connect to {run_dir / transport.SOCKET_NAME}: {error}; "
            "use a run_dir of your own, or stop the process that holds it"
        ) from error


def _prepare(run_dir: Path) -> None:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = run_dir.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"cannot use run_dir {run_dir}: {error.strerror}; choose another"
        ) from error
    if owner != os.geteuid():
        raise ConfigError(
            f"run_dir {run_dir} belongs to user {owner}, not to {os.geteuid()}: choose another"
        )


@contextmanager
def _alone(run_dir: Path, deadline: float) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run_dir / LOCK_NAME, deadline))
        except TimeoutError as error:
            raise SmpUnavailable(
                f"{run_dir / LOCK_NAME} was locked for {config.timeout_s():g} s: "
                "another rank hangs while it starts the SMP; end it"
            ) from error
        yield


def _start(settings: SmpSettings) -> None:
    command = [sys.executable, "-m", "holdfast.snapshot.smp"]
    command += ["--run-dir", str(settings.run_dir), "--world-size", str(settings.world_size)]
    command += ["--keep", str(settings.keep), "--linger-s", str(settings.linger_s)]
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(_log(settings.run_dir), "ab") as log:
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
    _wait_started(starter, settings.run_dir)


def _wait_started(starter: subprocess.Popen[bytes], run_dir: Path) -> None:
    # The starter waits timeout_s for the daemon itself; its own start comes on top.
    try:
        code = starter.wait(2 * config.timeout_s())
    except subprocess.TimeoutExpired:
        starter.kill()
        code = starter.wait()
    if code != 0:
        tail = _log(run_dir).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        last = tail.splitlines()[-1] if tail else "no output"
        raise SmpUnavailable(f"the SMP did not start ({last}): see {_log(run_dir)}")


def _log(run_dir: Path) -> Path:
    return run_dir / LOG_NAME
