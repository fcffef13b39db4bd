"""The interception of torch's own products by the native core, for this process."""

from functools import cache
from types import ModuleType

from holdfast.abft.attention.suspects import resolve_findings
from holdfast.abft.conv.interception import on_convolution
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.cpu import configured_core


@cache
def interception() -> ModuleType:
    """Return the native core; the first call registers its kernels over torch's own products.

    ``change_process_depth(±1)`` begins or ends the verification of all threads' products, and
    ``change_thread_depth(±1)`` that of this thread's; calls nest. ``push_module(module, scope)``
    and ``pop_module(module)`` set the module to which this thread's products belong, and after
    ``close_scope(scope)`` the modules pushed with that scope no longer count. ``watch(tensors)``,
    ``unwatch(keys)`` and ``forget(tensor)`` select the weights whose checksums are cached.
    ``counters()`` returns ``abft.counters.Counters`` of every site.
    """
    import holdfast.abft.attention.fused  # noqa: F401 (defines an op that the native core calls)

    core = configured_core()
    core.set_handlers(
        suspect=suspects.on_suspect_rows,
        damaged_encoding=suspects.report_damaged_encoding,
        failed_check=suspects.on_failed_check,
        attention_findings=resolve_findings,
        convolution=on_convolution,
    )
    core.install()
    return core
