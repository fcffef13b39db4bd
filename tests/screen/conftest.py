"""Screenings of this machine, small; a cache folder of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.screen.runner import Request, screen
from holdfast.screen.units import Unit, machine_units
from holdfast.screen.verdict import Verdict

Screen = Callable[..., Verdict]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "holdfast"


@pytest.fixture
def three_units() -> list[Unit]:
    """Three workers of which one can be outvoted, on the cores that there are."""
    cores = [unit.core for unit in machine_units(gpus=False)]
    return [Unit(f"unit {place}", cores[place % len(cores)]) for place in range(3)]


@pytest.fixture
def screened() -> Screen:
    """Runs a small screening of three rounds."""

    def run(units: list[Unit], *, watch: dict[str, Any] | None = None, **settings: Any) -> Verdict:
        small = {"rounds": 3, "scale": "small", "memory_bytes": 1 << 20}
        return screen(Request(units, **small | settings), **watch or {})

    return run
