"""Several optimizers, containers of optimizers and models in parts; what cannot come back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.training_state import Training


class Container:
    """Optimizers behind a state without param_groups, as frameworks wrap them."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> Any:
        return {f"part {n}": each.state_dict() for n, each in enumerate(self.optimizers)}

    def load_state_dict(self, state: Any) -> None:
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[f"part {number}"])


class Listing(Container):
    """As above, with a list."""

    def state_dict(self) -> Any:
        return [each.state_dict() for each in self.optimizers]

    def load_state_dict(self, state: Any) -> None:
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(saved)


class Forgetful(Container):
    """Loads nothing."""

    def load_state_dict(self, state: Any) -> None:
        if state:
            raise NotImplementedError("loading is for subclasses")


class Rounding(Container):
    """Gives back other values than it was given."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.optimizers[0].param_groups[0]["lr"] *= 1.5


class Pair:
    """Two models with an optimizer each, trained together."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.parts = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))]
        first = torch.optim.AdamW(self.parts[0].parameters(), lr=1e-2)
        second = torch.optim.SGD(self.parts[1].parameters(), lr=1e-2, momentum=0.9)
        self.optimizers = [first, second]
        wrap = {"container": Container, "states in a list": Listing}.get(kind)
        self.optimizer: Any = wrap(first, second) if wrap else self.optimizers

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            out = torch.randn(8, 4)
            for part in self.parts:
                out = part(out)
            out.square().sum().backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def digest(self) -> str:
        return state_digest([each.state_dict() for each in (*self.parts, *self.optimizers)])


KINDS = ["list", "container", "states in a list"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_several_optimizers_comes_back_bit_for_bit(kind: str) -> None:
    pair = Pair(kind)
    pair.train(3)
    taken = Training(pair.parts, pair.optimizer)
    flat = taken.capture(3)
    # Nothing of an optimizer's state is copied while training waits.
    stable = dict(zip(flat.paths, flat.stable, strict=True))
    moments = [path for path in flat.paths if path.endswith(("exp_avg", "momentum_buffer"))]
    assert len(moments) == 6
    assert all(stable[path] for path in moments)
    blob = manifest.encode(flat.skeleton, flat_buffer.plan(flat))
    described = manifest.decode(blob, manifest.digest_of(blob))
    kept = [tensor.clone() for tensor in flat.tensors]
    wanted = pair.digest()
    other = Pair(kind, seed=1)
    live = Training(other.parts, other.optimizer)
    assert other.digest() != wanted
    live.load(live.fitted(live.tree(described, kept)))
    assert other.digest() == wanted
    for each in (pair, other):
        torch.manual_seed(5)
        each.train(2)
    assert other.digest() == pair.digest() != wanted


@pytest.mark.processes
@pytest.mark.representative
def test_several_optimizers_and_parts_are_rolled_back(run_dir: Path) -> None:
    pair = Pair("list")
    with Snapshots(pair.parts, pair.optimizers, run_dir=run_dir) as snapshots:
        pair.train(2)
        snapshots.begin(2)
        assert snapshots.wait_committed() == 2
        wanted = pair.digest()
        pair.train(2)
        assert pair.digest() != wanted
        assert snapshots.rollback() == 2
        assert pair.digest() == wanted


@pytest.fixture
def model() -> nn.Module:
    """A model of one layer."""
    return nn.Linear(4, 4)


class Odd:
    """An ``extra`` whose state cannot be stored, or not loaded."""

    def __init__(self, state: Any, error: Exception | None = None) -> None:
        self.state, self.error = state, error

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: (m, Forgetful(sgd(m))), "optimizer, a Forgetful, cannot load the state"),
        (lambda m: (m, Rounding(sgd(m))), "does not return from state_dict what it was given"),
        (lambda m: (m, [sgd(m), 3]), r"Optimizers\(int\)"),
        (lambda m: (m, [sgd(m), sgd(m)]), "2 parameters are in two of the optimizers"),
        (lambda m: (m, []), r"Optimizers\(nothing\)"),
        (lambda m: ([m, 3], sgd(m)), "a list of .*int.*modules are needed"),
        (lambda m: (m, sgd(m), None, None, Odd({"f": print})), "entry 'extra.f' is a <builtin"),
        (
            lambda m: (m, sgd(m), None, None, Odd({"x": 1}, KeyError("y"))),
            r"extra, a Odd, cannot load the state that its own state_dict returns \(KeyError",
        ),
    ],
)
def test_what_could_not_be_restored_is_refused_before_training(
    model: nn.Module, build: Any, message: str
) -> None:
    before = state_digest(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        Training(*build(model)).dry_run()
    assert state_digest(model.state_dict()) == before


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_dry_run_copies_nothing_and_changes_nothing(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = nn.ModuleList([model])
    large.register_buffer("table", torch.empty(1).expand(2**40))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    held = optimizer.param_groups, [id(value) for value in optimizer.state.values()]
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_: pytest.fail("a tensor was copied"))
    rng = torch.get_rng_state()
    Training(large, optimizer).dry_run()
    assert optimizer.param_groups is held[0]
    assert [id(value) for value in optimizer.state.values()] == held[1]
    assert torch.equal(torch.get_rng_state(), rng)


def test_too_large_an_extra_is_refused_with_what_to_do(model: nn.Module) -> None:
    tensors = {"ema": torch.empty(1).expand(2**27)}
    training = Training(model, sgd(model), extra=Odd(tensors))
    with pytest.raises(ConfigError, match=r"extra\.ema \(512\.0 MiB\); give .*\[first, second\]"):
        training.dry_run(shares.plan)
    training.dry_run()
