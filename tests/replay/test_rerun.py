"""Repeating a micro-step: bit-equal repetitions, verdicts, and ranks that stay in step."""

import random
from collections.abc import Callable, Iterator
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.replay import Attempt, MicroStep, Verdict, rerun
from holdfast.replay.rerun import MAX_ATTEMPTS

RIGHT = "right"
PATIENCE_S = 20.0


def _attempt(digest: str, *, faulty: bool = False) -> Attempt:
    return Attempt(torch.tensor(1.0), digest, digest, faulty)


def _verdict(first: str, *others: str, faulty: str = "") -> tuple[Verdict, int]:
    """The verdict on attempts with these digests; those named in ``faulty`` report a fault."""
    left: Iterator[str] = iter(others)
    made = [0]

    def repeat() -> Attempt:
        made[0] += 1
        digest = next(left)
        return _attempt(digest, faulty=digest in faulty.split())

    verdict = rerun(_attempt(first, faulty=first in faulty.split()), repeat)
    return verdict, made[0]


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
    ],
)
def test_the_verdict_is_what_two_agreeing_runs_say(digests: str, kind: str, runs: int) -> None:
    verdict, _ = _verdict(*digests.split())
    assert (verdict.kind, len(verdict.attempts)) == (kind, runs)
    assert verdict.disagreed == (len(set(digests.split())) > 1)
    if kind != "persistent":
        assert verdict.attempts[-1].digest == "a"


@pytest.mark.parametrize(
    ("digests", "kind"),
    [("f a a", "transient"), ("f f f f", "persistent"), ("a f a", "genuine"), ("f a f a", "")],
)
def test_a_faulty_attempt_is_never_accepted_nor_a_witness(digests: str, kind: str) -> None:
    verdict, _ = _verdict(*digests.split(), faulty="f")
    assert verdict.kind == (kind or "transient")
    assert verdict.disagreed
    if verdict.kind != "persistent":
        assert not verdict.attempts[-1].faulty


def test_two_equal_faulty_attempts_do_not_confirm_each_other() -> None:
    same = [_attempt("a", faulty=True), _attempt("a", faulty=True), _attempt("a")]
    verdict = rerun(same[0], iter([*same[1:], _attempt("a")]).__next__)
    assert [attempt.faulty for attempt in verdict.attempts] == [True, True, False, False]
    assert verdict.kind == "transient"


@pytest.mark.parametrize("limit", [2, 3, 6])
def test_the_number_of_runs_is_bounded(limit: int) -> None:
    made = iter(range(100))
    verdict = rerun(_attempt("x"), lambda: _attempt(str(next(made))), max_attempts=limit)
    assert (verdict.kind, len(verdict.attempts)) == ("persistent", limit)


class Ranks:
    """Ranks in threads whose agreement is a barrier: a rank that asks more often hangs the rest."""

    def __init__(self, count: int) -> None:
        self.barrier = Barrier(count, timeout=PATIENCE_S)
        self.wishes = [False] * count
        self.asked = [0] * count
        self.verdicts: list[Verdict | None] = [None] * count

    def agreement(self, rank: int) -> Callable[[bool], bool]:
        def agree(wish: bool) -> bool:
            self.asked[rank] += 1
            self.wishes[rank] = wish
            self.barrier.wait()
            decided = any(self.wishes)
            self.barrier.wait()
            return decided

        return agree

    def run(self, sequences: list[str]) -> None:
        def one(rank: int) -> None:
            attempts = iter([_attempt(d, faulty=d == "f") for d in sequences[rank].split()])
            self.verdicts[rank] = rerun(
                next(attempts), attempts.__next__, agree=self.agreement(rank)
            )

        threads = [Thread(target=one, args=(rank,), daemon=True) for rank in range(len(sequences))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("sequences", "kinds", "runs"),
    [
        (["a a", "b b"], ["genuine", "genuine"], 2),
        (["a a a", "x b b"], ["genuine", "transient"], 3),
        (["x a a", "b y b"], ["transient", "genuine"], 3),
        (["a a a a", "x y b b"], ["genuine", "transient"], 4),
        (["f a a", "b b b"], ["transient", "genuine"], 3),
        (["a a a a", "f f f f"], ["persistent", "persistent"], 4),
        (["a a x a", "x b y b"], ["genuine", "transient"], 4),
    ],
)
def test_ranks_repeat_together_whatever_each_of_them_sees(
    sequences: list[str], kinds: list[str], runs: int
) -> None:
    ranks = Ranks(2)
    ranks.run(sequences)
    verdicts = [verdict for verdict in ranks.verdicts if verdict is not None]
    assert [verdict.kind for verdict in verdicts] == kinds
    assert [len(verdict.attempts) for verdict in verdicts] == [runs, runs]
    assert ranks.asked[0] == ranks.asked[1] == runs - 1


