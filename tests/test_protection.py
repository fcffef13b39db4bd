"""protect(): names, coverage, threads, and leaving without a trace."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from case_loops import for_each
from site_reports import covered, uncovered
from torch import nn
from torch.nn import functional

import holdfast
from holdfast import events, native, sites
from holdfast.abft import policy
from holdfast.abft.gemm.modules import identifier
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import ConfigError
from holdfast.nn import Attention
from holdfast.protection import METHODS, CoverageReport, SiteCoverage

pytestmark = pytest.mark.skipif(native.core is None, reason="nothing is covered without the core")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No event from before, no hook left behind, no module left entered."""
    events.clear()
    torch.manual_seed(0)
    yield
    sites.disarm()
    assert [event.kind for event in events.recent()] == []


class Block(nn.Module):
    """Two linear layers, and products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(x).relu())
        scores = hidden @ hidden.mT
        return scores @ hidden + x


ROLES = ("forward", "grad_a", "grad_b")


def expected_sites(*names: str) -> set[str]:
    """Every site of blocks that computed all their gradients."""
    products = ("/bmm", "/bmm#2", ".up/addmm", ".down/mm")
    return {f"{name}{each}/{role}" for name in names for each in products for role in ROLES}


def batch() -> torch.Tensor:
    """An input that wants its gradient."""
    return torch.randn(2, 5, 8, requires_grad=True)


def test_nested_modules_name_their_products_and_one_called_twice_is_one_name() -> None:
    block = Block()
    for model, names, calls in (
        (nn.Sequential(Block(), Block()), ("0", "1"), 1),
        (nn.Sequential(block, block), ("0",), 2),
    ):
        with holdfast.protect(model) as protection:
            model(batch()).sum().backward()
            assert covered(protection.report()) == dict.fromkeys(expected_sites(*names), calls)


class Product(torch.autograd.Function):
    """A product with a derivative of its own."""

    @staticmethod
    def forward(ctx, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def,override]
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


def test_a_custom_autograd_function_is_named_by_its_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(x, self.weight)  # type: ignore[no-any-return]

    model = Model()
    with holdfast.protect(model) as protection:
        model(torch.randn(3, 8, requires_grad=True)).sum().backward()
        found = covered(protection.report())
    assert found == {f"Model/mm/{role}": 1 for role in ROLES}


def test_a_product_without_a_gradient_does_not_take_the_name_of_the_one_before() -> None:
    layer = nn.Linear(8, 8)
    with holdfast.protect(layer) as protection:
        output = layer(torch.randn(3, 8))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        output.sum().backward()
        found = covered(protection.report())
    assert found == {"(outside)/mm/forward": 1, "Linear/addmm/forward": 1, "Linear/addmm/grad_b": 1}


def test_a_gradient_taken_inside_a_forward_is_backward() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(self.layer(x).sum(), x)
            return grad @ grad.mT

    model = Penalty()
    with holdfast.protect(model) as protection:
        model(torch.randn(3, 8, requires_grad=True))
        found = covered(protection.report())
    assert found == {"Penalty/mm/forward": 1, "layer/addmm/forward": 1, "layer/addmm/grad_a": 1}


class Failing(nn.Module):
    """Raises in the middle of a forward pass."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.error = nn.Linear(8, 8), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        raise self.error


