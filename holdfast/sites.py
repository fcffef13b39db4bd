"""Fault sites: named points inside verified ops at which a fault can be injected in tests.

Ops call ``visit`` here, and ``holdfast.inject`` installs a hook here with ``arm``, so that ops need
not import the injector. While no hook is installed, a visit costs one load of a flag.

A matmul is named by where the program calls it: ``blocks.0.attn/bmm#2/grad_a`` is the second
``bmm`` that the module ``blocks.0.attn`` calls, in backward, computing the gradient of its left
operand. ``/forward`` computes the output; ``grad_b`` is the gradient of the right operand (of the
weight, for a linear layer). Fused attention is ``blocks.0.attn/sdpa/forward``, and all three
gradients together are ``blocks.0.attn/sdpa_backward/grad_qkv``.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from holdfast import native
from holdfast.errors import ConfigError
from holdfast.site_names import ATTENTION_ROLE as ATTENTION_ROLE
from holdfast.site_names import BACKWARD_TILES as BACKWARD_TILES
from holdfast.site_names import FORWARD_TILES as FORWARD_TILES
from holdfast.site_names import ROLES as ROLES
from holdfast.site_names import STAGES as STAGES
from holdfast.site_names import TILE_STAGES as TILE_STAGES

OUTSIDE = "(outside)"

native.agree("stages", (*STAGES, *TILE_STAGES))
native.agree("roles", (*ROLES, ATTENTION_ROLE))

module_names: dict[int, str] = {}

SiteTuple = tuple[int, str, int, int]


@dataclass(frozen=True)
class Gemm:
    """One matrix product ``C = beta · addend + alpha · A B`` with the checksums of B.

    ``a`` is [M, K] or [batch, M, K], ``b`` [K, N] or [batch, K, N]. ``row_sum``, fp64 [batch, K],
    is Σ_j r_j B[k, j] with random signs r_j. ``statistics``, fp64 [batch, K + 2], holds the
    values of B that the rounding threshold needs, then a fingerprint of these values.
    """

    addend: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    beta: float
    alpha: float
    row_sum: torch.Tensor
    statistics: torch.Tensor


Hook = Callable[[str, str, Gemm, torch.Tensor | None], None]
InjectingHook = TypeVar("InjectingHook", bound=Hook)

_hook: Hook | None = None
_stages: Collection[str] = ()


def site_name(site: SiteTuple | str) -> str:
    """Return the name of a matmul from (module id, op, ordinal, role); a str is returned as is."""
    if isinstance(site, str):
        return site
    module, op, ordinal, role = site
    nth = f"#{ordinal + 1}" if ordinal else ""
    return f"{module_names.get(module, OUTSIDE)}/{op}{nth}/{(*ROLES, ATTENTION_ROLE)[role]}"


def arm(hook: Hook, stages: Collection[str] = (*STAGES, *TILE_STAGES)) -> None:
    """Call ``hook(stage, site, gemm, output)`` at these stages of every intercepted matmul.

    ``stage`` is one of ``STAGES``; ``output`` is None before the product was computed. The hook
    may write into the tensors: that is the injected fault.

    Fused attention calls it for each tile it computes, with a stage of ``TILE_STAGES``: ``output``
    is then the tile of scores, probabilities or accumulators, [rows, columns]; of ``state`` it is
    the rows' running maxima and sums, [2, rows]; of ``grad_key`` and ``grad_value`` the transposed
    accumulator; ``grad_scores`` is dS. What is written into ``exponentials`` (P) or
    ``grad_softmax`` (dS) counts as computed so: the sums that the kernel forms in the same pass
    follow it. ``gemm`` is the product of the tile's queries and keys.

    Raises:
        ConfigError: Another hook is installed; replacing it would lose its faults.
    """
    global _hook, _stages
    if _hook is not None:
        raise ConfigError("another injector is armed: one device or Injector at a time")
    _stages, _hook = stages, hook
    if native.core is not None:
        native.core.arm(_from_native)


def disarm() -> None:
    """Remove the installed hook."""
    global _hook
    _hook = None
    if native.core is not None:
        native.core.arm(None)


@contextmanager
def injecting(hook: InjectingHook) -> Iterator[InjectingHook]:
    """Install a hook while the context is open; raises what ``arm`` raises."""
    arm(hook)
    try:
        yield hook
    finally:
        disarm()


def armed() -> bool:
    """Return whether a hook is installed."""
    return _hook is not None


def visit(stage: str, site: SiteTuple | str, gemm: Gemm, output: torch.Tensor | None) -> None:
    """Call the installed hook, if any, from an operator in Python; the native core does so in C++.

    For an operator that is not a matmul, ``gemm.b`` is its operand as it is stored.
    """
    if _hook is not None and stage in _stages:
        _hook(stage, site_name(site), gemm, output)


def _from_native(
    stage: str, site: SiteTuple, problem: tuple[object, ...], output: torch.Tensor | None
) -> None:
    visit(stage, site, Gemm(*problem), output)  # type: ignore[arg-type]
