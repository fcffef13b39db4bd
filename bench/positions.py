"""Position codes compared: the smallest fault that each locates, and what it does with two.

    python -m bench.positions [--vectors N]

σ is the standard deviation of the plain residual. A fault of the listed size, in units of σ, is
located in 99 % of vectors: predicted from the code's geometry, and measured on products rounded to
bf16. Certain is the size, in thresholds, from which a fault is corrected whatever the noise below
the threshold. Pairs are two equal faults of twice that size in one vector, of random signs: those
that are altered at all are altered wrongly. Encoding is timed against the plain checksum alone.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.paired import paired
from bench.rows import record
from holdfast.abft.checksums import Bits, Encoding, correct_vectors, encoding

LENGTHS = (64, 256, 1024, 4096)
SURE = 0.99
THRESHOLD_SIGMAS = 8.0


@dataclass(frozen=True)
class Linear(Bits):
    """``p(k) = (k + 1) / 2^⌈log2 count⌉``: the one weighted checksum of ATTNChecker, scaled."""

    name: str = "linear"
    spread: float = 1.0

    def resolution(self, count: int) -> float:
        """Neighbours are 1 / 2^⌈log2 count⌉ apart, and so is the first position from "none"."""
        return 2.0 * (1 << (count - 1).bit_length())

    def weights(self, count: int) -> torch.Tensor:
        """fp64 [1, count]."""
        k = torch.arange(1, count + 1, dtype=torch.float64)
        return k[None] / (1 << (count - 1).bit_length())

    def decode(self, residuals: torch.Tensor, count: int) -> torch.Tensor:
        """``round(δ2 / δ1 · 2^⌈log2 count⌉) − 1``."""
        ratio = residuals[..., 1] / residuals[..., 0] * (1 << (count - 1).bit_length())
        return ratio.nan_to_num().clamp(0, count + 1).round().long() - 1


@dataclass(frozen=True)
class TwoDigits(Bits):
    """Two linear codes, for the digits of k in a base of about √count."""

    name: str = "two digits"
    spread: float = 1.0

    def resolution(self, count: int) -> float:
        """Digits are 1 / base apart."""
        return 2.0 * self.base(count)

    def weights(self, count: int) -> torch.Tensor:
        """fp64 [2, count], in (0, 1]."""
        k, base = torch.arange(count), self.base(count)
        return torch.stack([k // base + 1, k % base + 1]).double() / base

    def decode(self, residuals: torch.Tensor, count: int) -> torch.Tensor:
        """Both digits rounded."""
        base = self.base(count)
        ratio = residuals[..., 1:] / residuals[..., :1] * base
        digits = ratio.nan_to_num().clamp(0, base + 1).round().long() - 1
        return digits[..., 0] * base + digits[..., 1]

    def base(self, count: int) -> int:
        """The power of two at or above √count."""
        return 1 << ((count - 1).bit_length() + 1) // 2


@dataclass(frozen=True)
class Phase(Bits):
    """``(cos, sin)(2π k / count)``: the position is an angle."""

    name: str = "phase"
    spread: float = 2.0

    def resolution(self, count: int) -> float:
        """Neighbours are a chord apart, at least 1 / √2 of it in one coordinate."""
        return 2 * self.spread / (math.sqrt(2) * math.sin(math.pi / count))

    def weights(self, count: int) -> torch.Tensor:
        """fp64 [2, count], on the unit circle."""
        angle = torch.arange(count, dtype=torch.float64) * (2 * math.pi / count)
        return torch.stack([angle.cos(), angle.sin()])

    def decode(self, residuals: torch.Tensor, count: int) -> torch.Tensor:
        """The angle, rounded."""
        turned = residuals[..., 1:] * residuals[..., :1].sign()
        angle = torch.atan2(turned[..., 1], turned[..., 0]).nan_to_num()
        return (angle * (count / (2 * math.pi))).round().long() % count


def missed_digits(weights: torch.Tensor, spacing: float, size: float) -> float:
    """P(a rounded ratio is wrong): noise ``rms_k(p_k − p_i)`` σ against half a spacing of δ."""
    right = torch.ones(weights.shape[1], dtype=torch.float64)
    for row in weights.unbind():
        rms = (row.square().mean() - 2 * row * row.mean() + row.square()).sqrt()
        right *= torch.erf(size * spacing / 2 / rms.clamp_min(1e-300) / math.sqrt(2))
    return float(1 - right.mean())


def missed(code: Bits, count: int, size: float) -> float:
    """P(a fault of ``size`` σ is not located), from the geometry of the code."""
    weights = code.weights(count)
    if code.name == "bits":  # D − 1 signs and that of δ1, each with noise σ
        return 1 - (0.5 * math.erfc(-size / math.sqrt(2))) ** len(weights)
    if code.name == "phase":  # the noise across the angle is σ / √2
        return math.erfc(size * math.pi / count)
    return missed_digits(weights, 2 / code.resolution(count), size)


def smallest(located: Callable[[float], float]) -> float:
    """The size, in σ and to 5 %, from which at least ``SURE`` are located."""
    size = 1.0
    while located(size) < SURE:
        size *= 1.05
    return size


class Products:
    """Rows of bf16 products beside their exact values, and the noise of their checksums."""

    def __init__(self, code: Bits, count: int, vectors: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.encoding: Encoding = encoding(count, code=code, accumulate=torch.float64)
        truth = torch.randn(vectors, count, generator=generator, dtype=torch.float64)
        self.stored = truth.bfloat16()
        self.sums = self.encoding.sums(truth)
        self.noise = self.sums - self.encoding.sums(self.stored)
        self.sigma = float((truth - self.stored.double()).norm(dim=-1).mean())
        self.positions = torch.rand(vectors, count, generator=generator).argsort(-1)[:, :2]
        self.signs = 1 - 2 * torch.randint(0, 2, (vectors, 2), generator=generator).double()

    def located(self, size: float) -> float:
        """The share of vectors whose fault of this size, in σ, is read at its position."""
        delta = size * self.sigma * self.signs[:, :1]
        words = self.encoding.words[self.positions[:, 0]]
        residuals = self.noise + delta * torch.cat([torch.ones_like(delta), words], -1)
        decoded = self.encoding.code.decode(residuals, self.encoding.count)
        return float((decoded == self.positions[:, 0]).double().mean())

    def altered_pairs(self) -> int:
        """How many vectors with two equal faults are changed by the correction."""
        certain = (self.encoding.code.resolution(self.encoding.count) + 1) * THRESHOLD_SIGMAS
        change = 2 * certain * self.sigma * self.signs
        damaged = self.stored.double().scatter_add(-1, self.positions, change)
        threshold = torch.full((len(damaged),), THRESHOLD_SIGMAS * self.sigma)
        result = correct_vectors(
            damaged, self.sums[:, 0], self.sums[:, 1:], threshold, self.encoding
        )
        return int((result.matrix != damaged).any(-1).sum())


def measure(code: Bits, count: int, vectors: int) -> dict[str, object]:
    """One row of the table."""
    data = Products(code, count, vectors)
    plain = data.encoding.table[0]

    def encode_plain() -> None:
        (data.stored.double() * plain).sum(-1)

    def encode_all() -> None:
        data.encoding.sums(data.stored)

    timing = paired(encode_plain, encode_all, pairs=15)
    return {
        "code": code.name,
        "length": count,
        "checksums": 1 + data.encoding.words.shape[1],
        "vectors": vectors,
        "predicted_sigmas": round(smallest(lambda size: 1 - missed(code, count, size)), 1),
        "measured_sigmas": round(smallest(data.located), 1),
        "certain_thresholds": round(code.resolution(count) + 1, 1),
        "altered_pairs": data.altered_pairs(),
        "encode_ratio": timing["ratio"],
        "encode_ratio_quartiles": timing["ratio_quartiles"],
    }


def main() -> None:
    """Every code at every length; the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=2000)
    args = parser.parse_args()
    codes: list[Bits] = [Linear(), Phase(), TwoDigits(), Bits()]
    rows = [measure(code, count, args.vectors) for count in LENGTHS for code in codes]
    for row in rows:
        record("positions", row)
    columns = [name for name in rows[0] if name not in ("vectors", "encode_ratio_quartiles")]
    print("  ".join(f"{name:>18}" for name in columns))
    for row in rows:
        print("  ".join(f"{row[name]!s:>18}" for name in columns))


if __name__ == "__main__":
    main()
