"""Steps that are run again: repaired, found genuine, or given up before the optimizer."""

import math
from pathlib import Path

import pytest
import torch
from guard_cases import STRUCK, Run, always_wrong, events_of, kinds, snapshots_of

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import UncorrectableFault
from holdfast.guard import Guard
from holdfast.inject import Fault
from holdfast.protection import protect

# In a module that no checksum covers, and in a bit too low for a checksum.
MODULE_FAULT = Fault(STRUCK, 0, "bitflip", site="module", op="norm", bit=30)
LOW_FLIP = Fault(STRUCK, 0, "bitflip", op="up/addmm/forward", bit=3, index=(1, 1))


def test_a_module_fault_is_recomputed() -> None:
    right = Run().bare().digest()
    assert Run().inject(MODULE_FAULT).bare().digest() != right
    events.clear()
    run = Run().inject(MODULE_FAULT)
    with protect(run.model):
        run.guarded()
    assert run.digest() == right
    (event,) = events_of("rerun")
    assert (event.step, event.rung, event.detail["verdict"]) == (STRUCK, "recompute", "transient")
    assert run.computed.count(STRUCK) == 3


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_only_a_full_audit_repairs_a_low_flip(audit: float) -> None:
    right = Run().bare().digest()
    run = Run().inject(LOW_FLIP)
    with protect(run.model):
        run.guarded(audit=audit)
    assert len(events_of("injected")) == 1
    assert (run.digest() == right) == (audit == 1.0)
    assert [event.detector for event in events_of("rerun")] == (["audit"] if audit else [])


@pytest.mark.parametrize(("attempt", "verdict"), [(1, "transient"), (2, "genuine")])
def test_an_audit_reports_a_fault_in_either_pass(attempt: int, verdict: str) -> None:
    run = Run()

    def flip_a_low_bit(number: int) -> None:
        if number == STRUCK and run.computed.count(STRUCK) == attempt:
            run.model.up.weight.grad.view(torch.int32)[0, 0] ^= 1

    run.damage = flip_a_low_bit
    run.guarded(audit=1.0)
    assert run.digest() == Run().bare().digest()
    (event,) = events_of("rerun")
    assert (event.detail["verdict"], event.rung, event.step) == (verdict, "recompute", STRUCK)


def test_the_audited_share_is_about_what_was_asked_and_the_same_on_all_ranks() -> None:
    run = Run()
    chosen = [
        [
            step
            for step in range(2000)
            if Guard(run.model, run.optimizer, **o)._verifier.is_audited(step)
        ]
        for o in ({"audit": 0.25}, {"audit": 0.25}, {"audit": 0.25, "seed": 1})
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 400 < len(chosen[0]) < 600


@pytest.mark.parametrize("held", [False, True])
def test_a_fault_in_every_attempt_never_reaches_the_optimizer(run_dir: Path, held: bool) -> None:
    run = Run()
    run.damage = always_wrong(run, STRUCK)
    with pytest.raises(UncorrectableFault, match=f"step {STRUCK}: 4 runs gave no confirmed") as at:
        run.guarded(**({"snapshots": snapshots_of(run, run_dir)} if held else {}))
    assert ("after 2 roll-backs" in str(at.value)) == held
    clean = Run().bare(STRUCK)
    parameters = [p.tolist() for p in clean.model.parameters()]
    assert [p.tolist() for p in run.model.parameters()] == parameters
    assert state_digest(run.optimizer.state_dict()) == state_digest(clean.optimizer.state_dict())
    assert len(events_of("rollback")) == (2 if held else 0)
    assert run.computed.count(STRUCK) == 4 * (3 if held else 1)


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("held", [False, True])
def test_a_genuine_nan_batch_ends_as_in_the_bare_loop(run_dir: Path, held: bool) -> None:
    nan = {5: torch.full((6, 8), math.nan)}
    bare, run = Run(special=nan).bare(7), Run(special=nan)
    with protect(run.model):
        run.guarded(7, **({"snapshots": snapshots_of(run, run_dir)} if held else {}))
    assert run.digest() == bare.digest()
    assert {event.step for event in events_of("nonfinite_genuine")} == {5, 6}
    assert all(event.detail["verdict"] == "genuine" for event in events_of("rerun"))
    events.close_ledger()
    if held:  # the guard keeps its events in the run directory
        stored = [event.kind for _, event in events.read_ledger(run_dir / events.LEDGER_NAME)]
        assert "nonfinite_genuine" in stored


def test_a_transient_nan_is_not_genuine() -> None:
    run = Run()
    run.damage = lambda number: (
        run.model.up.weight.grad.fill_(math.nan) if run.computed.count(3) == 1 == number - 2 else 0
    )
    run.guarded(6)
    assert run.digest() == Run().bare(6).digest()
    assert kinds() == ["rerun"]
    assert events_of("rerun")[0].detector == "non-finite value"


def test_a_huge_but_genuine_batch_is_applied() -> None:
    huge = {STRUCK: 1e4 * torch.ones(6, 8).cumsum(1).cumsum(0)}
    plain = {"special": huge, "dropout": 0, "without": ["norm", "batch_norm"]}
    bare, run = Run(**plain), Run(**plain)
    run.guarded()
    assert run.digest() == bare.bare().digest()
    (event,) = events_of("rerun")
    assert (event.detector, event.step) == ("loss spike", STRUCK)
    assert (event.detail["verdict"], event.rung) == ("genuine", "")
