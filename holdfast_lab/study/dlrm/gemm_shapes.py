"""The layers whose products the DLRM paper measures, and operands for them.

The paper prints one of its 28 shapes, (1, 800, 3200). FBGEMM's own benchmarks of 8-bit products
have a list of exactly 28 shapes that contains it. They draw A from 0 … 5 and B from −4 … 4, so that
a sixth of the activations is zero. With these operands, and eight shapes of a single row, 4.8 % of
the flips in B do not change the result, which is the share that the paper's table II does not
detect.
"""

from dataclasses import dataclass

import torch

from holdfast.abft.int8_gemm.weights import Int8Weights

# (m, n, k): rows of A, columns of B, and the inner dimension.
SHAPES: tuple[tuple[int, int, int], ...] = (
    *((1, 128, 512), (1, 1024, 256), (1, 2048, 512), (1, 4096, 1024)),
    *((6, 256, 1024), (6, 256, 2048), (6, 512, 512), (6, 1024, 256), (6, 2048, 256)),
    *((6, 2048, 512), (6, 4096, 256), (6, 4096, 1024), (6, 4096, 2048)),
    *((10, 2048, 256), (10, 4096, 1024), (20, 2048, 256), (20, 4096, 1024)),
    *((102, 1024, 512), (102, 2323, 256), (102, 512, 256)),
    *((1, 800, 3200), (1, 800, 8000), (16, 256, 1500), (16, 256, 1567)),
    *((1, 128, 2876), (16, 128, 1567), (1, 128, 2722), (16, 256, 512)),
)
TINY = ((1, 20, 30), (3, 33, 16))


@dataclass(frozen=True)
class Data:
    """The bounds between which operands are drawn uniformly."""

    name: str
    a: tuple[int, int]
    b: tuple[int, int]

    def draw_a(self, m: int, k: int, generator: torch.Generator) -> torch.Tensor:
        """Draw activations, uint8 [m, k]."""
        low, high = self.a
        return torch.randint(low, high + 1, (m, k), dtype=torch.uint8, generator=generator)

    def pack(self, n: int, k: int, encoding: str, generator: torch.Generator) -> Int8Weights:
        """Pack a weight with a bias and one scale."""
        low, high = self.b
        weight = torch.randint(low, high + 1, (n, k), dtype=torch.int8, generator=generator)
        bias = torch.randn(n, generator=generator)
        return Int8Weights(weight, 0.01, bias=bias, encoding=encoding)


BENCHMARK = Data("A 0…5, B −4…4, as FBGEMM's benchmarks", (0, 5), (-4, 4))
UNIFORM = Data("all of uint8 and int8", (0, 255), (-128, 127))
