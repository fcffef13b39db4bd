"""The numeric settings: each that changes a rounding is seen, and can be asked for again."""

from collections.abc import Iterator

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds.settings import (
    ENVIRONMENT,
    calibrate_command,
    device_of,
    numeric_settings,
)
from holdfast.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def changed(before: dict[str, str]) -> dict[str, str]:
    after = numeric_settings(CPU)
    assert after.keys() == before.keys()
    return {name: value for name, value in after.items() if before[name] != value}


def test_the_number_of_threads_and_the_fp32_precision_are_seen() -> None:
    torch.set_num_threads(1)
    before = numeric_settings(CPU)
    torch.set_num_threads(2)
    assert changed(before) == {"threads": "2"}
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    assert changed(before) == {"fp32_precision": "bf16"}
    torch.set_float32_matmul_precision("highest")
    assert changed(before) == {}


def test_onednn_switched_off_is_seen() -> None:
    before = numeric_settings(CPU)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(not enabled)
    try:
        assert changed(before) == {"onednn_enabled": str(not enabled)}
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@for_each("name", ENVIRONMENT["cpu"])
def test_every_variable_of_the_environment_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = numeric_settings(CPU)
    monkeypatch.setenv(name, "other")
    assert changed(before) == {name: "other"}


def test_the_command_asks_for_the_same_settings() -> None:
    settings = numeric_settings(CPU) | {"threads": "3", "fp32_precision": "ieee"}
    assert calibrate_command(settings) == "holdfast calibrate --device cpu --threads 3"
    command = calibrate_command(settings | {"fp32_precision": "bf16"})
    assert command.endswith("--threads 3 --matmul-precision medium")


@for_each(
    ("name", "words"),
    [
        ("abacus", "'abacus' is no device; give cpu"),
        ("meta", "'meta' cannot be calibrated; give cpu or cuda"),
        ("cuda:99", "'cuda:99' is not here"),
    ],
)
def test_an_unusable_device_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        device_of(name)
    assert device_of("cpu:0") == CPU
