"""The share of a training step that is verified: of its FLOPs, and of the bytes that it moves."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from holdfast.abft.gemm import unverified_ops

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu", "holdfast::sdpa"


@dataclass
class OperatorShare:
    """What one operator did in a step, and how much of it was verified by checksums.

    Attributes:
        calls: the number of calls; ``verified_calls`` of them were verified.
        flops: as torch's FLOP counter has them: those of products, convolutions and attention.
        nbytes: bytes of the tensors that it read and wrote; an operator that returns a view has 0.
        uncounted: true if it may compute products whose FLOPs torch's counter does not know, or a
            call of it could not be counted.
    """

    name: str
    calls: int = 0
    verified_calls: int = 0
    flops: int = 0
    verified_flops: int = 0
    nbytes: int = 0
    verified_bytes: int = 0
    uncounted: bool = False


@dataclass(frozen=True)
class StepShare:
    """The verified share of one step; ``str`` lists the largest operators that are not verified."""

    operators: list[OperatorShare] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """The verified share of the FLOPs; 1 for a step without any, NaN if none are known."""
        if any(e.uncounted for e in self.operators) and not any(e.flops for e in self.operators):
            return math.nan
        return _share(
            (each.verified_flops for each in self.operators),
            (each.flops for each in self.operators),
        )

    @property
    def nbytes(self) -> float:
        """The verified share of the bytes that are read and written; 1 for a step without any."""
        return _share(
            (each.verified_bytes for each in self.operators),
            (each.nbytes for each in self.operators),
        )

    def __str__(self) -> str:
        left = [each for each in self.operators if each.verified_calls < each.calls]
        left.sort(key=lambda each: (each.flops - each.verified_flops, each.nbytes), reverse=True)
        total = sum(each.nbytes for each in self.operators) or 1
        lines = [
            f"of the measured step {self.flops:.2%} of the FLOPs (of products, convolutions and "
            f"attention) and {self.nbytes:.2%} of the bytes are in verified operators; largest "
            "of the others:"
        ]
        for each in left[:8]:
            share = (each.nbytes - each.verified_bytes) / total
            what = ", FLOPs unknown" if each.uncounted else ""
            flops = each.flops - each.verified_flops
            lines.append(f"  {each.name}: {flops:.3g} FLOPs, {share:.2%} of the bytes{what}")
        return "\n".join(lines)


def _share(verified: Iterable[int], whole: Iterable[int]) -> float:
    total = sum(whole)
    return sum(verified) / total if total else 1.0


class Measurement(TorchDispatchMode):
    """Counts the operators that run below autograd in this block.

    Args:
        calls: returns how many calls of operators have been verified so far. A call during which
            the number grows is a verified one.
        convolutions: share of the calls of convolutions that are checked in other steps than this
            one, which checks all: so much of their FLOPs and bytes counts as verified.
    """

    def __init__(self, calls: Callable[[], int], convolutions: float = 1.0) -> None:
        super().__init__()
        self._calls, self._convolutions = calls, convolutions
        self._operators: dict[str, OperatorShare] = {}

    def share(self) -> StepShare:
        """Return what was counted so far."""
        return StepShare(list(self._operators.values()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet not in flop_registry and func._can_decompose():
            with self:  # as torch's counter does, where no autograd has decomposed it
                return func.decompose(*args, **kwargs)
        before = self._calls()
        result = func(*args, **kwargs)
        verified = self._calls() > before
        name = packet.__module__.rpartition(".")[2] + "." + packet.__name__
        row = self._operators.setdefault(name, OperatorShare(name))
        try:
            self._count(row, func, (args, kwargs, result), verified)
        except Exception:  # an operator that cannot be counted does not end the step; it is listed
            row.calls += 1
            row.uncounted = True
        return result

    def _count(
        self, row: OperatorShare, func: Any, call: tuple[Any, dict[str, Any], Any], verified: bool
    ) -> None:
        flops, nbytes = flops_of(func, *call), bytes_of(func, *call)
        row.calls += 1
        row.nbytes += nbytes
        row.flops += flops or 0
        row.uncounted |= flops is None and may_multiply(func)
        if verified:
            share = self._convolutions if func.overloadpacket in CONVOLUTIONS else 1.0
            row.verified_calls += 1
            row.verified_flops += int(share * (flops or 0))
            row.verified_bytes += int(share * nbytes)


def may_multiply(func: Any) -> bool:
    """Return true if an operator is a product, or one of holdfast's that may hold some."""
    return bool(unverified_ops.product_name(func)) or func.namespace == "holdfast"


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the FLOPs of a call as torch counts them; None for operators that it does not know."""
    if func.name() in ATTENTION:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if func.name().removesuffix("_backward") in ATTENTION:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    if func.overloadpacket is aten._grouped_mm:
        left, right = args[0].shape, args[1].shape
        groups = left[0] if len(left) == len(right) == 3 else 1  # else the groups divide a side
        return 2 * int(groups * left[-2] * left[-1] * right[-1])
    count = flop_registry.get(func.overloadpacket)
    return None if count is None else int(count(*args, **kwargs, out_val=result))


def bytes_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes of the tensors that a call reads and writes; 0 if it returns views only."""
    read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    places = {place for each in read if (place := _place(each))}
    viewed = made and all(_place(each) in places for each in made)
    if viewed and not func._schema.is_mutable:
        return 0
    return sum(each.numel() * each.element_size() for each in read + made)


def _place(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is; 0 if it has none of its own, as a sparse one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
