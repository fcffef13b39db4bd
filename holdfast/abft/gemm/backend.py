"""What intercepts torch's GEMMs: the native core, or the plain-torch reference without it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch

from holdfast import native
from holdfast.abft.attention.fused import resolve_findings
from holdfast.abft.gemm import recovery
from holdfast.sites import Gemm, SiteTuple


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

    def open_scope(self) -> int:
        """Begin to count modules as entered; the number is for ``push_module``."""
        return 0

    def close_scope(self, scope: int) -> None:
        """No thread is inside a module of this scope any more."""

    def push_module(self, module: int, scope: int) -> None:
        """This thread's matmuls now belong to a module (an id of ``sites.module_names``)."""

    def pop_module(self, module: int) -> None:
        """Back to before this module was pushed; nothing if it was not."""

    def watch(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """Keep these tensors' checksums until the tensor changes (its version counter).

        Returns what ``unwatch`` needs: by then a weight may have other memory.
        """
        return []

    def unwatch(self, keys: Sequence[int]) -> None:
        """Undo one ``watch``."""

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the kept checksums of a weight."""

    def counters(self) -> list[dict[str, Any]]:
        """Per site: site, covered, calls, rows, suspects, unverified, reason, line, and seconds
        encode_s, product_s, verify_s.
        """

    def reset_counters(self) -> None:
        """Set all counters to zero."""


class NativeBackend:
    """The C++ kernels registered over torch's own."""

    name = "native"

    def __init__(self, core: Any) -> None:
        self._core = core
        core.set_handlers(_suspicion_from_native, recovery.report_damaged_encoding)
        core.set_attention_handler(resolve_findings)
        core.install()
        self.push_module = core.push_module
        self.pop_module = core.pop_module
        self.open_scope = core.open_scope
        self.close_scope = core.close_scope
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


@cache
def backend() -> Backend:
    """The interception of this process."""
    if native.core is not None:
        return NativeBackend(native.core)
    from holdfast.abft.gemm.torch_backend import TorchBackend

    return TorchBackend()


def _suspicion_from_native(
    site: SiteTuple,
    problem: tuple[Any, ...],
    output: torch.Tensor,
    rows: torch.Tensor,
    kept: bool,
    rerun: Any,
) -> None:
    gemm = Gemm(*problem)
    forget = partial(backend().forget, gemm.b)
    recovery.resolve(recovery.Suspicion(site, gemm, output, rows, kept, rerun, forget))
