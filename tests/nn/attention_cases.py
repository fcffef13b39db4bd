"""The attention that the tests of the module share."""

from typing import Any

import torch

from holdfast.nn import Attention

BATCH, WIDTH, HEADS = 2, 16, 4


def made(dtype: torch.dtype = torch.float32, **settings: Any) -> Attention:
    """A small module, with the same weights every time."""
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS, dtype=dtype, **settings)


def data(
    length: int, width: int = WIDTH, *, dtype: torch.dtype = torch.float32, seed: int = 1
) -> torch.Tensor:
    """[BATCH, length, width], the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, width, generator=generator).to(dtype)
