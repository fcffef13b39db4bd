"""Modules that are computed again: silent on clean passes, a struck one is found and repeated."""

import gc
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guard_cases import events_of, kinds
from spot_cases import MODELS, SPOT_STEPS, SPOT_STRUCK, Gpt, SpotRun
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import events
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.report.coverage_section import coverage_section
from holdfast.report.run import gather_run
from holdfast.step.spot_check import SpotCheck

STRUCK_MODULES = [
    *(("gpt", name) for name in ("words", "norm", "soft", "act", "drop")),
    *(("recurrent", name) for name in ("lstm", "gru", "bags")),
    *(("images", name) for name in ("2", "3", "4", "6")),
    ("recomputed", "act"),
]


@cache
def right(model: str) -> str:
    """The digest of an undisturbed run without spot checks."""
    run = SpotRun(model)
    run.guarded(spot=0.0)
    return run.digest()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("model", "module"), STRUCK_MODULES)
def test_a_struck_module_is_found_and_the_step_repeated(
    model: str, module: str, direction: str
) -> None:
    run = SpotRun(model).strike(module, direction)
    run.guarded(spot=1.0)
    assert kinds() == ["module_fault", "rerun"]
    fault, rerun = events.recent()
    assert (fault.op, fault.step) == (module, SPOT_STRUCK)
    assert (fault.detail["pass"], fault.detail["wrong"]) == (direction, "module")
    assert rerun.detail["verdict"] == "transient"
    assert run.digest() == right(model)
    without = SpotRun(model).strike(module, direction)
    without.guarded(spot=0.0)
    assert without.digest() != right(model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["plain", "protected", "autocast", "accumulated"])
def test_clean_steps_raise_no_alarm_and_keep_their_bits(model: str, how: str) -> None:
    """In all 20 cases together 160 steps, in which a share of 1/64 checks as much as in 10,240."""
    digests, checked = [], []
    for spot in (1.0, 0.0, None):
        run = SpotRun(model, how)
        coverage = run.guarded(8, spot=spot).spot.coverage()
        assert coverage["left_out"] == {}
        digests.append(run.digest())
        checked.append(coverage["checked"])
    assert len(set(digests)) == 1
    assert checked[0] > 8 * len(SpotCheck(run.model, 1.0).due(0))
    assert checked[1] == 0
    assert kinds() == []


def test_each_module_has_its_turn_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(share: float | None = None, seed: int = 0) -> list[str]:
        check = SpotCheck(Gpt(), share, seed=seed)
        return [unit.name for step in range(64) for unit in check.due(step)]

    leaves = ["act", "drop", "norm", "soft", "words"]
    assert sorted(turns()) == leaves
    assert sorted(turns(1 / 16)) == sorted(4 * leaves)
    assert turns() == turns()
    assert len({tuple(turns(seed=seed)) for seed in range(9)}) > 1
    ranks = iter(range(9))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: next(ranks))
    assert len({tuple(turns()) for _ in range(9)}) > 1
    with pytest.raises(ConfigError, match="must be a share of the modules"):
        SpotCheck(Gpt(), 1.5)


class Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.forward_ = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the function returns."""
        return self.forward_(x)


class Torchs(Applied):
    """Stands for a module of torch: others are not checked below a share of 1."""

    __module__ = "torch.nn.modules.activation"


def failing(since: int) -> nn.Module:
    """Five modules that take turns; one errs from a step on, each time otherwise."""
    errors = iter(range(1, 10**9))

    def failed(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (next(errors) * 1e-4 if events.current_step() >= since else 0))

    layers = [nn.Linear(4, 4), Torchs(failed), nn.Tanh(), nn.Softplus(), nn.GELU()]
    return nn.Sequential(*layers, nn.LayerNorm(4))


@pytest.mark.parametrize("since", [5, 6, 7, 8, 9])
def test_a_device_that_errs_in_one_module_is_found_in_its_turn(since: int) -> None:
    """With a share of 1/5 each of five modules is checked in one of five successive steps."""
    run = SpotRun(lambda: failing(since))
    with pytest.raises(UncorrectableFault, match="4 runs gave no confirmed result"):
        run.guarded(20, spot=0.2)
    found = events_of("module_fault")
    assert [(event.op, event.detail["wrong"]) for event in found] == 4 * [("1", "unknown")]
    turn = next(n for n in range(since, 20) if SpotCheck(run.model, 0.2).due(n)[0].name == "1")
    assert found[0].step == turn < since + 5


def test_a_module_that_never_repeats_is_left_out_after_one_repeated_step() -> None:
    run = SpotRun(lambda: failing(0))
    with pytest.warns(UserWarning, match="1 is not checked any more"):
        left_out = run.guarded(spot=1.0).spot.coverage()["left_out"]
    assert kinds() == ["module_fault", "check_failed", "rerun"]
    assert left_out == {"1": "its forward never gave the same bits when repeated"}


class Counting(nn.Module):
    """Counts its calls, in a number, a list and a buffer, and holds what the test gives it."""

    def __init__(self, held: object = None) -> None:
        super().__init__()
        self.calls, self.seen, self.held = 0, [0], held
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        self.calls += 1
        self.seen[0] += 1
        self.total += 1
        return x * 1


def test_a_module_counts_its_calls_once() -> None:
    counting = Counting({"a": [1]})
    run = SpotRun(lambda: nn.Sequential(nn.Linear(4, 4), counting))
    assert run.guarded(spot=1.0).spot.coverage()["checked"] == 2 * SPOT_STEPS
    assert (counting.calls, counting.seen, counting.total) == (SPOT_STEPS, [SPOT_STEPS], SPOT_STEPS)


class Twice(nn.Module):
    """Returns one tensor twice, as a module does that returns its hidden state, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input's square twice."""
        squared = x * x
        return squared, squared


