"""Convolutions that are listed and not verified, because their rounding is not known."""

from typing import Any

import torch
from torch import nn

import holdfast


def _report() -> str:
    torch.manual_seed(0)
    model = nn.Conv2d(16, 16, 3)
    with holdfast.protect(model) as protection:
        model(torch.randn(16, 16, 32, 32))
        return str(protection.report())


def test_other_kernels_than_those_of_onednn_are_listed() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert "NOT COVERED: not computed by oneDNN" in _report()


def test_reduced_precision_is_listed() -> None:
    backend: Any = torch.backends.mkldnn
    before = backend.conv.fp32_precision
    backend.conv.fp32_precision = "bf16"
    try:
        report = _report()
    finally:
        backend.conv.fp32_precision = before
    assert "NOT COVERED: fp32 products may be computed in reduced precision" in report


def test_a_convolution_without_channels_runs() -> None:
    model = nn.Conv1d(0, 8, 2, stride=2)
    with holdfast.protect(model):
        assert model(torch.ones(2, 0, 15)).shape == (2, 0, 7)
