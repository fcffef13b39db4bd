"""The chains that kernels sum in, measured: by the probe, and in sums whose chains are known."""

import pytest
import torch
from case_loops import for_each
from struck import DTYPES

from holdfast.abft.thresholds import chains
from holdfast.abft.thresholds.rounding import growth, unbroken


def summed_in_panels(panel: int) -> object:
    """A matmul in fp32 that starts afresh after ``panel`` products."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1])
        for begin in range(0, a.shape[1], panel):
            part = torch.zeros_like(total)
            for k in range(begin, min(begin + panel, a.shape[1])):
                part = part + a[:, k : k + 1] * b[k : k + 1]
            total = total + part
        return total

    return product


@pytest.mark.parametrize("panel", [16, 100, 384, 700])
def test_the_probe_finds_a_known_chain(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", summed_in_panels(panel))
    assert panel <= chains._lost(torch.float32, 2, 3, 0) <= panel + 1


def test_a_sum_without_panels_is_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", summed_in_panels(1 << 20))
    monkeypatch.setattr(chains, "_SHAPES", ((2, 3),))
    assert chains.longest_chain.__wrapped__(torch.float32) == chains.UNBOUNDED


@for_each("dtype", DTYPES)
def test_this_machine_has_a_chain_for_every_dtype(dtype: torch.dtype) -> None:
    assert chains.longest_chain(dtype) >= chains.LEAST


def test_surroundings_do_not_reach_the_probe() -> None:
    expected = chains.longest_chain(torch.float32)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert chains.longest_chain.__wrapped__(torch.float32) == expected


def test_a_dtype_without_a_probe_is_taken_as_one_chain() -> None:
    assert chains.longest_chain(torch.float8_e4m3fn) == chains.UNBOUNDED


def test_a_narrow_product_is_one_chain() -> None:
    assert unbroken(4096, 16, 16, 384) == 1
    factor = unbroken(4096, 1, 8, 384)
    assert factor == unbroken(4096, 64, 15, 384) > 5
    assert factor >= growth(4096, chains.UNBOUNDED).walk / growth(4096, 384).walk
    assert unbroken(4096, 1, 8, chains.UNBOUNDED) == 1
