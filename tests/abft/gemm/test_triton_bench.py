"""The CUDA bench goes through from end to end, and stops before it times what is wrong."""

from pathlib import Path

import pytest
import torch
from triton_cases import CUDA, MARKS

from bench import gemm_cuda, rows
from holdfast.abft.gemm import triton as passes

pytestmark = MARKS


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for whatever would be recorded."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return tmp_path


def test_a_dry_run_takes_every_path_and_reports_no_figure(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm_cuda.main(["--dry-run"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("candidate / baseline")
    assert all(line.endswith("not measured") for line in lines)
    for candidate, baseline in gemm_cuda.COMPARED:
        assert sum(line.startswith(f"{candidate} / {baseline} ") for line in lines) == 4
    assert sum(line.startswith("encode ") for line in lines) == 6
    assert list(results.iterdir()) == []


@pytest.mark.skipif(CUDA, reason="would measure")
def test_without_a_device_nothing_is_measured() -> None:
    with pytest.raises(SystemExit, match="there is none: use --dry-run"):
        gemm_cuda.main([])


@pytest.mark.parametrize(
    ("name", "replacement", "failure"),
    [
        ("matmul", lambda a, b, **_: torch.zeros_like(a), "our product is wrong"),
        ("matmul", lambda a, b, **_: (a @ b) * (1 + 2**-7), "verification changes the product"),
    ],
)
def test_a_wrong_product_is_not_timed(
    name: str, replacement: object, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, name, replacement)
    with pytest.raises(SystemExit, match=f"bfloat16 64: {failure}.*nothing was timed"):
        gemm_cuda.main(["--dry-run"])


@pytest.mark.parametrize(
    ("widened", "failure"),
    [(0.0, r"clean rows are suspected: \[\d+, 0"), (1e9, r"online missed it: \[0, 0\]")],
)
def test_a_detector_that_errs_is_not_timed(
    widened: float, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = passes.Tolerance(scale=widened, output=0.0, walk=1.0, drift=0.0, floor=0.0)
    monkeypatch.setattr(passes.Tolerance, "of", lambda *_: off)
    with pytest.raises(SystemExit, match=f"{failure}.*nothing was timed"):
        gemm_cuda.main(["--dry-run"])


def test_the_table_shows_what_was_measured() -> None:
    row = {"candidate": "online", "baseline": "own", "dtype": "bfloat16", "size": 8192}
    figures = {"ratio": 1.25, "ratio_quartiles": [1.125, 1.5]}
    line = gemm_cuda.table([{**row, **figures}], measured=True).splitlines()[1]
    assert line.split() == [
        "online",
        "/",
        "own",
        "bfloat16",
        "8192",
        "1.250",
        "1.125",
        "…",
        "1.500",
    ]
