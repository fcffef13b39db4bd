"""``holdfast plan attention``: what is printed, written and drawn; refused with the remedy."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from case_loops import for_each

from holdfast.cli.main import main
from holdfast.planner.attention import SECTIONS, AttentionSize, modelled_costs
from holdfast.planner.frequencies import ErrorRates, plan_frequencies, sections_of
from holdfast.planner.vulnerability import published

Plan = Callable[..., dict[str, Any]]
TIGHT = ["--target", "3e-14"]  # at which the default rates need some checks
TABLE = {
    gemm: {"inf": 0.5, "nan": 0.5, "near_inf": 0.5} for gemm in ("Q", "K", "V", "AS", "CL", "O")
}


@pytest.fixture
def planned(document: Plan) -> Plan:
    """Plans the checks of attention."""
    return partial(document, "plan", "attention")


def written(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return str(path)


def test_as_the_paper_prints_it_no_check_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "attention"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("bert-base: batch 16, length 128, width 768, 12 heads of 64")
    assert "errors per 1e25 flops: inf 20, nan 20, near_inf 20" in lines
    assert "target: 1e-11 failures an execution, met" in lines
    assert "expected overhead: 0 % of the step (all checks 7 %)" in lines
    assert "no checks are needed up to 215 times these rates" in printed


def test_table_and_file_hold_the_planners_numbers(
    capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    found = planned(*TIGHT)
    size = AttentionSize.of_model("bert-base", 16, 128)
    rates = ErrorRates(2e-24, 2e-24, 2e-24)
    sections = sections_of(size, rates, published("bert-base"), modelled_costs(size))
    plan = plan_frequencies(sections, 3e-14)
    assert found["plan"]["frequencies"] == plan.frequencies
    assert 0 < plan.frequencies["S_AS"] < plan.frequencies["S_O"] == 1
    assert found["plan"]["failure"] == plan.failure
    assert found["plan"]["feasible"] is True
    assert found["rates_per_flop"] == {"inf": 2e-24, "nan": 2e-24, "near_inf": 2e-24}
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    for section in sections:
        row = next(cell for cell in cells if cell[:1] == [section.name])
        assert row[1 : 1 + len(SECTIONS[section.name])] == list(SECTIONS[section.name])
        assert row[-1] == f"{plan.frequencies[section.name]:.4g}"


def test_rates_model_and_sizes_are_the_ones_asked_for(planned: Plan) -> None:
    words = "--model gpt2 --batch 2 --length 9 --rate-inf 1 --rate-nan 2 --rate-near-inf 3"
    found = planned(*words.split())
    assert found["model"] == "gpt2"
    assert (found["size"]["batch"], found["size"]["length"]) == (2, 9)
    assert list(found["rates_per_flop"].values()) == pytest.approx(
        [1e-25, 2e-25, 3e-25], rel=1e-12, abs=0.0
    )
    assert found["vulnerability"]["K"]["inf"] == 0.868


def test_own_sizes_take_the_worst_vulnerability_unless_a_model_is_named(planned: Plan) -> None:
    words = ["--width", "40", "--heads", "4", "--kv-heads", "2", "--head-size", "6"]
    found = planned(*words)
    assert found["size"] == {
        "batch": 16,
        "length": 128,
        "width": 40,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 6,
    }
    assert found["vulnerability"]["Q"]["near_inf"] == 0.54
    found = planned("--model", "gpt2", "--heads", "6")
    assert (found["model"], found["size"]["width"]) == ("gpt2, resized", 768)
    assert (found["size"]["heads"], found["size"]["head_size"]) == (6, 128)
    assert found["vulnerability"]["Q"]["near_inf"] == 0.384


def test_measured_costs_change_what_is_checked_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, planned: Plan
) -> None:
    costs = {"S_AS": 1e-6, "S_CL": 1e-3, "S_O": 1e-3}
    found = planned(*TIGHT, "--costs", written(tmp_path, "costs.json", costs))
    chosen = found["plan"]["frequencies"]
    assert 0 < chosen["S_AS"] <= 1
    assert chosen["S_CL"] == chosen["S_O"] == 0
    printed = capsys.readouterr().out
    assert f"expected overhead: {chosen['S_AS'] * 1e-6:.3g} s an execution" in printed
    timed = costs | {"attention": 0.1, "step": 0.5}
    planned(*TIGHT, "--costs", written(tmp_path, "costs.json", timed))
    printed = capsys.readouterr().out
    assert "(all checks 2 %)" in printed
    assert "of the step (all checks 0.4 %)" in printed


def test_vulnerabilities_of_our_own_are_read(tmp_path: Path, planned: Plan) -> None:
    harmless = {gemm: dict.fromkeys(types, 0.0) for gemm, types in TABLE.items()}
    file = written(tmp_path, "phi.json", {"bert": harmless, "other": TABLE})
    found = planned(*TIGHT, "--model", "bert-base", "--phi", file)
    assert found["plan"]["cost"] == 0
    found = planned(*TIGHT, "--phi", file)
    assert {value for types in found["vulnerability"].values() for value in types.values()} == {0.5}
    assert "the largest of all models" in found["vulnerability_source"]


def test_without_errors_there_is_nothing_to_check(
    capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    none = ["--rate-inf", "0", "--rate-nan", "0", "--rate-near-inf", "0"]
    found = planned(*none)
    assert found["bearable_factor"]["without_checks"] == "inf"
    assert "without errors no checks are needed" in capsys.readouterr().out


FLEET = Path(__file__).parents[2] / "examples" / "fleet.toml"
JOB = "snapshots --nodes 16 --group 8 --mttf 30d --state 80GB --step 0.7s"


@pytest.fixture
def fleets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's fleet in the current folder, one of crashes, and one that asks too much."""
    monkeypatch.chdir(tmp_path)
    text, asked = FLEET.read_text(), "undetected_faults_per_1000_device_months = 1e-9\n"
    Path("fleet.toml").write_text(text)
    Path("crashing.toml").write_text(text.replace("mttf_days = 4_200", "mttf_days = 1"))
    detection = "[detection]\nshadowed_share = 0.01\n"
    Path("strict.toml").write_text(f"{text}[target]\n{asked}{detection}")


