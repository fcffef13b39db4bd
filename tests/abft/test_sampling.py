"""protect(frequency=…): which passes are verified, and that backward follows its forward."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from case_loops import for_each
from struck import kinds, struck
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import native
from holdfast.abft.frequency import RECORDED, Executions, due
from holdfast.guard import Guard
from holdfast.protection import Protection

pytestmark = pytest.mark.skipif(native.core is None, reason="nothing is verified without the core")


def batch() -> torch.Tensor:
    return torch.randn(3, 8, requires_grad=True)


def calls(protection: Protection) -> dict[str, int]:
    """Verified calls by role and module."""
    found: dict[str, int] = {}
    for site in protection.report().sites:
        module, _, role = site.site.split("/") if "/" in site.site else (site.site, "", "")
        if role and site.covered:
            found[f"{module}/{role}"] = site.calls
    return found


def every_role(name: str, count: int) -> dict[str, int]:
    return {f"{name}/{role}": count for role in ("forward", "grad_a", "grad_b") if count}


@for_each(("frequency", "checked"), [(0.5, 8), (0.25, 4), (0.0, 0)])
def test_two_optimizers_do_not_change_the_share(frequency: float, checked: int) -> None:
    model = nn.Linear(8, 8)
    assert model.bias is not None
    optimizers = [torch.optim.SGD([p], 0.1) for p in (model.weight, model.bias)]
    with holdfast.protect(model, frequency=frequency) as protection:
        for _ in range(16):
            model(batch()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert calls(protection) == every_role("Linear", checked)
        report = protection.report()
    assert (report.passes, report.verified_passes) == (16, checked)
    assert report.verified_share == checked / 16
    assert f"verified in {checked} of 16 passes, a share of {checked / 16:.4g}" in str(report)
    assert f"(asked for: {frequency:.4g})" in str(report)


def test_inference_has_its_share_before_and_after_a_step() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holdfast.protect(model, frequency=0.5) as protection:
        for _ in range(2):
            protection.reset_counters()
            model.eval()
            with torch.no_grad():
                for _ in range(16):
                    model(batch())
            assert calls(protection) == {"Linear/forward": 8}
            assert protection.report().passes == 16
            model.train()
            model(batch()).sum().backward()
            optimizer.step()


def test_an_evaluation_does_not_shift_which_training_passes_are_verified() -> None:
    def decisions(evaluations: int) -> list[int]:
        torch.manual_seed(0)
        model, made = nn.Linear(8, 8), []
        with holdfast.protect(model, frequency=0.5) as protection:
            for _ in range(6):
                protection.reset_counters()
                model.train()(batch()).sum().backward()
                made.append(protection.report().verified_passes)
                model.eval()
                for _ in range(evaluations):
                    model(batch())
        return made

    assert decisions(0) == decisions(1) == decisions(3) == [due(n, 0.5) for n in range(6)]


def test_protections_have_shares_of_their_own() -> None:
    """Two networks trained in turns, as in a GAN: each backward passes through both."""
    made, judge = nn.Linear(8, 8), nn.Linear(8, 8)
    with (
        holdfast.protect(made, frequency=0.5) as half,
        holdfast.protect(judge, frequency=0.25) as quarter,
    ):
        for _ in range(8):
            judge(made(batch())).sum().backward()
        reports = half.report(), quarter.report()
    assert [(each.passes, each.verified_passes) for each in reports] == [(8, 4), (8, 2)]
    for protection, checked in ((half, 4), (quarter, 2)):
        # Both models are a Linear of that name: keep the sites of the protection's own model.
        assert calls(protection) == every_role("Linear", checked)


def test_the_parts_of_a_model_that_are_called_one_by_one_have_the_same_share() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "decoder": nn.Linear(8, 8)})
    with holdfast.protect(model, frequency=0.5) as protection:
        for _ in range(8):
            model["decoder"](model["encoder"](batch())).sum().backward()
        assert calls(protection) == every_role("encoder", 4) | every_role("decoder", 4)


def test_a_backward_pass_follows_its_own_forward_pass() -> None:
    """As in a pipeline, where several forward passes come before their backward passes."""
    model = nn.Linear(8, 8)
    with holdfast.protect(model, frequency=0.5) as protection:
        for order in ((0, 1), (1, 0)):
            protection.reset_counters()
            losses = [model(batch()).sum() for _ in range(2)]
            for index in order:
                losses[index].backward()
            assert calls(protection) == every_role("Linear", 1)
        protection.reset_counters()
        torch.stack([model(batch()).sum() for _ in range(2)]).sum().backward()
        assert calls(protection) == every_role("Linear", 1)


class Blocks(nn.Module):
    """Two blocks, each computed by ``call``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = call(block, x)
        return x


