"""Files with a device's measured rounding errors, with version, digest and measuring settings."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from holdfast import json_store
from holdfast.abft.thresholds.fits import Fit, best_fit
from holdfast.abft.thresholds.settings import calibrate_command, device_of, numeric_settings
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError

FORMAT = "holdfast-calibration"
SCHEMA = 1
WHAT = "calibration profile"


@dataclass(frozen=True)
class Growth:
    """Measured signed-checksum residuals ``C r − A(B r)`` in units of ``u ‖C_i‖₂``, over rows i.

    Args:
        rms: root mean square; largest: the largest magnitude; rows: how many rows.
    """

    rms: float
    largest: float
    rows: int


@dataclass(frozen=True)
class Bucket:
    """Measurement of one dtype at one K.

    Args:
        dtype: of operands and product, e.g. "bf16"; "bf16-online" is its fp32 accumulator.
        inner: K; rows: how many row checksums were compared.
        e_max: largest ``|E| / |checksum|`` on |N(1,1)|, without margin.
        growth: by distribution: "n01", "n11" (its absolute value) and "u01".
    """

    dtype: str
    inner: int
    rows: int
    e_max: float
    growth: Mapping[str, Growth]


@dataclass(frozen=True)
class Profile:
    """The rounding of one device under one set of settings.

    Args:
        settings: what it holds for, as ``numeric_settings`` gives it.
        effort: "quick", "default" or "full"; seed: of the operands; seconds: what it took.
        created_utc: ISO 8601.
        buckets: by dtype and K, ascending.
    """

    settings: dict[str, str]
    effort: str
    seed: int
    seconds: float
    created_utc: str
    buckets: tuple[Bucket, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Measured dtypes, in the order in which they were measured."""
        return tuple(dict.fromkeys(bucket.dtype for bucket in self.buckets))

    def measured(self, dtype: str) -> dict[int, float]:
        """Largest relative error by K, without margin."""
        return {bucket.inner: bucket.e_max for bucket in self._of(dtype)}

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """The preferred model of ``e_max`` by dtype, margin included."""
        return {dtype: best_fit(self.measured(dtype)) for dtype in self.dtypes}

    def growth(self, dtype: str, inner: int) -> float:
        """Estimate the root mean square of a signed residual at inner size K, in u·‖C_i‖₂.

        The largest over the distributions and over the two measured K around ``inner`` (kernels
        change between sizes, so neither alone would do); beyond the largest K it grows with √K.

        Raises:
            ValueError: the dtype was not measured, or ``inner`` is not positive.
        """
        if inner < 1:
            raise ValueError(f"inner = {inner} must be at least 1")
        buckets = self._of(dtype)
        below = [bucket for bucket in buckets if bucket.inner <= inner][-1:]
        above = [bucket for bucket in buckets if bucket.inner >= inner][:1]
        rms = max(part.rms for bucket in below + above for part in bucket.growth.values())
        return rms if above else rms * math.sqrt(inner / buckets[-1].inner)

    def _of(self, dtype: str) -> list[Bucket]:
        found = [bucket for bucket in self.buckets if bucket.dtype == dtype]
        if not found:
            known = ", ".join(self.dtypes)
            raise ValueError(f"dtype {dtype!r} was not calibrated; measured: {known}")
        return found


def cache_dir() -> Path:
    """Folder in the user's cache: below ``$XDG_CACHE_HOME``, else below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "holdfast"


def profile_path(settings: Mapping[str, str]) -> Path:
    """Path of the profile for these settings."""
    key = state_digest(dict(sorted(settings.items())))[:16]
    return cache_dir() / f"calibration-{settings['device']}-{key}.json"


def check_replaceable(path: Path) -> None:
    """Check that ``save`` may write a profile there, before anything is measured.

    Raises:
        ConfigError: no file can be made there, or one is there that is no profile.
    """
    json_store.check_replaceable(path, FORMAT, WHAT)


def save(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile, replacing an older one in a single step; the old one stays on failure.

    Raises:
        ConfigError: it cannot be written, with the reason.
    """
    path = path or profile_path(profile.settings)
    json_store.write_document(path, FORMAT, SCHEMA, "profile", asdict(profile))
    return path


def load(path: Path | None = None, device: str | torch.device = "cpu") -> Profile:
    """Load the profile of this device under the settings of this process.

    Args:
        path: of the profile; by default the one in the user's cache for the present settings.
        device: "cpu" or a CUDA device.

    Guarantees: what is returned was measured on this model of device with this torch, these
        libraries and settings, and is bit for bit what was written.

    Raises:
        ConfigError: there is none; or it was made under other settings (each named with its
            stored and present value), by another schema version, or is damaged.
    """
    settings = numeric_settings(device_of(device))
    if path is None:
        path = profile_path(settings)
        if not path.exists():
            raise ConfigError(_absent(settings))
    profile = read(path)
    require(profile, settings, str(path))
    return profile


def require(profile: Profile, settings: dict[str, str], what: str = "the profile") -> None:
    """Check that a profile was measured under the present settings.

    Raises:
        ConfigError: a setting differs; the message names each, and the command to run.
    """
    if found := differences(profile.settings, settings):
        raise ConfigError(f"{what} was measured under other settings: {found}; {_remedy(settings)}")


def read(path: Path) -> Profile:
    """Read the profile in a file, whatever settings it was made under.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has another schema version.
    """
    again = "measure again with: holdfast calibrate"
    content = json_store.read_document(path, FORMAT, SCHEMA, "profile", what=WHAT, again=again)
    return _as_profile(content)


def _as_profile(content: dict[str, Any]) -> Profile:
    buckets = []
    for entry in content["buckets"]:
        growth = {name: Growth(**part) for name, part in entry["growth"].items()}
        buckets.append(Bucket(**entry | {"growth": growth}))
    return Profile(**content | {"buckets": tuple(buckets)})


def _absent(settings: dict[str, str]) -> str:
    """Return the message that no profile fits, with the settings of the closest one."""
    text = f"this device is not calibrated under its present settings; {_remedy(settings)}"
    others: list[tuple[int, str]] = []
    for path in cache_dir().glob(f"calibration-{settings['device']}-*.json"):
        with suppress(ConfigError):
            stored = read(path).settings
            count = sum(stored.get(name) != value for name, value in settings.items())
            others.append((count, f"{path} differs: {differences(stored, settings)}"))
    return f"{text} ({min(others)[1]})" if others else text


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Return the settings that differ, each with its stored and its present value."""
    missing = "missing"
    return ", ".join(
        f"{name} was {stored.get(name, missing)} and is {current.get(name, missing)}"
        for name in {**current, **stored}
        if stored.get(name) != current.get(name)
    )


def _remedy(settings: dict[str, str]) -> str:
    return f"measure with: {calibrate_command(settings)}"
