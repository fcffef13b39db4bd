"""The module: torch's results, every option, decoding, and errors that say what to do."""

import math
from copy import deepcopy
from typing import Any

import attention_cases
import pytest
import torch
from attention_cases import BATCH, HEADS, WIDTH
from case_loops import for_each
from struck import kinds, same_bits, struck
from torch import nn
from torch.nn import functional

import holdfast
from holdfast import events
from holdfast.abft import counters
from holdfast.nn import Attention, Cache
from holdfast.nn.masks import alibi_slopes

LENGTH = 7


def made(**settings: Any) -> Attention:
    return attention_cases.made(torch.float64, **settings)


def data(length: int = LENGTH, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return attention_cases.data(length, width, dtype=torch.float64, seed=seed)


def heads_of(module: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """Q, K and V by head, [BATCH, heads, length, d]."""
    return [
        layer(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for layer in (module.q_proj, module.k_proj, module.v_proj)
    ]


def out(module: Attention, context: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.out_proj(context.transpose(1, 2).flatten(2))
    return result


@for_each("kdim", [None, 5])
@for_each("bias", [True, False])
def test_from_torch_computes_what_torch_does(kdim: int | None, bias: bool) -> None:
    torch.manual_seed(2)
    theirs = nn.MultiheadAttention(
        WIDTH, HEADS, bias=bias, kdim=kdim, vdim=kdim, batch_first=True, dtype=torch.float64
    )
    ours = Attention.from_torch(theirs)
    query, key = data(), data(5, kdim or WIDTH, 3)
    mask = torch.rand(BATCH * HEADS, LENGTH, 5) < 0.3
    padding = torch.zeros(BATCH, 5, dtype=torch.bool)
    padding[1, 4] = True
    mask[..., 0] = False  # torch's result of a query without keys is NaN
    expected, _ = theirs(query, key, key, key_padding_mask=padding, attn_mask=mask)
    result = ours(query, key, mask=mask, key_padding_mask=padding)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert not ours.eval().training
    assert Attention.from_torch(theirs.eval()).training is False


def test_from_torch_refuses_what_it_has_no_product_for() -> None:
    with pytest.raises(ValueError, match="add_bias_kv"):
        Attention.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(TypeError, match="not Linear"):
        Attention.from_torch(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_rotary_embedding_turns_pairs_by_their_position() -> None:
    module = made(rope=100.0)
    q, k, v = heads_of(module, data())
    half = module.head_dim // 2
    angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * 100.0 ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (
        torch.view_as_real(torch.complex(t[..., :half], t[..., half:]) * turn).mT.flatten(-2)
        for t in (q, k)
    )
    expected = out(module, functional.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(module(data()), expected, rtol=1e-12, atol=1e-12)


def test_alibi_subtracts_slope_times_distance() -> None:
    module = made(alibi=True)
    q, k, v = heads_of(module, data())
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    bias = -alibi_slopes(HEADS)[:, None, None] * distance
    expected = out(module, functional.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    torch.testing.assert_close(module(data()), expected, rtol=1e-12, atol=1e-12)
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]


@for_each(
    "settings",
    [
        {},
        {"rope": 10000.0},
        {"alibi": True},
        {"window": 3},
        {"kv_heads": 2, "rope": 500.0, "window": 4},
        {"kv_heads": 1},
    ],
)
@for_each("steps", [[1] * LENGTH, [4, 1, 2]])
def test_decoding_with_a_cache_gives_what_the_whole_sequence_gives(
    settings: dict[str, Any], steps: list[int]
) -> None:
    module, x = made(causal=True, **settings), data()
    cache, outputs = Cache(), []
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 0] = True
    with torch.no_grad():
        for part in x.split(steps, 1):
            seen = padding[:, : len(cache) + part.shape[1]]
            outputs.append(module(part, cache=cache, key_padding_mask=seen))
        expected = module(x, key_padding_mask=padding)
    assert len(cache) == LENGTH
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-12, atol=1e-12)
    assert events.recent() == []


def test_dropout_is_torchs_and_stays_the_same_in_a_recomputation() -> None:
    module = made(dropout=0.4)
    q, k, v = heads_of(module, data())
    torch.manual_seed(7)
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(module.head_dim))
    shape = scores.shape
    probabilities = functional.dropout(scores.softmax(-1).flatten(0, 1), 0.4).view(shape)
    expected = out(module, torch.matmul(probabilities, v))

    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)
        output = module(data())
        return [output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))]

    healthy = run()
    assert torch.equal(healthy[0], expected)
    torchs = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    torch.testing.assert_close(tuple(healthy[1:]), torchs, rtol=1e-12, atol=1e-12)
    for matrix in ("S_CL.V", "S_CL.AP", "S_CL.CL"):
        with struck((-1,) * 3, math.nan, site=f"{matrix}/forward") as strike:
            repaired = run()
        assert strike.seen
        assert same_bits(repaired, healthy), matrix
    assert torch.equal(module.eval()(data()), made()(data()))


