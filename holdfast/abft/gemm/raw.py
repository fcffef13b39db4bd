"""Products of an op's own that are nobody else's site: torch's, neither verified nor struck."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdfast import native


@contextmanager
def raw() -> Iterator[None]:
    """Inside, this thread's products are torch's own: the op checks its products itself.

    Autocast is off: the operands are in its dtype already, and so are to be what comes of them.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if native.core is None:
            stack.enter_context(_disable_current_modes())
        else:
            native.core.change_thread_bypass(1)
            stack.callback(native.core.change_thread_bypass, -1)
        yield
