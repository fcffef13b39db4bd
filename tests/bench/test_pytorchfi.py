"""The comparison with PyTorchFI, at a small size, where it is installed."""

import pytest

pytest.importorskip("pytorchfi.core", reason="PyTorchFI is not installed (bench/pytorchfi.py)")

from bench.pytorchfi import Sides, agreement


@pytest.mark.parametrize("what", ["activation", "weight"])
def test_every_trial_has_the_same_bits(what):
    found = agreement(Sides(what, trials=12, size=32, width=4, steps=0))
    assert found["trials"] == found["same_outcome"] == found["same_bits"] == 12
