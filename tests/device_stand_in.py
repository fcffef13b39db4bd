"""What CPU found as the device whose products are verified (``emulation.stand_in``)."""

import torch

from holdfast.abft.gemm.interception import interception
from holdfast.sites import site_name
from holdfast_lab.emulation.stand_in import CPU


def slots() -> dict[str, float]:
    """Return the largest ``|D| / T`` of each site so far, by its name."""
    values, sites = interception().ledger(CPU)
    ratios = values.view(torch.float32).tolist()
    return dict(zip(map(site_name, sites), ratios, strict=True))
