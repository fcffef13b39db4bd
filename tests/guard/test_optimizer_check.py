"""Updates of an optimizer that are computed again: what is found, repaired, named, left alone."""

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from case_loops import for_each
from guard_cases import events_of, kinds
from optimizer_cases import OPTIMIZERS, Stepped, Strike
from torch import nn

from holdfast import events
from holdfast.errors import ConfigError
from holdfast.replay.updates import Sample
from holdfast.snapshot.client.at_rest import expected_steps
from holdfast.step import optimizer_check
from holdfast.step.optimizer_check import OptimizerCheck

CLEAN_STEPS = 200
BITS = (0, 12, 22, 23, 29, 31)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small tensors are faster so."""


def strikes_on(run: Stepped) -> list[Strike]:
    """A flip of each kind of bit, in each value of each parameter in turn, every second step."""
    run.run(1)
    values = [(n, name) for n in range(len(run.held)) for name in run.values(n)]
    turns = itertools.islice(itertools.cycle(values), max(len(BITS), len(values)))
    return [(3 + 2 * k, *value, BITS[k % len(BITS)]) for k, value in enumerate(turns)]


FEW = ("SGD single", "Adam foreach", "AdamW fused", "Adafactor single", "Muon")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.fuzz) for n in OPTIMIZERS]
)
def test_the_triple_of_each_optimizer(name: str) -> None:
    """Clean: 200 steps, all updates. Struck: found and repaired. Unchecked: it gets through."""
    make = OPTIMIZERS[name]
    clean = Stepped(make, 1.0).run(CLEAN_STEPS)
    assert kinds() == []
    (told,) = clean.check.coverage()
    assert told["checked"] == CLEAN_STEPS * len(clean.held)
    assert (told["repeatable"], told["reason"]) == (1.0, "")
    assert clean.digest() == Stepped(make, 0.0).run(CLEAN_STEPS).digest()

    strikes = strikes_on(Stepped(make, 0.0))
    steps = strikes[-1][0] + 3
    right = Stepped(make, 0.0).run(steps).digest()
    struck = Stepped(make, 1.0).struck(strikes).run(steps)
    found = events_of("optimizer_fault")
    names = {id(p): name for name, p in struck.model.named_parameters()}
    kind = type(struck.optimizer).__name__
    assert [(e.step, e.op, e.detail["differs"]) for e in found] == [
        (step, f"{kind}.step/{names[id(struck.held[number])]}", [value])
        for step, number, value, _ in strikes
    ]
    assert {(e.rung, e.rank, e.device, e.detail["wrong"]) for e in found} == {
        ("recompute", 0, "cpu", "update")
    }
    assert struck.digest() == right

    events.clear()
    # AMSGrad's maximum hides what makes it smaller.
    for name in {strike[2] for strike in strikes} - {"max_exp_avg_sq"}:
        some = [strike for strike in strikes if strike[2] == name]
        assert Stepped(make, 0.0).struck(some).run(steps).digest() != right
    assert Stepped(make, 0.0).struck(strikes).run(steps).digest() != right
    assert kinds() == []


@pytest.mark.fuzz
@pytest.mark.usefixtures("two_threads")
def test_bfloat16_and_several_threads() -> None:
    """Both change how elements are grouped; tensors of 48,000 elements are divided over threads."""
    shapes, steps = ((300, 161), (7,)), 5
    for make, dtype in itertools.product(
        (OPTIMIZERS["AdamW fused"], OPTIMIZERS["SGD foreach"]), (torch.float32, torch.bfloat16)
    ):
        run = Stepped(make, 1.0, shapes=shapes, dtype=dtype).run(steps)
        assert run.check.coverage()[0]["checked"] == steps * len(shapes)
    assert kinds() == []


SGD = OPTIMIZERS["SGD plain"]
TRIALS = 30


def steps_to_name(*, anywhere: bool) -> list[int]:
    """Steps from when a device begins to err, in each step, until the first event names it."""
    draw, equal = random.Random(0), 8
    run = Stepped(SGD, 1 / 64, shapes=((8,),) * equal)
    for parameter in run.held:
        parameter.grad = torch.zeros(8)
    run.optimizer.step()  # in which the smallest are checked
    waits = []
    for _ in range(TRIALS):
        run.optimizer._optimizer_step_code = lambda: None
        for _ in range(draw.randrange(64)):
            run.optimizer.step()
        fixed = draw.randrange(equal)

        def strike(fixed: int = fixed) -> None:
            run.held[draw.randrange(equal) if anywhere else fixed].data[3] += 1.0

        run.optimizer._optimizer_step_code = strike
        assert kinds() == []
        waits.append(1)
        run.optimizer.step()
        while not kinds():
            waits[-1] += 1
            run.optimizer.step()
        assert kinds()[0] == "optimizer_fault"
        events.clear()
    return waits


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_device_that_errs_in_every_step_is_named_after_the_expected_steps(anywhere: bool) -> None:
    """In one parameter: uniform over 1 to 64 steps. In any parameter: geometric, with mean 64."""
    waits = steps_to_name(anywhere=anywhere)
    expected = 64.0 if anywhere else expected_steps(1 / 64)
    # The standard deviations of both distributions.
    deviation = 64.0 if anywhere else 64 / 12**0.5
    assert abs(sum(waits) / TRIALS - expected) < 4 * deviation / TRIALS**0.5
    assert anywhere or max(waits) <= 64


def test_a_device_is_to_be_replaced_once_it_was_found_wrong_twice() -> None:
    strikes: list[Strike] = [(n, 0, "parameter", 20) for n in (4, 6, 8)]
    Stepped(SGD, 1.0).struck(strikes).run(10)
    assert kinds() == ["optimizer_fault", "optimizer_fault", "evict", "optimizer_fault"]
    (evict,) = events_of("evict")
    assert (evict.step, evict.rank, evict.device) == (6, 0, "cpu")


def test_an_update_that_was_lost_is_made_up_for() -> None:
    """The parameter has the value of the step before, and the moments have moved."""
    make = OPTIMIZERS["AdamW default"]

    def lost(run: Stepped) -> Stepped:
        def put_back(step: int) -> None:
            if step == 3:
                run.held[0].data.copy_(before)

        run.run(3)
        before = run.held[0].detach().clone()
        run.strikes = put_back
        return run.run(3, 3)

    right = Stepped(make, 0.0).run(6).digest()
    assert lost(Stepped(make, 0.0)).digest() != right
    assert kinds() == []
    assert lost(Stepped(make, 1.0)).digest() == right
    assert [event.detail["differs"] for event in events_of("optimizer_fault")] == [["parameter"]]


def test_a_wrong_recomputation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    right, again, calls = Stepped(SGD, 0.0).run(6).digest(), Sample.again, itertools.count()

    def errs_once(sample: Sample) -> dict[str, Any]:
        values = again(sample)
        if next(calls) == 7:
            values["parameter"].view(-1)[0] += 1.0
        return values

    monkeypatch.setattr(Sample, "again", errs_once)
    assert Stepped(SGD, 1.0).run(6).digest() == right
    (event,) = events_of("optimizer_fault")
    assert (event.rung, event.detail["wrong"]) == ("recompute", "recomputation")


def test_hooks_of_others_keep_what_they_change() -> None:
    """Before the step gradients, after it parameters; in steps in which they come too late."""

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.5, 0.5)

    digests = set()
    for share in (0.0, 1.0):
        run = Stepped(SGD, share)
        run.optimizer.register_step_post_hook(clamp)
        run.check.close()
        run.check.watch()
        run.run(2)
        run.optimizer.register_step_pre_hook(halve)
        digests.add(run.run(6, 2).digest())
    assert len(digests) == 1
    assert kinds() == []
    # The first step with the late hook is left out, as its gradients were changed afterwards.
    assert run.check.coverage()[0]["checked"] == 7 * len(run.held)
    assert run.struck([(9, 0, "parameter", 3)]).run(4, 8).digest()
    assert kinds() == ["optimizer_fault"]


def test_gradients_that_a_closure_computes_are_seen() -> None:
    """As Lightning gives its passes to the optimizer."""
    for strikes in ([], [(2, 1, "parameter", 0)]):
        events.clear()
        run = Stepped(OPTIMIZERS["AdamW default"], 1.0).struck(strikes)

        def closure(run: Stepped = run) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = sum(p.square().sum() for p in run.held)
            loss.backward()
            return loss.detach()

        for step in range(4):
            events.set_step(step)
            run.optimizer._optimizer_step_code = lambda step=step, run=run: run.strikes(step)
            given = run.optimizer.step(closure) if step % 2 else run.optimizer.step(closure=closure)
            assert given.numel() == 1
        assert kinds() == ["optimizer_fault"] * len(strikes)
        assert run.check.coverage()[0]["checked"] == 4 * len(run.held) - len(strikes)


@pytest.mark.parametrize("action", ["always", "error"])
def test_an_optimizer_that_never_comes_out_the_same_is_left_alone(action: Any) -> None:
    """As a compiled one might be; also where a program makes errors of warnings."""

    def other_bits(run: Stepped) -> None:
        for parameter in run.held:
            parameter.data.mul_(1 + 2**-23)

    run, plain = Stepped(SGD, 1.0), Stepped(SGD, 0.0)
    for each in (run, plain):
        each.strikes = lambda step, each=each: other_bits(each)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings(action, r"SGD\.step is not checked any more")
        run.run(3)
    assert len(said) == (action == "always")
    assert run.digest() == plain.run(3).digest()
    assert kinds() == ["check_failed"]
    (told,) = run.check.coverage()
    assert (told["share"], told["checked"]) == (0.0, 0)


@pytest.mark.compile
def test_a_compiled_step_is_listed_as_not_checked() -> None:
    runs = [Stepped(OPTIMIZERS["AdamW default"], share) for share in (1.0, 0.0)]
    for run in runs:
        run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")
        run.run(3)
    assert runs[0].digest() == runs[1].digest()
    assert kinds() == []
    (told,) = runs[0].check.coverage()
    assert (told["share"], told["checked"]) == (0.0, 0)
    assert "compiled" in str(told["reason"])


def test_an_error_of_the_check_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sample: Sample) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Sample, "again", fails)
    with pytest.warns(UserWarning, match="out of memory"):
        run = Stepped(SGD, 1.0).run(3)
    assert run.digest() == Stepped(SGD, 0.0).run(3).digest()
    assert kinds() == ["check_failed"]


@for_each("raises", [1, 2])
def test_a_recomputation_that_raises_hides_nothing_that_was_found(raises: int) -> None:
    """Once, as a fault may divide by zero: it is done again. Twice: what differed is repaired."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, again, calls = Stepped(SGD, 1.0).run(2), Sample.again, itertools.count()

        def fails(sample: Sample) -> dict[str, Any]:
            if 0 < next(calls) <= raises:
                raise ZeroDivisionError
            return again(sample)

        patch.setattr(Sample, "again", fails)
        # The update that is compared first is the last one.
        run.struck([(2, len(run.held) - 1, "parameter", 30)]).run(2, first=2)
    assert run.digest() == Stepped(SGD, 0.0).run(4).digest()
    assert kinds() == ["check_failed", "optimizer_fault"][2 - raises :]
    assert bool(run.check.coverage()[0]["reason"]) == (raises > 1)