class UsesBoth(nn.Module):
    """Uses both results of a module that returns one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(4, 4), Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a weighted sum of both."""
        one, other = self.twice(self.layer(x))
        return 2 * one + 3 * other


class OnTwoThreads(nn.Module):
    """Calls its layer on another thread in the middle of a call on this one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.Tanh()
        self.act.register_forward_hook(self.meanwhile)

    def meanwhile(self, *_: object) -> None:
        """Call the layer on another thread, before the check of the first call ends."""
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=self.act, args=(torch.ones(2, 4),))
            other.start()
            other.join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result."""
        out: torch.Tensor = self.act(self.layer(x))
        return out


def test_a_module_that_another_thread_calls_meanwhile_is_checked_on_its_own() -> None:
    run = SpotRun(OnTwoThreads)
    coverage = run.guarded(spot=1.0).spot.coverage()
    assert (coverage["checked"], coverage["left_out"]) == (2 * SPOT_STEPS, {})
    assert kinds() == []


def test_a_model_that_is_called_compiled_is_not_compiled_anew_in_each_turn() -> None:
    """The Guard has the model itself, and the step calls its compiled form."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), *(nn.LayerNorm(4) for _ in range(9)))
    compiled, check = torch.compile(model, backend=counted), SpotCheck(model, 1 / 9)
    for step in range(9):
        events.set_step(step)
        with check.watching():
            compiled(torch.ones(2, 4)).sum().backward()
    assert len(graphs) == 4  # with the hooks of three turns, and without
    reasons = {*check.coverage()["left_out"].values()}
    assert reasons == {"it may be compiled: for 3 turns a graph was compiled anew"}


class Odd(nn.Module):
    """A model with one module that is used in a way of its own."""

    def __init__(self, used: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.first, self.used, self.last = nn.Linear(4, width), used, nn.Linear(out, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        scores: torch.Tensor = self.last(self.between(self.first(x)))
        return scores

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Use the module."""
        raise NotImplementedError


class Joined(Odd):
    """Gradients come in as slices of a wider tensor, whose ends kernels compute otherwise."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU(), 20, 40)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Join two results."""
        return torch.cat([self.used(x), self.used(x + 1)], -1)


class Cells(Odd):
    """Autocast casts the weights once for all calls."""

    def __init__(self) -> None:
        super().__init__(nn.GRUCell(16, 16), 16, 16)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Call the cell three times."""
        state = torch.zeros(len(x), 16)
        for _ in range(3):
            state = self.used(x, state)
        return state


class Sliced(Odd):
    """A slice is changed in place."""

    def __init__(self) -> None:
        super().__init__(nn.ELU(inplace=True), 12, 9)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Change three of four columns."""
        return self.used(x.unflatten(1, (3, 4))[..., 1:]).flatten(1)