def test_ranks_agree_on_random_storms_of_attempts() -> None:
    draw = random.Random(0)
    for _ in range(100):
        sequences = [" ".join(draw.choice("aaxf") for _ in range(MAX_ATTEMPTS)) for _ in range(2)]
        ranks = Ranks(2)
        ranks.run(sequences)
        verdicts = [verdict for verdict in ranks.verdicts if verdict is not None]
        assert len(verdicts) == 2, sequences
        assert len(verdicts[0].attempts) == len(verdicts[1].attempts), sequences
        persistent = [verdict.kind == "persistent" for verdict in verdicts]
        assert persistent[0] == persistent[1], sequences


class Noisy(nn.Module):
    """A model with a buffer that each pass changes, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return self.head(self.layers(x + noise)).square().mean()


def _noisy_step() -> tuple[Noisy, MicroStep]:
    torch.manual_seed(0)
    model = Noisy()

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch)
        loss.backward()
        return loss

    return model, MicroStep(model, forward_backward, torch.randn(4, 6))


def test_repetitions_are_bit_equal_in_loss_gradients_and_buffers() -> None:
    model, step = _noisy_step()
    digests = {step.attempt(step.run()).digest for _ in range(3)}
    assert len(digests) == 1
    assert int(model.layers[1].num_batches_tracked) == 1


def test_without_going_back_to_the_start_the_same_pass_differs() -> None:
    model, step = _noisy_step()
    first = step.attempt(step.run())
    batch = step.batch
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    assert step.attempt(loss.detach()).digest != first.digest


def test_gradients_are_emptied_before_every_run() -> None:
    model = nn.Linear(3, 1)
    model.weight.grad = torch.full_like(model.weight, 1e6)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).sum()
        loss.backward()
        return loss

    step = MicroStep(model, forward_backward, torch.ones(2, 3))
    for _ in range(2):
        step.run()
        assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]


def test_a_run_that_raises_leaves_the_next_one_the_saved_start() -> None:
    model, _ = _noisy_step()
    raising = [True]

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch)
        if raising.pop(0):
            raise RuntimeError("out of memory")
        loss.backward()
        return loss

    raising += [False, False]
    step = MicroStep(model, forward_backward, torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="out of memory"):
        step.run()
    assert step.attempt(step.run()).digest == step.attempt(step.run()).digest
    assert int(model.layers[1].num_batches_tracked) == 1


@pytest.mark.parametrize(
    ("returned", "named"), [(1.5, "float"), (None, "NoneType"), (torch.ones(3), r"\[3\]")]
)
def test_what_is_no_loss_is_refused(returned: object, named: str) -> None:
    step = MicroStep(nn.Linear(2, 2), lambda batch: returned, None)
    with pytest.raises(TypeError, match=rf"returned {named}: it must return a one-element loss"):
        step.run()


def _swap_parameters(model: nn.Sequential) -> None:
    first, second = model[0].weight, model[1].weight
    first.grad, second.grad = second.grad, first.grad


def _reverse(model: nn.Sequential) -> None:
    model[0].weight.grad = model[0].weight.grad.flatten().flip(0).view(4, 4)


def _flip_the_same_bit_twice(model: nn.Sequential) -> None:
    bits = model[0].weight.grad.view(torch.int32)
    bits[0, 0] ^= 1 << 30
    bits[2, 3] ^= 1 << 30


def _drop_zeros(model: nn.Sequential) -> None:
    model[1].weight.grad = None


@pytest.mark.parametrize(
    "damage", [_swap_parameters, _reverse, _flip_the_same_bit_twice, _drop_zeros]
)
def test_the_digest_sees_what_sums_and_xors_do_not(damage: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    step = MicroStep(model, lambda batch: torch.zeros(()), None)
    model[0].weight.grad = torch.arange(16.0).view(4, 4)
    model[1].weight.grad = torch.zeros(4, 4)
    loss = torch.tensor(0.5)
    before = step.attempt(loss)
    assert step.attempt(loss).digest == before.digest
    damage(model)
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
