"""The shares of a step's time that ``bench.step_shares`` measures."""

import pytest

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

from bench.step_shares import measured, table


def test_the_classes_share_the_whole_of_a_step() -> None:
    row = measured("dlrm", steps=1)
    assert sum(row["shares"].values()) == pytest.approx(1.0, abs=1e-5 * len(row["shares"]))
    assert {"matmul", "gather and scatter", "optimizer"} <= row["shares"].keys()
    half = {"model": "half", "shares": {"matmul": 0.5, "optimizer": 0.5}}
    assert "| matmul | 50.0 |" in table([half])