class Caller(nn.Module):
    """Goes on after a module of its own has failed."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.after = Failing(error), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(self.inner.error):
            self.inner(x)
        return self.after(x)


@for_each("error", [KeyError, KeyboardInterrupt])
def test_an_exception_or_interrupt_does_not_leave_its_module_entered(
    error: type[BaseException],
) -> None:
    model, x = Caller(error), torch.randn(3, 8)
    calls = {"inner.inner/addmm/forward": 1, "after/addmm/forward": 1, "(outside)/mm/forward": 1}
    with holdfast.protect(model) as protection:
        model(x)
        if error is KeyError:
            calls["inner.inner/addmm/forward"] += 1
            with pytest.raises(error):
                model.inner(x)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        assert covered(protection.report()) == calls


def test_a_pre_hook_that_fails_before_ours_does_not_pop_its_caller() -> None:
    class Multiplying(Caller):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            return x @ x.mT

    def fail(module: nn.Module, args: object) -> None:
        raise KeyError

    model = Multiplying(KeyError)
    model.inner.register_forward_pre_hook(fail)
    with holdfast.protect(model) as protection:
        model(torch.randn(3, 8))
        assert "Multiplying/mm/forward" in covered(protection.report())


def test_the_prefix_of_a_wrapper_is_not_part_of_a_name() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    with holdfast.protect(Wrapper()) as protection:
        protection.model(torch.randn(3, 8))
        assert covered(protection.report()) == {"0/addmm/forward": 1}


def test_two_models_with_the_same_names_are_told_apart() -> None:
    first, second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    with holdfast.protect(first) as idle, holdfast.protect(second) as busy:
        second(torch.randn(3, 8))
        assert covered(idle.report()) == {}
        assert uncovered(idle.report()) == {"0": "not run yet"}
        assert covered(busy.report()) == {"0/addmm/forward": 1}


def test_a_new_protection_counts_from_zero() -> None:
    model = nn.Linear(8, 8)
    for _ in range(2):
        with holdfast.protect(model) as protection:
            model(torch.randn(3, 8))
            assert covered(protection.report()) == {"Linear/addmm/forward": 1}


def test_a_hook_from_another_thread_and_the_counters_do_not_deadlock() -> None:
    model, stop = nn.Linear(32, 32), threading.Event()

    def train() -> None:
        while not stop.is_set():
            model(torch.randn(8, 32)).sum().backward()

    with holdfast.protect(model) as protection:
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            sites.arm(lambda *_: None)
            protection.report()
            sites.disarm()
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        calls = Counter(covered(protection.report()))
    assert calls["Linear/addmm/forward"] > 0


def test_removal_leaves_no_trace() -> None:
    def hooks() -> list[dict[str, object]]:
        return [
            {key: dict(value) if key.endswith("_hooks") else None for key, value in vars(m).items()}
            for m in model.modules()
        ]

    model, x = nn.Sequential(Block(), nn.LayerNorm(8)), torch.randn(2, 5, 8)
    before, expected = hooks(), tensors_digest([model(x)])
    protection = holdfast.protect(model)
    assert tensors_digest([model(x)]) == expected
    protection.remove()
    protection.remove()
    assert hooks() == before
    sites = protection.report().sites
    assert tensors_digest([model(x)]) == expected
    torch.dot(x.flatten(), x.flatten())  # what would be listed as uncovered
    assert protection.report().sites == sites


def test_removal_survives_a_model_that_was_converted_meanwhile() -> None:
    model = nn.Linear(8, 8)
    protection = holdfast.protect(model)
    model.double()
    model(torch.randn(3, 8).double())
    protection.remove()
    assert not model._forward_hooks


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, got function"):
        holdfast.protect(lambda x: x)  # type: ignore[arg-type]


def test_the_report_prints_and_exports_every_site() -> None:
    report = CoverageReport(
        "native",
        [SiteCoverage("a/mm/forward", True, "", 3, 9, 1, 2e-6, 1, 50, 2, "row checksums")],
        4,
    )
    assert "1 of 1 matmul sites covered: 1 by row checksums" in str(report)
    assert "2.0e-06   6.0%  covered by row checksums" in str(report)
    assert report.as_dict()["sites"][0]["rows"] == 9
    assert report.as_dict()["sites"][0]["method"] == "row checksums"


class _EveryMethod(nn.Module):
    """One matmul of each kind, and one that is not verified."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sections = nn.Linear(8, 8), Attention(8, 2)
        self.unused, self.convolved = nn.Linear(8, 8), nn.Conv1d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sections(self.linear(self.convolved(x)))
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads).sum(1)
        return (mixed + mixed.flatten() @ torch.ones(mixed.numel())).sum()


def test_the_report_says_by_which_method_each_site_is_covered() -> None:
    model = _EveryMethod()
    with holdfast.protect(model) as protection:
        model(torch.randn(2, 3, 8)).backward()
        report = protection.report()
    methods: dict[str, set[str]] = {}
    for site in report.sites:
        methods.setdefault(site.method, set()).add(site.site.split("/")[0])
    assert methods == {
        "row checksums": {"linear"},
        "sections": {"sections"},
        "fused tiles": {"_EveryMethod"},
        "signed sums": {"convolved"},
        "": {"_EveryMethod", "unused"},  # a dot product; not run
    }
    assert all(bool(site.method) == site.covered for site in report.sites)
    counted = [sum(site.method == name for site in report.sites) for name in METHODS]
    by = ", ".join(f"{n} by {name}" for n, name in zip(counted, METHODS, strict=True))
    assert f"{sum(counted)} of {len(report.sites)} matmul sites covered: {by} (" in str(report)


@for_each(("frequency", "checked"), [(1.0, 6), (0.5, 3), (0.25, 2), (0.0, 0)])
def test_products_are_verified_in_that_share_of_the_steps(frequency: float, checked: int) -> None:
    model = nn.Linear(8, 8)
    optimizer, other = (
        torch.optim.SGD(p, 0.1) for p in (model.parameters(), nn.Linear(2, 2).parameters())
    )
    with holdfast.protect(model, frequency=frequency) as protection:
        for _ in range(6):
            model(batch()).sum().backward()
            optimizer.step()
            other.step()
        calls = {site.site: site.calls for site in protection.report().sites if site.covered}
    assert calls.get("Linear/addmm/forward", 0) == calls.get("Linear/addmm/grad_b", 0) == checked
    with holdfast.protect(model) as protection:
        model(batch()).sum().backward()
        assert {site.calls for site in protection.report().sites} == {1}


def test_a_frequency_that_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"frequency = 1\.5 must be between 0"):
        holdfast.protect(nn.Linear(2, 2), frequency=1.5)


