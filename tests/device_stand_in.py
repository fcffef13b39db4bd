"""CPU as the device whose products are verified, with the interception and ledger of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast.abft import ledger
from holdfast.abft.gemm.interception import interception

CPU = torch.device("cpu")


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """Verify products on CPU as those of a device are, with the reference in plain torch.

    No model may be protected when it begins, as the interception of CPU comes first.
    """
    core = interception()
    core.intercept_device("CPU", "aten")
    try:
        yield
    finally:
        core.release_device("CPU")
        core.ledger(CPU)[0].zero_()
        core.forget_all()
        ledger.settle(set)


def slots() -> dict[str, float]:
    """Return the largest ``|D| / T`` of each site so far, by its name."""
    from holdfast.sites import site_name

    values, sites = interception().ledger(CPU)
    ratios = values.view(torch.float32).tolist()
    return dict(zip(map(site_name, sites), ratios, strict=True))
