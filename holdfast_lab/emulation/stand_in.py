"""CPU as the device whose products are verified as those of a GPU are, on a machine without one.

A check is queued behind each product, its verdict goes into the ledger that is read once a step,
and a step with a wrong product is repeated. The checks are the reference in plain torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast.abft import ledger
from holdfast.abft.gemm.interception import interception

CPU = torch.device("cpu")


@contextmanager
def cpu_as_device(backend: str = "aten") -> Iterator[None]:
    """Verify products on CPU as those of a device are; no model may be protected when it begins.

    Args:
        backend: Name of the checks in the native core, by default the reference in plain torch.
    """
    core = interception()
    core.intercept_device("CPU", backend)
    try:
        yield
    finally:
        core.release_device("CPU")
        core.forget_all()
        core.ledger(CPU)[0].zero_()
        ledger.settle(lambda module: False)