@for_each(
    ("words", "code", "said"),
    [
        (
            "attention --target 1e-30",
            1,
            ["target: 1e-30 failures an execution, NOT MET, even by checking everything"],
        ),
        ("ladder strict.toml", 1, ["NOT MET by any shares"]),
        (
            "ladder crashing.toml",
            0,
            [
                "beware, ladder: failures are not rare",
                "beware, checkpoints alone: failures are not rare",
            ],
        ),
        (
            "snapshots --nodes 1024 --mttf 1d --state 80GB --step 10s --restart 10m",
            1,
            ["NO PROGRESS: more time is lost than trained"],
        ),
        (
            "snapshots --nodes 1 --mttf 30d --state 1GB --step 1s",
            0,
            ["plan with snapshots, no parity"],
        ),
        (
            "snapshots --nodes 8 --mttf 30d --state 4GB --step 0.7s --disk-share 1",
            0,
            [
                "8 nodes in 1 group of 8",
                "1 parity: snapshot every step (700 ms), persist every 3 steps",
            ],
        ),
    ],
)
def test_what_a_plan_says_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], fleets: None, words: str, code: int, said: list[str]
) -> None:
    assert main(["plan", *words.split()]) == code
    printed = capsys.readouterr().out
    assert [text for text in said if text not in printed] == []
    assert ("1 parity" in printed) == (words.startswith("snapshots") and "--nodes 1 " not in words)


ATTENTION_LABELS = [
    *("S_AS", "S_CL", "S_O", "planned", "target", "errors per 1e25 flops, all types")
]
SNAPSHOT_LABELS = ["checkpoints: ", *(f"snapshots, {n}: " for n in ("1 parity", "2 parities"))]


@for_each(
    ("words", "labels"),
    [
        ("attention", ATTENTION_LABELS),
        ("attention --target 3e-14", ATTENTION_LABELS),
        ("attention --target 1e-30", ATTENTION_LABELS),
        ("attention --rate-nan 1e9", ATTENTION_LABELS),
        (
            "ladder fleet.toml",
            ["checkpoints alone", "ladder, nothing detected", "hours lost in a month of 730"],
        ),
        (JOB, SNAPSHOT_LABELS),
        (f"{JOB} --shape 2", SNAPSHOT_LABELS),
        (f"{JOB} --software-mttf 1d", SNAPSHOT_LABELS),
        (f"{JOB} --group 1", ["checkpoints: ", "snapshots, no parity: "]),
    ],
)
def test_a_plot_is_drawn(fleets: None, words: str, labels: list[str]) -> None:
    pytest.importorskip("matplotlib")
    main(["plan", *words.split(), "--plot", "plan.svg"])
    drawn = Path("plan.svg").read_text()
    assert [label for label in labels if f"<!-- {label}" not in drawn] == []
