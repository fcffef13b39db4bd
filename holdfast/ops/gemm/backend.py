"""What intercepts torch's GEMMs: the native core, or the plain-torch reference without it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from holdfast import native
from holdfast.ops.gemm import recovery
from holdfast.ops.gemm.reference import encode_rows_reference, verify_rows_reference
from holdfast.sites import Gemm, SiteTuple
from holdfast.thresholds.extreme import EXTREME
from holdfast.thresholds.vabft import C_SIGMA, E_MAX


class Backend(Protocol):
    """Interception of every CPU ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of this process."""

    name: str

    def start(self, *, verify: bool) -> None:
        """Begin to intercept; nests. With ``verify`` false, sites are only named and passed."""

    def stop(self, *, verify: bool) -> None:
        """Undo one ``start``."""

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Verify what this thread computes inside the block."""
        yield

    def push_module(self, module: int) -> None:
        """This thread's matmuls now belong to a module (an id of ``sites.module_names``)."""

    def pop_module(self, module: int) -> None:
        """Back to before this module was pushed; nothing if it was not."""

    def clear_modules(self) -> None:
        """This thread is outside any module."""

    def watch(self, weights: Sequence[torch.Tensor]) -> None:
        """Keep these tensors' checksums until the tensor changes (its version counter)."""

    def unwatch(self, weights: Sequence[torch.Tensor]) -> None:
        """Undo one ``watch``."""

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the kept checksums of a weight."""

    def counters(self) -> list[dict[str, Any]]:
        """Per site: site, covered, calls, rows, suspects, unverified, reason, line."""

    def reset_counters(self) -> None:
        """Set all counters to zero."""


class NativeBackend:
    """The C++ kernels registered over torch's own."""

    name = "native"

    def __init__(self, core: Any) -> None:
        self._core = core
        core.set_suspect_handler(_suspicion_from_native)
        core.install()
        self.push_module = core.push_module
        self.pop_module = core.pop_module
        self.clear_modules = core.clear_modules
        self.watch = core.watch
        self.unwatch = core.unwatch
        self.forget = core.forget
        self.counters = core.counters
        self.reset_counters = core.reset_counters

    def start(self, *, verify: bool) -> None:
        self._core.change_process_depth(int(verify))

    def stop(self, *, verify: bool) -> None:
        self._core.change_process_depth(-int(verify))

    @contextmanager
    def verifying(self) -> Iterator[None]:
        self._core.change_thread_depth(1)
        try:
            yield
        finally:
            self._core.change_thread_depth(-1)


if native.core is not None:  # the passes below need it too, whether or not anything intercepts
    native.core.configure(
        e_max=[E_MAX[t] for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)],
        c_sigma=C_SIGMA,
        extreme=EXTREME,
    )


@cache
def backend() -> Backend:
    """The interception of this process."""
    if native.core is not None:
        return NativeBackend(native.core)
    from holdfast.ops.gemm.torch_backend import TorchBackend

    return TorchBackend()


def encode(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row checksums and statistics of b; native where it can be (see the reference)."""
    if native.core is None:
        return encode_rows_reference(b)
    row_sum, statistics = torch.ops.holdfast.encode_rows(b)
    return row_sum, statistics


def verify(
    c: torch.Tensor,
    a: torch.Tensor,
    row_sum: torch.Tensor,
    statistics: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Residual, threshold and energy of each row, fp64 [3, batch, M] (see the reference)."""
    run = verify_rows_reference if native.core is None else torch.ops.holdfast.verify_rows
    return run(c, a, row_sum, statistics, addend, beta, alpha)


def _suspicion_from_native(
    site: SiteTuple,
    problem: tuple[Any, ...],
    output: torch.Tensor,
    rows: torch.Tensor,
    cached: bool,
    rerun: Any,
) -> None:
    recovery.resolve(recovery.Suspicion(site, Gemm(*problem), output, rows, cached, rerun))
