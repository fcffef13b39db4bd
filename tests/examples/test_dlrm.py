"""The serving example, small: right without faults, right under them, wrong unprotected."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from examples.dlrm import __main__ as command
from examples.dlrm import measure
from examples.dlrm.measure import Scenario, arrivals, throughput, under_faults
from examples.dlrm.model import Dlrm, Sizes, quantised
from examples.dlrm.requests import Request, Traffic, zipf
from examples.dlrm.serving import Load, answering, serve
from holdfast import UncorrectableFault, native

SIZES = Sizes((50, 3, 400), width=16, dense=5, bottom=(32, 16), top=(24, 1))


@pytest.fixture
def scenario() -> Scenario:
    torch.manual_seed(0)
    model = quantised(Dlrm(SIZES))
    requests = [Traffic(SIZES, batch=8, pooling=5).request(seed) for seed in range(60)]
    right = [answering(model)(request) for request in requests]
    return Scenario(model, requests, right, threads=2, seed=0)


def test_the_quantised_model_answers_as_the_float_one() -> None:
    torch.manual_seed(0)
    model = Dlrm(SIZES)
    request = Traffic(SIZES).request(1)
    exact = answering(model)(request)
    theirs = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    error = (answering(theirs)(request) - exact).abs().max()
    assert 0 < (answering(quantised(model))(request) - exact).abs().max() <= 2 * error


def test_threads_give_the_answers_of_one(scenario: Scenario) -> None:
    for mode in ("unprotected", "protected"):
        served = scenario.serve(mode)
        assert served.off_by(scenario.right) == []
        assert served.refused == 0
        assert served.percentile_ms(0.5) <= served.percentile_ms(0.99)


@pytest.mark.parametrize("mode", ["protected", "unprotected"])
def test_faults_reach_the_answers_of_the_unprotected_server_alone(
    scenario: Scenario, mode: str
) -> None:
    worth = under_faults(scenario, mode, 3, share=0.2, every_s=0.002, say=lambda _: None)
    assert sum(worth["faults"].values()) > 100
    assert (worth["events"] > 0) == (mode == "protected")
    assert (worth["wrong"] == 0) == (mode == "protected")
    if mode == "protected":
        assert worth["failed"] == 0


def test_an_error_of_the_server_is_no_refusal_and_is_not_allowed_on_healthy_input(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(request: Request) -> torch.Tensor:
        if request is scenario.requests[7]:
            raise UncorrectableFault("a row is damaged")
        if request is scenario.requests[9]:
            raise ValueError("the input holds NaN or INF")
        return answering(scenario.model)(request)

    served = serve(faulty, Load(scenario.requests), threads=2)
    assert (served.refused, served.failed, served.answers.count(None)) == (1, 1, 2)
    monkeypatch.setattr(measure, "answering", lambda model: faulty)
    with pytest.raises(RuntimeError, match="2 requests fail without any fault") as raised:
        throughput(scenario, 1, say=lambda _: None)
    assert isinstance(raised.value.__cause__, UncorrectableFault)


def test_a_thread_that_dies_is_not_waited_for(scenario: Scenario) -> None:
    def broken(_: object) -> torch.Tensor:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        serve(broken, Load(scenario.requests), threads=2)


def test_popular_indices_are_asked_for_more_often() -> None:
    drawn = zipf(1000, 1.05, 20_000, np.random.default_rng(0))
    counts = np.sort(np.bincount(drawn, minlength=1000))[::-1]
    assert drawn.min() >= 0
    assert drawn.max() < 1000
    assert counts[0] > 5 * counts[50]


def test_arrivals_come_at_the_rate_asked_for() -> None:
    due_s = arrivals(2000, 100.0, seed=1)
    assert due_s == sorted(due_s)
    assert due_s[-1] == pytest.approx(20.0, rel=0.1)


@pytest.mark.skipif(native.core is None, reason="too slow without the native core")
def test_the_command_reports_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"requests": 20, "rounds": 2, "most-rows": 100, "batch": 4, "pooling": 3}
    given = [f"--{name}={value}" for name, value in small.items()]
    assert command.main([*given, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [found["faults"]["protected"][name] for name in ("wrong", "failed")] == [0, 0]
    assert found["speed"]["p99_ratio"] > 0
    shown = capsys.readouterr().out
    assert shown.index("failed") < shown.index("wrong") < shown.index("events")


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        command.main(["--threads", "0"])
    assert exit.value.code == 2
    assert "0 must be positive" in capsys.readouterr().err
