"""What shadows cannot be, which ranks are a unit, and gradients seen before they are added up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.replay import Shadow
from holdfast.replay.gradients import local_gradients, set_aside
from holdfast.replay.units import units_of


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rate": 1.5}, "must be a share of steps"),
        ({"rate": -0.1}, "must be a share of steps"),
        ({"rate": 0.1, "groups": 2}, "give their number, and what computes one"),
        ({"rate": 0.1, "group_step": lambda batch, n: batch}, "give their number"),
        ({"rate": 0.1, "groups": 0}, "groups = 0"),
        ({"rate": 0.1}, "call init_process_group first"),  # one process has no shadow
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=said):
        Guard(model, optimizer, shadow=Shadow(**settings))
    assert Guard(model, optimizer).shadow.units == []


def _mesh(names: tuple[str, ...] | None, *shape: int) -> Any:
    ranks = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    return SimpleNamespace(mesh_dim_names=names, shape=shape, mesh=ranks)


@pytest.fixture
def six(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A plain model in a job of six ranks."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("mesh", "unit", "units"),
    [
        (None, None, [(0,), (1,), (2,), (3,), (4,), (5,)]),
        (_mesh(("ddp", "tp"), 3, 2), None, [(0, 1), (2, 3), (4, 5)]),
        (_mesh(("tp", "ddp"), 3, 2), None, [(0, 2, 4), (1, 3, 5)]),
        (_mesh(("dp_replicate", "dp_shard"), 3, 2), None, [(n,) for n in range(6)]),
        (_mesh(("dp_replicate", "dp_shard"), 3, 2), ("dp_shard",), [(0, 1), (2, 3), (4, 5)]),
        (_mesh(("pp", "fsdp", "cp"), 1, 3, 2), None, [(0, 1), (2, 3), (4, 5)]),
        (_mesh(("stage", "ddp", "tp"), 2, 3, 1), None, [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_units_are_the_ranks_that_compute_one_gradient_together(
    six: nn.Module, mesh: Any, unit: Any, units: list[tuple[int, ...]]
) -> None:
    assert units_of(six, mesh, unit) == units


@pytest.mark.parametrize(
    ("mesh", "unit", "said"),
    [
        (_mesh(None, 3, 2), None, "made with mesh_dim_names"),
        (_mesh(("ddp", "tp"), 2, 2), None, "the mesh of the whole job"),
        (_mesh(("ddp", "tp"), 3, 2), ("ep",), r"unit = \['ep'\]"),
    ],
)
def test_a_mesh_that_does_not_tell_is_refused(
    six: nn.Module, mesh: Any, unit: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        units_of(six, mesh, unit)


class Tied(nn.Module):
    """A weight that is used twice, beside one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.idle = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().sum()


def _passes(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor | None]:
    model.zero_grad()
    for batch in batches:
        model(batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_each_passs_gradient_is_seen_once_and_its_sum_is_what_is_there() -> None:
    torch.manual_seed(0)
    model, batches = Tied(), [torch.randn(2, 3) for _ in range(3)]
    bare = _passes(model, batches)
    with local_gradients(model, keep=True) as found:
        assert all(map(_same, _passes(model, batches), bare))
    assert set(found.values) == {"one.weight"}
    total = found.values["one.weight"][0].clone()
    for value in found.values["one.weight"][1:]:
        total += value
    assert bare[0] is not None
    assert torch.equal(total, bare[0])
    assert len(found.starts) == 3
    assert len({found.of_group(group) for group in range(3)}) == 3
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_kept_gradients_take_the_place_of_wrong_ones_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, batches = Tied(), [torch.randn(2, 3) for _ in range(2)]
    with local_gradients(model, keep=True) as found:
        right = _passes(model, batches)
    wrong = [batch + 1 for batch in batches]
    with local_gradients(model, right=found.values) as seen:
        assert all(map(_same, _passes(model, wrong), right))
    assert seen.of_group(0) != found.of_group(0)
    assert not all(map(_same, _passes(model, wrong), right))


def test_passes_made_meanwhile_leave_gradients_buffers_and_random_state_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model(torch.randn(4, 3)).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    before = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with set_aside(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        assert not all(map(torch.equal, model.buffers(), before))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.equal(torch.get_rng_state(), state)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
