"""Settings of torch under which the thresholds of products on CUDA hold."""

from collections.abc import Iterator

import pytest
import torch

from holdfast.abft.gemm import devices

MATMUL = torch.backends.cuda.matmul


def settings() -> list[object]:
    return [getattr(MATMUL, name) for name in devices.REDUCED_PRECISION if hasattr(MATMUL, name)]


@pytest.fixture
def _allowed() -> Iterator[None]:
    names = [name for name in devices.REDUCED_PRECISION if hasattr(MATMUL, name)]
    before = settings()
    for name in names:
        setattr(MATMUL, name, True)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(MATMUL, name, value)


@pytest.mark.usefixtures("_allowed")
def test_sums_in_16_bits_are_off_while_products_on_cuda_are_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intercepted: set[str] = set()
    monkeypatch.setattr(devices, "is_intercepted", intercepted.__contains__)
    before = settings()
    assert all(before)
    devices.keep_full_precision()  # for a model on CPU
    assert settings() == before
    intercepted.add("cuda")
    devices.keep_full_precision()  # for another one on CUDA
    assert not any(settings())
    devices.allow_reduced_precision()
    assert not any(settings())
    devices.allow_reduced_precision()
    assert settings() == before


@pytest.mark.usefixtures("_allowed")
def test_sums_in_16_bits_are_off_once_a_protected_model_is_moved_to_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, verified = settings(), False

    class Core:
        def intercept_device(self, *_: str) -> None:
            nonlocal verified
            verified = True

    monkeypatch.setattr(devices, "interception", Core)
    monkeypatch.setattr(devices, "is_intercepted", lambda _: verified)
    monkeypatch.setattr(devices, "_failure", lambda _: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices.keep_full_precision()
    assert settings() == before
    devices.intercept.__wrapped__(torch.device("cuda:0"))
    assert not any(settings())
    devices.allow_reduced_precision()
    assert settings() == before


def test_a_device_whose_checks_fail_costs_protection_of_all_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[str, ...]] = []

    class Core:
        def intercept_device(self, *arguments: str) -> None:
            begun.append(arguments)

        def prepare_ledger(self, device: torch.device) -> None:
            if device.index == 2:
                raise RuntimeError("no memory")

    monkeypatch.setattr(devices, "interception", Core)
    monkeypatch.setattr(devices, "_failures", [])
    monkeypatch.setattr(devices, "prepared_backend", lambda _: "kernels")
    monkeypatch.setattr(devices.self_test, "failure", lambda device, _: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reasons = [devices.intercept.__wrapped__(torch.device("cuda", n)) for n in (1, 2, 3)]
    assert reasons[0] == ""
    assert reasons[1] == "on cuda:2: its checks could not be prepared: RuntimeError('no memory')"
    assert reasons[2] == reasons[1]
    assert begun == [("CUDA", "kernels", ""), ("CUDA", "", reasons[1]), ("CUDA", "", reasons[1])]
