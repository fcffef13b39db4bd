"""Batches that a micro-step uses up or changes: the same for each repetition, or no repetition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_cases import SplitRun

from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard


def train(
    audit: float, use: Callable[[Any], torch.Tensor], make: Callable[[torch.Tensor], Any]
) -> str:
    run = SplitRun()
    with Guard(run.model, run.optimizer, audit=audit) as guard:
        for step in range(3):
            for number, inputs in enumerate(run.loader.batch(step).chunk(3)):
                guard.micro_step(
                    lambda b, s=step, n=number: run.part((s, n, use(b))),
                    make(inputs.clone()),
                    last=number == 2,
                )
            run.apply()
            guard.after_optimizer_step()
    return run.digest()


def test_what_a_micro_step_takes_out_of_its_batch_is_put_back() -> None:
    pop = lambda b: b.pop("x")  # noqa: E731
    assert train(1.0, pop, lambda x: {"x": x}) == train(0.0, pop, lambda x: {"x": x})


def test_an_iterator_is_refused() -> None:
    with pytest.raises(ConfigError, match="would find it used up"):
        train(0.0, next, lambda x: iter([x]))


def test_a_batch_that_was_changed_in_place_overrules_nothing() -> None:
    double = lambda x: x.mul_(2)  # noqa: E731
    train(0.0, double, lambda x: x)
    with pytest.raises(UncorrectableFault, match="batch"):
        train(1.0, double, lambda x: x)
