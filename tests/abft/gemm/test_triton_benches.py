"""The CUDA benches go through from end to end, and stop before they time what is wrong."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case_loops import for_each
from triton_device import CUDA, MARKS

from bench import attention_cuda, gemm_cuda, rows
from holdfast.abft.attention import cuda as fused
from holdfast.abft.attention.problem import Problem, Tolerances
from holdfast.abft.gemm import cuda as passes
from holdfast.abft.triton.tolerance import Tolerance

pytestmark = MARKS

BENCHES = (gemm_cuda, attention_cuda)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for whatever would be recorded; a timing is one call."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    monkeypatch.setattr("bench.cuda.SAMPLE_S", 0.0)
    return tmp_path


@pytest.mark.parametrize("bench", BENCHES)
def test_a_dry_run_takes_every_path_and_reports_no_figure(
    bench: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(["--dry-run"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("candidate / baseline")
    assert all(line.endswith("not measured") for line in lines)
    if bench is gemm_cuda:
        for candidate, baseline in gemm_cuda.COMPARED:
            assert sum(line.startswith(f"{candidate} / {baseline} ") for line in lines) == 4
        assert sum(line.startswith("encode ") for line in lines) == 6
    else:
        assert len(lines) == len(attention_cuda.COMPARED) * len(attention_cuda.KINDS)
    assert list(results.iterdir()) == []


@pytest.mark.skipif(CUDA, reason="would measure")
@for_each("bench", BENCHES)
def test_without_a_device_nothing_is_measured(bench: ModuleType) -> None:
    with pytest.raises(SystemExit, match="there is none: use --dry-run"):
        bench.main([])


def slightly_wrong(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Attention whose output is off by one per cent."""

    def wrong(*args: Any, **options: Any) -> Any:
        out, lse, verdict = forward(*args, **options)
        return out * 1.01, lse, verdict

    return wrong


def tolerance(scale: float, output: float) -> Tolerance:
    """One that suspects everything, or nothing."""
    return Tolerance(scale=scale, output=output, walk=1.0, drift=output, floor=0.0)


def tolerances(scale: float) -> Tolerances:
    off = tolerance(scale, 1.0)
    return Tolerances(off, off, state=1e-4, exponential=1e-4)


# The bench, what is replaced where and by what, and what the bench must say.
ERRORS: dict[str, tuple[ModuleType, Any, str, Any, str]] = {
    "no product": (
        *(gemm_cuda, passes, "matmul"),
        *(lambda a, b, **_: torch.zeros_like(a), "bfloat16 64: our product is wrong"),
    ),
    "another product": (
        *(gemm_cuda, passes, "matmul", lambda a, b, **_: (a @ b) * (1 + 2**-7)),
        "bfloat16 64: verification changes the product",
    ),
    "suspicious products": (
        *(gemm_cuda, passes.Tolerance, "of", lambda *_: tolerance(0.0, 0.0)),
        r"clean rows are suspected: \[\d+, 0",
    ),
    "blind products": (
        *(gemm_cuda, passes.Tolerance, "of", lambda *_: tolerance(1e9, 0.0)),
        r"online missed it: \[0, 0\]",
    ),
    "attention": (
        *(attention_cuda, fused, "attention_forward", slightly_wrong(fused.attention_forward)),
        r"output is wrong by ",
    ),
    "suspicious attention": (
        *(attention_cuda, Problem, "tolerances", lambda *_: tolerances(0.0)),
        "clean rows are suspected",
    ),
    "blind attention": (
        *(attention_cuda, Problem, "tolerances", lambda *_: tolerances(1e12)),
        "a fault in P V was missed",
    ),
}


@for_each("name", ERRORS)
def test_what_is_wrong_or_errs_is_not_timed(name: str) -> None:
    bench, place, attribute, replacement, failure = ERRORS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, attribute, replacement)
        with pytest.raises(SystemExit, match=f"{failure}.*nothing was timed"):
            bench.main(["--dry-run"])


@for_each(
    "bench, row, shown",
    [
        (
            gemm_cuda,
            {"candidate": "online", "baseline": "own", "dtype": "bfloat16", "size": 8192},
            "online / own bfloat16 8192",
        ),
        (
            attention_cuda,
            {"candidate": "verified", "baseline": "sdpa", "kind": "forward"}
            | attention_cuda.Case(torch.bfloat16, 16, 16, 4096, 128, 4, "causal").described(),
            "verified / sdpa forward bfloat16 4096 128 causal",
        ),
    ],
)
def test_the_table_shows_what_was_measured(
    bench: ModuleType, row: dict[str, Any], shown: str
) -> None:
    figures = {"ratio": 1.25, "ratio_quartiles": [1.125, 1.5]}
    line = bench.table([{**row, **figures}], measured=True).splitlines()[1]
    assert " ".join(line.split()) == f"{shown} 1.250 1.125 … 1.500"
