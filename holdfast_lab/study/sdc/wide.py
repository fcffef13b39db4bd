"""A matrix product as wide as the paper's, and which thresholds detect a node's wrong values.

Each bound grows with the inner dimension at its own rate, so that results of a small model do not
hold at the width of the paper's.
"""

from dataclasses import dataclass

import torch

from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.inject.statistics import Rate
from holdfast_lab.emulation.profile import SUBMODULES, TRAINING, NodeProfile
from holdfast_lab.emulation.strike import count_wrong, wrong_values
from holdfast_lab.study.vabft.residuals import WEIGHTS, Residuals, exceeds, residuals

WEIGHT_STD = 0.02  # standard deviation of a GPT's weights; activations are normalised
BOUND_RMS = 1.0  # default of the unhealthy device


@dataclass(frozen=True)
class Wide:
    """A clean product, its residuals, and the values of every threshold, fp64 [M]."""

    c: torch.Tensor
    residuals: Residuals
    thresholds: dict[str, torch.Tensor]

    @classmethod
    def make(cls, rows: int, width: int, generator: torch.Generator) -> "Wide":
        """Compute ``[rows, width] · [width, width]`` in fp32."""
        a = torch.randn(rows, width, generator=generator)
        b = WEIGHT_STD * torch.randn(width, width, generator=generator)
        c = a @ b
        product = Product(a, b, c, torch.float32)
        bounds = {name: member(product) for name, member in REGISTRY.items()}
        return cls(c, residuals(a, b, c), bounds)

    def lines(self) -> dict[str, float]:
        """Return the mean threshold in units of the product's rms; smaller errors are not found."""
        rms = float(self.c.double().square().mean().sqrt())
        return {name: float(bound.mean()) / rms for name, bound in self.thresholds.items()}

    def false_alarms(self) -> dict[str, int]:
        """Count the clean rows over each threshold."""
        return {
            name: int(exceeds(bound, self.residuals[REGISTRY[name].weights]).sum())
            for name, bound in self.thresholds.items()
        }

    def seen(self, profile: NodeProfile, calls: int, generator: torch.Generator) -> dict[str, Rate]:
        """Count the wrong calls of a node in which some row exceeds a threshold.

        A call has as many wrong values as the paper's frequency gives, but at least one. The
        submodules take turns. Thresholds are those of the clean product.
        """
        found = dict.fromkeys(REGISTRY, 0)
        for call in range(calls):
            submodule = SUBMODULES[call % len(SUBMODULES)]
            (frequency,) = profile.frequencies(submodule, 1, TRAINING)
            (severity,) = profile.severities(submodule, 1)
            count = max(1, count_wrong(self.c.numel(), frequency, generator))
            wrong = wrong_values(self.c, count, severity, BOUND_RMS, generator)
            rows, columns = torch.unravel_index(wrong.places, self.c.shape)
            errors = wrong.after.double() - wrong.before.double()
            for name, bound in self.thresholds.items():
                weights = REGISTRY[name].weights
                moved = self.residuals[weights].index_add(
                    0, rows, errors * WEIGHTS[weights](self.c.shape[1])[columns]
                )
                found[name] += bool(exceeds(bound, moved).any())
        return {name: Rate(count, calls) for name, count in found.items()}
