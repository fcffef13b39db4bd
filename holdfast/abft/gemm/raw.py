"""Products that an operator checks itself: torch's own, not intercepted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from holdfast import native


@contextmanager
def raw() -> Iterator[None]:
    """Compute this thread's products within the block by torch alone, not intercepted.

    Autocast is turned off, as operands were converted to its dtype before.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if native.core is not None:
            native.core.change_thread_bypass(1)
            stack.callback(native.core.change_thread_bypass, -1)
        yield
