"""The stages of ``bench.gpu``: a rehearsal, what stops the sequence, and what a later call does."""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from case_loops import for_each
from torch import nn

from bench import rows
from bench.gpu import elsewhere, graphs, model, papers, process, sequence, stage
from bench.gpu.models import GPT2_MEDIUM
from bench.gpu.process import Outcome
from bench.gpu.sequence import main
from bench.gpu.stage import Goal, Machine, Row, Stage, WrongResult
from bench.gpu.stages import BUILD_S, STAGES
from bench.gpu.state import State
from bench.gpu.strike import Added
from holdfast import sites
from holdfast.protection import protect
from holdfast_lab.study.vabft.residuals import residuals

Launch = Callable[..., tuple[int, dict[str, Any]]]
CODE = process._code


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    """A folder of its own for whatever would be recorded; stages run in this process."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(process, "_code", lambda command, limit_s: main(command[3:]))
    return tmp_path / "results"


@pytest.fixture
def run(tmp_path: Path) -> Launch:
    """Call the sequence; return its exit code and what it wrote."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "all.json"
        code = main([*words, "--state", str(tmp_path / "a" / "s.json"), "--json", str(path)])
        return code, json.loads(path.read_text())

    return call


def statuses(shown: dict[str, Any]) -> dict[str, str]:
    """How the stages ended that were to run."""
    stages = shown["stages"].items()
    return {number: one["status"] for number, one in stages if one["status"] != "not run"}


def test_a_rehearsal_goes_through_the_stages_and_measures_nothing(
    run: Launch, results: Path
) -> None:
    code, shown = run("--rehearse", "--only", "3,4,5,8,11,12")
    right = dict.fromkeys(("3", "4", "8", "11", "12"), "right")
    assert (code, statuses(shown)) == (0, {**right, "5": "not rehearsed"})
    kinds = {row["case"]: row for row in shown["stages"]["3"]["rows"]}
    assert set(kinds) == {"known answers", "bf16", "fp16", "fp32", "tf32"}
    assert [(kinds[k]["strikes"], kinds[k]["missed"]) for k in ("bf16", "tf32")] == [(28, 0)] * 2
    assert all(row["rows"] >= 2000 for row in shown["stages"]["4"]["rows"])
    assert [row["case"] for row in shown["stages"]["8"]["rows"]] == ["forward", "grad_a", "grad_b"]
    found = {row["case"]: row for row in shown["stages"]["11"]["rows"]}
    assert found["V-ABFT e_max bf16 32"]["apart in the paper"] == "2"
    step = found["ATTNChecker bert-base batch 2: training step"]
    assert (step["overhead_percent in the paper"], step["pairs"]) == ("7", 2)
    cases = [row["case"] for row in shown["stages"]["12"]["rows"]]
    assert cases[0] == "rates"
    assert cases[-2:] == ["step gpt2-medium 32 tokens", "step llama-8b 32 tokens"]
    assert {goal["verdict"] for goal in shown["goals"]} == {"not measured"}
    assert not results.exists()


