"""The model of large data-parallel training, against arithmetic by hand."""

import re
from dataclasses import replace

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.study.attnchecker.scaled_overhead import Cluster, Decoder, scaled_overhead

DECODER = Decoder("small", layers=2, width=8, heads=2)
CLUSTER = Cluster(
    devices=4,
    flops=1000.0,
    utilisation=0.5,
    memory_bytes_s=100.0,
    check_efficiency=0.5,
    link_bytes_s=10.0,
    overlap=0.5,
    batch=1,
    length=4,
    element_bytes=2,
)


def test_a_step_by_hand() -> None:
    found = scaled_overhead(DECODER, CLUSTER)
    weights = 12 * 2 * 64
    forward = 2 * (2 * 4 * 12 * 64 + 4 * 16 * 8) / 500
    ring = 2 * 3 / 4 * weights * 2 / 10
    read = 32 + 128 + 32 + 32 + 32  # S_AS: X, Wq and Wk, K, Q, AS
    read += 64 + 32 + 32 + 32 + 32 + 32  # S_CL: Wv, AP, X, V, AP, CL
    read += 64 + 32  # S_O: Wo, O
    assert DECODER.parameters == weights
    assert found.compute_s == pytest.approx(3 * forward)
    assert found.all_reduce_s == pytest.approx(ring)
    assert found.step_s == pytest.approx(3 * forward + ring - 0.5 * 2 * forward)
    assert found.checks_s == pytest.approx(2 * read * 2 / 50)
    assert found.overhead == pytest.approx(found.checks_s / found.step_s)
    share = scaled_overhead(DECODER, CLUSTER, "share")
    assert share.checks_s == pytest.approx(0.11 * 2 * (2 * 4 * 4 * 64 + 4 * 16 * 8) / 500)


def test_a_fast_network_hides_behind_backward_and_a_lone_device_sends_nothing() -> None:
    fast = scaled_overhead(DECODER, replace(CLUSTER, link_bytes_s=1e9))
    assert fast.step_s == fast.compute_s
    alone = scaled_overhead(DECODER, replace(CLUSTER, devices=1))
    assert alone.all_reduce_s == 0
    assert alone.step_s == alone.compute_s


def test_impossible_clusters_and_an_unknown_price_are_refused() -> None:
    for name, value, message in (
        ("devices", 0, "devices = 0 must be positive"),
        ("link_bytes_s", -1.0, "link_bytes_s = -1.0 must be positive"),
        ("utilisation", 1.5, "utilisation = 1.5 must be at most 1"),
        ("overlap", -0.5, "overlap = -0.5 must be at most 1 and not negative"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            replace(CLUSTER, **{name: value})
    with pytest.raises(ConfigError, match="price = 'gold': choose reads or share"):
        scaled_overhead(DECODER, CLUSTER, "gold")
