"""Healthy data raises nothing, however coherent; what the input brought is named as such."""

from collections.abc import Callable

import torch
from case_loops import for_each
from section_cases import BATCH, DTYPES, HEADS, WIDTH, Plain, Strike, armed, data, module, results
from struck import kinds

from holdfast import events
from holdfast.abft.attention import section_counters
from holdfast.nn import Attention

dtypes = for_each("dtype", DTYPES)
SHAPE = (2, 65, 48)


def _normal() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _outlier() -> torch.Tensor:
    x = _normal() * 2e-3  # the scores of what follows end below fp16's 65504
    x[..., 7] *= 1e5
    return x


def _padded() -> torch.Tensor:
    x = _normal()
    x[1, 20:] = 0
    return x


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: _normal(),
    "constant": lambda: torch.full(SHAPE, 0.1, dtype=torch.float64),
    "constant rows": lambda: _normal()[..., :1].expand(SHAPE),
    "one token repeated": lambda: _normal()[:, :1].expand(SHAPE),
    "zeros": lambda: torch.zeros(SHAPE, dtype=torch.float64),
    "outlier channel": lambda: _outlier(),
    "padding": lambda: _padded(),
    "all positive": lambda: _normal().abs() + 1,
    "tiny": lambda: _normal() * 1e-6,
    "one-hot probabilities": lambda: _normal() * 30,
    "one-hot tokens": lambda: torch.eye(48, dtype=torch.float64)[
        torch.arange(130).view(2, 65) % 48
    ],
}


@dtypes
@for_each("name", INPUTS)
@for_each("causal", [False, True])
def test_healthy_data_raises_no_event(name: str, dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(3)
    made = Attention(48, 4, causal=causal, dtype=torch.float64).to(dtype)
    section_counters.reset()
    results(made, INPUTS[name]().to(dtype))
    rows = section_counters.counters()
    assert len(rows) == 19
    assert sum(row["rows"] for row in rows) > 4000
    assert events.recent() == []


@dtypes
@for_each("inner", [1, 3, 200, 1500])
def test_any_inner_length_raises_no_event(inner: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inner)
    made = Attention(8, 2, kdim=inner, vdim=inner, dtype=torch.float64).to(dtype)
    query = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64).to(dtype)
    keys = torch.randn(2, 300, inner, generator=generator, dtype=torch.float64).to(dtype)
    results(made, query, keys, keys.abs())
    assert events.recent() == []


@dtypes
@for_each("value", [torch.nan, torch.inf])
def test_nan_and_inf_of_the_input_are_named_and_left(value: float, dtype: torch.dtype) -> None:
    x = data(dtype)
    x[0, 3, 5] = value
    made = module(dtype)
    output = made(x)
    assert torch.equal(output.isnan(), Plain(made)(x).isnan())
    assert torch.equal(output[1], made(data(dtype))[1])
    assert {event.kind for event in events.recent()} == {"nonfinite_input"}


def test_an_overflow_of_fp16_is_named_and_is_no_fault() -> None:
    made = module(torch.float16)
    x = data(torch.float16) * 600
    scores = (made.q_proj(x) @ made.k_proj(x).mT).float()
    assert made.q_proj(x).isfinite().all()
    assert scores.isinf().any()
    output = made(x)
    assert not output.isfinite().all()
    assert set(kinds()) == {"nonfinite_input"}
    assert any("overflows" in event.detail["reason"] for event in events.recent())


def test_beside_a_nan_of_the_input_a_fault_is_still_repaired() -> None:
    x = data()
    x[0, 3, 5] = torch.nan  # the first sequence; the fault strikes the second
    healthy = module()(x)
    events.clear()

    def damage(old: torch.Tensor) -> torch.Tensor:
        return torch.full_like(old, 1e9)

    with armed(Strike("S_AS.AS/forward", damage)) as strike:
        result = module()(x)
    assert strike.index[0] >= HEADS
    assert torch.equal(result[1], healthy[1])
    assert kinds().count("gemm_fault") == 1


@for_each("batch", [0, BATCH])
def test_empty_sequences_are_empty(batch: int) -> None:
    output = module()(torch.empty(batch, 0, WIDTH))
    assert output.shape == (batch, 0, WIDTH)
    assert events.recent() == []
