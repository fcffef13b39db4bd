"""Repeating a micro-step: bit-equal repetitions, verdicts, and ranks that stay in step."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.replay import Attempt, MicroStep, Verdict, rerun
from holdfast.replay.rerun import MAX_ATTEMPTS

PATIENCE_S = 20.0


def _attempts(digests: str) -> Iterator[Attempt]:
    """Yield attempts with these digests; a trailing ! marks one that reports a fault."""
    for digest in digests.split():
        name = digest.rstrip("!")
        yield Attempt(torch.tensor(1.0), name, name, digest.endswith("!"))


@pytest.mark.parametrize(
    ("digests", "kind", "runs"),
    [
        ("a a", "genuine", 2),
        ("x a a", "transient", 3),
        ("a x a", "genuine", 3),
        ("x y a a", "transient", 4),
        ("x a y a", "transient", 4),
        ("a x y a", "genuine", 4),
        ("a b c d", "persistent", 4),
        ("f! a", "transient", 2),  # the doubt is explained
        ("f! f! a", "transient", 3),
        ("f! f! f! f!", "persistent", 4),
        ("a f! a", "genuine", 3),
        ("x f! a a", "transient", 4),
        ("a! a! a", "transient", 3),  # two equal faulty ones do not confirm each other
    ],
)
def test_the_verdict_is_what_two_agreeing_runs_say_or_one_after_faults_only(
    digests: str, kind: str, runs: int
) -> None:
    attempts = _attempts(digests)
    verdict = rerun(next(attempts), attempts.__next__)
    assert (verdict.kind, len(verdict.attempts)) == (kind, runs)
    assert verdict.disagreed == (len(set(digests.split())) > 1 or "!" in digests)
    if kind != "persistent":
        assert (verdict.attempts[-1].digest, verdict.attempts[-1].faulty) == ("a", False)


@pytest.mark.parametrize("limit", [2, 3, 6])
def test_the_number_of_runs_is_bounded(limit: int) -> None:
    attempts = _attempts("a b c d e f g")
    verdict = rerun(next(attempts), attempts.__next__, max_attempts=limit)
    assert (verdict.kind, len(verdict.attempts)) == ("persistent", limit)


class Ranks:
    """Ranks in threads whose agreement is a barrier: a rank that asks more often hangs the rest."""

    def __init__(self, sequences: list[str]) -> None:
        self.barrier = Barrier(len(sequences), timeout=PATIENCE_S)
        self.wishes = [False] * len(sequences)
        self.asked = [0] * len(sequences)
        with ThreadPoolExecutor(len(sequences)) as pool:
            self.verdicts = list(pool.map(self._run, range(len(sequences)), sequences))

    def _run(self, rank: int, digests: str) -> Verdict:
        def agree(wish: bool) -> bool:
            self.asked[rank] += 1
            self.wishes[rank] = wish
            self.barrier.wait()
            decided = any(self.wishes)
            self.barrier.wait()
            return decided

        attempts = _attempts(digests)
        return rerun(next(attempts), attempts.__next__, agree=agree)


@pytest.mark.parametrize(
    ("sequences", "kinds", "runs"),
    [
        (["a a", "b b"], ["genuine", "genuine"], 2),
        (["a a a", "x b b"], ["genuine", "transient"], 3),
        (["x a a", "b y b"], ["transient", "genuine"], 3),
        (["a a a a", "x y b b"], ["genuine", "transient"], 4),
        (["f! a", "b b"], ["transient", "genuine"], 2),
        (["a a a a", "f! f! f! f!"], ["persistent", "persistent"], 4),
        (["a a x a", "x b y b"], ["genuine", "transient"], 4),
    ],
)
def test_ranks_repeat_together_whatever_each_of_them_sees(
    sequences: list[str], kinds: list[str], runs: int
) -> None:
    ranks = Ranks(sequences)
    assert [verdict.kind for verdict in ranks.verdicts] == kinds
    assert [len(verdict.attempts) for verdict in ranks.verdicts] == [runs, runs]
    assert ranks.asked[0] == ranks.asked[1] == runs - 1


def test_ranks_agree_on_random_storms_of_attempts() -> None:
    draw = random.Random(0)
    for _ in range(100):
        drawn = [draw.choices(["a", "a", "x", "f!"], k=MAX_ATTEMPTS) for _ in range(2)]
        first, second = Ranks([" ".join(digests) for digests in drawn]).verdicts
        assert len(first.attempts) == len(second.attempts), drawn
        assert (first.kind == "persistent") == (second.kind == "persistent"), drawn


class Noisy(nn.Module):
    """A model with a buffer that each pass changes, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return self.head(self.layers(x + noise)).square().mean()


