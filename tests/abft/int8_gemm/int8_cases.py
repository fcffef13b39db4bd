"""Layers to multiply by, and faults to strike them with."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from struck import Strike, struck

from holdfast import native
from holdfast.abft.int8_gemm.op import int8_linear
from holdfast.abft.int8_gemm.reference import int8_linear_reference
from holdfast.abft.int8_gemm.weights import Int8Weights

BACKENDS = ["native", "torch"]
OUTPUTS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16},
    {"out_scale": 3.7, "out_zero_point": 11},
]


def has_native() -> bool:
    return native.core is not None and native.core.int8_available()


@dataclass
class Layer:
    """A quantised layer on random data, and what it must compute."""

    m: int = 9
    n: int = 70
    k: int = 100
    seed: int = 0
    per_channel: bool = True
    zero_points: bool = False
    biased: bool = True
    relu: bool = False
    encoding: str = "digits"
    backend: str = "native"
    a_zero_point: int = 7
    device: str = "cpu"
    output: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.weight = torch.randint(-128, 128, (self.n, self.k), dtype=torch.int8, generator=g)
        self.a = torch.randint(0, 256, (self.m, self.k), dtype=torch.uint8, generator=g)
        entries = self.n if self.per_channel else 1
        self.scale = torch.rand(entries, generator=g) * 0.01 + 0.001
        drawn = torch.randint(-128, 128, (entries,), generator=g)
        self.zero_point = drawn if self.zero_points else None
        self.bias = torch.randn(self.n, generator=g) if self.biased else None
        self.weights = self.pack()

    def pack(self) -> Int8Weights:
        packed = Int8Weights(
            self.weight.to(self.device),
            self.scale,
            0 if self.zero_point is None else self.zero_point,
            bias=self.bias,
            relu=self.relu,
            encoding=self.encoding,
            implementation="reference" if self.backend == "torch" else None,
        )
        assert packed.deferred or packed.native == (self.backend == "native" and has_native())
        return packed

    def flip(self, k: int, j: int, bits: int = 64) -> None:
        self.weights.gemm.buffer[self.weights.gemm.address(k, j)] ^= bits

    def run(self, **changed: Any) -> torch.Tensor:
        scales = {"a_scale": 0.02, "a_zero_point": self.a_zero_point}
        a = self.a.to(self.device)
        return int8_linear(a, self.weights, **scales | self.output | changed).cpu()

    def expected(self) -> torch.Tensor:
        """What 64-bit integers compute."""
        return int8_linear_reference(
            self.a,
            self.weight,
            a_scale=0.02,
            a_zero_point=self.a_zero_point,
            scale=self.scale,
            zero_point=self.zero_point,
            bias=self.bias,
            relu=self.relu,
            **self.output,
        )


def flipped(row: int, column: int, bit: int) -> AbstractContextManager[Strike]:
    """Within the block a bit of one accumulator of every product flips."""
    mask = -(1 << 31) if bit == 31 else 1 << bit
    return struck((row, column), lambda old: old ^ mask, always=True)
