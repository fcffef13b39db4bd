"""Attention as a function: right with every option, silent, repaired without ``protect``."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from case_loops import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from struck import DTYPES, Strike, armed, kinds, same_bits
from torch import nn

import holdfast
from holdfast import events, native
from holdfast.abft.attention.reference import attention, attention_gradients
from holdfast.errors import ConfigError
from holdfast.nn.functional import attention as module
from holdfast.nn.functional import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_varlen,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = list[torch.Tensor]
NATIVE = pytest.mark.skipif(native.core is None, reason="only the native core fuses attention")
FORWARD, BACKWARD = "(outside)/sdpa/forward", "(outside)/sdpa_backward/grad_qkv"
BATCH, HEADS, WIDTH = 2, 4, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """One attention: operands, options as the function takes them, and the same as fp64 biases."""

    def __init__(self, names: tuple[str, ...], dtype: torch.dtype, first: int = 0) -> None:
        long, short = (9, 17) if "more keys" in names else (17, 9) if "fewer keys" in names else (
            13, 13,
        )  # fmt: skip
        shared = 2 if "grouped" in names else HEADS
        shapes = [(BATCH, HEADS, long), *[(BATCH, shared, short)] * 2, (BATCH, HEADS, long)]
        self.q, self.k, self.v, self.grad = (
            random(*shape, WIDTH, seed=seed).to(dtype) for seed, shape in enumerate(shapes)
        )
        distance = first + torch.arange(long)[:, None] - torch.arange(short)
        self.options: dict[str, object] = {"enable_gqa": True} if "grouped" in names else {}
        self.bias = torch.zeros(1, 1, long, short, dtype=torch.float64)
        if "causal" in names:
            self.options["is_causal"] = True
            self.block(distance < 0)
        if "window" in names:
            self.options["window"] = 3
            self.block(distance.abs() >= 3)
        for name, shape in (("slopes", (HEADS,)), ("slopes of batches", (BATCH, HEADS))):
            if name in names:
                slopes = self.options["alibi_slopes"] = random(*shape, seed=9).abs().float()
                self.bias = self.bias - slopes.double()[..., None, None] * distance.abs()
        if "scale" in names:
            self.options["scale"] = -0.7
        if "added" in names:
            added = self.options["attn_mask"] = random(HEADS, long, short, seed=8).to(dtype)
            self.bias = self.bias + added.double()
        if "kept" in names:
            kept = self.options["attn_mask"] = random(BATCH, 1, 1, short, seed=7) < 0.5
            self.block(~kept)
        if "empty rows" in names:
            kept = torch.ones(long, short, dtype=torch.bool)
            kept[::3] = False
            self.options["attn_mask"] = kept
            self.block(~kept)

    def block(self, blocked: torch.Tensor) -> None:
        self.bias = self.bias.masked_fill(blocked, -math.inf)

    def results(self, function: Callable[..., torch.Tensor], **options: object) -> Tensors:
        """Output and gradients."""
        leaves = [each.detach().requires_grad_() for each in (self.q, self.k, self.v)]
        output = function(*leaves, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, self.grad)]

    def ours(self) -> Tensors:
        return self.results(scaled_dot_product_attention, **self.options)

    def torchs(self) -> Tensors:
        bias = self.bias.to(torch.promote_types(self.q.dtype, torch.float32))
        grouped = {"attn_mask": bias, "scale": self.options.get("scale"), "enable_gqa": True}
        return self.results(F.scaled_dot_product_attention, **grouped)

    def exact(self, factors: torch.Tensor | None = None) -> tuple[Tensors, list[float]]:
        """Output and gradients in fp64, and the largest sum of absolute terms in each."""
        q, k, v, grad = (each.double() for each in (self.q, self.k, self.v, self.grad))
        options = self.bias, False, self.options.get("scale"), factors
        output = attention(q, k, v, *options)[0]  # type: ignore[arg-type]
        eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
        shares = attention(q, k, eye, *options)[0]  # type: ignore[arg-type]
        groups = HEADS // k.shape[1]
        wide_k, wide_v = (each.abs().repeat_interleave(groups, 1) for each in (k, v))
        mixed, scale = shares @ wide_v, abs(float(self.options.get("scale") or WIDTH**-0.5))  # type: ignore[arg-type]
        scores = shares * (grad.abs() @ wide_v.mT + (grad.abs() * mixed).sum(-1, keepdim=True))
        of_keys = (scores.mT @ q.abs() * scale, shares.mT @ grad.abs())
        summed = (each.unflatten(1, (k.shape[1], groups)).sum(2) for each in of_keys)
        terms = [mixed, scores @ wide_k * scale, *summed]
        found = [output, *attention_gradients(grad, q, k, v, *options)]
        return found, [each.max().item() for each in terms]

    def check(self) -> None:
        """Check the errors of ours."""
        self.compare(self.ours(), self.torchs(), self.exact())

    def compare(self, ours: Tensors, torchs: Tensors, exact: tuple[Tensors, list[float]]) -> None:
        """Check that errors are at most twice torch's, beyond four units of the terms."""
        for mine, theirs, truth, term in zip(ours, torchs, *exact, strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            error, usual = ((each.double() - truth).abs().max() for each in (mine, theirs))
            assert error <= 2 * usual + 4 * torch.finfo(mine.dtype).eps * term


MASKS = ("added", "kept", "empty rows")
OPTIONS = ("causal", "window", "slopes", "slopes of batches", "scale", "grouped", *MASKS)
OPTIONS += ("more keys", "fewer keys")
EXCLUDING = [set(MASKS), {"more keys", "fewer keys"}, {"slopes", "slopes of batches"}]
PAIRS = [
    pair for pair in itertools.combinations(OPTIONS, 2)
    if not any(set(pair) <= each for each in EXCLUDING)
]  # fmt: skip


@for_each("dtype", DTYPES)
@for_each("names", [(), *((name,) for name in OPTIONS), *PAIRS])
def test_every_option_and_pair_of_options_is_as_right_as_torchs(
    names: tuple[str, ...], dtype: torch.dtype
) -> None:
    Case(names, dtype).check()
    assert events.recent() == []


@settings(derandomize=True, deadline=None)
@given(st.sets(st.sampled_from(OPTIONS)), st.sampled_from(DTYPES))
def test_so_is_any_set_of_options(names: set[str], dtype: torch.dtype) -> None:
    if not any(len(names & each) > 1 for each in EXCLUDING):
        Case(tuple(names), dtype).check()
        assert events.recent() == []


@NATIVE
@for_each("names", [(), ("causal", "grouped"), ("window", "slopes", "added")])
@for_each(
    ("site", "stage"),
    [(FORWARD, stage) for stage in ("scores", "probabilities", "accumulator", "state")]
    + [(BACKWARD, stage) for stage in ("scores", "grad_query", "grad_key", "grad_value")],
)
def test_a_fault_in_a_tile_is_repaired_without_protect_and_passes_torchs_function(
    names: tuple[str, ...], site: str, stage: str
) -> None:
    case = Case(names, torch.float32)

    def struck() -> Strike:
        return Strike((0, 0), lambda x: x * 1.5 + 0.25, site=site, stage=stage)

    clean = case.ours()
    assert events.recent() == []
    with armed(struck()):
        assert same_bits(case.ours(), clean)
    (event,) = events.recent()
    assert (event.kind, event.op) == ("gemm_fault", site)
    events.clear()
    with armed(lambda *_: None):  # armed, torch's function has the kernel without its checks
        unprotected = case.torchs()
    with armed(struck()):
        assert not same_bits(case.torchs(), unprotected)
    assert events.recent() == []


def seeded(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function with one random state."""

    def run(*args: torch.Tensor, **options: object) -> torch.Tensor:
        torch.manual_seed(5)
        return function(*args, **options, dropout_p=0.4)

    return run


@for_each("dtype", DTYPES)
@for_each("names", [(), ("causal",), ("window", "slopes", "grouped"), ("more keys", "empty rows")])
def test_dropout_drops_what_torchs_function_drops(
    names: tuple[str, ...], dtype: torch.dtype
) -> None:
    case = Case(names, dtype)
    ours, torchs = seeded(scaled_dot_product_attention), seeded(F.scaled_dot_product_attention)
    bias = case.bias.to(torch.promote_types(dtype, torch.float32))
    plain = {"attn_mask": bias, "enable_gqa": True}
    torch.manual_seed(5)
    factors = F.dropout(torch.ones(BATCH, HEADS, *case.bias.shape[2:], dtype=bias.dtype), 0.4)
    found = case.results(ours, **case.options), case.results(torchs, **plain)
    case.compare(*found, case.exact(factors.double()))
    # With the identity as values the output is the probabilities that are left.
    case.v = torch.eye(case.k.shape[2], dtype=dtype).expand(*case.k.shape[:2], -1, -1)
    left, theirs_left = (
        function(case.q, case.k, case.v, **options) == 0
        for function, options in ((ours, case.options), (torchs, plain))
    )
    assert torch.equal(left, theirs_left)
    assert 0 < left.sum() < left.numel()
    assert events.recent() == []


@NATIVE
@for_each(
    ("site", "stage"),
    [(FORWARD, stage) for stage in ("scores", "accumulator")]
    + [(BACKWARD, stage) for stage in ("grad_probabilities", "grad_query", "grad_key")],
)
def test_with_dropout_faults_in_the_products_and_their_gradients_are_repaired(
    site: str, stage: str
) -> None:
    case = Case((), torch.float32)
    ours, torchs = seeded(scaled_dot_product_attention), seeded(F.scaled_dot_product_attention)

    def struck() -> Strike:
        row = (0, slice(None))  # of which dropout leaves some
        return Strike(row, 7.0, site=site, stage=stage)

    clean = case.results(ours)
    with armed(lambda *_: None):  # armed, torch's function has the kernel without its checks
        unprotected = case.results(torchs)
    with armed(struck()):
        assert same_bits(case.results(ours), clean)
    assert kinds() == ["gemm_fault"]
    events.clear()
    with armed(struck()):
        assert not same_bits(case.results(torchs), unprotected)
    assert events.recent() == []


@for_each("names", [(), ("causal", "grouped"), ("window", "slopes of batches"), ("empty rows",)])
def test_written_out_where_no_kernel_fuses_it(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "FUSED", ())
        Case(names, torch.float32).check()
    assert events.recent() == []


def test_a_mask_and_slopes_that_require_grad_get_it_and_values_may_be_of_another_size() -> None:
    case, slopes = Case(("added",), torch.float64), random(HEADS).requires_grad_()
    mask = case.options["attn_mask"].requires_grad_()  # type: ignore[attr-defined]
    values = random(BATCH, HEADS, 13, 5)
    distance = (torch.arange(13)[:, None] - torch.arange(13)).abs()
    both = mask - slopes[:, None, None] * distance
    expected = F.scaled_dot_product_attention(case.q, case.k, values, both)
    found = scaled_dot_product_attention(case.q, case.k, values, mask, alibi_slopes=slopes)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(each.sum(), (mask, slopes)) for each in (found, expected))
    torch.testing.assert_close(*gradients)


def test_leading_dimensions_may_be_left_out() -> None:
    q, k, v = (random(HEADS, 6, WIDTH, seed=seed) for seed in range(3))
    whole = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert whole.shape == q.shape
    first = scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)
    assert same_bits(first, whole[0])


def test_autocast_converts_as_for_torchs_function() -> None:
    case = Case(("added",), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for dropout_p in (0.0, 0.5):
            found = scaled_dot_product_attention(case.q, case.k, case.v, dropout_p=dropout_p)
            assert found.dtype is torch.bfloat16
        found, expected = case.ours(), case.torchs()
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


@NATIVE
def test_a_second_derivative_is_refused() -> None:
    q = random(1, 1, 4, 3).requires_grad_()
    output = scaled_dot_product_attention(q, q, q)
    (gradient,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


Q, FEW = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8)
REFUSED: list[tuple[type[Exception], str, tuple[torch.Tensor, ...], dict[str, object]]] = [
    (TypeError, "float8_e4m3fn: convert", (Q.to(torch.float8_e4m3fn),) * 3, {}),
    (TypeError, "int64: convert", (Q.long(),) * 3, {}),
    (ConfigError, "on meta: it is verified on", (Q.to("meta"),) * 3, {}),
    (ValueError, "do not fit", (Q, Q.double(), Q), {}),
    (ValueError, "do not fit", (Q, Q[..., :7], Q), {}),
    (ValueError, "do not fit", (Q, Q, Q[:, :, :4]), {}),
    (ValueError, "do not fit", (Q[..., :0],) * 3, {}),
    (ValueError, "do not fit", (Q[None],) * 3, {}),
    (ValueError, "enable_gqa=True", (Q, FEW, FEW), {}),
    (ValueError, "do not fit", (Q[:, :3], FEW, FEW), {"enable_gqa": True}),
    (TypeError, "attn_mask torch.float64", (Q,) * 3, {"attn_mask": random(5, 5)}),
    (
        ValueError,
        r"attn_mask torch.float32 \(5, 4\)",
        (Q,) * 3,
        {"attn_mask": torch.zeros(5, 4)},
    ),
    (ValueError, "alibi_slopes", (Q,) * 3, {"alibi_slopes": torch.zeros(3)}),
    (ValueError, "window = 0", (Q,) * 3, {"window": 0}),
    (ValueError, r"window = 2\.5", (Q,) * 3, {"window": 2.5}),
    (ValueError, r"dropout_p = 1\.5", (Q,) * 3, {"dropout_p": 1.5}),
    (ValueError, "dropout_p = 'a'", (Q,) * 3, {"dropout_p": "a"}),
    (ValueError, "scale = nan", (Q,) * 3, {"scale": math.nan}),
    (TypeError, "query is a list", ([1.0], Q, Q), {}),  # type: ignore[list-item]
    (TypeError, "attn_mask is a list", (Q,) * 3, {"attn_mask": [True]}),
]


@for_each(("error", "message", "operands", "options"), REFUSED)
def test_what_is_not_supported_is_refused_with_a_message(
    error: type[Exception],
    message: str,
    operands: tuple[torch.Tensor, ...],
    options: dict[str, object],
) -> None:
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(*operands, **options)  # type: ignore[arg-type]


ENDS_Q, ENDS_K = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 6, 8, 11])


@for_each("names", [(), ("causal",), ("window",), ("causal", "window", "slopes of batches")])
@for_each("dtype", [torch.float64, torch.bfloat16])
def test_packed_sequences_attend_within_themselves_and_end_together(
    names: tuple[str, ...], dtype: torch.dtype
) -> None:
    q, k, v = (random(n, HEADS, WIDTH, seed=n).to(dtype).requires_grad_() for n in (9, 11, 11))
    slopes = random(3, HEADS).abs()
    options = {"is_causal": "causal" in names, "window": 3 if "window" in names else None}
    options |= {"alibi_slopes": slopes.to(dtype) if "slopes of batches" in names else None}
    found = scaled_dot_product_attention_varlen(q, k, v, ENDS_Q, ENDS_K, **options)
    found_grads = torch.autograd.grad(found, (q, k, v), found.detach())
    parts = []
    for i, ((a, b), (c, d)) in enumerate(
        zip(itertools.pairwise(ENDS_Q.tolist()), itertools.pairwise(ENDS_K.tolist()), strict=True)
    ):
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        bias = torch.zeros(1, HEADS, b - a, d - c, dtype=torch.float64)
        if "slopes of batches" in names:
            bias = bias - slopes[i].to(dtype).double()[:, None, None] * distance.abs()
        bias = bias.masked_fill((distance < 0) & ("causal" in names), -math.inf)
        bias = bias.masked_fill((distance.abs() >= 3) & ("window" in names), -math.inf)
        heads = (each.double().transpose(0, 1)[None] for each in (q[a:b], k[c:d], v[c:d]))
        parts.append(attention(*heads, bias)[0][0].transpose(0, 1))
    expected = torch.cat(parts)
    grads = torch.autograd.grad(expected, (q, k, v), found.detach().double())
    near = {"rtol": 0.03, "atol": 0.03} if dtype is torch.bfloat16 else {}
    for mine, truth in zip((found, *found_grads), (expected, *grads), strict=True):
        torch.testing.assert_close(mine, truth.to(dtype), **near)
    assert events.recent() == []


@for_each("ends", [[], [0], [1, 9], [0, 8], [0, 12, 9]])
def test_wrong_cumulative_lengths_are_refused(ends: list[int]) -> None:
    packed = random(9, HEADS, WIDTH)
    with pytest.raises(ValueError, match="cumulative lengths"):
        scaled_dot_product_attention_varlen(
            *[packed] * 3, torch.tensor(ends, dtype=torch.int32), ENDS_Q
        )


def test_wrong_packed_sequences_are_refused() -> None:
    packed, ends = random(9, HEADS, WIDTH), torch.tensor([0, 9])
    attend = scaled_dot_product_attention_varlen
    with pytest.raises(ValueError, match="at least one sequence"):
        attend(*[packed[:0]] * 3, ends[:1], ends[:1])
    with pytest.raises(ValueError, match="give integers"):
        attend(*[packed] * 3, ends.double(), ends)
    with pytest.raises(TypeError, match="cu_seq_k is a list"):
        attend(*[packed] * 3, ends, [0, 9])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"packed sequences \[\(1, 9,"):
        attend(packed[None], packed, packed, ends, ends)
    with pytest.raises(ValueError, match="of 2 sequences: there are 1"):
        attend(*[packed] * 3, ends, ends, alibi_slopes=torch.ones(2, HEADS))


@NATIVE
def test_calls_are_named_by_their_module_and_counted_once() -> None:
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(x, x, x, window=2)

    model = nn.Sequential()
    model.add_module("attend", Attend())
    with holdfast.protect(model) as protection:
        model(random(1, 2, 6, WIDTH).requires_grad_()).sum().backward()
        sites = {site.site: site.rows for site in protection.report().sites}
    assert sites == {"attend/sdpa/forward": 12, "attend/sdpa_backward/grad_qkv": 12}


@pytest.fixture
def _compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@NATIVE
@pytest.mark.compile
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@for_each("names", [("causal",), ("window", "slopes", "added")])
def test_compiled_it_has_the_bits_of_eager_mode_and_faults_are_repaired(
    names: tuple[str, ...], backend: str
) -> None:
    case = Case(names, torch.float32)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    eager, function = case.ours(), scaled_dot_product_attention
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert same_bits(case.results(compiled, **case.options), eager)
    for site, stage in ((FORWARD, "scores"), (BACKWARD, "grad_key")):
        with armed(Strike((0, 0), 7.0, site=site, stage=stage)):
            assert same_bits(case.results(compiled, **case.options), eager)
        assert [(event.kind, event.op) for event in events.recent()] == [("gemm_fault", site)]
        events.clear()
    dropped = case.results(
        torch.compile(function, fullgraph=True, backend=backend), **case.options, dropout_p=0.5
    )
    assert [each.shape for each in dropped] == [each.shape for each in eager]
