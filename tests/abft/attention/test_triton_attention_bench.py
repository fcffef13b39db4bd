"""The CUDA bench of attention goes through, and stops before it times what is wrong."""

from pathlib import Path

import pytest
import torch
from triton_attention_cases import CUDA, MARKS

from bench import attention_cuda, rows
from holdfast.abft.attention import triton as fused
from holdfast.abft.attention import triton_launch
from holdfast.abft.attention.triton_types import Tolerances
from holdfast.abft.gemm.triton_types import Tolerance

pytestmark = MARKS


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for whatever would be recorded; a timing is one call."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    monkeypatch.setattr("bench.cuda.SAMPLE_S", 0.0)
    return tmp_path


def test_a_dry_run_takes_every_path_and_reports_no_figure(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attention_cuda.main(["--dry-run"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("candidate / baseline")
    assert all(line.endswith("not measured") for line in lines)
    assert len(lines) == len(attention_cuda.COMPARED) * len(attention_cuda.KINDS)
    assert list(results.iterdir()) == []


@pytest.mark.skipif(CUDA, reason="would measure")
def test_without_a_device_nothing_is_measured() -> None:
    with pytest.raises(SystemExit, match="there is none: use --dry-run"):
        attention_cuda.main([])


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = fused.attention_forward

    def wrong(*args, **options):
        out, lse, verdict = forward(*args, **options)
        return out * 1.01, lse, verdict

    monkeypatch.setattr(fused, "attention_forward", wrong)
    with pytest.raises(SystemExit, match=r"output is wrong by .*nothing was timed"):
        attention_cuda.main(["--dry-run"])


@pytest.mark.parametrize(
    ("scale", "failure"), [(0.0, "clean rows are suspected"), (1e12, "a fault in P V was missed")]
)
def test_a_detector_that_errs_is_not_timed(
    scale: float, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Tolerance(scale=scale, output=1.0, walk=1.0, drift=1.0, floor=0.0)
    monkeypatch.setattr(
        triton_launch, "_tolerances", lambda *_: Tolerances(off, off, state=1e-4, exponential=1e-4)
    )
    with pytest.raises(SystemExit, match=f"{failure}.*nothing was timed"):
        attention_cuda.main(["--dry-run"])


def test_the_table_shows_what_was_measured() -> None:
    case = attention_cuda.Case(torch.bfloat16, 16, 16, 4096, 128)
    row = {"candidate": "verified", "baseline": "sdpa", "kind": "forward", **case.described()}
    figures = {"ratio": 1.25, "ratio_quartiles": [1.125, 1.5]}
    line = attention_cuda.table([{**row, **figures}], measured=True).splitlines()[1]
    expected = "verified / sdpa forward bfloat16 4096 128 1.250 1.125 … 1.500"
    assert line.split() == expected.split()
