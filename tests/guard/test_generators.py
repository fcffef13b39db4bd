"""A generator of the user's own, from which passes draw."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import Run, always_wrong, events_of, interruption, kinds, snapshots_of

from holdfast import rng
from holdfast.errors import ConfigError, UncorrectableFault

STEPS = 8


class Drawing(Run):
    """A run whose passes draw noise from a generator of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward_backward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        noise = torch.rand(inputs.shape, generator=self.generator)
        return super().forward_backward((number, inputs + noise))


def train(run: Drawing, **options: Any) -> str:
    run.guarded(STEPS, **options)
    return run.digest()


@pytest.mark.parametrize("named", [False, True])
def test_a_registered_generator_is_repeated_with_the_step(named: bool) -> None:
    right = Drawing().bare(STEPS).digest()
    run = Drawing()
    generators = {"noise": run.generator} if named else [run.generator]
    assert train(run, audit=1.0, generators=generators) == right
    assert kinds() == []
    assert "generators" not in rng.rng_state()


def test_one_that_is_not_registered_is_not_taken_for_bad_hardware_alone() -> None:
    with pytest.raises(UncorrectableFault, match=r"no confirmed result.*check_determinism"):
        train(Drawing(), audit=1.0)


def test_it_is_in_the_snapshots_and_rolled_back_with_them(run_dir: Path) -> None:
    right = Drawing().bare(STEPS).digest()
    first, second = Drawing(), Drawing()
    wrong = always_wrong(first, 3)
    first.damage = lambda number: wrong(number) if not events_of("rollback") else None
    stop = interruption(lambda number: number == 6)
    damage = first.damage

    def damage_and_stop(number: int) -> None:
        damage(number)
        stop(number)

    first.damage = damage_and_stop
    with pytest.raises(KeyboardInterrupt):
        train(
            first, audit=1.0, generators=[first.generator], snapshots=snapshots_of(first, run_dir)
        )
    assert events_of("rollback")
    second.generator.manual_seed(99)
    held = {"generators": [second.generator], "snapshots": snapshots_of(second, run_dir)}
    assert train(second, **held) == right
    assert second.computed[0] > 0


def test_what_cannot_be_registered_is_refused() -> None:
    run = Drawing()
    with pytest.raises(ConfigError, match=r"'x' is a int: only a torch\.Generator"):
        run.guarded(1, generators={"x": 3})
    other = torch.Generator()
    rng.register("taken", other)
    with pytest.raises(ConfigError, match="another generator is registered as 'taken'"):
        run.guarded(1, generators={"taken": run.generator})
    rng.unregister(["taken"])
