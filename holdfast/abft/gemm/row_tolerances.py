"""The threshold with which the row checks of this process compare: ``rounding``, or another one.

``rounding`` is built into the kernels. For any other threshold T of ``REGISTRY`` the checks ask
``tolerances`` for one number per row. The published methods bound checksums of ones, and row checks
weight columns by random signs r. As a change of sign rounds nothing, ``C r − A (B r)`` is the
residual of ones of the product ``A (B diag(r))``, to which a method is applied as published:

``T_i(C = beta D + alpha A B) = T_i(alpha A · B diag(r)) + W_i(beta D)``

No method has an addend D. W is the share of its roundings in the worst-case bound (``Analytic``).
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch

from holdfast import native
from holdfast.abft.checksums.weights import signs
from holdfast.abft.thresholds import REGISTRY, Product, Rounding, Threshold, VAbft
from holdfast.abft.thresholds.analytic import row_bound
from holdfast.abft.thresholds.calibrate import apply
from holdfast.abft.thresholds.measurement import DTYPES
from holdfast.abft.thresholds.profile import load
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.errors import ConfigError
from holdfast.sites import Gemm

_lock = threading.Lock()
_in_use: list[Threshold] = []  # one for each verifying protection; all are equal


def chosen(threshold: str | Threshold, tensors: Iterable[torch.Tensor]) -> Threshold:
    """Return the threshold of a name, with the measured constants of this device if it has any.

    Args:
        threshold: A name in ``REGISTRY``, or a threshold, which is returned as it is.
        tensors: The parameters of the model whose products are to be checked.

    Raises:
        ConfigError: The name is unknown, a parameter is where only ``rounding`` is available, or
            the profile of ``vabft`` is missing, of other settings or without a parameter's dtype.
    """
    found = REGISTRY.get(threshold) if isinstance(threshold, str) else threshold
    named = isinstance(getattr(found, "name", None), str)
    if not callable(found) or isinstance(found, type) or not named:
        raise ConfigError(
            f"protect: threshold is {threshold!r}: choose one of {', '.join(REGISTRY)}, or give a "
            "threshold of holdfast.thresholds"
        )
    if isinstance(found, Rounding):
        return found
    held = list(tensors)
    elsewhere = sorted({each.device.type for each in held} - {"cpu"})
    if elsewhere:
        raise ConfigError(
            f"protect: threshold {found.name!r} is for products on CPU, and parameters are on "
            f"{', '.join(elsewhere)}, where checks have 'rounding' built in: leave threshold out"
        )
    needs_profile = threshold == VAbft.name
    return _calibrated({each.dtype for each in held}) if needs_profile else found


def _calibrated(dtypes: set[torch.dtype]) -> VAbft:
    """Return ``VAbft`` with the profile of this device under its present settings."""
    try:
        profile = load()
    except ConfigError as error:
        raise ConfigError(
            f"protect: threshold 'vabft' needs this device's profile: {error}; or pass "
            "holdfast.thresholds.VAbft(), which has the paper's constants"
        ) from error
    used = [name for name, dtype in DTYPES.items() if dtype in dtypes]
    missing = [name for name in used if name not in profile.dtypes]
    if missing:
        raise ConfigError(
            f"protect: threshold 'vabft' needs {', '.join(missing)}, and this device's profile has "
            f"only {', '.join(profile.dtypes)}: measure with: holdfast calibrate"
        )
    return apply(profile)


def put_in_force(threshold: Threshold) -> Callable[[], None]:
    """Let the row checks of this process use a threshold, until the returned function is called.

    Raises:
        ConfigError: Another threshold is in force.
    """
    with _lock:
        if _in_use and _in_use[0] != threshold:
            raise ConfigError(
                f"protect: threshold is {threshold!r}, and another protection of this process uses "
                f"{_in_use[0]!r}: products of one process have one threshold, so give the same one "
                "or remove that protection first"
            )
        _in_use.append(threshold)
        _tell_core()
    return partial(_retire, threshold)


def _retire(threshold: Threshold) -> None:
    with _lock:
        _in_use.remove(threshold)
        _tell_core()


def _tell_core() -> None:
    if native.core is not None:
        method = other()
        native.core.set_tolerances(method and partial(_fill, method))


def _fill(method: Threshold, problem: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """Compute the tolerances of a product, as the native core's handler for them."""
    out.copy_(tolerances(Gemm(*problem), method))  # type: ignore[arg-type]


def other() -> Threshold | None:
    """Return the threshold in force if it is another one than ``rounding``."""
    used = next(iter(_in_use), None)  # the list may change meanwhile
    return None if isinstance(used, Rounding) else used


def tolerances(gemm: Gemm, method: Threshold) -> torch.Tensor:
    """Compute the largest residual of each row that a method takes for rounding, fp64 [batch, M].

    Raises:
        ValueError: The method knows nothing of the dtype.
    """
    dtype, columns = gemm.a.dtype, gemm.b.shape[-1]
    # What underflow loses before the factor alpha is applied grows with it, and is no less after.
    scale = max(1.0, abs(gemm.alpha))
    a, b = gemm.a.detach().double(), gemm.b.detach().double()
    if method.weights == "ones":
        b = b * signs(columns)
    if gemm.alpha != scale:
        a = a * (gemm.alpha / scale)
    bound = method(Product(a, b, None, dtype, accumulation=ACCUMULATION[dtype])) * scale
    if gemm.addend is not None and gemm.beta != 0:
        added = (gemm.beta * gemm.addend.detach().double()).abs()
        magnitude = added.expand(*a.shape[:-1], columns).sum(-1)
        accumulator, factor = ACCUMULATION[dtype], max(1.0, abs(gemm.beta))
        bound = bound + row_bound(
            magnitude, a.shape[-1], columns, accumulator, dtype, factor=factor
        )
    return bound.reshape(-1, a.shape[-2])


def tile_tolerances(
    a: torch.Tensor, b: torch.Tensor, block: int, method: Threshold, output: torch.dtype
) -> torch.Tensor:
    """Compute the tolerance of each row in each block of columns, fp64 [blocks, M].

    The fp32 accumulator of ``A B`` is verified, before it is rounded to ``output``.
    """
    left, right = a.detach().double(), b.detach().double()
    if method.weights == "ones":
        right = right * signs(b.shape[-1]).to(b.device)
    tiles = [
        Product(left, tile, None, output, online=True, accumulation=torch.float32)
        for tile in right.split(block, -1)
    ]
    return torch.stack([method(tile) for tile in tiles])
