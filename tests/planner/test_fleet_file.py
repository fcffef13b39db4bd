"""The fleet file: what it holds is what is planned, the rest is named, bad values are refused."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from case_loops import for_each

from holdfast.errors import ConfigError
from holdfast.planner.fleet import KINDS, Devices, LadderCosts, LadderQuestion, Model
from holdfast.planner.fleet_file import _TABLES, load_question, parse_question

ROOT = Path(__file__).parents[2]
LEAST: dict[str, Any] = {
    "fleet": {"devices": 64},
    "model": {"step_s": 2.0, "state_bytes": 8e9},
}


def test_the_least_file_is_completed_and_says_what_it_assumes() -> None:
    question = parse_question(LEAST)
    assert question.fleet == Devices(64, 8, 8)
    assert dict(question.faults) == dict(KINDS)
    assert question.costs.audit_s_per_step == question.costs.rerun_s == 2.0
    assert question.costs.check_s_per_step == pytest.approx(0.1)
    assert question.costs.persist_s == pytest.approx(8e9 / 8 / 250e6)
    assert question.costs.rebuild_s == pytest.approx(8e9 / 1e9)
    assert min(getattr(question.costs, item.name) for item in fields(LadderCosts)) >= 0
    assert "faults.crash" in question.assumed
    assert "costs.persist_s" in question.assumed
    assert not {"fleet.devices", "model.step_s"} & set(question.assumed)


def test_what_is_given_is_not_assumed() -> None:
    given = {
        "costs": {"persist_s": 7.0},
        "faults": {"crash": {"mttf_days": 3.0, "per": "node", "shape": 0.7}},
    }
    question = parse_question(LEAST | given)
    assert question.costs.persist_s == 7.0
    assert question.faults["crash"].shape == 0.7
    assert question.per_s("crash") == pytest.approx(8 / 3 / 86_400)
    assert not {"costs.persist_s", "faults.crash"} & set(question.assumed)
    assert "faults.matmul" in question.assumed


def test_a_modelled_stall_is_what_copying_adds_to_computing() -> None:
    slow = parse_question(LEAST | {"speeds": {"copy_bytes_per_s": 0.25e9}})
    assert slow.costs.snapshot_stall_s == slow.costs.parity_stall_s == pytest.approx(4.0 - 2.0)


def test_the_example_is_a_fleet_file() -> None:
    question = load_question(ROOT / "examples" / "fleet.toml")
    assert question.fleet.nodes == 128
    assert not [name for name in question.assumed if name.startswith(("fleet", "faults"))]


def test_every_field_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "planning.md").read_text()
    for name, table in _TABLES.items():
        for item in fields(table):
            assert f"`{item.name}`" in manual, f"{name}.{item.name}"
    assert all(f"faults.{kind}" in manual for kind in KINDS)


@for_each(
    ("text", "expected"),
    [
        ("[flet]\ndevices = 8", "unknown table [flet]; valid: fleet, model"),
        ("fleet = 8", "fleet = 8 is no table"),
        ("[fleet]\ndevice = 8", "unknown key fleet.device = 8; valid: devices,"),
        ("[fleet]\ndevices = 8.5", "fleet.devices = 8.5 must be a whole number"),
        ("[fleet]\ndevices = true", "fleet.devices = True must be a whole number"),
        ("[fleet]\ndevices = 0", "fleet.devices = 0 must be at least 1"),
        ("[fleet]\ndevices = 9\ndevices_per_node = 8", "fleet.devices = 9 are not whole nodes"),
        ("[fleet]", "fleet.devices is missing: give it in [fleet]"),
        ("[fleet]\ndevices = 8\n[model]", "model.step_s is missing"),
        ("[fleet]\ndevices = 8\n[model]\nstep_s = 0\nstate_bytes = 1", "model.step_s = 0 must be"),
        ("[fleet]\ndevices = 8\n[model]\nstep_s = inf\nstate_bytes = 1", "model.step_s = inf must"),
        ("[faults.crashes]\nmttf_days = 1", "unknown fault [faults.crashes]; valid: matmul,"),
        ("[faults.crash]\nmttf_days = 0", "[faults.crash] mttf_days = 0 must be above 0"),
        ("[faults.crash]\nshape = 1", "faults.crash.mttf_days is missing"),
        ('[faults.crash]\nmttf_days = 1\nper = "rack"', "per = 'rack' must be"),
        ("[faults.crash]\nmttf_days = 1\nshape = 0", "shape = 0 must be from 0.1 to 100"),
        ("[costs]\nrestart_s = -1", "costs.restart_s = -1 must be at least 0; leave out"),
        ("[costs]\ndisk_share = 0", "costs.disk_share = 0 must be above 0"),
        ("[detection]\ncheck_coverage = 1.5", "detection.check_coverage = 1.5 must be from 0 to 1"),
        ("[target]\npersist_at_least_every_h = 0", "target.persist_at_least_every_h = 0 must be"),
        ("[faulty_device]\nevict_after = 0", "faulty_device.evict_after = 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse_question(LEAST | tomllib.loads(text))


def test_a_file_that_is_none_or_no_toml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the fleet file .*nowhere\.toml: No such"):
        load_question(tmp_path / "nowhere.toml")
    (tmp_path / "fleet.toml").write_text("[fleet")
    with pytest.raises(ConfigError, match="Expected"):
        load_question(tmp_path / "fleet.toml")


def test_a_fleet_resized_keeps_nodes_whole() -> None:
    question = LadderQuestion(Devices(1024, 8, 8), Model(1.0, 1e9))
    for devices in (1, 2, 3, 7, 12, 1000, 100_000):
        fleet = question.resized(devices).fleet
        assert fleet.devices == devices
        assert fleet.nodes * fleet.devices_per_node == devices
        assert max(fleet.devices_per_node, fleet.group_nodes) <= 8
