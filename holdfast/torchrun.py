"""Signals, environment variables and log of a process that runs torchrun's agent."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# torchrun 2.13 keeps one key-value store, on its first host, over all restarts of the ranks. It
# keeps addresses of ended ranks and is lost with that host, so rank 0 makes one at each restart.
OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@contextmanager
def quiet_torchrun() -> Iterator[None]:
    """Silence torchrun's report of a killed worker, which the event ledger records already."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, logger.disabled = logger.level, True
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.disabled = False
        logger.setLevel(before)


@contextmanager
def environment_of(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the context is open, then restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore this process's signal handlers, which torchrun's agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interruptible() -> None:
    """Handle SIGTERM like Ctrl-C, so that it also ends the processes of the run.

    This also works where Ctrl-C is ignored, as in background jobs of a shell script.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
