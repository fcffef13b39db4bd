"""Measured rounding errors of a device under its settings, and the files that store them."""

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
    """Root mean square and largest magnitude of residuals ``C r − A(B r)``, in ``u ‖C_i‖₂``."""

    rms: float
    largest: float
    rows: int


@dataclass(frozen=True)
class Bucket:
    """Measurement of one dtype at one K.

    Args:
        dtype: Dtype of operands and product, such as "bf16"; "bf16-online" is the fp32 accumulator.
        inner: K.
        rows: Number of row checksums that were compared.
        e_max: Largest ``|E| / |checksum|`` for operands |N(1,1)|, without margin.
        growth: Residuals by distribution of the operands: N(0,1) is "n01", |N(1,1)| is "n11" and
            U(0,1) is "u01".
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
        settings: Settings for which the profile holds, from ``numeric_settings``.
        seconds: Duration of the measurement.
        created_utc: Time of the measurement, ISO 8601.
        buckets: Measurements by dtype and ascending K.
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
        """Return the largest relative error by K, without margin."""
        return {bucket.inner: bucket.e_max for bucket in self._of(dtype)}

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """The preferred model of ``e_max`` by dtype, margin included."""
        return {dtype: best_fit(self.measured(dtype)) for dtype in self.dtypes}

    def growth(self, dtype: str, inner: int) -> float:
        """Estimate the root mean square of a signed residual at K = ``inner``, in ``u ‖C_i‖₂``.

        It is the largest one over the distributions and over the two measured K around ``inner``,
        as kernels change between sizes; beyond the largest K it grows with √K.
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
    """Return holdfast's folder in ``$XDG_CACHE_HOME``, by default in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "holdfast"


def profile_path(settings: Mapping[str, str]) -> Path:
    """Return the path in the user's cache of the profile for some settings."""
    key = state_digest(dict(sorted(settings.items())))[:16]
    return cache_dir() / f"calibration-{settings['device']}-{key}.json"


def check_replaceable(path: Path) -> None:
    """Raise ConfigError if ``save`` could not write a profile at a path."""
    json_store.check_replaceable(path, FORMAT, WHAT)


def save(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile, replacing an older one atomically; return the path of the file.

    Args:
        profile: A profile from ``calibrate``.
        path: Path of the file; by default the one in the user's cache for the profile's settings.

    Raises:
        ConfigError: It cannot be written; says why.
    """
    path = path or profile_path(profile.settings)
    json_store.write_document(path, FORMAT, SCHEMA, "profile", asdict(profile))
    return path


def load(path: Path | None = None, device: str | torch.device = "cpu") -> Profile:
    """Load the profile of this device under the settings of this process.

    Args:
        path: Path of the profile; by default the one in the user's cache for the present settings.
        device: "cpu" or a CUDA device.

    Guarantees: the profile was measured on this model of device with this torch, these libraries
    and settings, and is bit for bit as it was written.

    Raises:
        ConfigError: There is no profile, it was measured under other settings (the message names
            each), it has another schema version, or it is damaged.
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
    """Raise ConfigError, naming each difference, if a profile is of other settings."""
    if found := differences(profile.settings, settings):
        raise ConfigError(f"{what} was measured under other settings: {found}; {_remedy(settings)}")


def read(path: Path) -> Profile:
    """Read a profile of any settings; raise ConfigError if the file is unusable."""
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
    """Compose the message that no profile fits, with the differences of the closest one."""
    text = f"this device is not calibrated under its present settings; {_remedy(settings)}"
    others: list[tuple[int, str]] = []
    for path in cache_dir().glob(f"calibration-{settings['device']}-*.json"):
        with suppress(ConfigError):
            stored = read(path).settings
            count = sum(stored.get(name) != value for name, value in settings.items())
            others.append((count, f"{path} differs: {differences(stored, settings)}"))
    return f"{text} ({min(others)[1]})" if others else text


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> str:
    """List the settings that differ, each with its stored and its present value."""
    missing = "missing"
    return ", ".join(
        f"{name} was {stored.get(name, missing)} and is {current.get(name, missing)}"
        for name in {**current, **stored}
        if stored.get(name) != current.get(name)
    )


def _remedy(settings: dict[str, str]) -> str:
    return f"measure with: {calibrate_command(settings)}"
