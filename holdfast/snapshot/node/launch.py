"""Finding, starting, asking and stopping the SMP of a run directory."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot.node import host
from holdfast.snapshot.node.locks import locked
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.roster import ProtocolViolation, fitted
from holdfast.snapshot.transport import frames, local

# JSON-ready values, as ``smp.Server.status`` gives them.
Status = dict[str, Any]

LOCK_NAME = "smp.lock"
LOG_NAME = "smp.log"
FINISHED_NAME = "run-finished"  # in the run directory: the last step of a run that ended well
_LOG_TAIL_BYTES = 2000
_KINDS: dict[Any, str] = {
    int: "pid commits aborts bytes refused",
    list: "steps clean connected leased",
    float: "uptime_s stall_s",
    float | None: "age_s copy_bytes_s",
    dict | None: "cluster persister persist_failed",
    int | None: "newest",
    dict: "peers",
    str: "state",
}
_StatusFields = msgspec.defstruct(
    "Status", [(name, kind) for kind, names in _KINDS.items() for name in names.split()]
)


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
    lock, log = settings.run_dir / LOCK_NAME, settings.run_dir / LOG_NAME
    late = SmpUnavailable(
        f"{lock} was locked for {config.timeout_s():g} s: another rank hangs while it starts the "
        "SMP; end it"
    )
    advice = (
        f"the SMP is stopped, or another of the {settings.world_size} local ranks does not do the "
        f"same; see {log} or raise {config.TIMEOUT_VARIABLE}"
    )
    with locked(lock, late):
        if (connection := connect(settings.run_dir, advice)) is None:
            _start(settings, log)
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
        if status is not None:
            fitted(status, _StatusFields)
    except ProtocolViolation as error:
        raise SmpUnavailable(
            f"what listens at the socket of {run_dir} is no SMP: {error}"
        ) from error
    return status


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
    advice = advice or f"the SMP of {run_dir} may be stopped: see {run_dir / LOG_NAME}"
    return None if connection is None else frames.SmpConnection(connection, advice)


def _ask(run_dir: Path, verb: str) -> Status | None:
    if (connection := connect(run_dir)) is None:
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


def _start(settings: SmpSettings, log: Path) -> None:
    arguments = ["--run-dir", str(settings.run_dir), "--world-size", str(settings.world_size)]
    arguments += ["--keep", str(settings.keep), "--linger-s", str(settings.linger_s)]
    # The process waits timeout_s for its daemon, and its own start takes some time as well.
    limit_s = 2 * config.timeout_s()
    code = host.ask(settings.run_dir, arguments, limit_s)
    if code is None:
        with open(log, "ab") as file:
            starter = host.spawn(arguments, file)
        try:
            code = starter.wait(limit_s)
        except subprocess.TimeoutExpired:
            starter.kill()
            code = starter.wait()
    if code != 0:
        tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        last = tail.splitlines()[-1] if tail else "no output"
        raise SmpUnavailable(f"the SMP did not start ({last}): see {log}")
