"""Convolutions of every kind, and the values with which they are filled."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
T2 = nn.ConvTranspose2d

# A layer, and the shape of its images.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (partial(nn.Conv1d, 8, 32, 5, padding=2), (16, 8, 20)),
    "2d": (partial(nn.Conv2d, 16, 32, 3, padding=1), (16, 16, 9, 9)),
    "stem": (partial(nn.Conv2d, 3, 16, 7, 2, 3, bias=False), (20, 3, 17, 17)),
    "1x1": (partial(nn.Conv2d, 32, 64, 1), (16, 32, 7, 7)),
    "1x1, stride 2": (partial(nn.Conv2d, 32, 16, 1, 2), (3, 32, 9, 9)),
    "2d, channels last": (partial(nn.Conv2d, 16, 32, 3, 2, 1), (16, 16, 10, 10)),
    "dilated": (partial(nn.Conv2d, 8, 16, 3, dilation=2), (16, 8, 12, 12)),
    "grouped": (partial(nn.Conv2d, 16, 32, 3, padding=1, groups=4), (16, 16, 8, 8)),
    "depthwise": (partial(nn.Conv2d, 24, 24, 3, padding=1, groups=24), (16, 24, 8, 8)),
    "3d": (partial(nn.Conv3d, 4, 8, 3, padding=1), (16, 4, 5, 6, 7)),
    "3d, channels last": (partial(nn.Conv3d, 4, 8, 3, 2), (16, 4, 7, 7, 7)),
    "transposed": (partial(T2, 16, 24, 3, 2, 1, 1), (16, 16, 7, 7)),
    "transposed 1d": (partial(nn.ConvTranspose1d, 8, 16, 4, 2), (16, 8, 11)),
    "transposed, grouped": (partial(T2, 16, 16, 3, groups=4, dilation=2), (16, 16, 6, 6)),
    "transposed, dilated": (partial(T2, 8, 16, 3, 1, 0, 2, dilation=3), (16, 8, 6, 6)),
    "transposed 3d": (partial(nn.ConvTranspose3d, 4, 8, 2, 2, bias=False), (16, 4, 3, 4, 5)),
    "few images": (partial(nn.Conv2d, 16, 128, 3, padding=1), (2, 16, 9, 9)),
    "one image": (partial(nn.Conv2d, 8, 64, 3), (1, 8, 10, 10)),
    "few, grouped": (partial(nn.Conv2d, 32, 128, 3, groups=2), (2, 32, 6, 6)),
    "few, transposed": (partial(T2, 128, 128, 3, 2, groups=2), (2, 128, 5, 5)),
}


def scaled(values: torch.Tensor, dim: int, low: float, high: float) -> torch.Tensor:
    """Values times powers of ten along a dimension."""
    powers = 10.0 ** torch.linspace(low, high, values.shape[dim])
    return values * powers.view([-1 if each == dim else 1 for each in range(values.dim())])


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda v: v,
    "all equal": lambda v: torch.full_like(v, 0.1),
    "positive": lambda v: v.abs(),
    "rectified": lambda v: v.relu() + 0.3,
    "one huge": lambda v: torch.where(v == v.max(), 1e12, v),
    "zeros": torch.zeros_like,
    "denormal": lambda v: v * 1e-40,
    "tiny": lambda v: v * 1e-22,
    "mixed scales": lambda v: v * torch.exp(4 * torch.randn_like(v)),
    "channels of 1e-20 to 1e15": lambda v: scaled(v, 1, -20, 15),
    "images of 1e-10 to 1e10": lambda v: scaled(v, 0, -10, 10),
    "equal images": lambda v: v[:1].expand_as(v),
}


class Setting:
    """A layer, images and a gradient of its output."""

    def __init__(
        self, name: str, dtype: torch.dtype, distribution: str = "normal", weights: str = "normal"
    ) -> None:
        torch.manual_seed(0)
        make, shape = KINDS[name]
        layout = torch.contiguous_format
        if "last" in name:
            layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        self.layer, fill = make(), DISTRIBUTIONS[distribution]
        with torch.no_grad():
            self.layer.weight.copy_(DISTRIBUTIONS[weights](self.layer.weight.clone()))
        self.layer.to(dtype=dtype, memory_format=layout)
        images = fill(torch.randn(shape)).to(dtype)
        self.images = images.contiguous(memory_format=layout).requires_grad_()
        with torch.no_grad():
            self.gradient = fill(torch.randn(self.layer(self.images).shape)).to(dtype)

    def run(self) -> list[torch.Tensor]:
        """The output, and the gradients of images, weight and bias."""
        output = self.layer(self.images)
        operands = [self.images, *self.layer.parameters()]
        return [output.detach(), *torch.autograd.grad(output, operands, self.gradient)]
