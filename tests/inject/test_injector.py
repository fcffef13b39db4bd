"""The injector: each fault once, logged first, where the fault model says it is seen."""

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from case_loops import for_each
from torch import nn
from torch.nn import functional

from holdfast import events, native, sites
from holdfast.abft.gemm.cpu import verify
from holdfast.errors import ConfigError
from holdfast.inject import Fault, Injector
from holdfast.inject.injector import MODULE_FACTOR, fired_faults
from holdfast.protection import protect
from holdfast.sites import BACKWARD_TILES, FORWARD_TILES

UP = "up/addmm/forward"


class Net(nn.Module):
    """A linear layer, a norm, and a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x))
        return torch.bmm(hidden, hidden.mT)


MATMULS = [f"up/addmm/{role}" for role in ("forward", "grad_b")] + [
    f"Net/bmm/{role}" for role in ("forward", "grad_a", "grad_b")
]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def _pass(net: Net) -> torch.Tensor:
    torch.manual_seed(1)
    output = net(torch.randn(3, 5, 8))
    output.square().mean().backward()
    return output.detach()


def _struck(net: Net, *faults: Fault, step: int = 0, passes: int = 1) -> list[events.Event]:
    injector = Injector(net, faults, rank=0)
    with protect(net, verify=False):
        for _ in range(passes):
            with injector.step(step):
                _pass(net)
    return [event for event in events.recent() if event.kind == "injected"]


def _flip(op: str = UP, **values: object) -> Fault:
    fields: dict[str, object] = {"step": 0, "rank": 0, "kind": "bitflip", "bit": 30} | values
    return Fault(op=op, **fields)


@for_each(
    "fault",
    [
        _flip(),
        _flip(site="operand"),
        _flip(site="checksum", bit=60),
        _flip("norm", site="module"),
        *(_flip(op) for op in MATMULS),
        Fault(0, 0, "inf", op=UP),
        Fault(0, 0, "nan", op=UP),
    ],
)
def test_a_fault_strikes_once_and_at_its_step_only(net: Net, fault: Fault) -> None:
    assert _struck(net, fault, step=1) == []
    struck = _struck(net, fault, passes=3)
    assert [(e.op, e.detail["fault"], e.detail["site"]) for e in struck] == [
        (fault.op, 0, fault.site)
    ]
    assert not struck[0].detail["below_line"]
    assert struck[0].detail["true"] != struck[0].detail["corrupted"]
    if fault.kind != "bitflip":
        assert str(abs(struck[0].detail["corrupted"])) == fault.kind


def test_the_effect_is_one_element_and_what_the_log_says(net: Net) -> None:
    right = net.up(torch.ones(3, 5, 8)).detach()
    injector = Injector(net, [_flip("up", site="module")], rank=0)
    with injector.step(0):
        wrong = net.up(torch.ones(3, 5, 8)).detach()
    (event,) = events.recent()
    changed = (right != wrong).nonzero().tolist()
    assert changed == [event.detail["index"]]
    place = tuple(changed[0])
    assert (event.detail["true"], event.detail["corrupted"]) == (
        float(right[place]),
        float(wrong[place]),
    )


def test_only_its_own_ranks_faults_are_injected_and_logged_for_it(net: Net) -> None:
    faults = [_flip(rank=1), _flip(identifier=1), _flip(rank=3, identifier=2)]
    assert [event.detail["fault"] for event in _struck(net, *faults)] == [1]
    events.clear()
    with protect(net, verify=False), Injector(net, faults, rank=3).step(0):
        _pass(net)
    assert [(event.rank, event.detail["fault"]) for event in events.recent()] == [(3, 2)]


def test_after_a_restart_only_what_has_not_struck_is_left(net: Net, tmp_path: Path) -> None:
    faults = [_flip(identifier=0), _flip("Net/bmm/forward", identifier=1), _flip(identifier=2)]
    events.open_ledger(tmp_path)
    _struck(net, faults[0], faults[1])
    fired = fired_faults(tmp_path / events.LEDGER_NAME, 0)
    assert fired == {0, 1}
    assert fired_faults(tmp_path / events.LEDGER_NAME, 1) == set()
    assert fired_faults(tmp_path / "none.sqlite", 0) == set()
    events.clear()
    injector = Injector(net, faults, rank=0, fired=fired)
    with protect(net, verify=False), injector.step(0):
        _pass(net)
    assert [event.detail["fault"] for event in events.recent()] == [2]


def test_the_log_is_written_before_the_effect(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.inject import injector as module

    logged: list[int] = []
    monkeypatch.setattr(
        module, "write_element", lambda *_: logged.append(len(events.recent())) or (0.0, 0.0)
    )
    _struck(net, _flip())
    assert logged == [1]


def _watched(net: Net, faults: list[Fault], look: Callable[..., None]) -> None:
    """Strike, and look at every site before the injector does."""
    injector = Injector(net, faults, rank=0)
    with protect(net, verify=False), injector.step(0):
        hook = sites._hook
        assert hook is not None

        def both(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
            look(stage, site, gemm, output)
            hook(stage, site, gemm, output)

        sites.disarm()
        sites.arm(both)
        _pass(net)


def _thresholds(product: torch.Tensor, gemm: sites.Gemm) -> torch.Tensor:
    """The threshold of each row, one row of them for each product of a batch."""
    seen = (gemm.a, gemm.row_sum, gemm.statistics, gemm.addend, gemm.beta, gemm.alpha)
    rows = verify(product, *seen)
    return rows[1].reshape(-1, rows.shape[-1])


@for_each("identifier", range(12))
@for_each(("op", "site"), [*((op, "output") for op in MATMULS), (UP, "operand")])
def test_drawn_faults_move_a_row_by_more_than_twice_its_threshold_or_are_below_the_line(
    net: Net, op: str, site: str, identifier: int
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(stage: str, name: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
        if (stage, name) == (site, op):
            product = torch.addmm(gemm.addend, gemm.a, gemm.b) if output is None else output
            seen.append((gemm.a, _thresholds(product, gemm)))

    fault = _flip(op, site=site, bit=18 + identifier, identifier=identifier)
    _watched(net, [fault], look)
    (event,) = events.recent()
    index, detail = event.detail["index"], event.detail
    change = detail["corrupted"] - detail["true"]
    (a, thresholds), *_ = seen
    if site == "operand":
        moved = (a[:, index[-2]].double() * change).abs()
        above = ~(moved <= 2 * thresholds.flatten())
        assert bool(above.any()) != detail["below_line"]
    elif not detail["below_line"]:
        assert abs(change) > 2 * float(thresholds[index[0] if len(index) == 3 else 0, index[-2]])


@for_each("identifier", range(8))
def test_a_drawn_module_fault_outweighs_every_true_element(net: Net, identifier: int) -> None:
    right = net.norm(torch.arange(60.0).view(5, 12)).detach()
    injector = Injector(net, [_flip("norm", site="module", identifier=identifier)], rank=0)
    with injector.step(0):
        net.norm(torch.arange(60.0).view(5, 12))
    (event,) = events.recent()
    assert not abs(event.detail["corrupted"]) <= MODULE_FACTOR * float(right.abs().max())


def test_the_same_fault_draws_the_same_element_and_one_that_none_satisfies_is_below_the_line(
    net: Net,
) -> None:
    places = []
    for identifier in (4, 4, 5):
        events.clear()
        places.append(_struck(net, _flip(identifier=identifier))[0].detail["index"])
    assert places[0] == places[1] != places[2]
    events.clear()
    (event,) = _struck(net, _flip(bit=0))
    assert event.detail["below_line"]


@for_each(
    ("fault", "shape"),
    [
        (_flip(index=(14, 11)), r"\[15, 12\]"),
        (_flip("Net/bmm/grad_b", index=(2, 11, 4)), r"\[3, 12, 5\]"),
        (_flip(site="operand", index=(7, 11)), r"\[8, 12\]"),
        (_flip(site="checksum", bit=60, index=(0, 7)), r"\[1, 8\]"),
        (_flip("norm", site="module", index=(2, 4, 11)), r"\[3, 5, 12\]"),
    ],
)
def test_an_explicit_index_is_respected_and_a_wrong_one_refused(
    net: Net, fault: Fault, shape: str
) -> None:
    (event,) = _struck(net, fault)
    assert tuple(event.detail["index"]) == fault.index
    outside = (*fault.index[:-1], fault.index[-1] + 1)
    for wrong in (outside, fault.index[1:], (0, *fault.index)):
        bad = _flip(fault.op, site=fault.site, bit=fault.bit, index=wrong, identifier=6)
        events.clear()
        pattern = rf"fault 7: index \[.*\] is outside the {fault.site} of .* shape is {shape}"
        with pytest.raises(ConfigError, match=pattern):
            _struck(net, bad)
        assert events.recent() == []
        assert not sites.armed()


def test_a_pass_that_raises_disarms_too(net: Net) -> None:
    injector = Injector(net, [_flip(), _flip("norm", site="module", identifier=1)], rank=0)
    with pytest.raises(RuntimeError, match="stopped"), injector.step(0):
        raise RuntimeError("stopped")
    assert not sites.armed()
    assert not net.norm._forward_hooks


def test_a_module_that_the_model_lacks_or_that_returns_no_tensor_is_refused(net: Net) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(ConfigError, match=r"fault 1: 'nrom' is not a module"):
        Injector(net, [_flip("nrom", site="module")], rank=0)
    model = nn.Sequential(Pair())
    injector = Injector(model, [_flip("0", site="module")], rank=0)
    with pytest.raises(ConfigError, match="0 returns tuple, not a tensor"), injector.step(0):
        model(torch.ones(2))


class Attends(nn.Module):
    """Fused attention over one head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


