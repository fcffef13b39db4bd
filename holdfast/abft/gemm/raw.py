"""Products that are not intercepted, as their operator checks them itself."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from holdfast import native


@contextmanager
def raw() -> Iterator[None]:
    """Compute this thread's products in the block by torch alone, without interception.

    Autocast is turned off, as the operands have been converted to its dtype before.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if native.core is not None:
            native.core.change_thread_bypass(1)
            stack.callback(native.core.change_thread_bypass, -1)
        yield
