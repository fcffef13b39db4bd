"""The checks of a device's products, given known answers in a screening; CPU is the device."""

from collections.abc import Callable, Sequence

import pytest
import torch
from case_loops import for_each

from holdfast import native
from holdfast.abft.gemm import devices
from holdfast.cli.screen_report import print_verdict
from holdfast.screen import workloads
from holdfast.screen.emulation import Emulated
from holdfast.screen.job import SCALES
from holdfast.screen.judge import FINDERS, Judge
from holdfast.screen.messages import Observation, Order
from holdfast.screen.units import Unit
from holdfast.screen.verdict import UnitWork, Verdict
from holdfast.screen.worker import Worker
from holdfast.screen.workloads import CHECKS, checks_job, make_jobs, op_names

CPU = torch.device("cpu")
DEVICE = Unit("cuda:0", None, "cpu", "cuda stand-in")


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setitem(devices.BACKENDS, "cpu", "aten")
    # Nothing has to be loaded for it.
    monkeypatch.setattr(workloads, "prepared_backend", lambda device: devices.BACKENDS["cpu"])


def screened(finders: Sequence[str] = FINDERS, faults: Sequence[Emulated] = ()) -> Verdict:
    """Two rounds of the known answers on one unit."""
    worker = Worker(Order(DEVICE, "small", 1 << 20, 2, tuple(faults)), [checks_job(CPU)])
    judge, work = Judge([DEVICE], None, finders), UnitWork(DEVICE)
    for message in worker.work(float("inf"), float("inf")):
        work.take(message)
        if isinstance(message, Observation):
            judge.observe(message)
    return Verdict(judge.findings(), [], [work], judge.comparisons, 1.0, 1 << 20)


def test_a_device_whose_checks_work_is_healthy() -> None:
    verdict = screened()
    assert (verdict.state, dict(verdict.work[0].executions)) == ("healthy", {CHECKS: 4})


@for_each("judge", [lambda *args: None, lambda *args: args[-1].fill_(2**30)])
def test_a_device_whose_checks_do_not_work_is_named(
    judge: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    real = native.required().device_judge
    with pytest.MonkeyPatch.context() as patch:
        # The right answers are made on CPU by the backend of the same name, outside of the slot.
        patch.setattr(native.core, "device_judge", _on_the_device(judge, real))
        patch.setitem(devices.BACKENDS, "cpu", "broken")
        verdict = screened()
        assert screened(["repetition", "comparison"]).state == "healthy"
    shown = verdict.as_dict()
    assert (shown["verdict"], shown["suspects"]) == ("suspect", ["cuda:0"])
    (finding,) = verdict.findings
    assert (finding.op, finding.finders, finding.wrong) == (CHECKS, ("checksum",), 4)
    assert "float64 products" in finding.checks[0]
    print_verdict(verdict)
    out = capsys.readouterr().out
    assert f"cuda:0, {CHECKS}: its own check: screen_fault in {CHECKS}: reason" in out
    assert out.endswith("SUSPECT: cuda:0\n")


def _on_the_device(judge: Callable[..., None], real: Callable[..., None]) -> Callable[..., None]:
    """Judge as ``judge`` does on the device and as the real one for the reference."""
    return lambda backend, *args: judge(*args) if backend == "broken" else real(backend, *args)


def test_an_emulated_fault_in_the_known_answers_is_found() -> None:
    verdict = screened(faults=[Emulated(DEVICE.name, CHECKS, every=2)])
    assert verdict.suspects() == ["cuda:0"]


def test_it_is_a_workload_of_devices_that_verify_products() -> None:
    names = [job.name for job in make_jobs(SCALES["small"], CPU, 1 << 20)]
    assert CHECKS in names
    assert sorted(names) == sorted(op_names("cpu"))
    devices.BACKENDS.pop("cpu")
    assert CHECKS not in op_names("cpu")
