"""The surroundings of torchrun's agent in this process: signals, environment, log."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# torchrun 2.13 keeps one store over all lives of the ranks, on the host that was first: with the
# addresses of the dead in it, and gone with that host. So rank 0 makes one for each life.
OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@contextmanager
def quiet_torchrun() -> Iterator[None]:
    """Silence torchrun's own report of a killed worker: the ledger says it on one line."""
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
    """Set some environment variables while the context lasts."""
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
    """Put the signal handlers back that torchrun's agent takes over."""
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
    """Let SIGTERM end a run like Ctrl-C does, so that its processes are ended too.

    Also where Ctrl-C is ignored, as in the background jobs of a shell script.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
