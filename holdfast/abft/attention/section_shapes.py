"""Layout of heads in memory, and the rotation of queries and keys by their positions."""

from typing import NamedTuple

import torch


class Heads(NamedTuple):
    """Heads of one call: ``groups`` query heads share each of ``shared`` key and value heads.

    The queries of a group are stacked along the rows, so that one product per key head serves all
    of them and no key is repeated in memory.
    """

    batch: int
    shared: int
    groups: int
    size: int

    def split(self, flat: torch.Tensor, groups: int) -> torch.Tensor:
        """Split [batch · length, heads · size] into [batch · shared, groups · length, size]."""
        length = flat.shape[0] // self.batch if self.batch else 0
        apart = flat.view(self.batch, length, self.shared, groups, self.size)
        by_head = apart.permute(0, 2, 3, 1, 4)
        return by_head.reshape(self.batch * self.shared, groups * length, self.size)

    def merge(self, by_head: torch.Tensor, groups: int) -> torch.Tensor:
        """Merge [batch · shared, groups · length, size] into [batch · length, heads · size]."""
        length = by_head.shape[1] // groups
        apart = by_head.view(self.batch, self.shared, groups, length, self.size)
        return apart.permute(0, 3, 1, 2, 4).reshape(
            self.batch * length, self.shared * groups * self.size
        )

    def whole(self, scores: torch.Tensor) -> torch.Tensor:
        """View [batch · shared, groups · length, keys] as [batch, heads, length, keys]."""
        heads, length = self.shared * self.groups, scores.shape[1] // self.groups
        return scores.view(self.batch, heads, length, scores.shape[2])


class Rotary(NamedTuple):
    """Rotary position embedding: cosines and sines, [length, size] each."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def turn(self, by_head: torch.Tensor, groups: int, *, back: bool = False) -> torch.Tensor:
        """Rotate (or rotate back) the vectors of [.., groups · length, size]."""
        cosine, sine = self.cosine.repeat(groups, 1), self.sine.repeat(groups, 1)
        lower, upper = by_head.chunk(2, -1)
        turned = torch.cat([-upper, lower], -1)
        return by_head * cosine - turned * sine if back else by_head * cosine + turned * sine


def rotary(first: int, length: int, size: int, base: float, dtype: torch.dtype) -> Rotary:
    """Compute the rotation of positions first … first + length − 1, in half-split order (GPT-NeoX).

    Element i of the lower half and element i of the upper half turn together by the angle
    ``position · base^(−2 i / size)``; angles are computed in fp64.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    positions = torch.arange(first, first + length, dtype=torch.float64)
    angles = torch.outer(positions, base**-exponents).repeat(1, 2)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))