def _noisy_step(broken: bool = False) -> tuple[Noisy, MicroStep]:
    """Return a model and a step that draws random numbers; a broken one fails the first time."""
    torch.manual_seed(0)
    model, failures = Noisy(), [RuntimeError("out of memory")] * broken

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch)
        if failures:
            raise failures.pop()
        loss.backward()
        return loss

    return model, MicroStep(model, forward_backward, torch.randn(4, 6))


@pytest.mark.parametrize("broken", [False, True])
def test_repetitions_are_bit_equal_in_loss_gradients_and_buffers(broken: bool) -> None:
    model, step = _noisy_step(broken)
    model.head.weight.grad = torch.full_like(model.head.weight, 1e6)
    if broken:
        with pytest.raises(RuntimeError, match="out of memory"):
            step.run()
    first = step.attempt(step.run())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    assert {step.attempt(step.run()).digest for _ in range(2)} == {first.digest}
    assert int(model.layers[1].num_batches_tracked) == 1
    # From where it ended instead of from the start, the same pass differs.
    model.zero_grad()
    loss = model(step.batch)
    loss.backward()
    assert step.attempt(loss.detach()).digest != first.digest
    # Gradients are those of one pass, whatever was there before.
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e4


@pytest.mark.parametrize(
    ("returned", "named"), [(1.5, "float"), (None, "NoneType"), (torch.ones(3), r"\[3\]")]
)
def test_what_is_no_loss_is_refused(returned: object, named: str) -> None:
    step = MicroStep(nn.Linear(2, 2), lambda batch: returned, None)
    with pytest.raises(TypeError, match=rf"returned {named}: it must return a one-element loss"):
        step.run()


def _swap(first: nn.Parameter, second: nn.Parameter) -> None:
    first.grad, second.grad = second.grad, first.grad


def _flip_the_same_bit_twice(first: nn.Parameter, second: nn.Parameter) -> None:
    bits = first.grad.view(torch.int32)
    bits[0, 0] ^= 1 << 30
    bits[2, 3] ^= 1 << 30


@pytest.mark.parametrize(
    "damage",
    [
        _flip_the_same_bit_twice,
        _swap,
        lambda first, second: first.grad.copy_(first.grad.flatten().flip(0).view(4, 4)),
        lambda first, second: setattr(second, "grad", None),
    ],
    ids=["the same bit twice", "swapped", "reversed", "zeros dropped"],
)
def test_the_digest_sees_what_sums_and_xors_do_not(damage: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    step = MicroStep(model, lambda batch: torch.zeros(()), None)
    first, second = model.parameters()
    first.grad, second.grad = torch.arange(16.0).view(4, 4), torch.zeros(4, 4)
    loss = torch.tensor(0.5)
    before = step.attempt(loss)
    assert step.attempt(loss).digest == before.digest
    damage(first, second)
    after = step.attempt(loss)
    assert after.digest != before.digest
    assert after.loss_digest == before.loss_digest


def test_a_changed_loss_or_buffer_is_seen() -> None:
    model = nn.BatchNorm1d(3)
    step = MicroStep(model, lambda batch: torch.zeros(()), None)
    before = step.attempt(torch.tensor(1.0))
    assert step.attempt(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))) != before
    model.running_mean.view(torch.int32)[1] ^= 1
    assert step.attempt(torch.tensor(1.0)).digest != before.digest
