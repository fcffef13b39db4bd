"""Finding, starting, asking and stopping the SMP of a run directory."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot.node import host
from holdfast.snapshot.node.locks import locked
from holdfast.snapshot.node.status_fields import unlike_a_status
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.roster import ProtocolViolation
from holdfast.snapshot.transport import frames, local

# JSON-ready values, as ``smp.Server.status`` gives them.
Status = dict[str, Any]

LOCK_NAME = "smp.lock"
LOG_NAME = "smp.log"
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class SmpSettings:
    """The settings of an SMP; all ranks of a node must use the same.

    Attributes:
        run_dir: the directory that identifies the run on this node.
        world_size: the number of ranks on this node.
        keep: the number of clean snapshots kept for each rank.
        linger_s: how long the SMP waits for a new trainer, in seconds.
        persist: where checkpoints are written and how often; None if none are.
    """

    run_dir: Path
    world_size: int
    keep: int
    linger_s: float
    persist: PersistSettings | None = None


def find_or_start(settings: SmpSettings) -> frames.SmpConnection:
    """Return a connection to the run's SMP; start one if none runs.

    Raises:
        SmpUnavailable: it cannot be started, or does not answer within ``config.timeout_s()``.
        ConfigError: the run directory cannot be used.
    """
    prepare(settings.run_dir)
    lock = settings.run_dir / LOCK_NAME
    late = SmpUnavailable(
        f"{lock} was locked for {config.timeout_s():g} s: another rank hangs while it starts the "
        "SMP; end it"
    )
    log = _log(settings.run_dir)
    advice = (
        f"the SMP is stopped, or another of the {settings.world_size} local ranks does not do the "
        f"same; see {log} or raise {config.TIMEOUT_VARIABLE}"
    )
    with locked(lock, late):
        connection = connect(settings.run_dir, advice)
        if connection is None:
            _start(settings)
            connection = connect(settings.run_dir, advice)
    if connection is None:
        raise SmpUnavailable(f"the SMP ended right after its start: see {log}")
    return connection


def smp_status(run_dir: Path) -> Status | None:
    """Return the status of the run's SMP as JSON-ready values; None if no SMP runs there.

    Raises:
        SmpUnavailable: it does not answer within ``config.timeout_s()``, or it is no SMP that
            answers.
    """
    try:
        status = _ask(run_dir, "status")
    except ProtocolViolation as error:
        raise _no_smp(run_dir, str(error)) from error
    if status is not None and (wrong := unlike_a_status(status)):
        raise _no_smp(run_dir, wrong)
    return status


def _no_smp(run_dir: Path, what: str) -> SmpUnavailable:
    return SmpUnavailable(f"what listens at the socket of {run_dir} is no SMP: {what}")


def stop_smp(run_dir: Path) -> bool:
    """Ask the run's SMP to free everything and exit; return false if none runs."""
    return _ask(run_dir, "stop") is not None


def ask_persist(run_dir: Path) -> Status | None:
    """Have the newest clean step persisted now; return the SMP's status, or None if none runs."""
    return _ask(run_dir, "persist")


def connect(run_dir: Path, advice: str = "") -> frames.SmpConnection | None:
    """Return a connection to the run's SMP; None if no SMP runs there.

    ``advice`` is for the error that is raised if the SMP does not answer.
    """
    if not run_dir.is_dir():
        return None
    try:
        connection = local.connect(run_dir, timeout_s=config.timeout_s())
    except OSError as error:
        raise SmpUnavailable(
            f"cannot connect to {run_dir / frames.SOCKET_NAME}: {error}; "
            "use a run_dir of your own, or stop the process that holds it"
        ) from error
    advice = advice or f"the SMP of {run_dir} may be stopped: see {_log(run_dir)}"
    return None if connection is None else frames.SmpConnection(connection, advice)


def _ask(run_dir: Path, verb: str) -> Status | None:
    connection = connect(run_dir)
    if connection is None:
        return None
    try:
        connection.send(verb)
        header = connection.receive().header
    except ConnectionError:
        return None
    finally:
        connection.close()
    return {key: value for key, value in header.items() if key != "verb"}


def prepare(run_dir: Path) -> None:
    """Make the run directory, with its lock and its log.

    Raises:
        ConfigError: it cannot be used, or belongs to another user.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = run_dir.stat().st_uid
        for name in (LOCK_NAME, LOG_NAME):
            with open(run_dir / name, "ab"):  # the storage may be read-only
                pass
    except OSError as error:
        raise ConfigError(
            f"cannot use run_dir {run_dir}: {error.strerror}; choose another"
        ) from error
    if owner != os.geteuid():
        raise ConfigError(
            f"run_dir {run_dir} belongs to user {owner}, not to {os.geteuid()}: choose another"
        )


def _start(settings: SmpSettings) -> None:
    arguments = ["--run-dir", str(settings.run_dir), "--world-size", str(settings.world_size)]
    arguments += ["--keep", str(settings.keep), "--linger-s", str(settings.linger_s)]
    code = host.ask(settings.run_dir, arguments, 2 * config.timeout_s())
    if code is None:
        with open(_log(settings.run_dir), "ab") as log:
            code = _wait_started(host.spawn(arguments, log))
    if code != 0:
        tail = _log(settings.run_dir).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        last = tail.strip().splitlines()[-1] if tail.strip() else "no output"
        raise SmpUnavailable(f"the SMP did not start ({last}): see {_log(settings.run_dir)}")


def _wait_started(starter: subprocess.Popen[bytes]) -> int:
    # The process waits timeout_s for its daemon, and its own start takes some time as well.
    try:
        return starter.wait(2 * config.timeout_s())
    except subprocess.TimeoutExpired:
        starter.kill()
        return starter.wait()


def _log(run_dir: Path) -> Path:
    return run_dir / LOG_NAME
