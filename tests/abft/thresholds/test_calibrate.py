"""Calibration as a whole: what it measures bounds clean products, and faults stand out."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds import calibrate as calibration
from holdfast.abft.thresholds.calibrate import apply, calibrate, exceeded
from holdfast.abft.thresholds.measurement import DTYPES, Effort, Kernel
from holdfast.abft.thresholds.profile import Profile
from holdfast.abft.thresholds.protocol import Product
from holdfast.abft.thresholds.vabft import VAbft
from holdfast.errors import ConfigError, UncorrectableFault

INNERS = (1, 32, 256)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    effort = Effort("tiny", INNERS, products=9, depth=9 * 256, seconds=60.0)
    monkeypatch.setitem(calibration.EFFORTS, "tiny", effort)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def profile(one_thread: None) -> Profile:
    return calibrate(effort="quick", inners=INNERS)


def operands(seed: int, name: str, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = (torch.randn(64, inner, generator=generator) + 1).abs()
    b = (torch.randn(inner, 96, generator=generator) + 1).abs()
    return a.to(DTYPES[name]), b.to(DTYPES[name])


def flagged(threshold: VAbft, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    residual = c.double().sum(-1) - a.double() @ b.double().sum(-1)
    return residual.abs() > threshold(Product(a, b, c, c.dtype))


def test_every_dtype_and_k_is_measured(profile: Profile) -> None:
    assert profile.dtypes == tuple(DTYPES)
    measured = [(bucket.dtype, bucket.inner) for bucket in profile.buckets]
    assert measured == [(name, inner) for name in DTYPES for inner in INNERS]
    assert all(bucket.rows > 0 for bucket in profile.buckets)
    assert {tuple(bucket.growth) for bucket in profile.buckets} == {("n01", "n11", "u01")}


def test_the_model_is_above_what_was_measured(profile: Profile) -> None:
    for bucket in profile.buckets:
        assert profile.fits[bucket.dtype].e_max(bucket.inner) >= 1.2 * bucket.e_max * (1 - 1e-12)


@for_each("name", list(DTYPES))
def test_a_calibrated_threshold_is_silent_on_clean_rows_and_sees_a_fault(
    profile: Profile, name: str
) -> None:
    threshold, rows = apply(profile), 0
    for seed in range(6):
        a, b = operands(seed, name, 64)
        c = a @ b
        assert not flagged(threshold, a, b, c).any()
        rows += len(c)
        struck = c.clone()
        struck[7, 5] *= 64.0
        caught = flagged(threshold, a, b, struck)
        assert caught.nonzero().flatten().tolist() == [7]
        unchecked = struck.double() - c.double()
        assert unchecked[7].abs().max() > 10 * c[7].abs().double().max()
    assert rows == 384


def test_what_was_measured_replaces_the_papers_figures(profile: Profile) -> None:
    threshold = apply(profile)
    assert threshold.e_max == {DTYPES[n]: profile.fits[n].e_max for n in DTYPES}
    assert threshold.online == profile.fits["fp32"].e_max
    low = replace(profile, buckets=tuple(b for b in profile.buckets if b.dtype == "bf16"))
    assert apply(low).online == VAbft().online
    a, b = operands(0, "fp32", 64)
    with pytest.raises(ValueError, match=r"no e_max for torch\.float32"):
        apply(low)(Product(a, b, a @ b, torch.float32))


def test_an_accumulators_own_figure_bounds_online_verification(profile: Profile) -> None:
    online = tuple(
        replace(bucket, dtype="bf16-online", e_max=bucket.e_max / 8)
        for bucket in profile.buckets
        if bucket.dtype == "fp32"
    )
    both = replace(profile, buckets=profile.buckets + online)
    assert apply(both).online(1024) == pytest.approx(apply(profile).online(1024) / 8)
    assert apply(both).e_max == apply(profile).e_max


def test_a_profile_of_other_settings_is_not_applied(profile: Profile) -> None:
    apply(profile)
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(ConfigError, match="fp32_precision was ieee and is bf16"):
        apply(profile)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="fp32 products take bf16 only with AMX here"
)
def test_settings_that_change_the_rounding_change_the_measurement(profile: Profile) -> None:
    torch.set_float32_matmul_precision("medium")
    coarse = calibrate(effort="tiny", dtypes=("fp32",))
    assert max(coarse.measured("fp32").values()) > 10 * max(profile.measured("fp32").values())
    assert exceeded(profile, coarse) != []


@pytest.mark.fuzz
def test_the_profile_covers_its_own_measurement_and_other_operands(
    monkeypatch: pytest.MonkeyPatch, profile: Profile
) -> None:
    assert exceeded(profile, profile) == []
    # The largest of a quick one's few rows says little of the next ones'.
    many, few = (Effort("", INNERS, n, depth=256 * n, seconds=60.0) for n in (180, 3))
    monkeypatch.setitem(calibration.EFFORTS, "many", many)
    monkeypatch.setitem(calibration.EFFORTS, "few", few)
    wide = ("fp64", "fp32")  # the others' products take long here
    thorough = calibrate(effort="many", dtypes=wide)
    fresh = calibrate(effort="few", dtypes=wide, seed=profile.seed + 1)
    assert fresh.buckets != thorough.buckets
    assert exceeded(thorough, fresh) == []


def test_a_profile_that_is_too_tight_is_found_out(profile: Profile) -> None:
    tight = tuple(
        replace(bucket, e_max=bucket.e_max / (100 if bucket.dtype == "fp32" else 1))
        for bucket in profile.buckets
    )
    above = exceeded(replace(profile, buckets=tight), profile)
    assert [(bucket.dtype, bucket.inner) for bucket in above] == [("fp32", k) for k in INNERS]


def test_progress_goes_from_nothing_to_all() -> None:
    seen: list[tuple[float, str]] = []
    calibrate(
        effort="tiny",
        dtypes=("bf16",),
        on_progress=lambda share, text: seen.append((share, text)),
    )
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, pytest.approx(1.0))
    assert {text for _, text in seen} == {f"K = {inner}" for inner in INNERS}


def test_a_seed_gives_the_same_measurement_again_and_moves_no_random_state() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        calibrate(effort="tiny", dtypes=("fp32", "bf16"), seed=seed) for seed in (5, 5, 6)
    )
    assert first.buckets == again.buckets != other.buckets
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 1


def test_a_faulty_device_is_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips once in the middle; a clean run of the same products ends well."""
    calibrate(effort="tiny", dtypes=("fp32",))
    right, calls = Kernel.multiply, iter(range(10**9))

    def multiply(self: Kernel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = right(self, a, b)
        if next(calls) == 20:
            product[2, 2] *= 2.0
        return product

    monkeypatch.setattr(Kernel, "multiply", multiply)
    with pytest.raises(UncorrectableFault, match="does not repeat bit for bit"):
        calibrate(effort="tiny", dtypes=("fp32",))


def test_settings_that_change_meanwhile_are_noticed() -> None:
    with pytest.raises(ConfigError, match="changed while they were measured"):
        calibrate(
            effort="tiny",
            dtypes=("bf16",),
            inners=(4,),
            on_progress=lambda share, text: torch.set_num_threads(2),
        )


@for_each(
    ("arguments", "words"),
    [
        ({"effort": "some"}, "effort 'some' is unknown; choose from quick, default, full"),
        ({"dtypes": ("fp8",)}, r"\['fp8'\] cannot be calibrated; choose from fp64, fp32"),
        ({"dtypes": ()}, r"\[\] cannot be calibrated"),
        ({"inners": ()}, "one or more K"),
        ({"inners": (4, 0)}, r"\[4, 0\] must be"),
        ({"inners": (1 << 20,)}, "less than 1048576"),
        ({"device": "meta"}, "'meta' cannot be calibrated"),
    ],
)
def test_a_bad_argument_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        calibrate(**arguments)  # type: ignore[arg-type]


def test_no_native_core_is_needed() -> None:
    code = (
        "import sys, holdfast.abft.thresholds.calibrate as c; "
        "c.calibrate(effort='quick', dtypes=('bf16',), inners=(4,)); "
        "assert 'holdfast.native' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