class Staged(nn.Module):
    """Each part of the batch comes in the same memory, which torch does not see written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 4)
        self.memory = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        self.memory.numpy()[:] = x.numpy()
        scores: torch.Tensor = self.last(self.norm(self.memory.detach()))
        return scores


@pytest.mark.parametrize(
    ("make", "how"),
    [(Joined, ""), (Cells, "autocast"), (Sliced, ""), (Staged, "accumulated"), (UsesBoth, "")],
)
def test_a_module_that_is_used_oddly_is_no_fault(make: Callable[[], nn.Module], how: str) -> None:
    run = SpotRun(make, how)
    coverage = run.guarded(8, spot=1.0).spot.coverage()
    assert kinds() == []
    if make is Sliced:
        assert coverage["left_out"] == {"used": "only forward is repeated"}
    else:
        assert (coverage["left_out"], coverage["checked"] >= 2 * 8) == ({}, True)


def test_what_a_hook_of_all_modules_changes_is_no_fault() -> None:
    def changed(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        return output * 1.01 if isinstance(module, nn.GELU) else None

    handle = nn.modules.module.register_module_forward_hook(changed)
    try:
        assert SpotRun("gpt").guarded(spot=1.0).spot.coverage()["checked"] == 0
    finally:
        handle.remove()
    assert kinds() == []


class Spare(nn.Module):
    """Has nine modules that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.spare = nn.Sequential(*(nn.Tanh() for _ in range(9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        scores: torch.Tensor = self.norm(self.first(x))
        return scores


def test_turns_of_modules_that_are_not_used_end_no_checks_of_others() -> None:
    coverage = SpotRun(Spare).guarded(20, spot=0.1).spot.coverage()
    assert coverage["checked"] == 4
    assert {*coverage["left_out"].values()} == {"it did not run by itself in its turn"}


def test_modules_with_unsteady_kernels_are_left_out_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = SpotCheck(nn.Sequential(nn.LSTM(2, 2), nn.MaxPool1d(2), nn.LayerNorm(4)), 1.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    events.set_step(0)
    with check.watching():
        pass
    reasons = {unit.name: unit.why_not for unit in check.due(0)}
    assert reasons == {"2": ""}
    assert check.coverage()["left_out"].keys() == {"0", "1", "2"}  # the last did not run


def test_what_has_no_gradient_is_not_kept_and_inference_tensors_are_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Tanh())
    check = SpotCheck(model, 1.0)
    with torch.inference_mode():
        made = torch.ones(2, 4)
    events.set_step(0)
    with check.watching():
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert check._waiting == []
        assert [unit.equal["forward"] for unit in check.due(0)] == [1, 1]
        model[1](made)
    (reason,) = (unit.why_not for unit in check._turns if unit.why_not)
    assert reason == "an input was made in inference mode: writes are not counted"


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in which a rank alone would wait for the others."""
    dist.all_reduce(x.detach().clone())
    return x * 1


def odd() -> nn.Module:
    """Modules that cannot be computed again, around one that can, under DDP."""
    replaced, compiled = nn.Tanh(), torch.compile(nn.GELU(), backend="eager")
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    layers = Counting(threading.Lock()), replaced, compiled, Applied(summed), nn.LayerNorm(4)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), *layers))


def test_what_cannot_be_repeated_is_listed_and_trained_on(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    events.open_ledger(tmp_path)
    try:
        unchecked, checked = SpotRun(odd), SpotRun(odd)
        unchecked.guarded(spot=0.0)
        coverage = checked.guarded(spot=1.0).spot.coverage()
        equal = checked.digest() == unchecked.digest()
        del unchecked, checked
    finally:
        events.close_ledger()
        gc.collect()  # or gloo's threads can hang this process
        dist.destroy_process_group()
    assert equal
    assert coverage["checked"] == 2 * SPOT_STEPS
    assert coverage["left_out"] == {
        "1": "it cannot be copied: cannot pickle '_thread.lock' object",
        "2": "it refers to other modules, or its forward was replaced",
        "3": "it is compiled",
        "4": "it calls the collective c10d.allreduce_.default",
    }
    assert kinds() == []
    page = str(coverage_section(gather_run(tmp_path)))
    assert f"1 take turns, 100% in each step, and agreed with {2 * SPOT_STEPS}" in page
    assert "4 (it calls the collective" in page


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_check_that_fails_costs_no_training(action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a program makes errors of warnings either."""

    def out_of_memory(*_: Any) -> None:
        raise MemoryError("as if")

    right("gpt")
    monkeypatch.setattr("holdfast.replay.module_calls.tensor_digests", out_of_memory)
    run = SpotRun("gpt")
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings(action, ".* is not checked any more")
        left_out = run.guarded(spot=1.0).spot.coverage()["left_out"]
    assert len(said) == (5 if action == "always" else 0)
    assert run.digest() == right("gpt")
    assert kinds() == ["check_failed"] * 5
    assert len(left_out) == 5
