"""One policy a protection, in any thread; operators without the native core."""

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch
from struck import Strike, struck
from torch import nn

import holdfast
from holdfast import events, native
from holdfast.abft import policy, registry
from holdfast.abft.gemm.op import MATMUL, matmul_reference
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard

native_only = pytest.mark.skipif(native.core is None, reason="torch's products are not intercepted")


def damaged(role: str) -> AbstractContextManager[Strike]:
    """Change one element of every product of a role."""
    return struck((0, 1), lambda old: old + 50.0, site=role, always=True)


def gradient(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    return found


@native_only
@pytest.mark.parametrize("role", ["forward", "grad_b"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_each_protection_has_its_own_correction_and_counters(role: str, in_thread: bool) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(16, 16) for _ in range(3)]
    x = torch.randn(4, 16)
    clean = [gradient(model, x) for model in models]
    corrections = ("recompute", "checksum", "detect")
    outcomes: dict[str, object] = {}

    def run(correction: str, model: nn.Linear) -> None:
        try:
            outcomes[correction] = gradient(model, x)
        except UncorrectableFault as fault:
            outcomes[correction] = fault

    protections = [
        holdfast.protect(model, correction=correction)
        for model, correction in zip(models, corrections, strict=True)
    ]
    try:
        with damaged(role):
            for call in zip(corrections, models, strict=True):
                if in_thread:
                    with ThreadPoolExecutor(1) as pool:
                        pool.submit(run, *call)
                else:
                    run(*call)
        suspects = [sum(site.suspects for site in p.report().sites) for p in protections]
    finally:
        for protection in protections:
            protection.remove()
    assert torch.equal(outcomes["recompute"], clean[0])  # type: ignore[arg-type]
    torch.testing.assert_close(outcomes["checksum"], clean[1])
    assert isinstance(outcomes["detect"], UncorrectableFault)
    methods = [event.detail.get("method") for event in events.recent()]
    assert methods == ["recompute", "checksum", None]
    assert suspects == [1, 1, 1]


@native_only
def test_the_latest_protection_decides_for_a_module_of_two_until_it_is_removed() -> None:
    inner = nn.Linear(8, 8)
    outer, x = nn.Sequential(inner), torch.randn(2, 8)
    with holdfast.protect(outer) as first, damaged("forward"):
        with holdfast.protect(inner, correction="detect"), pytest.raises(UncorrectableFault):
            outer(x)
        outer(x)
        assert [event.detail.get("method") for event in events.recent()] == [None, "recompute"]
        assert sum(site.suspects for site in first.report().sites) == 2
    assert policy.policy_of(1) is policy.process


@native_only
def test_a_protection_that_verifies_nothing_decides_nothing() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with (
        holdfast.protect(model, correction="checksum"),
        holdfast.protect(model, verify=False, correction="detect"),
        damaged("forward"),
    ):
        model(x)
    assert [event.detail["method"] for event in events.recent()] == ["checksum"]


@native_only
def test_counters_of_one_protection_start_anew_without_the_others() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with holdfast.protect(model) as first:
        model(x)
        with holdfast.protect(model) as second:
            model(x)
            first.reset_counters()
            model(x)
            calls = [[site.calls for site in each.report().sites] for each in (first, second)]
        model(x)
        assert calls == [[1], [2]]
        assert [site.calls for site in second.report().sites] == [2]  # as when it was removed


@native_only
@pytest.mark.parametrize("role", ["forward", "grad_a"])
def test_nested_and_interleaved_models_keep_their_corrections(role: str) -> None:
    """One backward pass runs through three models, one of them inside another."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 8)
    outer = nn.Sequential(nn.Linear(8, 8), inner)
    first, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)

    def computed() -> torch.Tensor:
        (found,) = torch.autograd.grad(outer(first(outer(x))).square().sum(), x)
        return found

    clean = computed()
    with (
        holdfast.protect(first, correction="checksum"),
        holdfast.protect(outer, correction="recompute"),
        holdfast.protect(inner, correction="detect"),
        policy.collecting() as found,
        damaged(role),
    ):
        computed()
    methods = {(event.op.split("/")[0], event.detail.get("method")) for event in events.recent()}
    # The outer model's layers are "0" and "1", which is also what the inner model is called.
    assert methods == {("Linear", "checksum"), ("0", "recompute"), ("Linear", None)}
    assert len(found.unrepaired) == 2
    events.clear()
    assert torch.equal(computed(), clean)


def _guarded(model: nn.Module, steps: int, beside: Callable[[], object]) -> list[int]:
    """Train under a Guard, with something beside each pass; return the passes of each step."""
    optimizer, passes = torch.optim.SGD(model.parameters(), 0.01), [0] * steps

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        passes[guard.steps_done] += 1
        loss = model(x).square().mean()
        beside()
        loss.backward()
        return loss

    with Guard(model, optimizer) as guard:
        for _ in range(steps):
            guard.step(forward_backward, torch.randn(3, 8))
    return passes


@native_only
def test_a_fault_of_a_worker_thread_is_the_workers_and_not_the_guards() -> None:
    trained, served = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    x, failed = torch.randn(3, 8), list[BaseException | None]()
    with (
        ThreadPoolExecutor(1) as pool,
        holdfast.protect(trained),
        holdfast.protect(served, correction="detect"),
        struck((0, 1), 1e6, site="Linear/addmm/forward", always=True),
    ):
        passes = _guarded(trained, 4, lambda: failed.append(pool.submit(served, x).exception()))
    assert passes == [1] * 4
    assert [type(each) for each in failed] == [UncorrectableFault] * 4
    assert {event.kind for event in events.recent()} == {"gemm_fault"}


@native_only
@pytest.mark.parametrize("role", ["forward", "grad_b"])
def test_a_fault_of_a_guarded_step_does_not_reach_a_worker_thread(role: str) -> None:
    trained, served = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    x, stop, served_rows = torch.randn(3, 8), threading.Event(), list[torch.Tensor]()

    def serve() -> None:
        while not stop.is_set():
            served_rows.append(served(x))

    with (
        ThreadPoolExecutor(1) as pool,
        holdfast.protect(trained, correction="detect"),
        holdfast.protect(served),
    ):
        clean, serving = served(x), pool.submit(serve)
        try:
            with struck((0, 1), 1e6, site=f"0/addmm/{role}", nth=2):
                passes = _guarded(trained, 4, lambda: None)
        finally:
            stop.set()
        serving.result()
    assert passes == [1, 1, 2, 1]
    assert served_rows
    assert all(torch.equal(row, clean) for row in served_rows)


def test_a_thread_that_python_did_not_start_collects_only_within_backward() -> None:
    """Such a thread may serve inference; those of the autograd engine evaluate nodes."""
    raised, done = list[BaseException](), threading.Event()

    def fail() -> None:
        context = policy.FaultContext("op")
        try:
            policy.decide_each(context, [policy.Unrepaired("gemm_persistent", "test")])
        except UncorrectableFault as fault:
            raised.append(fault)
        done.set()

    with policy.collecting() as found:
        _thread.start_new_thread(fail, ())
        assert done.wait(30)
    assert len(raised) == 1
    assert found.unrepaired == []


def test_faults_of_another_python_thread_or_within_an_inner_block_are_not_collected_here() -> None:
    def fail() -> None:
        context = policy.FaultContext("op")
        policy.decide_each(context, [policy.Unrepaired("gemm_persistent", "test")])

    with policy.collecting() as found, ThreadPoolExecutor(1) as pool:
        with pytest.raises(UncorrectableFault):
            pool.submit(fail).result()
        with policy.collecting() as inner:
            fail()
        assert (len(inner.unrepaired), found.unrepaired) == (1, [])
        fail()
    assert len(found.unrepaired) == 1
    with pytest.raises(UncorrectableFault):
        fail()


def test_what_cannot_be_had_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"matmul has no triton for .* not enabled yet"):
        MATMUL.select("cuda", torch.bfloat16, name="triton")
    with pytest.raises(ConfigError, match="choose one of native"):
        MATMUL.select("cpu", torch.int8)
    rows = {(row.operator, row.implementation): row.obstacle for row in registry.report()}
    assert rows["matmul", "reference"] == ""
    assert rows["matmul", "triton"] == "registered, not enabled yet"


def test_missing_implementations_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", None)
    rows = {(row.operator, row.implementation): row.obstacle for row in registry.report()}
    assert rows["matmul", "native"] == native.MISSING
    with pytest.raises(ConfigError, match="pip install"):
        MATMUL.select("cpu", name="native")
    assert MATMUL.select("cpu") is matmul_reference


SHAPES = [((5, 6), (6, 7)), ((2, 5, 6), (6, 7)), ((3, 1, 5, 6), (2, 6, 7)), ((5, 6), (2, 6, 7))]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_the_reference_has_torchs_bits_and_repairs(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = torch.randn(left), torch.randn(right)

    expected = a @ b
    assert torch.equal(matmul_reference(a, b), expected)
    assert events.recent() == []
    with struck((slice(None), 3, 2), 1e9):
        assert torch.equal(matmul_reference(a, b), expected)
    assert [event.kind for event in events.recent()] == ["gemm_fault"]


def test_a_device_without_an_implementation_is_refused() -> None:
    a = torch.ones(2, 2, device="meta")
    with pytest.raises(ConfigError, match="matmul has no implementation for any dtype on meta"):
        holdfast.matmul(a, a)


WITHOUT_CORE = """
import torch, holdfast
from holdfast import events, sites
model = torch.nn.Sequential(torch.nn.Linear(8, 8), holdfast.nn.Linear(8, 8))
x = torch.randn(3, 8, requires_grad=True)
clean = model(x).detach()
def hook(stage, site, gemm, output):
    if output is not None:
        output[1, 2] = 1e9
with holdfast.protect(model) as protection:
    sites.arm(hook)
    struck = model(x)
    struck.sum().backward()
    sites.disarm()
    report = protection.report()
assert torch.equal(struck, clean) and torch.isfinite(x.grad).all()
assert [event.kind for event in events.recent()] == ["gemm_fault"] * 3, events.recent()
assert not any(site.covered for site in report.sites)
print(report)
"""


def test_without_the_native_core_protect_says_what_it_cannot_cover() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", WITHOUT_CORE],
        env=os.environ | {native.DISABLE_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("NativeCoreMissing: holdfast: the native core is not loaded") == 1
    assert "HOLDFAST_PURE_PYTHON=1" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("(every mm")]
    assert "NOT COVERED: the native core is not loaded: build it with" in line
