"""DLRM (Naumov et al. 2019): dense features, embedding bags, their interaction, a click's odds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.nn import Int8EmbeddingBag, Int8Linear, pool_bags

# Rows of the 26 categorical features of the Criteo Kaggle data, in its own order.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

Bag = tuple[torch.Tensor, torch.Tensor]  # indices [count], offsets [batch]


@dataclass(frozen=True)
class Sizes:
    """What the model is made of.

    Args:
        rows: of each table; width: of each row.
        dense: continuous features; bottom, top: outputs of the linear layers before and after the
            interaction, of which bottom's last is ``width`` and top's last is 1.
    """

    rows: tuple[int, ...]
    width: int = 64
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (1024, 512, 256, 1)

    @classmethod
    def criteo(cls, most_rows: int) -> "Sizes":
        """The 26 tables of the Criteo Kaggle data, none of more than ``most_rows``."""
        return cls(tuple(min(rows, most_rows) for rows in CRITEO_ROWS))


class Dlrm(nn.Module):
    """Click probabilities [batch] of dense features [batch, dense] and a bag for each table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, sizes.width, mode="sum") for rows in sizes.rows
        )
        for table in self.tables:
            spread = len(table.weight) ** -0.5
            nn.init.uniform_(table.weight, -spread, spread)
        self.bottom = _layers(sizes.dense, sizes.bottom)
        vectors = len(sizes.rows) + 1
        self.top = _layers(sizes.width + vectors * (vectors - 1) // 2, sizes.top)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: torch.Tensor, bags: Sequence[Bag]) -> torch.Tensor:
        """See the class."""
        features = self.bottom(dense)
        looked_up = self._looked_up(bags)
        vectors = torch.stack([features, *looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = self.pairs
        together = torch.cat([features, products[:, rows, columns]], dim=1)
        return torch.sigmoid(self.top(together)).squeeze(1)

    def _looked_up(self, bags: Sequence[Bag]) -> list[torch.Tensor]:
        tables = list(self.tables)
        if isinstance(tables[0], Int8EmbeddingBag):
            return pool_bags(tables, bags)  # 26 calls would take longer than what they do
        return [table(*bag) for table, bag in zip(tables, bags, strict=True)]


def _layers(inputs: int, outputs: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in outputs:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers[:-1])


def quantised(model: Dlrm) -> Dlrm:
    """The model, changed in place: 8-bit tables and linear layers that verify themselves."""
    for index, table in enumerate(model.tables):
        model.tables[index] = Int8EmbeddingBag.from_float(table, name=f"tables.{index}")
    for layers in (model.bottom, model.top):
        for index, layer in enumerate(layers):
            if isinstance(layer, nn.Linear):
                layers[index] = Int8Linear.from_float(layer)
    return model.eval()
