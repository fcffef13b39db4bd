"""Replacing an SMP as soon as it is lost, and not only when this rank needs it next.

Ranks of other nodes may wait for what the lost SMP was to tell theirs, while this rank waits for
those ranks in a collective of the training. Nobody would go on before a timeout.
"""

from collections.abc import Callable
from threading import Event, Thread
from weakref import WeakMethod

POLL_S = 0.2


class SmpWatch:
    """A thread that looks every 0.2 seconds whether the SMP is lost.

    Args:
        replace: replaces the SMP if it is lost and no other thread talks to it; the method of an
            object whose end also ends this thread.
    """

    def __init__(self, replace: Callable[[], None]) -> None:
        self._ended = Event()
        arguments = WeakMethod(replace), self._ended
        Thread(target=_look, args=arguments, name="holdfast-smp-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread soon."""
        self._ended.set()


def _look(replace: "WeakMethod[Callable[[], None]]", ended: Event) -> None:
    while not ended.wait(POLL_S) and (alive := replace()) is not None:
        alive()
        del alive
