"""What CPU found as the device whose products are verified (``emulation.stand_in``)."""

import torch
from struck import Hook, armed

import holdfast
from holdfast.abft.gemm.interception import interception
from holdfast.sites import site_name
from holdfast_lab.emulation.stand_in import CPU, cpu_as_device


def slots() -> dict[str, float]:
    """Return the largest ``|D| / T`` of each site so far, by its name."""
    values, sites = interception().ledger(CPU)
    ratios = values.view(torch.float32).tolist()
    return dict(zip(map(site_name, sites), ratios, strict=True))


def verdicts(backend: str, dtype: torch.dtype, hook: Hook, *, shared: bool) -> list[float]:
    """Return ``|D| / T`` of Y, dW and dX of a layer without a bias, whose dW torch computes first.

    The hook sees the products of its second step. Without ``shared`` nothing is known in backward
    of what was read in forward, so that each check reads its own operands.
    """
    generator = torch.Generator().manual_seed(7)
    x, weight, upstream = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((40, 24), (16, 24), (40, 16))
    )
    layer, x = torch.nn.Linear(24, 16, bias=False, dtype=dtype), x.requires_grad_()
    layer.weight.data.copy_(weight)
    with cpu_as_device(backend), holdfast.protect(layer):
        layer(x).backward(upstream)
        with armed(hook):
            output = layer(x)
            if not shared:
                interception().forget_all()
            output.backward(upstream.clone())
        found = slots()
        interception().ledger(CPU)[0].zero_()  # else the end of the protection refuses it
    return [found[f"Linear/mm/{role}"] for role in ("forward", "grad_b", "grad_a")]
