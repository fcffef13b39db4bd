"""``holdfast plan ladder``: what is printed, written, simulated and drawn; what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import config
from holdfast.planner.fleet_file import load_question
from holdfast.planner.ladder import plan_checkpoints, plan_ladder

Plan = Callable[..., dict[str, Any]]
EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.toml"


@pytest.fixture
def planned(document: Plan) -> Plan:
    """Plans the ladder of a fleet."""

    def run(*words: str, fleet: Path = EXAMPLE, code: int = 0) -> dict[str, Any]:
        return document("plan", "ladder", fleet, *words, code=code)

    return run


def test_table_and_file_hold_the_planners_numbers(
    capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    found = planned()
    question = load_question(EXAMPLE)
    plan, alone = plan_ladder(question), plan_checkpoints(question)
    ladder = found["plans"]["ladder"]
    assert ladder["configuration"]["snapshot_steps"] == plan.configuration.snapshot_steps
    assert ladder["configuration"]["looks"]["check"] == plan.configuration.looks.check
    assert ladder["lost_h"] == plan.month.lost_h
    assert found["plans"]["checkpoints alone"]["lost_h"] == alone.month.lost_h
    assert found["simulated"] == {}
    said = capsys.readouterr().out
    assert "1024 devices in 128 nodes, 16 groups of 8" in said
    assert "ASSUMED, as the file does not say: model.compute_s = 0," in said
    assert f"every {plan.configuration.snapshot_steps} steps" in said
    lost = next(line for line in said.splitlines() if line.split()[:1] == ["lost"])
    assert lost.split()[1:] == [f"{plan.month.lost_h:.4g}", f"{alone.month.lost_h:.4g}"]
    assert "target: 1.02 undetected silent faults a month, met" in said


def test_what_is_written_is_a_config_file_of_the_plan(tmp_path: Path, planned: Plan) -> None:
    path = tmp_path / "holdfast.toml"
    found = planned("--write", str(path))["plans"]["ladder"]["configuration"]
    values = config.read(path)
    assert values["snapshots.every"] == found["snapshot_steps"]
    assert values["snapshots.parities"] == found["parities"]
    assert values["snapshots.persist_every"] == found["persist_steps"]
    assert 0 <= values["protect.frequency"] - found["looks"]["check"] < 1.1e-6
    assert values["guard.audit"] == found["looks"]["audit"]
    assert "attention.S_AS" not in values


def test_attention_is_planned_by_algorithm_1_where_there_is_a_table(
    tmp_path: Path, planned: Plan
) -> None:
    fleet, path = tmp_path / "fleet.toml", tmp_path / "holdfast.toml"
    table = "[attention]\ns_as_s = 2e-3\ns_cl_s = 2e-3\ns_o_s = 1e-3\nexecutions_per_step = 12\n"
    table += "batch = 16\nlength = 128\nfailures_per_execution = 3e-14\n"
    fleet.write_text(EXAMPLE.read_text() + table)
    found = planned("--write", str(path), fleet=fleet)["plans"]["ladder"]
    shares = found["attention"]
    assert 0 < sum(shares.values()) < 3
    values = config.read(path)
    for name, share in shares.items():
        assert values[f"attention.{name}"] == pytest.approx(share, abs=1.1e-6)


def test_simulated_beside_expected(capsys: pytest.CaptureFixture[str], planned: Plan) -> None:
    found = planned("--simulate", "30", "--seed", "5")
    for name, months in found["simulated"].items():
        lost = months["lost_h"]
        assert lost["low"] <= lost["mean"] <= lost["high"]
        assert lost["mean"] == pytest.approx(found["plans"][name]["lost_h"], rel=0.25)
    assert found["simulated"]["checkpoints alone"]["failures"]["mean"] > 5
    said = capsys.readouterr().out
    assert "simulated (ladder)" in said
    assert f"{found['simulated']['ladder']['lost_h']['mean']:.4g} [" in said
