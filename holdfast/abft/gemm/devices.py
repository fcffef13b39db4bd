"""Interception of the products of other devices than CPU, by device type.

The products keep the device's own kernels. A check of each is queued behind it, whose verdict
stays on the device until ``abft.ledger`` reads it.
"""

import torch

from holdfast import native

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})  # verified on a device that is intercepted
CPU = "cpu"


def intercept(device: torch.device) -> None:
    """Begin to verify a device's products, if there is a backend for its type."""


def is_intercepted(device: str) -> bool:
    """Return whether the products of a device type are verified by checks on the device."""
    return native.core is not None and bool(native.core.intercepts_device(torch.device(device)))


def intercepted() -> list[str]:
    """Return the device types whose products are verified by checks on the device."""
    return [device for device in (CPU, "cuda") if is_intercepted(device)]


def is_verified(device: str) -> bool:
    """Return whether the products of a device type are verified at all."""
    return device == CPU or is_intercepted(device)
