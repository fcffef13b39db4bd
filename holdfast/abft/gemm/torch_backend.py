"""The plain-torch interception: what ``csrc/intercept.cpp`` does, as a dispatch mode.

Used where the native core is absent, and as its oracle. Verifies the functional ``mm``, ``addmm``,
``bmm``, ``baddbmm``, ``mv`` and ``addmv`` of the thread that started it (autograd runs CPU backward
passes there too); their in-place and ``out=`` forms are passed through and reported as not
covered. Where
``torch.autograd.grad`` asks for the right operand's gradient alone, it is named ``grad_a``.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import sites
from holdfast.abft.checksums.rows import self_consistent
from holdfast.abft.gemm import recovery
from holdfast.abft.gemm.masked import has_mask, sound_beside_mask
from holdfast.abft.gemm.reference import encode_rows_reference, suspect_rows, verify_rows_reference
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.sites import Gemm, SiteTuple

FORWARD_SITES = 1 << 16  # remembered; older ones are named (outside) in backward

aten = torch.ops.aten
PLAIN = {aten.mm.default: "mm", aten.bmm.default: "bmm"}
WITH_ADDEND = {aten.addmm.default: "addmm", aten.baddbmm.default: "baddbmm"}
BY_VECTOR = (aten.mv.default, aten.addmv.default)
UNCOVERED = {
    packet: packet.__name__
    for packet in (
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.addmm_,
        aten.baddbmm,
        aten.baddbmm_,
        aten.addmv,
        aten.addmv_,
        aten.dot,
        aten.vdot,
        aten._addmm_activation,
    )
} | {
    aten.mv: "addmv",
    aten._scaled_dot_product_flash_attention_for_cpu: "sdpa",
    aten._scaled_dot_product_flash_attention_for_cpu_backward: "sdpa_backward",
    aten._int_mm: "_int_mm",
    aten._scaled_mm: "_scaled_mm",
    aten._weight_int8pack_mm: "_weight_int8pack_mm",
    aten._weight_int4pack_mm_for_cpu: "_weight_int4pack_mm",
    torch.ops.quantized.linear_dynamic: "quantized_linear",
    aten._sparse_sparse_matmul: "sparse_mm",
    aten._sparse_addmm: "sparse_addmm",
}
SPARSE = {
    aten.mm: "sparse_mm",
    aten.addmm: "sparse_addmm",
    aten.addmm_: "sparse_addmm",
    aten.bmm: "sparse_bmm",
    aten.mv: "sparse_mv",
}


COUNTED = (
    *("calls", "rows", "suspects", "unverified"),
    *("encode_s", "product_s", "verify_s"),
    "line",
)


class TorchBackend:
    """See ``backend.Backend``."""

    name = "reference"

    def __init__(self) -> None:
        self._mode: _Interception | None = None
        self._starts = 0
        self.verify_depth = 0
        self._modules: list[tuple[int, Any, dict[str, int], int]] = []  # id, node, calls, scope
        self._last_scope = 0
        self._forward_sites: dict[int, SiteTuple] = {}
        self._node = (-1, 0)  # sequence number of the node under evaluation, products it ran
        self._watched: dict[int, _Watch] = {}
        self._encodings: dict[tuple[Any, ...], tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._counters: dict[SiteTuple, dict[str, Any]] = {}

    def start(self, *, verify: bool) -> None:
        self._starts += 1
        self.verify_depth += int(verify)
        if self._mode is None:
            self._mode = _Interception(self)
            self._mode.__enter__()

    def stop(self, *, verify: bool) -> None:
        self._starts -= 1
        self.verify_depth -= int(verify)
        if self._starts == 0 and self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    @contextmanager
    def verifying(self) -> Iterator[None]:
        self.start(verify=True)
        try:
            yield
        finally:
            self.stop(verify=True)

    def open_scope(self) -> int:
        self._last_scope += 1
        return self._last_scope

    def close_scope(self, scope: int) -> None:
        self._modules = [frame for frame in self._modules if frame[3] != scope]

    def push_module(self, module: int, scope: int) -> None:
        self._modules.append((module, torch._C._current_autograd_node(), defaultdict(int), scope))

    def pop_module(self, module: int) -> None:
        entered = [index for index, frame in enumerate(self._modules) if frame[0] == module]
        if entered:
            del self._modules[entered[-1] :]

    def watch(self, weights: Sequence[torch.Tensor]) -> list[int]:
        dense = [weight for weight in weights if weight.layout is torch.strided]
        for weight in dense:
            self._watched.setdefault(_storage(weight), _Watch(weight)).watchers += 1
        return [_storage(weight) for weight in dense]

    def unwatch(self, keys: Sequence[int]) -> None:
        for key in keys:
            watch = self._watched[key]
            watch.watchers -= 1
            if not watch.watchers:
                del self._watched[key]
                self._drop(key)

    def forget(self, weight: torch.Tensor) -> None:
        self._drop(_storage(weight))

    def _drop(self, storage: int) -> None:
        for key in [key for key in self._encodings if key[0] == storage]:
            del self._encodings[key]

    def counters(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._counters.values()]

    def reset_counters(self) -> None:
        self._counters.clear()

    def count(self, site: SiteTuple, *, covered: bool = True, **added: Any) -> None:
        """Add to a site's counters; ``reason`` and ``line`` replace."""
        empty = dict.fromkeys(COUNTED, 0)
        row = self._counters.setdefault(
            site, {"site": site, "covered": covered, "reason": "", **empty}
        )
        for name, value in added.items():
            row[name] = value if name in ("reason", "line") else row[name] + value

    def encoding_of(
        self, b: torch.Tensor, site: SiteTuple
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """B's checksums, and whether they were kept from before."""
        if b.is_inference() or _storage(b) not in self._watched:
            return *encode_rows_reference(b), False
        key = (_storage(b), b.data_ptr(), b.dtype, b.shape, b.stride())
        known = self._encodings.get(key)
        if known is not None and known[0] == b._version:
            if self_consistent(known[1], known[2]):
                return known[1], known[2], True
            recovery.report_damaged_encoding(site)
        row_sum, statistics = encode_rows_reference(b)
        self._encodings[key] = (b._version, row_sum, statistics)
        return row_sum, statistics, False

    def current_site(self, op: str) -> SiteTuple:
        """Which matmul of the program this call is (see ``sites``)."""
        node = torch._C._current_autograd_node()
        # A module entered while this node is evaluated is recomputed (checkpointing): forward.
        inside = bool(self._modules) and self._modules[-1][1] is node
        return self._forward_site(op) if node is None or inside else self._backward_site(node, op)

    def _forward_site(self, op: str) -> SiteTuple:
        module, ordinal = 0, 0
        if self._modules:
            module, _, calls, _ = self._modules[-1]
            ordinal = calls[op]
            calls[op] = min(ordinal + 1, 999)
        site = (module, op, ordinal, 0)
        # An op that makes no node finds an earlier one there, which must keep its name.
        sequence = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        self._forward_sites.setdefault(sequence, site)
        if len(self._forward_sites) > FORWARD_SITES:
            del self._forward_sites[next(iter(self._forward_sites))]
        return site

    def _backward_site(self, node: Any, op: str) -> SiteTuple:
        sequence = node._sequence_nr()
        calls = self._node[1] + 1 if self._node[0] == sequence else 0
        self._node = (sequence, calls)
        module, forward_op, ordinal, _ = self._forward_sites.get(sequence, (0, op, 0, 0))
        edges = [edge[0] is not None for edge in node.next_functions]
        left, right = ([False, False, *edges])[-2:]
        # torch differentiates mm and bmm by b first, addmm and baddbmm by a first.
        right_now = (calls % 2 == 1) != (len(edges) == 2)
        both = left and right and forward_op != "addmv"  # whose matrix's gradient is no product
        return module, forward_op, ordinal, 2 if (right_now if both else right) else 1


def _well_formed(a: torch.Tensor, b: torch.Tensor) -> bool:
    """False for empty products, other devices, and shapes that get torch's own error."""
    fits = a.dim() == b.dim() in (2, 3) and a.shape[-1] == b.shape[-2] and a.device.type == "cpu"
    return fits and a.shape[:-2] == b.shape[:-2] and a.numel() > 0 and b.numel() > 0


def _uncovered(func: Any, args: tuple[Any, ...]) -> str | None:
    """What the report calls a product that has no checksum here; None if it has, or is none."""
    packet = func.overloadpacket
    if packet in SPARSE and any(_sparse(each) for each in args):
        return SPARSE[packet]
    covered = func in PLAIN or func in WITH_ADDEND or func in BY_VECTOR
    return None if covered else UNCOVERED.get(packet)


def _sparse(argument: object) -> bool:
    return isinstance(argument, torch.Tensor) and argument.layout is not torch.strided


class _Watch:
    """A watched storage; the weak reference keeps its address from being used again."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.storage = StorageWeakRef(weight.untyped_storage())
        self.watchers = 0


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Interception(TorchDispatchMode):
    def __init__(self, owner: TorchBackend) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite ops are decomposed nowhere else then
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        uncovered = _uncovered(func, args)
        if uncovered is not None:
            site = self._owner.current_site(uncovered)
            reason = "no checksum for this op yet"
            self._owner.count(site, covered=False, unverified=1, reason=reason)
            return func(*args, **kwargs)
        if func in PLAIN:
            return self._product(PLAIN[func], None, args[0], args[1], 1, 1, lambda: func(*args))
        if func in WITH_ADDEND:
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            run = lambda: func(*args, **kwargs)  # noqa: E731
            addend, a, b = args[:3]
            return self._product(WITH_ADDEND[func], addend, a, b, beta, alpha, run)
        if func in BY_VECTOR:
            return self._by_vector(func, args, kwargs)
        return func(*args, **kwargs)

    def _by_vector(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """cᵀ = beta dᵀ + alpha xᵀ Aᵀ: a weight A has the checksums it has in a Linear."""
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        *addend, a, x = args
        row = addend[0].reshape(1, -1) if addend else None
        run = lambda: func(*args, **kwargs)[None]  # noqa: E731
        return self._product("addmv", row, x[None], a.t(), beta, alpha, run)[0]

    def _product(
        self,
        op: str,
        addend: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        beta: float,
        alpha: float,
        run: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        owner = self._owner
        site = owner.current_site(op)
        if not _well_formed(a, b):
            return run()
        if a.dtype not in ACCUMULATION or a.dtype != b.dtype:
            owner.count(site, unverified=1, reason="dtype has no rounding threshold")
            return run()
        started_s = time.perf_counter()
        row_sum, statistics, kept = owner.encoding_of(b, site)
        gemm = Gemm(addend, a, b, float(beta), float(alpha), row_sum, statistics)
        sites.visit("checksum", site, gemm, None)
        sites.visit("operand", site, gemm, None)
        encoded_s = time.perf_counter()
        output = run()
        done_s = time.perf_counter()
        sites.visit("output", site, gemm, output)
        if owner.verify_depth:
            owner.count(site, encode_s=encoded_s - started_s, product_s=done_s - encoded_s)
            self._verify(site, gemm, output, kept, run)
        return output

    def _verify(
        self,
        site: SiteTuple,
        gemm: Gemm,
        output: torch.Tensor,
        kept: bool,
        run: Callable[[], torch.Tensor],
    ) -> None:
        started_s = time.perf_counter()
        encoding = (gemm.row_sum, gemm.statistics)
        rows = verify_rows_reference(
            output, gemm.a, *encoding, gemm.addend, gemm.beta, gemm.alpha, gemm.b
        )
        suspects = suspect_rows(rows)
        rms = (rows[2] / output.shape[-1]).sqrt()
        found = int(suspects.sum())
        if found and has_mask(gemm) and sound_beside_mask(gemm, output):
            found = 0
        verify_s = time.perf_counter() - started_s
        self._owner.count(site, calls=1, rows=suspects.numel(), suspects=found, verify_s=verify_s)
        if not found and (rms > 0).any():
            self._owner.count(site, line=float((rows[1] / rms)[rms > 0].mean()))
        if found:
            forget = partial(self._owner.forget, gemm.b)
            recovery.resolve(recovery.Suspicion(site, gemm, output, rows, kept, run, forget))