def test_a_wrong_result_stops_the_sequence_and_a_later_call_goes_on_from_there(
    run: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "protect", partial(protect, verify=False))  # checks that see nothing
        code, shown = run("--rehearse", "--only", "1,3,4")
        assert (code, statuses(shown)) == (1, {"1": "right", "3": "WRONG"})
        code, shown = run("--rehearse", "--only", "8")
        assert shown["stages"]["8"]["message"] == "a fault in forward led to []"
    assert shown["stages"]["3"]["message"] == "28 of 28 bf16 faults missed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.Machine, "largest_ratio", lambda self: 3.0)  # checks that see too much
        code, shown = run("--rehearse", "--only", "1,4,3")
    wrong_stages = {"1": "right", "3": "WRONG", "4": "WRONG", "8": "WRONG"}
    assert (code, statuses(shown)) == (1, wrong_stages)
    assert "right products exceed their thresholds" in shown["stages"]["4"]["message"]
    started: list[str] = []
    monkeypatch.setattr(process, "_code", lambda c, _: started.append(c[4]) or main(c[3:]))
    assert run("--rehearse", "--only", "1,3,4")[0] == 0
    assert started == ["3", "4"]
    assert run("--rehearse", "--only", "1,3")[0] == 0
    assert started == ["3", "4"]
    assert run("--rehearse", "--only", "1", "--again")[0] == 0
    assert started == ["3", "4", "1"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device in name, for stages that use none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")


def made_up(number: int, run: Callable[[], Iterator[Row]]) -> Stage:
    """A stage whose goals are a time of at most 2 and a share of at least 0.5."""

    def rows_of(machine: Machine, done: Collection[str]) -> Iterator[Row]:
        return (row for row in run() if row["case"] not in done)

    goals = Goal("time", "case", "time", 2.0), Goal("share", "case", "share", 0.5, at_least=True)
    return Stage(number, f"stage {number}", 5, rows_of, goals)


def two(time_s: float, share: float) -> Iterator[Row]:
    """Two cases, of which the second is the worse one."""
    yield {"case": "case 1", "time": 1.0, "share": 0.9}
    yield {"case": "case 2", "time": time_s, "share": share}


def wrong() -> Iterator[Row]:
    yield {"case": "case 1", "time": 1.0, "share": 1.0}
    raise WrongResult("two and two are five")


CASES = [
    (lambda: two(2.0, 0.5), 0, {"1": "right", "2": "right"}),
    (lambda: two(2.1, 0.5), 4, {"1": "right", "2": "right"}),
    (lambda: two(2.0, 0.4), 4, {"1": "right", "2": "right"}),
    (lambda: iter(()), 4, {"1": "right", "2": "right"}),
    (wrong, 1, {"1": "WRONG"}),
    (lambda: map(int, "x"), 70, {"1": "failed"}),
]


@pytest.mark.usefixtures("device")
@for_each(("first", "code", "ran"), CASES)
def test_a_missed_goal_does_not_stop_the_sequence_and_a_wrong_result_does(
    first: Callable[[], Iterator[Row]], code: int, ran: dict[str, str], run: Launch, results: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_code", _as_a_process)
        patch.setattr(sequence, "STAGES", [made_up(1, first), made_up(2, lambda: two(1.0, 1.0))])
        found, shown = run("--again")
    assert (found, statuses(shown)) == (code, ran)
    verdicts = [goal["verdict"] for goal in shown["goals"]]
    assert ("MISSED" in verdicts or "not measured" in verdicts) == (code != 0)
    recorded = [json.loads(line) for line in (results / "gpu.jsonl").read_text().splitlines()]
    kept = [row["case"] for one in shown["stages"].values() for row in one["rows"]]
    assert [row["case"] for row in recorded][len(recorded) - len(kept) :] == kept
    assert {row["device"] for row in recorded} == {"made up"}


def _as_a_process(command: list[str], limit_s: float) -> int:
    try:
        return main(command[3:])
    except ValueError:
        return 1


@pytest.mark.usefixtures("device")
def test_what_was_recorded_before_the_time_ran_out_is_not_repeated(
    run: Launch, monkeypatch: pytest.MonkeyPatch, results: Path
) -> None:
    computed: list[str] = []

    def cases() -> Iterator[Row]:
        for row in two(1.0, 1.0):
            computed.append(row["case"])
            yield row

    def late(command: list[str], limit_s: float) -> None:
        Path(command[-1]).write_text(json.dumps(next(two(1.0, 1.0))) + '\n{"case": "ca')

    monkeypatch.setattr(sequence, "STAGES", [made_up(1, cases)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_code", late)
        code, shown = run()
    assert (code, statuses(shown)) == (4, {"1": "out of time"})
    code, shown = run()
    assert (code, statuses(shown)) == (0, {"1": "right"})
    recorded = (results / "gpu.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in recorded] == ["case 1", "case 2"]


@pytest.mark.processes
@pytest.mark.representative
def test_a_stage_is_ended_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60"
    started_s = time.monotonic()
    assert CODE(["sh", "-c", script], 0.5) is None
    assert time.monotonic() - started_s < 10
    pid = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):  # it is killed, and may take a moment to end
        psutil.Process(pid).wait(10)
    assert CODE(["sh", "-c", "exit 9"], 5) == 9


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_a_stage_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_code", CODE)
    known = [{"case": "copy", "bytes_s": 1.0}]
    outcome = process.launched(STAGES[0], known, 60, rehearsed=True)
    assert (outcome.status, outcome.message) == ("right", "")
    assert [row["case"] for row in outcome.rows[:2]] == ["copy", "versions"]


def test_a_state_of_other_code_or_of_another_device_is_not_used(tmp_path: Path) -> None:
    state = State(tmp_path / "s.json", "one")
    state.keep(3, Outcome("right", "", [{"case": "x"}], 2.0))
    assert State(state.path, "one").of(3) == state.of(3) == Outcome("right", "", [{"case": "x"}], 2)
    assert State(state.path, "another").of(3) == Outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.gpu.state.provenance", lambda module: {"code": "changed"})
        assert State(state.path, "one").of(3) == Outcome()


def replays_of(model: nn.Module) -> Callable[[torch.Tensor], Callable[[], None]]:
    """What replays a step with a fault of a given size, as a captured graph does."""

    def record(amount: torch.Tensor) -> Callable[[], None]:
        sites.disarm()

        def replay() -> None:
            with sites.injecting(Added(lambda gemm, c: amount, site="addmm/forward")):
                model(torch.ones(2, 8)).square().mean().backward()

        replay()
        return replay

    return record


@for_each("verify", [True, False])
def test_a_fault_in_a_replay_must_be_found(verify: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    with Machine(rehearsed=True).protected(model) as protection:
        if verify:
            assert graphs.replayed("toy", model, protection, replays_of(model))["replays"] == 100
            return
        with (
            stage.unchecked(protection),
            pytest.raises(WrongResult, match="toy: a fault in a replay was missed"),
        ):
            graphs.replayed("toy", model, protection, replays_of(model))


def attended(case: SimpleNamespace, device: str, pairs: int) -> list[Row]:
    """A row of a made-up bench of attention."""
    names = {"candidate": "verified", "baseline": "unverified", "kind": "forward"}
    return [{**names, "length": 64, "width": 32, "ratio": case.ratio}]


def test_the_gate_of_another_bench_is_a_wrong_result_and_its_rows_meet_the_goal() -> None:
    (goal,) = STAGES[9].goals
    cases = [SimpleNamespace(dtype=torch.bfloat16, ratio=ratio) for ratio in (1.02, 1.04)]
    bench = SimpleNamespace(cases=lambda dry: cases, measure=attended)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elsewhere, "import_module", lambda name: bench)
        found = list(elsewhere.attention(Machine(rehearsed=False), ()))
        assert (goal.found(found), goal.met(found)) == (1.04, True)
        bench.measure = lambda *_: sys.exit("the output is wrong")
        with pytest.raises(WrongResult, match=r"bench\.attention_cuda: the output is wrong"):
            list(elsewhere.attention(Machine(rehearsed=False), ()))


def test_a_threshold_below_the_error_of_a_right_row_is_a_wrong_result() -> None:
    machine, known = Machine(rehearsed=True), [case for case, _ in papers._cases(Machine(True))]
    (row,) = papers.papers(machine, known[:-1])
    assert row["threshold / largest error"]["rounding"] > 1
    with pytest.MonkeyPatch.context() as patch:
        larger = lambda *given: {k: 9 * v for k, v in residuals(*given).items()}  # noqa: E731
        patch.setattr(papers, "residuals", larger)
        with pytest.raises(WrongResult, match="a right row of 32 exceeds our threshold"):
            list(papers.papers(machine, known[:-1]))


def test_the_fit_finds_the_rates_of_times_that_follow_the_model() -> None:
    rates, moved = model.Rates(3e12, 4e-6), (1e6, 3e7, 2e8, 9e8)
    found = model.fitted((each, rates.seconds(each)) for each in moved)
    assert found == pytest.approx(rates, rel=1e-6)
    # The launches that a step's checks are predicted from are those of the budget.
    checks = sum(model.PLANNED.seconds(x["bytes"]) for x in model._launches(GPT2_MEDIUM, 8192))
    assert checks == pytest.approx(model.budget().gpt2_medium(8192)[0], rel=0.05)
    (goal,) = STAGES[11].goals
    rows = [{"case": "rates"}, {"case": "check 1", "error": 0.1}, {"case": "check 2", "error": 0.3}]
    assert (goal.found(rows), goal.met(rows), goal.met(rows[:2])) == (0.3, False, True)


def test_times_that_do_not_grow_with_the_bytes_are_a_wrong_result() -> None:
    falling = lambda machine, rows, *_: {"case": "", "bytes": rows, "measured_us": 1e6 / rows}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_product", falling)
        with pytest.raises(WrongResult, match="do not grow with the bytes"):
            list(model.model(Machine(rehearsed=False), ()))


@for_each(
    ("words", "code", "said"),
    [
        (["--only", "3"], 3, "there is none here: use --rehearse"),
        (["--only", "3,13", "--rehearse"], 2, "there is no stage 13: give numbers of 1 to 12"),
        (["--only", "x", "--rehearse"], 2, "invalid literal"),
        (["--json", "/dev/null/x", "--rehearse"], 2, "cannot write"),
        (["--state", "pyproject.toml", "--rehearse"], 2, "is no state of bench.gpu"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(words) == code
    out = capsys.readouterr()
    assert said in out.out + out.err


def test_the_limits_leave_the_build_its_time() -> None:
    assert [stage.number for stage in STAGES] == list(range(1, 13))
    assert max(stage.limit_s for stage in STAGES) <= 480
    assert BUILD_S + sum(stage.limit_s for stage in STAGES) <= 2400
