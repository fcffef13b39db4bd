"""The module under activation checkpointing and under ``torch.compile``."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import attention_cases
import pytest
import torch
from case_loops import for_each
from struck import kinds, same_bits, struck
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import events
from holdfast.abft import counters
from holdfast.nn import Attention, Cache

SEEN, LENGTH = 4, 7

made = partial(attention_cases.made, causal=True)
data = partial(attention_cases.data, LENGTH)
Compute = Callable[[torch.Tensor], torch.Tensor]


def trained(module: Attention, compute: Compute) -> list[torch.Tensor]:
    module.zero_grad()
    x = data().requires_grad_()
    output = compute(x)
    output.square().sum().backward()
    operands = [x, *module.parameters()]
    return [output.detach(), *(t.grad.clone() for t in operands if t.grad is not None)]


@for_each("protected", [False, True])
@for_each("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant: bool, protected: bool) -> None:
    module = made()
    expected = trained(module, module)
    compute = partial(checkpoint, module, use_reentrant=use_reentrant)
    with holdfast.protect(module) if protected else nullcontext():
        found = trained(module, compute)
    assert same_bits(found, expected)
    assert events.recent() == []


@for_each("at", [0, 1])
@for_each("use_reentrant", [False, True])
def test_a_fault_is_repaired_in_either_computation(use_reentrant: bool, at: int) -> None:
    module = made()
    expected = trained(module, module)
    with struck((0, 1, 1), lambda old: old + 10.0, site="S_AS.AS/forward", nth=at) as strike:
        found = trained(module, partial(checkpoint, module, use_reentrant=use_reentrant))
    assert same_bits(found, expected)
    assert len(strike.seen) == 2
    assert kinds() == ["gemm_fault"]


def sections(compute: Callable[[Attention], Compute]) -> list[dict[str, tuple[int, int]]]:
    """Backward products checked and not checked in each of six passes, three sections each."""
    module = made(frequencies=(0.5, 0.3, 1.0))
    call, found = compute(module), []
    for _ in range(6):
        counters.reset()
        trained(module, call)
        rows = [row for row in counters.counters() if row["site"][3] != 0]
        found.append({str(row["site"][1:]): (row["calls"], row["unverified"]) for row in rows})
    return found


@for_each("use_reentrant", [False, True])
def test_the_sections_of_a_recomputed_call_are_checked_as_those_of_the_original(
    use_reentrant: bool,
) -> None:
    expected = sections(lambda module: module)
    assert len({str(each) for each in expected}) > 2  # sections are due in different passes
    checkpointed = partial(checkpoint, use_reentrant=use_reentrant)
    assert sections(lambda module: partial(checkpointed, module)) == expected


@for_each("use_reentrant", [False, True])
def test_a_cache_in_a_checkpointed_call_is_refused(use_reentrant: bool) -> None:
    """Recomputed, the call would find its own positions in the cache."""
    module, cache = made(), Cache()
    with torch.no_grad():
        module(data()[:, :SEEN], cache=cache)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return module(x[:, SEEN:], cache=cache)

    with pytest.raises(ValueError, match="activation checkpointing"):
        trained(module, partial(checkpoint, compute, use_reentrant=use_reentrant))
    assert len(cache) == LENGTH


def test_a_cache_beside_a_checkpointed_layer_works() -> None:
    module, cache = made(), Cache()
    whole = module(data())
    with torch.no_grad():
        first = module(data()[:, :SEEN], cache=cache)
    found = trained(
        module,
        lambda x: checkpoint(torch.tanh, module(x[:, SEEN:], cache=cache), use_reentrant=False),
    )
    torch.testing.assert_close(torch.cat([first, found[0].atanh()], 1), whole)


@pytest.mark.compile
def test_compiled_it_decodes_with_a_cache() -> None:
    module, cache = made(), Cache()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        parts = [compiled(part, cache=cache) for part in data().split([SEEN, LENGTH - SEEN], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), module(data()))
    assert len(cache) == LENGTH
    assert events.recent() == []


@pytest.mark.compile
def test_one_graph_is_refused_since_it_stays_eager() -> None:
    torch.compiler.reset()  # what an earlier test compiled in parts would serve this one
    compiled = torch.compile(made(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs eagerly, section by section"):
        compiled(data())
