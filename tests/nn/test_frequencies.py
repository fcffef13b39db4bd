"""A plan applied to a model: checked as often as planned, alike on all ranks, results unchanged."""

from collections.abc import Iterator
from math import ceil, nan

import pytest
import torch
from attention_cases import data
from case_loops import for_each
from torch import nn

from holdfast import events
from holdfast.abft import counters
from holdfast.abft.attention.op import SECTIONS
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.nn import Attention, set_frequencies
from holdfast.planner import AttentionSize, ErrorRates, modelled_costs, plan_frequencies
from holdfast.planner import published as phi_of
from holdfast.planner.frequencies import sections_of

WIDTH, HEADS, CALLS = 8, 2, 11
MATRICES = {"S_AS": "AS", "S_CL": "CL", "S_O": "O"}


@pytest.fixture(autouse=True)
def _counters() -> Iterator[None]:
    counters.reset()
    yield
    counters.reset()


def model() -> nn.Sequential:
    """Two attentions with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(Attention(WIDTH, HEADS), Attention(WIDTH, HEADS))


def batch() -> torch.Tensor:
    return data(5, WIDTH)


def planned() -> dict[str, float]:
    """A plan in which one section is never, one always and one sometimes checked."""
    size = AttentionSize.of_model("bert-base", 16, 128)
    rates = ErrorRates(2e-24, 2e-24, 1.3e-24)
    sections = sections_of(size, rates, phi_of("bert-base"), modelled_costs(size))
    return dict(plan_frequencies(sections, 3e-14).frequencies)


def counted() -> dict[str, tuple[int, int]]:
    """Checked and unchecked calls of one product of each section, over all modules."""
    rows = counters.counters()
    return {
        section: tuple(
            sum(row[name] for row in rows if row["site"][1] == f"{section}.{matrix}")
            for name in ("calls", "unverified")
        )
        for section, matrix in MATRICES.items()
    }


def test_sections_are_checked_as_often_as_planned() -> None:
    chosen, plan = model(), planned()
    assert sorted(plan[name] for name in SECTIONS)[::2] == [0, 1]
    assert set_frequencies(chosen, plan) == 2
    with torch.no_grad():
        for _ in range(CALLS):
            chosen(batch())
    for section, (checked, unchecked) in counted().items():
        assert checked == 2 * ceil(CALLS * plan[section]), section
        assert checked + unchecked == 2 * CALLS


def test_ranks_that_call_alike_check_alike() -> None:
    ranks = [model(), model()]
    decisions = []
    for rank in ranks:
        set_frequencies(rank, dict.fromkeys(SECTIONS, 0.3))
        decided = []
        for _ in range(CALLS):
            counters.reset()
            rank(batch()).sum().backward()
            decided.append(counted())
        decisions.append(decided)
    assert decisions[0] == decisions[1]
    assert len({str(decided) for decided in decisions[0]}) == 2  # some are due, some are not


def test_a_guarded_training_gives_the_weights_of_the_fully_checked_one() -> None:
    def train(share: float) -> str:
        chosen = model()
        set_frequencies(chosen, dict.fromkeys(SECTIONS, share))
        optimizer = torch.optim.SGD(chosen.parameters(), lr=0.1)

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = chosen(x).square().mean()
            loss.backward()
            return loss

        with Guard(chosen, optimizer) as guard:
            for _ in range(4):
                guard.step(forward_backward, batch())
        return tensors_digest(chosen.parameters())

    untrained = tensors_digest(model().parameters())
    assert train(0.5) == train(1.0) != untrained
    assert events.recent() == []


@for_each(
    ("frequencies", "message"),
    [
        ({"S_AS": 1.0}, r"frequencies of \['S_AS'\]: give one for each of S_AS, S_CL, S_O"),
        ({"S_AS": 1.0, "S_CL": 1.0, "S_O": 1.0, "S_X": 1.0}, "give one for each"),
        ({"S_AS": 1.0, "S_CL": 1.5, "S_O": 1.0}, "S_CL: frequency = 1.5 must be between"),
        ({"S_AS": 1.0, "S_CL": nan, "S_O": 1.0}, "S_CL: frequency = nan must be between"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_nothing_is_set(
    frequencies: dict[str, float], message: str
) -> None:
    chosen = model()
    with pytest.raises(ConfigError, match=message):
        set_frequencies(chosen, frequencies)
    assert all(module.frequencies == (1.0, 1.0, 1.0) for module in chosen)


def test_a_model_without_our_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no holdfast\.nn\.Attention"):
        set_frequencies(nn.Linear(2, 2), dict.fromkeys(SECTIONS, 1.0))