def test_under_protect_nothing_is_checked_twice_and_sites_have_the_modules_name() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), made(), nn.Linear(WIDTH, WIDTH)).double()
    x = data()
    expected = model(x)
    with holdfast.protect(model) as protection:
        protection.reset_counters()
        assert torch.equal(model(x), expected)
        report = protection.report()
    covered = {site.site for site in report.sites if site.covered}
    sections = {f"1/{name}/forward" for name in ("S_AS.Q", "S_AS.K", "S_AS.AS", "S_CL.V")}
    sections |= {f"1/{name}/forward" for name in ("S_CL.AP", "S_CL.CL", "S_O.O")}
    assert covered == {"0/addmm/forward", "2/addmm/forward"} | sections
    assert len(report.sites) == len(covered)
    assert all(
        0 < site.line < 1e-8 for site in report.sites if not site.site.endswith("AP/forward")
    )


def test_autocast_computes_in_its_dtype() -> None:
    module = Attention(WIDTH, HEADS)
    x = data().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
    low = deepcopy(module).bfloat16()
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, low(x.bfloat16()))
    saved = [t for t in output.grad_fn.saved_tensors if t is not None]
    assert {t.dtype for t in saved} == {torch.bfloat16}
    output.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert module.q_proj.weight.grad is not None


def test_it_copies_saves_and_infers() -> None:
    module, x, other = made(causal=True), data(), made(causal=True)
    other.load_state_dict(module.state_dict())
    expected = module(x)
    assert torch.equal(deepcopy(module)(x), expected)
    assert torch.equal(other(x), expected)
    with torch.inference_mode():
        assert torch.equal(module(x), expected)
    assert "causal" not in module.state_dict()


@for_each(
    ("settings", "says"),
    [
        ({"num_heads": 0}, "num_heads = 0"),
        ({"embed_dim": 0}, "embed_dim = 0"),
        ({"embed_dim": 18}, "embed_dim = 18 must be a multiple of num_heads = 4"),
        ({"kv_heads": 3}, "kv_heads = 3"),
        ({"rope": 10000.0, "embed_dim": 12}, "heads of an even size, not 3"),
        ({"rope": -1.0}, "rope = -1.0"),
        ({"window": 0}, "window = 0"),
        ({"dropout": 1.5}, "dropout = 1.5"),
        ({"correction": "hope"}, "correction = 'hope'"),
        ({"frequencies": (1.0,)}, "frequencies = .* one for each of .*S_AS"),
        ({"frequencies": (1.0, 2.0, 1.0)}, "frequency = 2.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Attention(**{"embed_dim": WIDTH, "num_heads": HEADS} | settings)


@for_each(
    ("call", "error", "says"),
    [
        ({"query": torch.zeros(3, WIDTH)}, ValueError, r"query has shape \(3, 16\)"),
        ({"query": torch.zeros(2, 3, 8)}, ValueError, r"give \[batch, length, 16\]"),
        ({"query": torch.zeros(2, 3, WIDTH).double()}, TypeError, "query is torch.float64"),
        ({"query": torch.zeros(2, 3, WIDTH).int()}, TypeError, "query is torch.int32"),
        ({"key": torch.zeros(1, 3, WIDTH)}, ValueError, "must agree in batch"),
        (
            {"key": torch.zeros(2, 4, WIDTH), "value": torch.zeros(2, 5, WIDTH)},
            ValueError,
            "key and value also in length",
        ),
        ({"mask": torch.zeros(3, 4).bool()}, ValueError, r"mask has shape \(3, 4\): give \(3, 3\)"),
        ({"mask": torch.zeros(2, 3, 3).bool()}, ValueError, r"mask has shape \(2, 3, 3\)"),
        ({"mask": torch.zeros(3, 3).int()}, TypeError, "mask is torch.int32: give bool"),
        ({"mask": torch.zeros(3, 3).double()}, TypeError, "mask is torch.float64"),
        ({"key_padding_mask": torch.zeros(3, 3).bool()}, ValueError, "key_padding_mask has shape"),
        ({"key_padding_mask": torch.zeros(2, 3).long()}, TypeError, "key_padding_mask is"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    call: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Attention(WIDTH, HEADS)(**{"query": torch.zeros(2, 3, WIDTH)} | call)


def test_positions_need_one_sequence_and_a_cache_its_batch() -> None:
    x = torch.zeros(2, 3, WIDTH)
    with pytest.raises(ValueError, match="3 queries and 4 keys: causal, window"):
        Attention(WIDTH, HEADS, causal=True)(x, torch.zeros(2, 4, WIDTH))
    cache, module = Cache(), Attention(WIDTH, HEADS)
    module(x, cache=cache)
    with pytest.raises(ValueError, match="the cache holds 2 sequences and the batch has 1"):
        module(x[:1], cache=cache)


@pytest.mark.compile
def test_in_a_compiled_model_it_stays_eager_and_verified() -> None:
    module, x = Attention(WIDTH, HEADS, causal=True), data().float()

    def run(call: nn.Module) -> list[torch.Tensor]:
        output = call(x)
        return [output, *torch.autograd.grad(output.sum(), list(module.parameters()))]

    expected = run(module)
    compiled = torch.compile(module, backend="eager")
    run(compiled)
    counters.reset()
    assert same_bits(run(compiled), expected)
    assert {row["calls"] for row in counters.counters()} == {1}
    with struck((-1,) * 3, math.nan, site="S_AS.K/grad_b"):
        repaired = run(compiled)
    assert same_bits(repaired, expected)
    assert kinds() == ["gemm_fault"]
