"""Products of a device, verified there: CPU stands in as the device, as no test has another."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_stand_in import slots
from hypothesis import given
from hypothesis import strategies as st
from site_reports import covered, uncovered
from struck import Strike, armed, kinds
from torch import nn
from torch._dynamo.utils import counters

import holdfast
from holdfast import events, native
from holdfast.abft import ledger
from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.gemm.self_test import failure
from holdfast.abft.triton.tolerance import Tolerance, drift_growth
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.inject import Fault, Injector
from holdfast.protection import CoverageReport
from holdfast_lab.emulation.stand_in import CPU, cpu_as_device

SITES = [
    *("0/addmm/forward", "0/addmm/grad_b"),
    *("2/mm/forward", "2/mm/grad_a", "2/mm/grad_b"),
]
STEPS = len(SITES) + 1
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _device(one_thread: None) -> Iterator[None]:
    with cpu_as_device():
        yield


def small_model() -> nn.Module:
    """Two linear layers, the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8, bias=False))


def batch() -> torch.Tensor:
    """[12, 24], the same every time."""
    return torch.randn(12, 24, generator=torch.Generator().manual_seed(1))


def forward_backward(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return run


def trained(
    run: nn.Module, model: nn.Module, faults: list[Fault], *, verify: bool = True
) -> tuple[str, CoverageReport]:
    """Train under a Guard; return the digest of the weights and the report."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with holdfast.protect(model, verify=verify) as protection:
        guard = holdfast.Guard(model, optimizer)
        for step in range(STEPS):
            with Injector(model, [f for f in faults if f.step == step], rank=0).step(step):
                guard.step(forward_backward(run), batch())
        report = protection.report()
    return tensors_digest(list(model.parameters())), report


def storm() -> list[Fault]:
    """One fault in each product, each in a step of its own."""
    return [
        Fault(step=step, rank=0, kind="bitflip", op=op, bit=29) for step, op in enumerate(SITES)
    ]


@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=[pytest.mark.compile, pytest.mark.representative])],
    ids=["eager", "compiled"],
)
def test_a_step_with_a_wrong_product_is_repeated_and_the_run_ends_with_the_calm_ones_bits(
    compiled: bool,
) -> None:
    digests = []
    for faults in ([], storm()):
        torch.compiler.reset()
        model = small_model()
        run = torch.compile(model, fullgraph=True) if compiled else model
        events.clear()
        digest, report = trained(run, model, faults)
        digests.append(digest)
        assert uncovered(report) == {}
        repeated = len(faults)
        assert set(covered(report)) == set(SITES)
        assert {site.calls for site in report.sites} == {STEPS + repeated}
        assert sum(site.suspects for site in report.sites) == repeated
        found = [(event.kind, event.op) for event in events.recent() if event.kind != "injected"]
        expected = [[("gemm_fault", fault.op), ("rerun", "")] for fault in faults]
        assert found == [each for pair in expected for each in pair]
        assert max(slots().values()) < 1  # what is left is of the repeated passes
    assert digests[0] == digests[1]
    torch.compiler.reset()


OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic": True},
    "tuned": {"options": {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"}},
    "bf16": {},
}


@pytest.mark.compile
@pytest.mark.parametrize("kind", OPTIONS)
def test_compiled_products_of_any_kernel_keep_their_bits_and_each_fault_is_found(kind: str) -> None:
    def gradients(run: nn.Module, x: torch.Tensor) -> str:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            loss = run(x).float().square().mean()
        return tensors_digest(list(torch.autograd.grad(loss, list(model.parameters()))))

    model, more = small_model(), torch.cat([batch(), batch()])
    torch.compiler.reset()
    bare = torch.compile(model, fullgraph=True, **OPTIONS[kind])
    expected = [gradients(bare, x) for x in (batch(), more)]
    torch.compiler.reset()
    with holdfast.protect(model) as protection:
        run = torch.compile(model, fullgraph=True, **OPTIONS[kind])
        assert [gradients(run, x) for x in (batch(), more)] == expected
        graphs = counters["stats"]["unique_graphs"]
        assert uncovered(protection.report()) == {}
        protection.check()
        for fault in storm():
            if kind == "bf16":
                fault = replace(fault, bit=13)
            with Injector(model, [fault], rank=0).step(fault.step):
                gradients(run, more)
            with pytest.raises(UncorrectableFault, match=fault.op):
                protection.check()
        assert counters["stats"]["unique_graphs"] == graphs
    torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_backward_graph_that_another_thread_compiles_has_its_verdicts(
    dynamic: bool | None,
) -> None:
    """As on a device, whose backward pass runs in a thread of autograd's."""
    torch.compiler.reset()
    model = small_model()
    run = torch.compile(model, fullgraph=True, dynamic=dynamic)
    with holdfast.protect(model) as protection:
        for x in (batch(), torch.cat([batch(), batch()])):
            loss = run(x).square().mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert covered(protection.report()) == dict.fromkeys(SITES, 2)
        assert uncovered(protection.report()) == {}
    torch.compiler.reset()


@pytest.mark.parametrize("flipped", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_common_check_of_a_layers_gradients_finds_a_fault_in_either(
    name: str, flipped: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    dtype = getattr(torch, name)
    dy, w, x = (torch.randn(s, generator=generator).to(dtype) for s in ((12, 8), (8, 24), (12, 24)))
    factors = (x.T, dy) if flipped else (dy.T, x)
    verdict = torch.ops.holdfast.verdict_of_gradients
    sites = ["0/mm/grad_a", "0/mm/grad_b"]
    with holdfast.protect(model := small_model()):
        site = identifier(model[0]), "mm", 0
        for struck in (None, 0, 1):
            results = [dy @ w, factors[0] @ factors[1]]
            bare = [each.clone() for each in results]
            if struck is not None:
                results[struck][3, 5] += 50
                assert not torch.equal(results[struck], bare[struck])
            verdict(results[0], dy, w, None, 1, 1, results[1], *factors, None, 1, 1, *site)
            found = {site: ratio for site, ratio in slots().items() if site in sites}
            assert set(found) == set(sites)
            assert [found[site] > 1 for site in sites] == [struck == 0, struck == 1]
            native.required().ledger(CPU)[0].zero_()


def test_with_the_detector_off_the_same_faults_reach_the_weights() -> None:
    calm, _ = trained(model := small_model(), model, [], verify=False)
    for fault in storm():
        events.clear()
        struck, _ = trained(model := small_model(), model, [fault], verify=False)
        assert struck != calm
        assert kinds() == ["injected"]


def test_without_a_guard_the_optimizer_refuses_and_keeps_the_weights() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holdfast.protect(model) as protection:
        for fault in storm():
            with Injector(model, [fault], rank=0).step(fault.step):
                forward_backward(model)(batch())
            before = tensors_digest(list(model.parameters()))
            with pytest.raises(UncorrectableFault, match=f"{fault.op}: a row exceeded"):
                optimizer.step()
            assert tensors_digest(list(model.parameters())) == before
            optimizer.zero_grad()
            protection.check()  # the verdict was read, and is not given twice
            forward_backward(model)(batch())
            optimizer.step()
            assert tensors_digest(list(model.parameters())) != before


def test_in_inference_the_end_of_the_protection_or_a_check_refuses_the_result() -> None:
    model, fault = small_model(), storm()[0]
    injector = Injector(model, [fault], rank=0)
    with (
        pytest.raises(UncorrectableFault, match=fault.op),
        holdfast.protect(model),
        injector.step(0),
        torch.no_grad(),
    ):
        model(batch())
    with holdfast.protect(model) as protection, torch.no_grad():
        with Injector(model, [fault], rank=0).step(0):
            model(batch())
        with pytest.raises(UncorrectableFault, match=fault.op):
            protection.check()


def test_a_verdict_is_left_to_the_model_that_it_is_about() -> None:
    ours, theirs = small_model(), small_model()
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    with holdfast.protect(ours), holdfast.protect(theirs) as other:
        with Injector(theirs, storm()[:1], rank=0).step(0):
            forward_backward(theirs)(batch())
        forward_backward(ours)(batch())
        optimizer.step()
        with pytest.raises(UncorrectableFault):
            other.check()


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_finite_operands_cannot_have_is_a_fault_with_and_without_a_guard(
    value: float, dtype: torch.dtype
) -> None:
    model, x = small_model().to(dtype), batch().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    guard = holdfast.Guard(model, optimizer, optimizer_hook=False)
    strike = Strike((3, 5), value, site="2/mm/grad_b")
    with holdfast.protect(model):
        with armed(strike):
            guard.step(forward_backward(model), x)
        assert kinds() == ["gemm_fault", "rerun"]
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        with armed(Strike((3, 5), value, site="2/mm/grad_b")):
            forward_backward(model)(x)
        with pytest.raises(UncorrectableFault, match="2/mm/grad_b"):
            optimizer.step()


def test_values_that_overflow_are_genuine() -> None:
    """As those of a loss that a GradScaler scaled too far, whose step it skips."""
    with holdfast.protect(model := nn.Linear(64, 8, bias=False).half()), torch.no_grad():
        model.weight.fill_(60_000)
        assert not model(torch.ones(3, 64).half()).isfinite().any()
    assert kinds() == ["nonfinite_input"]


def test_rows_beside_a_mask_are_not_judged_and_the_others_are() -> None:
    queries, keys = torch.randn(2, 6, 16), torch.randn(2, 16, 6)
    mask = torch.zeros(6, 6)
    mask[:3, 3:] = -torch.inf
    with holdfast.protect(nn.Linear(2, 2)) as protection:
        with armed(Strike((0, 1, 1), 50.0)):  # in a row beside the mask
            torch.baddbmm(mask, queries, keys)
        protection.check()
        with armed(Strike((0, 4, 1), 50.0)):
            torch.baddbmm(mask, queries, keys)
        with pytest.raises(UncorrectableFault):
            protection.check()


def test_a_wrong_product_of_a_teacher_repeats_the_step_that_used_it() -> None:
    teacher, student = small_model(), small_model()
    guard = holdfast.Guard(student, torch.optim.SGD(student.parameters(), 0.0))

    def distilled(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = teacher(x) + 1
        loss = (student(x) - aim).square().mean()
        loss.backward()
        return loss

    with holdfast.protect(teacher), holdfast.protect(student):
        with Injector(teacher, storm()[:1], rank=0).step(0):
            guard.step(distilled, batch())
        assert kinds() == ["injected", "gemm_fault", "rerun"]


def test_damaged_checksums_are_dropped_with_the_verdict_that_they_caused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    guard = holdfast.Guard(model, optimizer)
    with holdfast.protect(model):
        guard.step(forward_backward(model), batch())  # the weights' checksums are kept
        with armed(Strike((0, 5), 1e6, site="0/addmm/forward", stage="checksum")):
            guard.step(forward_backward(model), batch())
        assert kinds() == ["checksum_fault", "rerun"]


def test_a_weight_that_changed_in_memory_is_found_again_until_it_is_as_before() -> None:
    model = small_model()
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.0))
    with holdfast.protect(model):
        before = model[0].weight.detach().clone()
        with (
            armed(Strike((3, 5), 1e3, site="0/addmm/forward", stage="operand")),
            pytest.raises(UncorrectableFault, match="no snapshots to roll back to"),
        ):
            guard.step(forward_backward(model), batch())
        assert kinds() == ["gemm_fault"] * 4 + ["rerun"]
        with torch.no_grad():
            model[0].weight.copy_(before)
        guard.step(forward_backward(model), batch())


def test_loss_norm_and_verdicts_come_in_one_transfer() -> None:
    model = small_model()
    with holdfast.protect(model):
        forward_backward(model)(batch())
        with pytest.MonkeyPatch.context() as patch:
            copies: list[torch.Tensor] = []
            real = torch.Tensor.cpu
            patch.setattr(torch.Tensor, "cpu", lambda t: copies.append(t) or real(t))
            read = ledger.settle(bool, [torch.tensor([1.5, 2.25]), torch.tensor(3.0).double()])
    assert read == [1.5, 2.25, 3.0]
    assert [each.dtype for each in copies] == [torch.int32]


def products(name: str) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield (c, a, b, addend) of products of one dtype, in many layouts."""
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    yield draw(7, 33), draw(33, 20), draw(20)
    yield draw(33, 7).T, draw(20, 33).T, draw(7, 20)
    yield draw(1, 64), draw(64, 17), draw(17)
    yield draw(3, 5, 16), draw(3, 16, 9), draw(3, 5, 9)
    yield draw(5, 3, 16).transpose(0, 1), draw(16, 3, 9).transpose(0, 1), draw(3, 5, 9)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("beta", "alpha"), [(0.0, 1.0), (1.0, 1.0), (-0.5, 2.0)])
def test_clean_products_are_within_their_thresholds_and_twice_the_threshold_is_not(
    name: str, beta: float, alpha: float
) -> None:
    core = configured_core()
    for a, b, addend in products(name):
        fused = torch.addmm if a.dim() == 2 else torch.baddbmm
        c = fused(addend, a, b, beta=beta, alpha=alpha)
        given = (a, b, addend, beta, alpha)

        def ratio(c: torch.Tensor, given: tuple[object, ...] = given) -> float:
            slot = torch.zeros(1, dtype=torch.int32)
            core.device_judge("aten", c, *given, slot)
            return slot.view(torch.float32).item()

        assert ratio(c) < 1
        thresholds = core.device_thresholds(c, *given).reshape(c.shape[:-1])
        for sign in (-2.2, 2.2):
            struck = c.clone().double()
            struck[..., -1, 2] += sign * thresholds[..., -1]
            assert ratio(struck.to(c.dtype)) > 1


def test_the_reference_adds_up_fp64_in_pairs_as_its_thresholds_allow_for() -> None:
    generator, slot = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.int32)
    a, b = (torch.randn(n, m, generator=generator).double() for n, m in ((400, 4), (4, 4096)))
    configured_core().device_judge("aten", a @ b, a, b, None, 1.0, 1.0, slot)
    assert slot.view(torch.float32) < 1


@given(
    inner=st.integers(1, 100_000),
    columns=st.integers(1, 100_000),
    dtype=st.sampled_from([*DTYPES, torch.float8_e4m3fn]),
)
def test_both_sides_compute_the_same_tolerance(
    inner: int, columns: int, dtype: torch.dtype
) -> None:
    stored = dtype if dtype in DTYPES else torch.bfloat16
    operand, output = (torch.zeros((), dtype=each) for each in (dtype, stored))
    for precision in ("ieee", "tf32", "tf32x3", "fast"):
        theirs = configured_core().device_tolerance(operand, output, inner, columns, precision)
        ours = (*Tolerance.of(dtype, stored, inner, columns, precision), *drift_growth(inner))
        assert theirs == pytest.approx(ours, rel=1e-12)


def test_the_known_answer_test_passes_and_names_what_a_broken_check_does() -> None:
    assert failure(CPU, "aten") == ""
    core = native.required()
    real = core.device_judge
    broken = {
        "never raises": lambda *args, **rest: None,
        "always raises": lambda *args, **rest: args[-1].fill_(2**30),
        "is a tenth off": lambda *args, **rest: _scaled(real, *args, **rest),
    }
    for judge in broken.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "device_judge", _only("broken", judge, real))
            assert failure(CPU, "broken") != ""


def test_the_known_answer_test_covers_every_kind_of_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check that is wrong for one kind alone is found, and that kind is named."""
    core = native.required()
    real = core.device_judge

    def kind(a: torch.Tensor, c: torch.Tensor, rest: dict[str, torch.Tensor]) -> str:
        if "ends" in rest:
            return "rows" if c.dim() == 2 else "inner dimensions"
        return str(a.dtype)

    def judge(backend: str, c: torch.Tensor, a: torch.Tensor, *args: Any, **rest: Any) -> None:
        found.add(kind(a, c, rest))
        if backend != "broken":
            real(backend, c, a, *args, **rest)
        elif kind(a, c, rest) != broken:
            real("aten", c, a, *args, **rest)

    monkeypatch.setattr(core, "device_judge", judge)
    broken, found = "", set[str]()
    assert failure(CPU, "broken") == ""
    eight_bits = {"torch.float8_e4m3fn", "torch.float8_e5m2"}
    assert found == {str(dtype) for dtype in DTYPES} | eight_bits | {"rows", "inner dimensions"}
    for broken in sorted(found):
        assert broken in failure(CPU, "broken")


def _only(name: str, judge: Callable[..., None], real: Callable[..., None]) -> Callable[..., None]:
    """Judge as ``judge`` does for one backend and as the real one for the others."""
    return lambda backend, *args, **rest: (
        judge(*args, **rest) if backend == name else real(backend, *args, **rest)
    )


def _scaled(real: Callable[..., None], *args: torch.Tensor, **rest: torch.Tensor) -> None:
    real("aten", *args, **rest)
    slot = args[-1]
    slot.copy_((slot.view(torch.float32) * 1.1).view(torch.int32))


CSRC = Path(__file__).parents[2] / "csrc"
# What makes the host wait for a device, or copies to it from memory that is not pinned.
WAITS = re.compile(
    r"\.item\b|\.cpu\(|ynchronize|nonzero|at::equal|kCPU|\.to\(device|cuMemcpy|cuMemAlloc|local_scalar"
)
# The places that wait: a device is prepared outside of any capture, and what was kept is compared
# after a verdict.
ALLOWED = {
    "device/kernel_backend.cpp": 2,
    "gemm/encoding_cache.cpp": 1,
}


def test_nothing_that_queues_a_check_waits_for_the_device() -> None:
    sources = [
        *(CSRC / "device").glob("*.cpp"),
        *(CSRC / "gemm" / name for name in ("encoding_cache.cpp", "linear_reuse.cpp", "guarded.h")),
    ]
    found = {
        str(path.relative_to(CSRC)): len(WAITS.findall(path.read_text()))
        for path in sources
        if path.name != "aten_backend.cpp"  # the reference
    }
    assert {path: count for path, count in found.items() if count} == ALLOWED