def plainly(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result


CHECKPOINTED = [partial(checkpoint, use_reentrant=each) for each in (True, False)]


@for_each("call", CHECKPOINTED)
def test_a_recomputed_forward_takes_the_decision_of_the_original(
    call: Callable[..., torch.Tensor],
) -> None:
    def backward_calls(call: Callable[..., torch.Tensor]) -> tuple[dict[str, int], int]:
        model = Blocks()
        with holdfast.protect(model, frequency=0.5) as protection:
            losses = [model(batch(), call).sum() for _ in range(4)]
            for loss in (losses[1], losses[0], losses[2], losses[3]):
                loss.backward()
            found = calls(protection)
            report = protection.report()
        assert (report.passes, report.verified_passes) == (4, 2)
        backward = {site: n for site, n in found.items() if "forward" not in site}
        return backward, sum(found.values()) - sum(backward.values())

    expected, forward = backward_calls(plainly)
    found, forward_and_recomputed = backward_calls(call)
    assert found == expected
    assert set(expected.values()) == {2}
    # A non-reentrant checkpoint stops once it has recomputed what backward needs.
    assert forward < forward_and_recomputed <= 2 * forward


@for_each("call", CHECKPOINTED)
def test_a_whole_model_that_is_recomputed_takes_the_decision_of_the_original(
    call: Callable[..., torch.Tensor],
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with holdfast.protect(model, frequency=0.5) as protection:
        losses = [call(model, batch()).sum() for _ in range(2)]
        for loss in losses:  # the first one, which is due, before the second
            loss.backward()
        report = protection.report()
        found = calls(protection)
    assert (report.passes, report.verified_passes) == (2, 1)
    assert {n for site, n in found.items() if "grad" in site} == {1}


def test_a_guard_decides_by_its_step_also_for_repeated_passes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen: list[tuple[int, bool]] = []

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        before = protection.report().verified_passes
        loss = model(x).square().mean()
        loss.backward()
        seen.append((guard.steps_done, protection.report().verified_passes > before))
        return loss

    with (
        holdfast.protect(model, frequency=0.5) as protection,
        Guard(model, optimizer, audit=1.0) as guard,  # every step is computed twice
    ):
        for _ in range(4):
            guard.step(forward_backward, torch.randn(3, 8))
    assert len(seen) == 8
    assert seen == [(step, due(step, 0.5)) for step in range(4) for _ in range(2)]


def test_a_fault_is_seen_in_a_verified_pass_and_gets_through_in_another() -> None:
    model, x = nn.Linear(8, 8), batch()
    clean = model(x)
    with holdfast.protect(model, frequency=0.5):
        for _ in range(2):
            assert torch.equal(model(x), clean)
        assert kinds() == []
        with struck((0, 1), 1e6, always=True):
            assert torch.equal(model(x), clean)
            assert kinds() == ["gemm_fault"]
            assert not torch.equal(model(x), clean)
        assert kinds() == ["gemm_fault"]


def test_another_thread_has_decisions_of_its_own() -> None:
    model, x = nn.Linear(8, 8), batch()
    other = nn.Linear(8, 8)
    with (
        holdfast.protect(model, frequency=0.5) as protection,
        holdfast.protect(other, frequency=0.5),
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(4):
            loss = model(x).sum()
            pool.submit(other, x).result()
            pool.submit(other, x).result()
            loss.backward()
        assert calls(protection) == every_role("Linear", 2)


class Failing(nn.Linear):
    """A layer that fails when its input has the wrong sign."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.sum() < 0:
            raise KeyError
        return y


def test_a_pass_that_fails_ends_and_removal_stops_verification() -> None:
    model, x = Failing(8, 8), torch.ones(3, 8)
    with holdfast.protect(model, frequency=0.75) as protection:
        for _ in range(4):
            with pytest.raises(KeyError):
                model(-x)
            model(x)
        report = protection.report()
        loss = model(x).sum()
    assert (report.passes, report.verified_passes) == (8, 6)
    loss.backward()  # of a pass that was due, after the end of the protection
    with holdfast.protect(nn.Identity(), verify=False) as named:
        x @ x.mT
        assert [site for site in named.report().sites if site.calls] == []


def test_an_interrupted_pass_does_not_freeze_the_decision() -> None:
    model = nn.Linear(8, 8)
    with holdfast.protect(model, frequency=0.5) as protection:
        hook = next(each for each in model._forward_pre_hooks.values() if hasattr(each, "_sampler"))
        for _ in range(3):
            hook(model, ())  # begun, and never ended
        for _ in range(4):
            model(batch()).sum().backward()
        report = protection.report()
        assert (report.passes, report.verified_passes) == (7, 4)
        assert calls(protection) == every_role("Linear", 2)


def test_what_runs_between_passes_follows_the_latest_pass() -> None:
    model, head = nn.Linear(8, 8), torch.randn(8, 4, requires_grad=True)
    with holdfast.protect(model, frequency=0.5) as protection:
        for _ in range(4):
            (model(batch()) @ head).sum().backward()
        assert calls(protection) == every_role("Linear", 2) | every_role("(outside)", 2)


@pytest.mark.compile
def test_a_model_compiled_as_a_whole_is_sampled_by_rounds_of_its_optimizers() -> None:
    model = nn.Linear(8, 8)
    assert model.bias is not None
    optimizers = [torch.optim.SGD([p], 0.1) for p in (model.weight, model.bias)]
    with holdfast.protect(model, frequency=0.5) as protection:
        model.compile()
        for _ in range(6):
            model(batch()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        found, report = calls(protection), protection.report()
    assert set(found.values()) == {3}
    assert (report.passes, report.verified_passes) == (6, 3)


def test_executions_within_one_reentrant_checkpoint_are_recomputed_in_order() -> None:
    section, numbers = Executions(), list[int]()

    class Section(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            numbers.append(section.number())
            return x * 2

    twice = nn.Sequential(each := Section(), each)
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(twice, checkpoint(twice, x, use_reentrant=True), use_reentrant=True)
    y.sum().backward()
    assert numbers == [0, 1, 2, 3, 2, 3, 0, 1]
    assert section.number() == 4


def test_executions_keep_little_of_the_past() -> None:
    section = Executions()
    for _ in range(2 * RECORDED):
        section.number()
    assert len(section._threads[threading.get_ident()].executions) == RECORDED
