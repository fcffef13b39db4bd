"""The interception of torch's own products by the native core, for this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TypedDict

from holdfast.abft.attention.fused import resolve_findings
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.passes import configured_core
from holdfast.sites import SiteTuple


class Counters(TypedDict):
    """Counts of the products of one site since the counters were last set to zero."""

    site: SiteTuple
    covered: bool
    calls: int
    rows: int
    suspects: int
    unverified: int
    reason: str  # reason why calls were not verified
    line: float  # sampled ratio of a row's threshold to its rms
    encode_s: float
    product_s: float
    verify_s: float


class Interception:
    """The C++ kernels registered over torch's own products on CPU.

    Some attributes are functions of the native core. ``push_module(module, scope)`` and
    ``pop_module(module)`` set the module that this thread's products belong to; after
    ``close_scope(scope)`` modules pushed with that scope no longer count. ``watch(tensors)``,
    ``unwatch(keys)`` and ``forget(tensor)`` select the weights whose checksums are cached.
    """

    def __init__(self, core: ModuleType) -> None:
        self._core = core
        core.set_handlers(
            suspect=suspects.on_suspect_rows,
            damaged_encoding=suspects.report_damaged_encoding,
            attention_findings=resolve_findings,
        )
        core.install()
        self.push_module = core.push_module
        self.pop_module = core.pop_module
        self.open_scope = core.open_scope
        self.close_scope = core.close_scope
        self.watch = core.watch
        self.unwatch = core.unwatch
        self.forget = core.forget
        self.reset_counters = core.reset_counters

    def start(self, *, verify: bool) -> None:
        """Start to intercept, and if ``verify`` check, all threads' products; calls nest."""
        self._core.change_process_depth(int(verify))

    def stop(self, *, verify: bool) -> None:
        """Undo one call of ``start``."""
        self._core.change_process_depth(-int(verify))

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Verify what this thread computes inside the block."""
        self._core.change_thread_depth(1)
        try:
            yield
        finally:
            self._core.change_thread_depth(-1)

    def counters(self) -> list[Counters]:
        """Return the counters of every site."""
        rows: list[Counters] = self._core.counters()
        return rows


@cache
def interception() -> Interception:
    """Return the interception of this process; the first call installs it.

    Raises:
        ConfigError: The native core is not built.
    """
    return Interception(configured_core())
