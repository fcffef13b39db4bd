"""Verification of products on other devices than CPU.

The products keep the device's own kernels. A check of each is queued behind it, whose verdict
stays on the device until ``abft.ledger`` reads it.
"""

import logging
import threading
from functools import cache
from importlib.util import find_spec

import torch

from holdfast import native
from holdfast.abft.coverage import unverified_device
from holdfast.abft.gemm import self_test
from holdfast.abft.gemm.interception import interception

# Products that a device which is intercepted verifies, or counts with a reason why it does not.
PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"}
)
CPU, CUDA = "cpu", "cuda"
# What verifies on a device type, by its name in the native core.
BACKENDS = {CUDA: "kernels"} if find_spec("triton") is not None else {}
# Settings under which cuBLAS may add up a sum or parts of it in 16 bits, which no threshold allows
# for.
REDUCED_PRECISION = (
    "allow_fp16_accumulation",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)

_logger = logging.getLogger("holdfast.protection")
_lock = threading.Lock()
_users = 0
_settings: dict[str, object] = {}  # of the user, while they are changed
_failures: list[str] = []  # of the tests of the checks, in this process


@cache
def intercept(device: torch.device) -> str:
    """Begin to verify a device's products; return why they cannot be, or an empty string.

    The first call for a CUDA device compiles the kernels and tests them with known answers. If
    they fail on one device, the products of no CUDA device are verified.

    Args:
        device: With its index, if it is a CUDA device.
    """
    if native.core is None or device.type != CUDA or not torch.cuda.is_available():
        return unverified_device(device.type)
    if reason := _failure(device):
        _failures.append(reason)
    first = _failures[0] if _failures else ""
    interception().intercept_device("CUDA", "" if first else BACKENDS[CUDA], first)
    with _lock:
        if _users:  # the model was moved to the device after it was protected
            _keep_settings()
    return first


def _failure(device: torch.device) -> str:
    try:
        backend = prepared_backend(device)
        interception().prepare_ledger(device)
    except ImportError as error:
        return f"on {device.type}: {error}"
    except Exception as error:  # whatever it is, protection is lost and not the training
        return f"on {device}: its checks could not be prepared: {error!r}"
    reason = self_test.failure(device, backend)
    return f"on {device}: the known-answer test of its checks failed: {reason}" if reason else ""


def prepared_backend(device: torch.device) -> str:
    """Return the name of what verifies on a device, ready to do so, also in captured graphs.

    Raises:
        ImportError: Triton is missing; the message says how to install it.
    """
    from holdfast.abft.gemm.ahead_of_time import prepare

    _logger.info("preparing the checks on %s; the first time their kernels are compiled", device)
    prepare(device)
    return BACKENDS[device.type]


def keep_full_precision() -> None:
    """Keep cuBLAS from adding up in 16 bits, until ``allow_reduced_precision`` is called as often.

    Graphs of Dynamo compiled before are compiled again, as it guards on the setting.
    """
    global _users
    with _lock:
        _users += 1
        _keep_settings()


def _keep_settings() -> None:
    """Change the settings, unless they are changed already or no product on CUDA is verified."""
    if _settings or not is_intercepted(CUDA):
        return
    for name in REDUCED_PRECISION:
        if hasattr(torch.backends.cuda.matmul, name):  # older releases of torch lack one
            _settings[name] = getattr(torch.backends.cuda.matmul, name)
            setattr(torch.backends.cuda.matmul, name, False)


def allow_reduced_precision() -> None:
    """Restore the settings that ``keep_full_precision`` changed, if it is the last to need them."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for name, value in _settings.items():
                setattr(torch.backends.cuda.matmul, name, value)
            _settings.clear()


def is_intercepted(device: str) -> bool:
    """Return whether the products of a device type are verified by checks on the device."""
    if native.core is None or not device:  # of a value that is no tensor
        return False
    return bool(native.core.intercepts_device(torch.device(device)))


def is_verified(device: str) -> bool:
    """Return whether the products of a device type are verified at all."""
    return device == CPU or is_intercepted(device)