FUSED = {"Attends/sdpa/forward": FORWARD_TILES, "Attends/sdpa_backward/grad_qkv": BACKWARD_TILES}


@pytest.mark.skipif(native.core is None, reason="only the native core fuses attention")
@for_each(("op", "site"), [(op, site) for op, stages in FUSED.items() for site in stages])
def test_a_tile_of_fused_attention_is_struck_once_and_repaired(op: str, site: str) -> None:
    model = Attends()
    x = torch.randn(1, 1, 9, 8, generator=torch.Generator().manual_seed(2))

    def once(*faults: Fault) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        with protect(model), Injector(model, faults, rank=0).step(0):
            output = model(leaf)
            return [output.detach(), *torch.autograd.grad(output.square().sum(), leaf)]

    calm = once()
    repaired = once(Fault(step=0, rank=0, kind="inf", site=site, op=op))
    assert all(torch.equal(a, b) for a, b in zip(repaired, calm, strict=True))
    injected, found = events.recent()
    assert (injected.kind, injected.op, injected.detail["below_line"]) == ("injected", op, False)
    assert (found.kind, found.op) == ("gemm_fault", op)
    outside = Fault(step=0, rank=0, kind="inf", site=site, op=op, index=(100, 0))
    with pytest.raises(ConfigError, match=f"outside the {site} of {op}"):
        once(outside)


