"""``holdfast report``: a page of real runs, metrics until Ctrl-C, and clear refusals."""

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from process_server import Server
from report_dom import parse
from report_runs import corrected, struck, write_run

from holdfast import config
from holdfast.cli.main import main
from holdfast.inject.schedule import Fault
from holdfast.report import gather
from holdfast.report.run import RunReport
from holdfast.report.sources import Ledgers
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.launch import train
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.storm import outcomes

QKV = "blocks.0.attn.qkv/addmm/forward"
PATIENCE_S = 60.0
MODEL = GPTConfig(layers=1, heads=2, width=16, context=16)


def _call(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, python_server: Server) -> Path:
    """A calm and a stormy run: a flip in a product, one outside of products, a rank killed.

    Only one is killed by the schedule: torchrun ends the other one, which may then not have reached
    a fault of its own, and would be killed by it after the restart.
    """
    folder = tmp_path_factory.mktemp("both")
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("What a fault does not reach it cannot change. " * 100)
    common = {"steps": 6, "batch_size": 2, "warmup_steps": 1, "data": str(text), "model": MODEL}
    storm = [
        Fault(1, 0, "bitflip", op=QKV, bit=30, identifier=0),
        Fault(2, 1, "bitflip", site="module", op="blocks.0.ln_2", bit=30, identifier=1),
        Fault(4, 0, "kill_trainer", op=QKV, identifier=2),
    ]
    with pytest.MonkeyPatch.context() as patch, python_server.client.forking():
        patch.setenv(config.TIMEOUT_VARIABLE, "20")
        train(folder / "calm", Settings(mode="bare", **common))
        train(folder / "storm", Settings(mode="guarded", **common), storm)
    return folder


@pytest.mark.processes
@pytest.mark.representative
def test_a_real_storm_is_told_as_it_was(both, capsys):
    out, values = both / "page.html", both / "report.json"
    assert _call(both, "--out", out, "--json", values) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "3 incidents, every one answered: the run ended as if none had struck."
    )
    dom = parse(out.read_text())
    rows = dom.section("Faults, and what answered them").rows()
    assert [row["answered by"] for row in rows] == ["1 correct", "2 recompute", "3 roll back"]
    assert rows[0]["where"] == QKV
    assert dom.section("Coverage").rows()
    report = json.loads(values.read_text())
    assert report["verdict"]["level"] == "good"
    assert report["baseline"]["equal"] is True
    assert report["steps_done"] == report["steps_wanted"] == 6
    assert report["state"]["kind"] == "finished"
    assert [device["faults"] for device in report["devices"]] == [1, 1]
    # The storm's own table pairs the same faults with the same rungs.
    told = gather(both / "storm")
    assert isinstance(told, RunReport)
    by_incident = [
        incident.rung for incident in told.incidents for _ in range(incident.struck.total())
    ]
    by_fault = [outcome.rung for outcome in outcomes(Ledgers(both / "storm").read())]
    assert by_incident == by_fault == ["correct", "recompute", "rollback"]


def test_the_page_is_put_into_the_run_by_default(tmp_path, capsys):
    run = write_run(tmp_path / "run", [struck(1.0), corrected(1.1)])
    before = {path.name for path in run.iterdir()}
    assert _call(run) == 0
    assert {path.name for path in run.iterdir()} - before == {"report.html"}
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {run / 'report.html'}"
    first = (run / "report.html").read_text()
    assert _call(run) == 0
    assert parse(first).all("h1")[0].text == "1 incident, every one answered."
    assert _call(write_run(tmp_path / "bad", [struck(1.0)], mode="unprotected")) == 0
    assert "Unprotected: 1 fault struck" in capsys.readouterr().out


def test_serving_without_its_package_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "holdfast.report.exporter", raising=False)
    assert _call(write_run(tmp_path / "run"), "--serve", 0) == 2
    assert "pip install 'torch-holdfast[metrics]'" in capsys.readouterr().err


@contextmanager
def _serving(run: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*before, sys.executable, "-m", "holdfast.cli.main"]
    command += ["report", str(run), "--serve", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_metrics_are_served_until_the_end_is_asked_for(tmp_path, forked_python, ending):
    pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")
    with _serving(write_run(tmp_path / "run", [corrected(1.0)])) as (process, said):
        url = said.split()[3]
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            assert (
                b'holdfast_events_total{kind="gemm_fault",rank="0",rung="correct"} 1.0'
                in answer.read()
            )
        process.send_signal(ending)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.processes
@pytest.mark.representative
def test_a_background_job_of_a_script_ends_when_asked_to(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")
    deaf = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")  # as a shell starts one: deaf to Ctrl-C
    with _serving(write_run(tmp_path / "run"), *deaf) as (process, said):
        assert said.startswith("metrics of ")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_one_who_asks_for_the_end_as_soon_as_the_address_is_told_gets_it(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")

    class Impatient(io.StringIO):
        def flush(self) -> None:
            if "metrics of" in self.getvalue() and "ended" not in self.getvalue():
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys, "stdout", said := Impatient())
    assert _call(write_run(tmp_path / "run"), "--serve", 0) == 0
    assert [line.split()[0] for line in said.getvalue().splitlines()] == ["metrics", "ended"]