class Own(torch.optim.SGD):
    """A step of its own, around torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_cannot_be_computed_again_is_listed() -> None:
    def coverage(optimizer: torch.optim.Optimizer) -> dict[str, object]:
        check = OptimizerCheck(model, optimizer, 1.0)
        check.watch()
        optimizer.step()
        return check.coverage()[0]

    model = nn.Embedding(6, 4, sparse=True)
    model(torch.tensor([1, 3])).sum().backward()
    own = coverage(Own(model.parameters(), lr=0.1))
    why = "Own.step is not one of torch.optim that updates each parameter"
    assert (own["share"], own["reason"]) == (0.0, why)
    sparse = coverage(torch.optim.SGD(model.parameters(), lr=0.1))
    assert (sparse["repeatable"], sparse["checked"]) == (0.0, 0)
    inherits = coverage(type("Inherits", (torch.optim.SGD,), {})([nn.Parameter(torch.ones(2))]))
    assert inherits["reason"] == ""


def test_a_share_reads_so_many_elements_in_whole_parameters() -> None:
    run = Stepped(SGD, 1 / 8, shapes=((40,), (8,), (16,)))
    run.run(1)
    first = run.check.coverage()[0]["checked"]
    assert first == optimizer_check.FIRST
    run.run(160, 1)
    # 160 steps of an eighth are 20 rounds of three parameters.
    assert abs(run.check.coverage()[0]["checked"] - first - 20 * 3) <= 3


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"optimizer_check = .* must be a share of the updates"):
        Stepped(SGD, share)
