"""The settings that more than one layer reads: the one timeout and the run directory."""

import os
from pathlib import Path

from holdfast.errors import ConfigError

TIMEOUT_VARIABLE = "HOLDFAST_TIMEOUT_S"
RUN_DIR_VARIABLE = "HOLDFAST_RUN_DIR"
ADDRESS_VARIABLE = "HOLDFAST_ADDRESS"
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_RUN_DIR = "holdfast-run"


def timeout_s() -> float:
    """The longest that holdfast waits for any peer process, in seconds.

    Every wait (SMP start, snapshot commit, collective, agreement on a restore) derives from
    this one value, set by the environment variable ``HOLDFAST_TIMEOUT_S``.

    Raises:
        ConfigError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r} is not a positive number of seconds")
    return value


def run_dir(path: str | os.PathLike[str] | None = None) -> Path:
    """Where a run keeps its ledger and its SMP socket: the argument, else
    ``HOLDFAST_RUN_DIR``, else ``holdfast-run`` in the working directory."""
    return Path(path or os.environ.get(RUN_DIR_VARIABLE) or DEFAULT_RUN_DIR).absolute()


def rank() -> int:
    """This process's rank as torchrun states it (0 outside torchrun)."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many ranks the run has (1 outside torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def address() -> str:
    """The address at which other nodes reach this one, if ``HOLDFAST_ADDRESS`` says so."""
    return os.environ.get(ADDRESS_VARIABLE, "")


def master_address() -> str:
    """Where torchrun's store is, as it states it (this machine outside torchrun)."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def local_rank() -> int:
    """This process's rank on its node (0 outside torchrun)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks of the run live on this node (1 outside torchrun)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
