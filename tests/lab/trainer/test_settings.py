"""The record of a run: validated, saved whole, read back equal."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from case_loops import for_each

from holdfast.errors import ConfigError
from holdfast.report.run_files import SETTINGS_NAME
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.settings import DTYPES, MODES, Settings


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(
            mode="bare",
            steps=7,
            ranks=3,
            batch_size=1,
            data="/some where/ö",
            seed=2**32 - 1,
            lr=0.1 + 0.2,
            weight_decay=0.0,
            warmup_steps=6,
            clip_grad_norm=1e-9,
            dtype="bf16",
            audit=1.0,
            model=GPTConfig(1, 2, 16, 16, 256, 0.1),
        ),
    ],
)
def test_it_is_read_back_equal(tmp_path: Path, settings: Settings) -> None:
    settings.save(tmp_path)
    assert Settings.load(tmp_path) == settings
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS_NAME]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "gaurded"}, f"mode = 'gaurded' is unknown; valid: {', '.join(MODES)}"),
        ({"dtype": "fp16"}, f"dtype = 'fp16' is unknown; valid: {', '.join(DTYPES)}"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
        ({"ranks": 0}, "ranks = 0 must be at least 1"),
        ({"batch_size": -3}, "batch_size = -3 must be at least 1"),
        ({"warmup_steps": 100}, "warmup_steps = 100 must be less than steps = 100"),
        ({"warmup_steps": -1}, "warmup_steps = -1 must be less than steps = 100"),
        ({"audit": 1.01}, "audit = 1.01 must be a share"),
        ({"audit": math.nan}, "audit = nan must be a share"),
        ({"seed": -1}, "seed = -1 must be at least 0 and less than 4294967296"),
        ({"seed": 2**70}, f"seed = {2**70} must be"),
        ({"lr": 0.0}, "lr = 0.0 must be a positive number"),
        ({"lr": math.nan}, "lr = nan must be a positive number"),
        ({"lr": math.inf}, "lr = inf must be a positive number"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm = -1.0 must be a positive number"),
        ({"persist_every": -1}, "persist_every = -1 must be 0 (never) or positive"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1 must be 0 or positive"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@for_each(
    ("text", "message"),
    [
        (None, f"holds no run: no {SETTINGS_NAME} in it"),
        ("", "is not the record of a run"),
        ('{"mode": "bare", "st', "is not the record of a run"),
        ("[]", "is not the record of a run"),
        ('{"mode": "bare"}', "is not the record of a run"),
        (json.dumps(asdict(Settings()) | {"steps": -5}), "steps = -5"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / SETTINGS_NAME).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Settings.load(tmp_path)


def test_a_record_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(path: Path, text: str) -> int:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="No space left"):
        Settings().save(tmp_path)
    assert not (tmp_path / SETTINGS_NAME).exists()
