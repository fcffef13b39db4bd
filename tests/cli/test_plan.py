"""``holdfast plan attention``: what is printed, written and drawn; refused with the remedy."""

import json
from pathlib import Path

import pytest

from holdfast.cli import plots
from holdfast.cli.main import main
from holdfast.planner.attention import SECTIONS, AttentionSize, modelled_costs
from holdfast.planner.frequencies import ErrorRates, plan_frequencies, sections_of
from holdfast.planner.vulnerability import published

TIGHT = ["--target", "3e-14"]  # at which the default rates need some checks
TABLE = {
    gemm: {"inf": 0.5, "nan": 0.5, "near_inf": 0.5} for gemm in ("Q", "K", "V", "AS", "CL", "O")
}


def document(tmp_path: Path, *words: str, code: int = 0) -> dict[str, dict[str, object]]:
    path = tmp_path / "plan.json"
    assert main(["plan", "attention", "--json", str(path), *words]) == code
    written: dict[str, dict[str, object]] = json.loads(path.read_text())
    return written


def written(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends; nothing else is printed."""
    assert main(["plan", "attention", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("holdfast plan: ")
    assert captured.err.count("\n") == 1
    return captured.err


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
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = document(tmp_path, *TIGHT)
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


def test_rates_model_and_sizes_are_the_ones_asked_for(tmp_path: Path) -> None:
    words = "--model gpt2 --batch 2 --length 9 --rate-inf 1 --rate-nan 2 --rate-near-inf 3"
    found = document(tmp_path, *words.split())
    assert found["model"] == "gpt2"
    assert (found["size"]["batch"], found["size"]["length"]) == (2, 9)
    assert list(found["rates_per_flop"].values()) == pytest.approx(
        [1e-25, 2e-25, 3e-25], rel=1e-12, abs=0.0
    )
    assert found["vulnerability"]["K"]["inf"] == 0.868


def test_own_sizes_take_the_worst_vulnerability_unless_a_model_is_named(tmp_path: Path) -> None:
    words = ["--width", "40", "--heads", "4", "--kv-heads", "2", "--head-size", "6"]
    found = document(tmp_path, *words)
    assert found["size"] == {
        "batch": 16,
        "length": 128,
        "width": 40,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 6,
    }
    assert found["vulnerability"]["Q"]["near_inf"] == 0.54
    found = document(tmp_path, "--model", "gpt2", "--heads", "6")
    assert (found["model"], found["size"]["width"]) == ("gpt2, resized", 768)
    assert (found["size"]["heads"], found["size"]["head_size"]) == (6, 128)
    assert found["vulnerability"]["Q"]["near_inf"] == 0.384


def test_measured_costs_change_what_is_checked_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs = {"S_AS": 1e-6, "S_CL": 1e-3, "S_O": 1e-3}
    found = document(tmp_path, *TIGHT, "--costs", written(tmp_path, "costs.json", costs))
    chosen = found["plan"]["frequencies"]
    assert 0 < chosen["S_AS"] <= 1
    assert chosen["S_CL"] == chosen["S_O"] == 0
    printed = capsys.readouterr().out
    assert f"expected overhead: {chosen['S_AS'] * 1e-6:.3g} s an execution" in printed
    timed = costs | {"attention": 0.1, "step": 0.5}
    document(tmp_path, *TIGHT, "--costs", written(tmp_path, "costs.json", timed))
    printed = capsys.readouterr().out
    assert "(all checks 2 %)" in printed
    assert "of the step (all checks 0.4 %)" in printed


def test_vulnerabilities_of_our_own_are_read(tmp_path: Path) -> None:
    harmless = {gemm: dict.fromkeys(types, 0.0) for gemm, types in TABLE.items()}
    file = written(tmp_path, "phi.json", {"bert": harmless, "other": TABLE})
    found = document(tmp_path, *TIGHT, "--model", "bert-base", "--phi", file)
    assert found["plan"]["cost"] == 0
    found = document(tmp_path, *TIGHT, "--phi", file)
    assert {value for types in found["vulnerability"].values() for value in types.values()} == {0.5}
    assert "the largest of all models" in found["vulnerability_source"]


def test_a_target_that_cannot_be_met_is_exit_code_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = document(tmp_path, "--target", "1e-30", code=1)
    assert found["plan"]["feasible"] is False
    assert set(found["plan"]["frequencies"].values()) == {1.0}
    printed = capsys.readouterr().out
    assert "target: 1e-30 failures an execution, NOT MET, even by checking everything" in printed


def test_without_errors_there_is_nothing_to_check(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none = ["--rate-inf", "0", "--rate-nan", "0", "--rate-near-inf", "0"]
    found = document(tmp_path, *none)
    assert found["bearable_factor"]["without_checks"] == "inf"
    assert "without errors no checks are needed" in capsys.readouterr().out
    message = refused(capsys, *none, "--plot", str(tmp_path / "x.png"))
    assert "--plot draws over the error rate" in message


@pytest.mark.parametrize("words", [[], TIGHT, ["--target", "1e-30"], ["--rate-nan", "1e9"]])
def test_a_plot_is_drawn(tmp_path: Path, words: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    main(["plan", "attention", "--plot", str(path), *words])
    drawn = path.read_text()
    for text in ("S_AS", "S_CL", "S_O", "planned", "target", "errors per 1e25 flops, all types"):
        assert f"<!-- {text} -->" in drawn


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--target 0", "target = 0.0 must be more than 0 and less than 1"),
        ("--target nan", "target = nan must be more than 0"),
        ("--rate-inf -1", "rate of inf = "),
        ("--rate-near-inf inf", "rate of near_inf = inf"),
        ("--batch 0", "batch = 0 must be at least 1"),
        ("--width 64", "give both --width and --heads"),
        ("--kv-heads 2", "give both --width and --heads"),
        ("--width 64 --heads 0", "--heads 0 must be at least 1"),
        ("--width 65 --heads 2", "width = 65 is no multiple of heads = 2"),
        ("--model gpt2 --heads 7", "width = 768 is no multiple of heads = 7"),
        ("--costs nowhere.json", "cannot read nowhere.json: No such file"),
        ("--costs broken.json", "broken.json is no JSON"),
        ("--costs binary.json", "binary.json is no JSON"),
        ("--costs list.json", "costs are [1]: give {section: seconds}"),
        ("--phi nowhere.json", "cannot read nowhere.json"),
        ("--phi list.json", "no vulnerabilities: give {model: {gemm: {type: probability}}}"),
        ("--phi phi.json --model gpt2", "no vulnerabilities of 'gpt2', only of other"),
        ("--plot plan.gif", "cannot draw plan.gif"),
        ("--plot /no/such/folder/x.png", "/no/such/folder"),
        ("--json /no/such/folder/x.json", "/no/such/folder"),
    ],
)
def test_bad_input_is_one_line_with_the_value_and_the_remedy(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "phi.json").write_text(json.dumps({"other": TABLE}))
    assert expected in refused(capsys, *words.split())


def test_without_matplotlib_a_plot_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert "torch-holdfast[plot]" in refused(capsys, "--plot", str(tmp_path / "plan.png"))


@pytest.mark.parametrize("words", [[], ["nothing"], ["attention", "--model", "gpt5"]])
def test_an_unknown_subject_or_model_is_refused_by_the_parser(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *words])
    assert stopped.value.code == 2
