"""The verified linear layer: torch's numbers, and a fault that does not get through."""

import torch
from case_loops import for_each
from struck import kinds, same_bits, struck
from torch.nn import functional

from holdfast import events
from holdfast.nn import Linear


@for_each("bias", [True, False])
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_computes_what_torch_does(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Linear(6, 5, bias=bias, dtype=dtype)
    x = torch.randn(2, 3, 6, dtype=dtype)
    exact = functional.linear(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    torchs = (functional.linear(x, layer.weight, layer.bias).double() - exact).abs().max()
    ours = (layer(x).double() - exact).abs().max()
    assert ours <= 2 * torchs + torch.finfo(dtype).eps
    assert events.recent() == []


def test_a_fault_is_repaired_forward_and_backward() -> None:
    torch.manual_seed(0)
    layer, x = Linear(6, 5), torch.randn(4, 6, requires_grad=True)

    def run() -> list[torch.Tensor]:
        output = layer(x)
        return [output, *torch.autograd.grad(output.sum(), [x, *layer.parameters()])]

    healthy = run()
    for nth in range(3):
        with struck((0, 0), torch.inf, nth=nth) as strike:
            repaired = run()
        assert same_bits(repaired, healthy)
        assert len(strike.seen) == 3
    assert kinds() == ["gemm_fault"] * 3
