"""The config file: defaults for what is not given, refused by name, and seen to be in force."""

import os
import re
from pathlib import Path

import pytest
import torch
from case_loops import for_each
from torch import nn

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.nn import Attention
from holdfast.protection import protect
from holdfast.snapshot.client import pacing

TEXT = """
[protect]
frequency = 0.5
[attention]
S_AS = 0.25
S_CL = 0
S_O = 1.0
[guard]
audit = 0.125
shadow = 0.0625
[snapshots]
every = 7
parities = 0
persist_every = 70
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file in force."""
    path = tmp_path / "holdfast.toml"
    path.write_text(TEXT)
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(path))
    monkeypatch.setattr(config, "_used", {})
    return path


def guard(**options: float) -> Guard:
    model = nn.Linear(4, 4)
    return Guard(model, torch.optim.SGD(model.parameters(), 0.1), **options)


def in_force() -> list[object]:
    return [event.detail for event in events.recent() if event.kind == "config_in_force"]


def test_what_is_given_counts_then_the_file_then_the_default(file: Path) -> None:
    assert config.value("guard.audit", 0.5, 0.0) == 0.5
    assert config.value("guard.audit", 0.0, 1.0) == 0.0
    assert config.value("guard.audit", None, 0.0) == 0.125
    assert config.value("snapshots.mttf_s", None, 3.0) == 3.0
    assert config.used() == {"file": str(file), "guard.audit": 0.125}


def test_load_puts_a_file_in_force_and_a_bad_one_does_not(tmp_path: Path) -> None:
    path, bad = tmp_path / "holdfast.toml", tmp_path / "bad.toml"
    path.write_text(TEXT)
    bad.write_text("[guard]\naudit = 2")
    try:
        assert config.load(path)["snapshots.every"] == 7
        assert config.config_file() == path
        with pytest.raises(ConfigError):
            config.load(bad)
        with pytest.raises(ConfigError, match="plan ladder --write"):
            config.load(tmp_path / "nowhere.toml")
        assert config.config_file() == path
    finally:
        os.environ.pop(config.CONFIG_VARIABLE, None)


@for_each(
    ("text", "expected"),
    [
        ("[guards]\naudit = 0.1", "unknown: guards = {'audit': 0.1}; valid tables: protect, att"),
        ("audit = 0.1", "unknown: audit = 0.1; valid tables"),
        ("[guard]\naudits = 0.1", "unknown key guard.audits = 0.1; valid: guard.audit, guard.sh"),
        ("[guard]\naudit = 1.5", "guard.audit = 1.5 must be a share from 0 (never) to 1 (always)"),
        ("[guard]\naudit = nan", "guard.audit = nan must be a share"),
        ("[guard]\naudit = true", "guard.audit = True must be a share"),
        ("[snapshots]\nevery = 0", "snapshots.every = 0 must be a whole number of steps"),
        ("[snapshots]\nevery = 2.0", "snapshots.every = 2.0 must be a whole number"),
        ('[snapshots]\ninterval = "hourly"', "snapshots.interval = 'hourly' must be \"auto\""),
        ("[snapshots]\nparities = 3", "snapshots.parities = 3 must be 0, 1 or 2"),
        ("[snapshots]\nmttf_s = 0", "snapshots.mttf_s = 0 must be seconds above 0"),
        ("[snapshots]\nmttf_s = 9", "snapshots.mttf_s is for snapshots.interval"),
        ('[snapshots]\nevery = 2\ninterval = "auto"', "exclude each other: remove one"),
        ("[snapshots", "is no TOML file"),
    ],
)
def test_what_cannot_be_is_refused_with_file_name_and_value(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(expected)) as refused:
        config.load(path)
    assert str(path) in str(refused.value)


def test_a_guard_does_what_the_file_says_unless_it_is_told_and_says_so(file: Path) -> None:
    assert guard(audit=0.0, shadow=0.0).audit == 0.0
    with guard(shadow=0.0) as told:
        assert told.audit == 0.125
    assert in_force() == [{"file": str(file), "guard.audit": 0.125}]
    with pytest.raises(ConfigError, match=r"a shadow needs several ranks"):
        guard()


def test_without_a_file_there_are_only_defaults_and_nothing_is_said() -> None:
    assert config.config_file() is None
    assert config.value("guard.audit", None, 0.75) == 0.75
    with guard() as quiet:
        assert quiet.audit == 0.0
    assert config.used() == {}
    assert in_force() == []


def test_modules_have_the_files_frequencies_and_protect_reports_its_own(file: Path) -> None:
    assert Attention(8, 2).frequencies == (0.25, 0, 1.0)
    assert Attention(8, 2, frequencies=(1.0, 1.0, 0.5)).frequencies == (1.0, 1.0, 0.5)
    assert Attention.from_torch(nn.MultiheadAttention(8, 2)).frequencies == (0.25, 0, 1.0)
    with protect(nn.Linear(4, 4)) as protection:
        assert protection.frequency == 0.5
        assert "asked for: 0.5" in str(protection.report())
    with protect(nn.Linear(4, 4), frequency=1.0) as protection:
        assert "asked for" not in str(protection.report())


def test_intervals_of_the_file_hold_unless_one_is_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pacing.resolved(None, None, None) == (7, None, None)
    assert pacing.resolved(3, None, None) == (3, None, None)
    assert pacing.resolved(None, "auto", None) == (1, "auto", None)
    other = file.with_name("other.toml")
    other.write_text('[snapshots]\ninterval = "auto"\nmttf_s = 900')
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(other))
    assert pacing.resolved(None, None, None) == (1, "auto", 900)
    assert pacing.resolved(None, "auto", 5.0) == (1, "auto", 5.0)
    assert pacing.resolved(3, None, None) == (3, None, None)


@for_each("text", ["soon", "0", "-3", "inf", "nan"])
def test_a_timeout_that_is_no_positive_number_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=config.TIMEOUT_VARIABLE):
        config.timeout_s()


@for_each(
    ("name", "text"),
    [
        ("RANK", "abc"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "1.5"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "0"),
    ],
)
def test_a_rank_that_is_no_number_is_refused_with_the_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"variable {name}='{text}' must be a whole number"):
        getattr(config, name.lower())()
    monkeypatch.setenv(name, "3")
    assert getattr(config, name.lower())() == 3
    monkeypatch.setenv(name, "")
    assert getattr(config, name.lower())() == int("SIZE" in name)


@for_each("path", ["x" * 300, "y/" * 3000, "nul\0"])
def test_a_run_directory_that_no_system_can_hold_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: .*; choose another") as refused:
        config.run_dir(path)
    assert len(str(refused.value)) < 300