KILLED = """
import sys
from pathlib import Path
import torch
from torch import nn
from holdfast import events
from holdfast.inject import Fault, Injector
from holdfast.protection import protect

events.open_ledger(Path(sys.argv[1]))
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
injector = Injector(model, [Fault(1, 0, "kill_trainer", **eval(sys.argv[2]))], rank=0)
with protect(model, verify=False):
    for step in range(3):
        events.set_step(step)
        with injector.step(step):
            model(torch.ones(2, 4)).sum().backward()
        print("done", step, flush=True)
"""


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    "where",
    [
        {},
        pytest.param({"op": "0/addmm/grad_b"}, marks=pytest.mark.representative),
        {"op": "0/addmm/forward", "site": "operand"},
        {"op": "1", "site": "module"},
    ],
    ids=["at the start", "in backward", "at an operand", "in a module"],
)
def test_a_kill_is_a_kill_and_in_the_ledger(tmp_path: Path, where: dict[str, str]) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), repr(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ})
    assert (done.returncode, done.stdout) == (-9, "done 0\n"), done.stderr
    ((_, event),) = events.read_ledger(tmp_path / events.LEDGER_NAME)
    assert (event.kind, event.step, event.detail["kind"]) == ("injected", 1, "kill_trainer")
    assert event.op == where.get("op", "")


