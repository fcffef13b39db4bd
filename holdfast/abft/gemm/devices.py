"""Interception of the products of other devices than CPU, by device type.

The products keep the device's own kernels. A check of each is queued behind it, whose verdict
stays on the device until ``abft.ledger`` reads it.
"""

import torch

from holdfast import native

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})  # verified on a device that is intercepted
CPU = "cpu"
BACKENDS: dict[str, str] = {}  # what verifies on a device type; its products are then intercepted


def intercept(device: torch.device) -> None:
    """Begin to verify a device's products, if there is a backend for its type."""


def prepared_backend(device: torch.device) -> str:
    """Return the name of the backend for a device, ready to verify; empty if there is none."""
    return BACKENDS.get(device.type, "")


def is_intercepted(device: str) -> bool:
    """Return whether the products of a device type are verified by checks on the device."""
    return native.core is not None and bool(native.core.intercepts_device(torch.device(device)))


def intercepted() -> list[str]:
    """Return the device types whose products are verified by checks on the device."""
    return [device for device in (CPU, "cuda") if is_intercepted(device)]


def is_verified(device: str) -> bool:
    """Return whether the products of a device type are verified at all."""
    return device == CPU or is_intercepted(device)
