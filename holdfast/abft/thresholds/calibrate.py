"""Measurement of how a device rounds: V-ABFT's calibration protocol (section 3.6), by dtype and K.

For each K, positive operands ``|N(1, 1)|`` are multiplied, and ``e_max = max |E| / |checksum|`` is
taken over every row of many products, with checksums in the product's own dtype, as in the paper.
For random-sign checksums, which are summed in fp64, the root mean square of the residual is
measured as well, on coherent and on random operands.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from holdfast.abft.thresholds.measurement import DTYPES, ONLINE, Effort, Tally, kernels_of, measure
from holdfast.abft.thresholds.profile import Bucket, Profile, require
from holdfast.abft.thresholds.settings import device_of, numeric_settings
from holdfast.abft.thresholds.vabft import EMax, VAbft
from holdfast.errors import ConfigError

POWERS = tuple(2**power for power in range(15))
EFFORTS = {
    effort.name: effort
    for effort in (
        Effort("quick", POWERS[::2], products=6, depth=2**13, seconds=0.5),
        Effort("default", POWERS, products=180, depth=2**17, seconds=7.0),
        Effort("full", POWERS, products=1800, depth=2**20, seconds=120.0),
    )
}
LARGEST_INNER = 2**20

OnProgress = Callable[[float, str], None]


def calibrate(
    device: str | torch.device = "cpu",
    *,
    effort: str = "default",
    dtypes: tuple[str, ...] = tuple(DTYPES),
    inners: tuple[int, ...] | None = None,
    seed: int = 0,
    on_progress: OnProgress = lambda share, text: None,
) -> Profile:
    """Measure a device's rounding under this process's settings; nothing is stored.

    Args:
        device: "cpu", "cuda" or "cuda:INDEX".
        effort: "quick" (seconds), "default" (a minute or two) or "full" (many minutes).
        dtypes: Keys of ``DTYPES``; on CUDA fp16 and bf16 are also measured in their accumulator.
        inners: The K to measure; by default powers of two up to 16,384 ("quick": powers of four).
        seed: Seed of the operands.
        on_progress: Called with the share that is done, 0 to 1, and the name of the next K.

    Guarantees: a new maximum is measured twice and counts only if it repeats bit for bit, so that a
    transient fault cannot widen the thresholds. torch's random state and settings do not change.
    Not covered: a device that repeats its error bit for bit.

    Raises:
        ConfigError: An argument is unknown, or the settings changed meanwhile.
        UncorrectableFault: An error did not repeat or is not finite, so the device computes wrong.
    """
    device = device_of(device)
    plan = _checked(effort, dtypes, inners)
    settings, began = numeric_settings(device), time.monotonic()
    tallies = [
        Tally(kernel, inner) for kernel in kernels_of(device, dtypes) for inner in plan.inners
    ]
    done, total = 0.0, sum(map(plan.work, plan.inners))
    for inner in plan.inners:
        present = [tally for tally in tallies if tally.inner == inner]
        for fraction in measure(present, plan, seed, device):
            on_progress((done + fraction * plan.work(inner)) / total, f"K = {inner}")
        done += plan.work(inner)
    if numeric_settings(device) != settings:
        raise ConfigError("the numeric settings changed while they were measured; measure again")
    return Profile(
        settings=settings,
        effort=effort,
        seed=seed,
        seconds=time.monotonic() - began,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        buckets=tuple(tally.bucket() for tally in tallies),
    )


def apply(profile: Profile, device: str | torch.device | None = None) -> VAbft:
    """Return the V-ABFT threshold with the measured ``e_max``, 20 % above the largest error seen.

    ``e_max`` is constant or grows with √K. For online verification it is that of the accumulator if
    it was measured, else that of fp32, which sums in the same arithmetic, else the paper's.

    Args:
        profile: The profile, from ``load_profile`` or ``calibrate``.
        device: Device of the products; by default one of the profile's kind.

    Not covered: dtypes that were not measured; the threshold raises ValueError for their products.

    Raises:
        ConfigError: The profile was measured under other settings than the present ones.
    """
    require(profile, numeric_settings(device_of(device or profile.settings["device"])))
    fits = {name: fit.e_max for name, fit in profile.fits.items()}
    online = [e_max for name, e_max in fits.items() if name.endswith(ONLINE)]
    # With TF32 or bf16 inside, an fp32 product rounds its operands; an accumulator does not.
    if not online and "fp32" in fits and profile.settings["fp32_precision"] == "ieee":
        online = [fits["fp32"]]
    e_max = {DTYPES[name]: model for name, model in fits.items() if name in DTYPES}
    if not online:
        return VAbft(e_max=e_max)
    worst = EMax(max(m.constant for m in online), growth=max(m.growth for m in online))
    return VAbft(e_max=e_max, online=worst)


def exceeded(profile: Profile, fresh: Profile) -> list[Bucket]:
    """Select the buckets of a fresh measurement that the profile's models do not cover."""
    return [
        bucket
        for bucket in fresh.buckets
        if not bucket.e_max <= profile.fits[bucket.dtype].e_max(bucket.inner)
    ]


def _checked(effort: str, dtypes: tuple[str, ...], inners: tuple[int, ...] | None) -> Effort:
    if effort not in EFFORTS:
        raise ConfigError(f"effort {effort!r} is unknown; choose from {', '.join(EFFORTS)}")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown or not dtypes:
        known = ", ".join(DTYPES)
        raise ConfigError(f"dtypes {list(dtypes)} cannot be calibrated; choose from {known}")
    plan = EFFORTS[effort]
    if inners is None:
        return plan
    if not inners or not all(1 <= inner < LARGEST_INNER for inner in inners):
        raise ConfigError(
            f"inners {list(inners)} must be one or more K of at least 1 and less than "
            f"{LARGEST_INNER}"
        )
    return replace(plan, inners=tuple(sorted(set(inners))))