class _Functional(nn.Module):
    """A layer, functional products, and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.layer(x)) @ x.mT
        heads = torch.bmm(hidden, x).unsqueeze(1)
        return functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1)


@for_each("gradients", [True, False])
def test_products_on_another_device_are_listed_by_site_and_change_nothing(gradients: bool) -> None:
    model, x = _Functional().to("meta"), torch.empty(2, 5, 8, device="meta")
    with holdfast.protect(model) as protection, torch.set_grad_enabled(gradients):
        for _ in range(3):
            assert model(x).shape == (2, 5, 8)
        report = protection.report()
    assert covered(report) == {}
    reasons = uncovered(report)
    reason = "on meta: holdfast has no check for it there; nor are its gradients"
    assert set(reasons.values()) == {reason}
    by_module = {site.split("/")[0] for site in reasons}
    assert by_module == {"_Functional", "layer", "frozen"}
    own = {site.split("/")[1] for site in reasons if site.startswith("_Functional/")}
    assert len(own & {"bmm", "matmul"}) >= 1
    assert any("scaled_dot_product" in op for op in own) or own == {"bmm"}  # made of products
    seen = [(site.site, site.calls) for site in report.sites]
    assert all(calls <= 4 for _, calls in seen)  # the first pass alone is watched
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pass_that_fails_on_another_device_ends_the_watch() -> None:
    def fail(*_: object) -> None:
        raise KeyError

    model, x = _Functional().to("meta"), torch.empty(2, 5, 8, device="meta")
    hook = model.frozen.register_forward_hook(fail)
    with holdfast.protect(model) as protection:
        with pytest.raises(KeyError):
            model(x)
        hook.remove()
        assert "_Functional/bmm/forward" not in uncovered(protection.report())
        model(x)
        assert "_Functional/bmm/forward" in uncovered(protection.report())
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_model_on_cpu_is_never_watched() -> None:
    model = _Functional()
    with holdfast.protect(model) as protection:
        model(torch.randn(2, 5, 8)).sum().backward()
        assert protection._elsewhere.sites() == []
        assert uncovered(protection.report()) == {}


def _hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_sequential_without_products_gets_no_hooks() -> None:
    without, within = nn.Sequential(nn.ReLU(), nn.Sequential(nn.GELU())), nn.Linear(8, 8)
    model = nn.Sequential(without, nn.Sequential(nn.Sequential(within)))
    with holdfast.protect(model) as protection:
        assert _hooks_of(without) == 0
        assert all(m._forward_hooks for m in (model, model[1], model[1][0], within))
        without[0] = nn.Linear(8, 8)  # its products are those of the nearest module with hooks
        model(torch.randn(4, 8))
        names = {site.site for site in protection.report().sites if site.calls}
    assert names == {"1.0.0/addmm/forward", "Sequential/addmm/forward"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@for_each("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 8))])
def test_torchscript_is_refused_with_a_remedy_before_anything_is_hooked(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    part = compiled(nn.Linear(8, 8))
    for model in (part, nn.Sequential(nn.Linear(8, 8), part)):
        with pytest.raises(ConfigError, match="protect the module that it was scripted or traced"):
            holdfast.protect(model)
    assert isinstance(model, nn.Sequential)
    assert _hooks_of(model[0]) == 0
    with holdfast.protect(model[0]) as protection:
        model[0](batch())
        assert [site.calls for site in protection.report().sites] == [1]


@for_each("broken", ["register_forward_hook", "register_forward_pre_hook", "parameters"])
@for_each("frequency", [1.0, 0.5])
def test_a_failure_inside_protect_leaves_nothing_behind(broken: str, frequency: float) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError(broken)

    assert native.core is not None
    model, x = nn.Sequential(nn.Linear(8, 8), last := nn.Linear(8, 8)), torch.randn(3, 8)
    owner = model if broken == "parameters" else last
    setattr(owner, broken, fail)
    with pytest.raises(KeyError, match=broken):
        holdfast.protect(model, correction="detect", frequency=frequency)
    delattr(owner, broken)
    assert _hooks_of(model) == 0
    assert policy.policy_of(identifier(model)) is policy.process
    assert native.core.cached_encodings() == 0
    with holdfast.protect(nn.Identity(), verify=False) as named:
        model(x)
        assert [site for site in named.report().sites if site.calls] == []
    assert native.core.cached_encodings() == 0


def test_a_refreshed_weight_may_have_been_edited_unseen() -> None:
    model, other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(2, 2)
    first, x = model[0], torch.randn(3, 8)
    assert isinstance(first, nn.Linear)
    with holdfast.protect(model) as protection:
        for parameter in (first.weight, None):
            model(x)
            first.weight.data[2, 7] += 100.0
            expected = functional.linear(x, first.weight.detach().clone(), first.bias)
            protection.refresh(parameter)
            assert torch.equal(first(x), expected)
        with pytest.raises(ConfigError, match=r"shape \(2, 2\) is no parameter of Sequential"):
            protection.refresh(other.weight)
