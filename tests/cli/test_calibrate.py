"""``holdfast calibrate``: measured, kept, shown and checked; refused with the remedy."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.abft.thresholds import calibrate as calibration
from holdfast.abft.thresholds.measurement import Effort
from holdfast.abft.thresholds.profile import Profile, load, save
from holdfast.cli import calibration as verb
from holdfast.cli import plots
from holdfast.cli.calibration_tables import print_profile
from holdfast.cli.main import main
from holdfast.errors import UncorrectableFault

INNERS = (1, 16, 64)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> Iterator[Path]:
    """A cache folder of the test's own, tiny efforts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, products in (("quick", 3), ("default", 6), ("full", 9)):
        effort = Effort(name, INNERS, products=products, depth=9 * 64, seconds=60.0)
        monkeypatch.setitem(calibration.EFFORTS, name, effort)
    yield tmp_path / "cache" / "holdfast"
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def measured(one_thread: None) -> Profile:
    """A profile kept before."""
    return calibration.calibrate(effort="quick", inners=INNERS, dtypes=("fp32", "bf16"))


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line with which the command ends."""
    assert main(["calibrate", *words]) == code
    message = capsys.readouterr().err
    assert message.startswith("holdfast calibrate: ")
    assert message.count("\n") == 1
    return message


def test_it_measures_keeps_and_draws(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["calibrate"]) == 0
    printed = capsys.readouterr().out
    profile = load()
    path = next(cache.glob("*.json"))
    assert sorted(found.suffix for found in cache.iterdir()) == [".json", ".png"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert (profile.effort, profile.seed) == ("default", 0)
    assert profile.dtypes == ("fp64", "fp32", "fp16", "bf16")
    assert f"profile: {path}" in printed
    for dtype in profile.dtypes:
        assert f"{max(profile.measured(dtype).values()):.2e}" in printed
        assert profile.fits[dtype].model in printed


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_the_effort_is_the_one_asked_for(capsys: pytest.CaptureFixture[str], effort: str) -> None:
    assert main(["calibrate", f"--{effort}", "--dtype", "bf16", "--seed", "4"]) == 0
    assert ("measure without --quick" in capsys.readouterr().out) == (effort == "quick")
    profile = load()
    assert (profile.effort, profile.seed, profile.dtypes) == (effort, 4, ("bf16",))


def test_show_measures_nothing_and_everything_is_in_the_json(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    document: Callable[..., dict[str, Any]],
    measured: Profile,
) -> None:
    kept = save(measured)
    monkeypatch.setattr(verb, "calibrate", None)
    before = kept.read_bytes()
    written = document("calibrate", "--show")
    assert f"profile: {kept}" in capsys.readouterr().out
    assert list(kept.parent.iterdir()) == [kept]
    assert kept.read_bytes() == before
    assert written["file"] == str(kept)
    assert written["settings"] == measured.settings
    assert len(written["buckets"]) == len(measured.buckets)
    assert written["buckets"][0]["e_max"] == measured.buckets[0].e_max
    fits = written["fits"]["fp32"]
    assert fits["used"] == measured.fits["fp32"].model
    assert fits["constant"]["e_max"]["growth"] == 0.0
    assert fits["sqrt"]["margin"] == pytest.approx(1.2)
    assert "check" not in written


def test_a_profile_that_holds_is_confirmed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    measured: Profile,
) -> None:
    save(measured)
    fresh = replace(measured, seed=1)
    asked = []

    def measure(*arguments: Any, **options: Any) -> Profile:
        asked.append(options)
        return fresh

    monkeypatch.setattr(verb, "calibrate", measure)
    document = tmp_path / "out.json"
    assert main(["calibrate", "--check", "--json", str(document)]) == 0
    assert "check: the profile holds; " in capsys.readouterr().out
    check = json.loads(document.read_text())["check"]
    assert (check["holds"], check["above"]) == (True, [])
    assert len(check["buckets"]) == len(measured.buckets)
    assert (asked[0]["effort"], asked[0]["seed"]) == ("quick", measured.seed + 1)
    assert asked[0]["dtypes"] == ("fp32", "bf16")


def test_a_profile_that_no_longer_holds_fails_the_check(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, measured: Profile
) -> None:
    """As on a device that has begun to round ten times as coarsely in fp32."""
    tight = tuple(
        replace(bucket, e_max=bucket.e_max / (10 if bucket.dtype == "fp32" else 1))
        for bucket in measured.buckets
    )
    kept, document = save(replace(measured, buckets=tight)), tmp_path / "out.json"
    before = kept.read_bytes()
    plot = tmp_path / "plot.svg"
    words = ["--check", "--json", str(document), "--plot", str(plot)]
    assert main(["calibrate", *words]) == 1
    printed = capsys.readouterr().out
    assert "check: the profile DOES NOT HOLD" in printed
    assert "fp32 at K = 64: a relative checksum error of" in printed
    assert "bf16 at K" not in printed
    check = json.loads(document.read_text())["check"]
    assert check["above"] == [["fp32", inner] for inner in INNERS]
    assert not check["holds"]
    assert kept.read_bytes() == before
    assert "<!-- check -->" in plot.read_text()


def test_a_dtype_that_was_not_kept_cannot_be_checked(
    capsys: pytest.CaptureFixture[str], measured: Profile
) -> None:
    save(measured)
    message = refused(capsys, "--check", "--dtype", "fp64")
    assert "has no fp64, only fp32, bf16; measure with: holdfast calibrate" in message


def test_a_profile_of_other_settings_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, measured: Profile
) -> None:
    kept = save(measured, tmp_path / "kept.json")
    words = ("--show", "--profile", str(kept), "--threads", "2")
    assert "threads was 1 and is 2; measure with: holdfast calibrate" in refused(capsys, *words)
    precision = ("--show", "--profile", str(kept), "--matmul-precision", "medium")
    assert "fp32_precision was ieee and is bf16" in refused(capsys, *precision)
    assert main(["calibrate", "--show", "--profile", str(kept)]) == 0


def test_settings_are_measured_as_asked_and_put_back_and_files_go_where_they_are_asked(
    cache: Path, tmp_path: Path
) -> None:
    kept, plot = tmp_path / "deep" / "kept.json", tmp_path / "plot.svg"
    words = ["--profile", str(kept), "--plot", str(plot), "--dtype", "bf16", "--dtype", "fp32"]
    words += ["--threads", "2", "--matmul-precision", "medium"]
    assert main(["calibrate", *words]) == 0
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, "highest")
    settings = json.loads(kept.read_text())["profile"]["settings"]
    assert (settings["threads"], settings["fp32_precision"]) == ("2", "bf16")
    assert not cache.exists()
    drawn = plot.read_text()
    for text in ("bf16", "fp32", "measured", "margin", "constant", "N(0, 1)"):
        assert f"<!-- {text} -->" in drawn


def test_without_matplotlib_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert main(["calibrate", "--dtype", "bf16"]) == 0
    assert "no plot: matplotlib is not installed" in capsys.readouterr().out
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UncorrectableFault("does not repeat"), 1, "does not repeat"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_measurement_that_ends_early_leaves_the_old_profile(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    measured: Profile,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    kept = save(measured)
    before, whole = kept.read_bytes(), calibration.calibrate

    def failing(*arguments: Any, on_progress: Callable[[float, str], None], **options: Any) -> Any:
        def stop(share: float, text: str) -> None:
            on_progress(share, text)
            if share > 0.3:
                raise error

        return whole(*arguments, on_progress=stop, **options)

    monkeypatch.setattr(verb, "calibrate", failing)
    assert words in refused(capsys, code=code)
    assert kept.read_bytes() == before
    assert list(kept.parent.iterdir()) == [kept]


def test_an_error_of_0_is_explained(
    capsys: pytest.CaptureFixture[str], measured: Profile, tmp_path: Path
) -> None:
    print_profile(measured, tmp_path)
    assert "were rounded to the same" not in capsys.readouterr().out
    equal = [
        replace(bucket, e_max=0.0) if (bucket.dtype, bucket.inner) == ("bf16", 64) else bucket
        for bucket in measured.buckets
    ]
    print_profile(replace(measured, buckets=type(measured.buckets)(equal)), tmp_path)
    printed = capsys.readouterr().out
    assert "0.00 of bf16 at K = 64: in each of " in printed