def _trained(net: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    _pass(net)
    optimizer.step()
    return optimizer


REST = {
    "model.up.weight": lambda net, optimizer: net.up.weight,
    "model.up.bias": lambda net, optimizer: net.up.bias,
    "optimizer.state.0.exp_avg_sq": lambda net, optimizer: optimizer.state[net.up.weight][
        "exp_avg_sq"
    ],
    "optimizer.state.1.step": lambda net, optimizer: optimizer.state[net.up.bias]["step"],
}


@for_each("op", REST)
def test_state_at_rest_is_struck_once_before_the_pass_and_unseen_by_autograd(op: str) -> None:
    net = Net()
    optimizer, settled = _trained(net), []
    target = REST[op](net, optimizer)
    before, version = target.detach().clone(), target._version

    def settle() -> None:
        settled.append(torch.equal(target, before))

    fault = _flip(op, site="rest", step=3)
    injector = Injector(net, [fault], rank=0, optimizer=optimizer, settle=settle)
    events.set_step(3)
    for step in (2, 3, 3, 4):
        with injector.step(step):
            differs = (target != before).sum()
            assert int(differs) == (step >= 3)
    assert settled == [True]
    assert target._version == version
    (struck,) = [event for event in events.recent() if event.kind == "injected"][-1:]
    assert struck.op == op
    assert struck.detail["site"] == "rest"
    assert not struck.detail["below_line"]
    assert target[tuple(struck.detail["index"])] == struck.detail["corrupted"]
    again = Injector(net, [fault], rank=0, fired={0}, optimizer=optimizer)
    struck_value = target.detach().clone()
    with again.step(3):
        assert torch.equal(target, struck_value)


def test_an_update_is_struck_once_after_it_is_computed_and_before_hooks_see_it() -> None:
    net, op, seen = Net(), "optimizer.state.0.exp_avg", list[torch.Tensor]()
    optimizer = _trained(net)
    twin = deepcopy(net)
    other = torch.optim.AdamW(twin.parameters())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for parameter, copy in zip(net.parameters(), twin.parameters(), strict=True):
        copy.grad = parameter.grad

    def look(own: torch.optim.Optimizer, *_: object) -> None:
        seen.append(own.state[own.param_groups[0]["params"][0]]["exp_avg"].clone())

    for each in (optimizer, other):
        each.register_step_post_hook(look)
    injector = Injector(net, [_flip(op, site="update", step=3)], optimizer=optimizer)
    for step in (2, 3, 3, 4):
        with injector.step(step):
            pass
        optimizer.step()
        other.step()
        assert int((seen[-2] != seen[-1]).sum()) == (len(seen) > 2)
    message = r"'update' needs Injector\(optimizer=\)"
    unknown = Injector(net, [_flip(op, site="update")])
    with pytest.raises(ConfigError, match=message), unknown.step(0):
        pass


def test_a_tensor_that_the_state_lacks_is_named() -> None:
    net = Net()
    fault = _flip("optimizer.state.0.exp_avg", site="rest")
    unstepped = Injector(net, [fault], rank=0, optimizer=torch.optim.AdamW(net.parameters()))
    match = r"fault 1: there is no tensor 'optimizer.state.0.exp_avg' .* at step 0; .*model"
    with pytest.raises(ConfigError, match=match), unstepped.step(0):
        pass


def test_the_injector_is_a_context_that_names_faults_it_never_reached(caplog):
    model = nn.Linear(3, 2)
    faults = [Fault(step, 0, "nan", "module", op="0") for step in (0, 7)]
    model = nn.Sequential(model)
    with Injector(model, faults) as injector, injector.step(0):
        assert model(torch.ones(1, 3)).isnan().any()
    assert "1 faults were not injected: 0 at step 7" in caplog.text
    caplog.clear()
    with pytest.raises(KeyError), Injector(model, faults):
        raise KeyError
    assert caplog.text == ""
