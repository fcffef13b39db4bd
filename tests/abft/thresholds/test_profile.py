"""The profile's file: what was written is read, and nothing else is taken for it."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds import profile as profiles
from holdfast.abft.thresholds.profile import (
    Bucket,
    Growth,
    Profile,
    cache_dir,
    check_replaceable,
    load,
    profile_path,
    read,
    require,
    save,
)
from holdfast.abft.thresholds.settings import numeric_settings
from holdfast.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "holdfast"


def bucket(dtype: str, inner: int, e_max: float, *rms: float) -> Bucket:
    growth = {f"d{index}": Growth(value, 3 * value, 10) for index, value in enumerate(rms)}
    return Bucket(dtype, inner, 100, e_max, growth)


def made(**changes: str) -> Profile:
    """A profile of this device, with some settings changed."""
    return Profile(
        settings=numeric_settings(CPU) | changes,
        effort="quick",
        seed=3,
        seconds=1.5,
        created_utc="2026-01-02T03:04:05+00:00",
        buckets=(
            bucket("fp32", 1, 3e-7, 0.4, 0.5),
            bucket("fp32", 16, 0.1 + 0.2, 1.25, 1.0),
            bucket("fp32", 64, 4e-7, 0.75, 0.7),
            bucket("bf16", 16, 7.8e-3, 0.43),
        ),
    )


def test_what_is_saved_is_loaded_to_the_last_bit(cache: Path) -> None:
    profile = made()
    assert save(made(threads="77")) != (path := save(profile))
    assert path.parent == cache
    assert load() == read(path) == load(path) == profile
    assert profile_path(load().settings) == path
    assert len(list(cache.iterdir())) == 2


@for_each("name", sorted(numeric_settings(CPU)))
def test_a_profile_of_other_settings_is_refused_by_name(tmp_path: Path, name: str) -> None:
    now = numeric_settings(CPU)[name]
    path = save(made(**{name: "something else"}), tmp_path / "other.json")
    with pytest.raises(ConfigError) as refused:
        load(path)
    message = str(refused.value)
    assert f"{path} was measured under other settings" in message
    assert f"{name} was something else and is {now}; " in message
    assert f"holdfast calibrate --device cpu --threads {torch.get_num_threads()}" in message


def test_a_setting_that_one_side_lacks_is_refused() -> None:
    lacking, more = made(), made(new_setting="7")
    del lacking.settings["threads"]
    threads = torch.get_num_threads()
    with pytest.raises(ConfigError, match=f"threads was missing and is {threads}"):
        require(lacking, numeric_settings(CPU))
    with pytest.raises(ConfigError, match="new_setting was 7 and is missing"):
        require(more, numeric_settings(CPU))


def test_without_any_profile_the_command_is_named() -> None:
    with pytest.raises(ConfigError, match=r"not calibrated .* holdfast calibrate --device cpu"):
        load()


def test_without_a_fitting_profile_the_nearest_is_explained(cache: Path) -> None:
    save(made(threads="77", amx="maybe"))
    near = save(made(threads="88"))
    (cache / "calibration-cpu-damaged.json").write_text("{")
    with pytest.raises(ConfigError) as refused:
        load()
    assert f"({near} differs: threads was 88 and is" in str(refused.value)
    assert "amx" not in str(refused.value)


@for_each("text", ["", "{", "[]", "7", '{"format": "other"}', "\0\0"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json is .*holdfast calibrate"):
        read(path)
    path.write_text(save(made()).read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ConfigError, match=r"schema version 2, not 1; .* holdfast calibrate"):
        load(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*a\.json: No such file"):
        load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*a\.json"):
        save(made(), tmp_path / "file" / "a.json")
    assert not list(tmp_path.glob("file*.*"))


def test_a_damaged_byte_never_changes_what_is_loaded_and_a_truncated_file_is_refused(
    tmp_path: Path,
) -> None:
    profile = made()
    path = save(profile, tmp_path / "a.json")
    intact, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(intact)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            assert read(path) == profile
        except ConfigError:
            refused += 1
    assert refused > 200
    for length in range(0, len(intact) - 2, 97):
        path.write_bytes(intact[:length])
        with pytest.raises(ConfigError):
            read(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    path = save(made(), tmp_path / "a.json")
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(profiles.os, "fsync", fail)
    expected = ConfigError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save(replace(made(), seed=4), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    profile = replace(made(), buckets=(bucket("fp32", 1, math.nan, 0.4),))
    with pytest.raises(ValueError, match="JSON compliant"):
        save(profile, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_only_profiles_are_replaced(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new" / "a.json")
    check_replaceable(save(made(), tmp_path / "a.json"))
    (tmp_path / "notes.json").write_text("notes")
    for other in (tmp_path / "notes.json", tmp_path):
        with pytest.raises(ConfigError, match=f"{other} is there and no calibration profile"):
            check_replaceable(other)
    with pytest.raises(ConfigError, match=r"notes\.json is no writable directory"):
        check_replaceable(tmp_path / "notes.json" / "a.json")


def test_the_cache_folder_follows_the_xdg_specification(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_dir() == tmp_path / ".cache" / "holdfast"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_dir() == Path("/elsewhere/holdfast")


def test_growth_between_two_sizes_is_the_larger_and_beyond_them_a_square_root() -> None:
    profile = made()
    known = {1: 0.5, 2: 1.25, 16: 1.25, 17: 1.25, 64: 0.75, 256: 1.5}
    assert {inner: profile.growth("fp32", inner) for inner in known} == known


def test_growth_of_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fp16' was not calibrated; measured: fp32, bf16"):
        made().growth("fp16", 4)
    with pytest.raises(ValueError, match="inner = 0"):
        made().growth("fp32", 0)
