"""Fused attention with dropout: the elements that torch drops, the oracle's values, the triple."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from case_loops import for_each
from fused_cases import DTYPES, NATIVE, Case, largest_terms
from hypothesis import given, settings
from hypothesis import strategies as st
from struck import Strike, armed, kinds, same_bits
from test_fused_faults import DAMAGES, PLACES, Damage
from test_fused_values import CASES, shapes
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import events
from holdfast.abft.attention.reference import attention, attention_gradients

pytestmark = NATIVE
SEED = 5


@dataclass(frozen=True)
class Dropping:
    """An attention with dropout, as torch's function is given it."""

    case: Case
    dtype: torch.dtype = torch.float32
    p: float = 0.3

    def mask(self) -> torch.Tensor | None:
        """The mask, which holds what the function does not take beside one."""
        case, mask = self.case, self.case.additive(self.dtype)
        if case.causal and mask is not None:
            blocked = torch.ones(case.queries, case.keys, dtype=torch.bool).triu(1)
            mask = mask.masked_fill(blocked, -torch.inf)
        return mask

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(SEED)
        mask, causal = self.mask(), self.case.causal and not self.case.mask
        return F.scaled_dot_product_attention(
            *operands, mask, self.p, causal, scale=self.case.scale, enable_gqa=True
        )

    def results(self, given: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Output, and gradients of q, k and v."""
        *inputs, grad = self.case.operands(self.dtype) if given is None else given
        leaves = [each.requires_grad_() for each in inputs]
        output = self(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    def factors(self) -> torch.Tensor:
        """What torch's own dropout multiplies the probabilities by."""
        torch.manual_seed(SEED)
        case, wide = self.case, torch.promote_types(self.dtype, torch.float32)
        full = (case.batch, case.heads, case.queries, case.keys)
        return F.dropout(torch.ones(full, dtype=wide), self.p).double()

    def exact(self) -> list[torch.Tensor]:
        q, k, v, grad = (each.double() for each in self.case.operands(self.dtype))
        mask = self.mask()
        wide = None if mask is None else mask.double()
        rest = wide, self.case.causal and not self.case.mask, self.case.scale, self.factors()
        return [attention(q, k, v, *rest)[0], *attention_gradients(grad, q, k, v, *rest)]


def ours(problem: Dropping, **options: object) -> list[torch.Tensor]:
    with holdfast.protect(nn.Identity(), **options):  # type: ignore[arg-type]
        return problem.results()


def check_twice(problem: Dropping) -> None:
    """The 2× rule; torch writes it out in fp32, so that units are of the operands' dtype."""
    output, _, *of_operands = largest_terms(problem.case, problem.case.operands(problem.dtype))
    rows = ours(problem), problem.results(), problem.exact(), [output, *of_operands]
    for mine, theirs, true, term in zip(*rows, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        usual = (theirs.double() - true).abs().max().item()
        unit = torch.finfo(problem.dtype).eps * term / (1 - problem.p)
        assert (mine.double() - true).abs().max().item() <= 2 * usual + 4 * unit
    assert events.recent() == []


@for_each("dtype", DTYPES)
@for_each("case", CASES.values())
def test_no_further_from_the_truth_than_twice_torch(case: Case, dtype: torch.dtype) -> None:
    check_twice(Dropping(case, dtype))


@settings(derandomize=True, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.sampled_from([0.01, 0.1, 0.5, 0.9]))
def test_any_shape(case: Case, dtype: torch.dtype, p: float) -> None:
    check_twice(Dropping(case, dtype, p))


@for_each("dtype", DTYPES)
@for_each("name", ["small", "tiles of queries", "causal", "mask of heads", "grouped"])
def test_the_elements_that_torch_drops_are_dropped(name: str, dtype: torch.dtype) -> None:
    """With the identity as values the output is the probabilities that are left."""
    case = replace(CASES[name], keys=CASES[name].queries, width=CASES[name].queries)
    problem = Dropping(case, dtype)
    q, k, _, _ = case.operands(dtype)
    v = torch.eye(case.keys, dtype=dtype).expand_as(k)
    expected, after = problem(q, k, v), torch.get_rng_state()
    module = nn.Module()
    module.forward = problem  # type: ignore[assignment]
    with holdfast.protect(nn.ModuleDict({"attend": module})) as protection:
        found = module(q.requires_grad_(), k, v)
        assert torch.equal(torch.get_rng_state(), after)
        found.sum().backward()
        sites = {site.site: site.covered for site in protection.report().sites}
    assert sites == {f"attend/{name}": True for name in ("sdpa/forward", "sdpa_backward/grad_qkv")}
    assert torch.equal(found == 0, expected == 0)
    assert 0 < (found == 0).sum() < found.numel()


STRUCK = Dropping(Case(heads=2, kv_heads=1, queries=70, keys=600, width=16))
places = for_each(("site", "stage"), PLACES)


@cache
def calm(dtype: torch.dtype) -> list[torch.Tensor]:
    """Without a fault, in silence."""
    results = ours(replace(STRUCK, dtype=dtype))
    assert events.recent() == []
    return results


@for_each(("name", "dtype"), zip(DAMAGES, [torch.float32, *DTYPES, torch.bfloat16], strict=True))
@places
def test_a_fault_is_repaired_bit_for_bit_and_unverified_gets_through(
    site: str, stage: str, name: str, dtype: torch.dtype
) -> None:
    problem, expected = replace(STRUCK, dtype=dtype), calm(dtype)
    struck = [Strike((0, 0), DAMAGES[name], site=site, stage=stage) for _ in "ab"]
    with armed(struck[0]):
        assert same_bits(ours(problem), expected)
    (event,) = events.recent()
    assert (event.kind, event.op, event.rung) == ("gemm_fault", site, "correct")
    events.clear()
    with armed(struck[1]):
        assert not same_bits(ours(problem, verify=False), expected)
    assert events.recent() == []


@for_each("damage", [lambda p: p * 1.5 + 2, lambda p: -p - 0.25])
def test_an_impossible_exponential_is_computed_again(damage: Damage) -> None:
    expected = calm(torch.float32)
    with armed(Strike((0, 0), damage, stage="exponentials", nth=1)):
        assert same_bits(ours(STRUCK), expected)
    assert kinds() == ["gemm_fault"]


def test_activation_checkpointing_drops_the_same_elements_again() -> None:
    case = Case(queries=40, keys=40)
    *inputs, grad = case.operands(torch.float32)
    leaves = [each.requires_grad_() for each in inputs]
    attend = Dropping(case)
    with holdfast.protect(nn.Identity()):
        whole = torch.autograd.grad(attend(*leaves), leaves, grad)
        for reentrant in (False, True):
            copies = [each.detach().requires_grad_() for each in leaves]
            again = checkpoint(attend, *copies, use_reentrant=reentrant)
            assert again is not None
            again.backward(grad)
            assert same_bits([each.grad for each in copies], whole)  # type: ignore[misc]


def test_a_second_derivative_is_that_of_torch() -> None:
    for case in (Case(queries=7, keys=9), Case(kv_heads=1, causal=True), Case(mask="keys")):
        attend, (q, k, v, _) = Dropping(case, torch.float64), case.operands(torch.float64)

        def twice() -> tuple[torch.Tensor, ...]:
            leaves = [each.detach().requires_grad_() for each in (q, k, v)]  # noqa: B023
            wanted = leaves[:2]  # the value's gradient is not asked for
            output = attend(*wanted, leaves[2].detach()).square().sum()  # noqa: B023
            first = torch.autograd.grad(output, wanted, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

        expected = twice()
        with holdfast.protect(nn.Identity()):
            torch.testing.assert_close(twice(), expected)


@for_each("form", ["all is dropped", "a mask requires grad", "fused kernels are off", "3-D"])
def test_what_is_left_to_torch_keeps_its_bits(form: str) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(SEED)
        q = torch.randn((2, 6, 8) if form == "3-D" else (1, 2, 6, 8), requires_grad=True)
        mask = torch.zeros(6, 6, requires_grad=True) if form == "a mask requires grad" else None
        off = sdpa_kernel(SDPBackend.MATH) if form == "fused kernels are off" else nullcontext()
        with off:
            p = 1.0 if form == "all is dropped" else 0.3
            output = F.scaled_dot_product_attention(q, q, q, mask, p)
        return torch.autograd.grad(output.square().sum(), [q] if mask is None else [q, mask])

    expected = run()
    with holdfast.protect(nn.Identity()) as protection:
        assert same_bits(run(), expected)
        assert not any("sdpa" in site.site for site in protection.report().sites)
