"""The campaign of simulated clusters ends when it is told to, and records what it found."""

import signal
import subprocess
import sys

import pytest

CAMPAIGN = """
from bench import simulation
simulation.PROGRESS_S = 0
simulation.record = lambda claim, row: print("row", row["size"]["nodes"], row["seeds"] > 0)
raise SystemExit(simulation.main())
"""
OPTIONS = ("--nodes", "3", "4", "--steps", "4", "--jobs", "2")


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_rows_are_recorded_when_the_campaign_is_interrupted() -> None:
    words = [sys.executable, "-c", CAMPAIGN, *OPTIONS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as campaign:
        assert campaign.stdout is not None
        assert "nodes, ranks and seeds" in campaign.stdout.readline()
        campaign.send_signal(signal.SIGTERM)
        told, _ = campaign.communicate(timeout=60)
    assert campaign.returncode == 0
    assert "interrupted\nrow 3 True" in told


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_a_campaign_ends_when_its_time_is_over() -> None:
    words = [sys.executable, "-c", CAMPAIGN, *OPTIONS, "--minutes", "0.03"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "0.03 minutes are over" in done.stdout
