"""Workers that are killed, stopped, hang, crash or may not be pinned: said, never waited for."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from case_loops import for_each

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.screen.emulation import Emulated
from holdfast.screen.references import load_references, save_references
from holdfast.screen.runner import Request
from holdfast.screen.units import Unit, machine_units
from holdfast.screen.verdict import Verdict

pytestmark = pytest.mark.processes
Screen = Callable[..., Verdict]
LONG = {"rounds": 10**6, "scale": "small"}


def strike(victim: str, number: int, pids: dict[str, int]) -> Callable[[Mapping[str, int]], None]:
    """Sends a signal to one worker as soon as all work, and notes everyone's pid."""

    def on_started(workers: Mapping[str, int]) -> None:
        pids.update(workers)
        os.kill(workers[victim], number)

    return on_started


@pytest.mark.parametrize(
    ("number", "state", "said"),
    [
        (signal.SIGKILL, "unable", "killed by SIGKILL"),
        (signal.SIGSEGV, "suspect", "crashed by SIGSEGV"),
        (signal.SIGILL, "suspect", "crashed by SIGILL"),
    ],
)
def test_a_worker_that_dies_is_said_to_have(
    three_units: list[Unit], screened: Screen, number: int, state: str, said: str
) -> None:
    pids: dict[str, int] = {}
    watch = {"on_started": strike("unit 2", number, pids)}
    verdict = screened(three_units, watch=watch, rounds=20)
    (trouble,) = verdict.troubles
    assert (verdict.state, verdict.findings, trouble.unit) == (state, [], "unit 2")
    assert said in trouble.what
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.representative
def test_a_stopped_worker_ends_the_screening_in_time(
    three_units: list[Unit], screened: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: dict[str, int] = {}

    def stop(workers: Mapping[str, int]) -> None:
        strike("unit 0", signal.SIGSTOP, pids)(workers)
        monkeypatch.setenv(config.TIMEOUT_VARIABLE, "2")

    verdict = screened(three_units, watch={"on_started": stop})
    assert verdict.exit_code == 3
    assert [(each.unit, each.suspicious) for each in verdict.troubles] == [("unit 0", False)]
    assert "is stopped" in verdict.troubles[0].what
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.representative
def test_what_was_found_outweighs_a_killed_worker(
    three_units: list[Unit], screened: Screen
) -> None:
    watch = {"on_started": strike("unit 2", signal.SIGKILL, {})}
    faults = [Emulated("unit 1", "gemm.fp32", 30)]
    verdict = screened(three_units, watch=watch, faults=faults, rounds=10)
    assert (verdict.state, verdict.suspects()) == ("suspect", ["unit 1"])
    assert [trouble.unit for trouble in verdict.troubles] == ["unit 2"]


def test_a_core_that_it_may_not_run_on_is_unable(screened: Screen) -> None:
    beyond = (os.cpu_count() or 1) + 1000
    units = [machine_units(gpus=False)[0], Unit("core 9999", beyond)]
    verdict = screened(units)
    (trouble,) = verdict.troubles
    assert (verdict.exit_code, trouble.unit) == (3, "core 9999")
    assert "cannot be pinned" in trouble.what


def test_a_reference_of_other_settings_is_refused(
    three_units: list[Unit], screened: Screen, tmp_path: Path
) -> None:
    stored = tmp_path / "stored.json"
    verdict = screened(three_units, store=stored)
    assert (verdict.state, len(load_references(stored)["cpu"].digests)) == ("healthy", 26)
    given = screened(three_units, reference=stored)
    assert given.comparisons["reference"] == given.comparisons["checksum"]
    (reference,) = load_references(stored).values()
    reference.settings["torch"] = "1.0"
    save_references({"cpu": reference}, stored)
    with pytest.raises(ConfigError, match=r"other settings.*torch was 1\.0 and is"):
        screened(three_units, reference=stored)


def test_a_damaged_own_reference_is_not_used_and_said(
    three_units: list[Unit], screened: Screen, cache: Path
) -> None:
    screened(three_units)
    (path,) = cache.glob("screen-*.json")
    path.write_text(path.read_text().replace('"units": 3', '"units": 4'))
    verdict = screened(three_units)
    assert (verdict.state, verdict.comparisons["reference"]) == ("healthy", 0)
    assert any("is not used" in note and "damaged" in note for note in verdict.notes)


@pytest.mark.representative
@for_each(
    ("settings", "said"),
    [
        ({"rounds": 1}, "--rounds 1"),
        ({"finders": ()}, "leaves no finder"),
        ({"memory_bytes": 1 << 50}, "more than the"),
        ({"faults": (Emulated("unit 0", "gemm.fp8"),)}, "op=gemm.fp8"),
        ({"reference": Path("x"), "finders": ("repetition",)}, "--without reference"),
        ({"store": Path("/dev/null/x.json")}, "cannot write"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    three_units: list[Unit], settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Request(three_units, **settings).check()  # type: ignore[arg-type]
