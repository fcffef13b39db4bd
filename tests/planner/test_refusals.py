"""What makes no sense is refused with the value, and where it helps with the remedy."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
from case_loops import for_each

from holdfast.errors import ConfigError
from holdfast.planner.attention import AttentionSize, parse_costs
from holdfast.planner.fleet import Devices, Faults, LadderQuestion, Model
from holdfast.planner.frequencies import ErrorRates, plan_frequencies
from holdfast.planner.intervals import (
    MAX_PARITIES,
    every,
    interval_s,
    job_rate,
    log_bearable,
    memory_loss_rate,
    overhead,
    several_failures,
    stall_s,
)
from holdfast.planner.ladder import plan_ladder
from holdfast.planner.simulate import estimates, simulate
from holdfast.planner.snapshots import Costs, Fleet, Speeds, plan_snapshots, snapshot_costs
from holdfast.planner.survival import Survival, weibull_rate
from holdfast.planner.vulnerability import parse

FIGURE_8 = Survival(3072, 6, hardware=1e-4, software=1e-5, shape=1.3)
FLEET = Fleet(16, 8, mttf_s=1e6, software_mttf_s=4e6)
COSTS = Costs(0.4, 0.0, 100.0, 20.0, 5.0, 40.0)
SPEEDS = Speeds(copy_bytes_s=4e9, disk_bytes_s=1e9, network_bytes_s=2e9)
CHEAP = {"S_AS": 1, "S_CL": 1, "S_O": 1}
PHI = {gemm: {"inf": 1, "nan": 1, "near_inf": 0} for gemm in ("Q", "K", "V", "AS", "CL")}
LADDER = LadderQuestion(Devices(8), Model(10.0, 1e11))


def months(count: int, **faults: Faults) -> object:
    question = replace(LADDER, faults={**LADDER.faults, **faults})
    return estimates(simulate(question, plan_ladder(LADDER).configuration, range(count)))


ATTENTION = [
    (lambda: AttentionSize(0, 1, 8, 2), "batch = 0 must be at least 1"),
    (lambda: AttentionSize(1, 0, 8, 2), "length = 0 must be at least 1"),
    (lambda: AttentionSize(1, 1, 8, 2, -1), "kv_heads = -1 must be positive, or 0"),
    (lambda: AttentionSize(1, 1, 9, 2), "width = 9 is no multiple of heads = 2; give head_size"),
    (lambda: AttentionSize(1, 1, 8, 4, 3), "heads = 4 must be a multiple of kv_heads = 3"),
    (lambda: parse_costs([1, 2]), "costs are [1, 2]: give {section: seconds}"),
    (lambda: parse_costs({"S_AS": 1, "S_CL": 1}), "costs of ['S_AS', 'S_CL']: give those of"),
    (lambda: parse_costs(CHEAP | {"S_X": 1}), "'S_X'"),
    (lambda: parse_costs(CHEAP | {"S_AS": -1}), "cost of S_AS = -1 must be finite and at least 0"),
    (lambda: parse_costs(CHEAP | {"S_AS": "1"}), "cost of S_AS = '1' is no number of seconds"),
    (lambda: parse_costs(CHEAP | {"S_AS": nan}), "cost of S_AS = nan must be finite"),
    (lambda: parse_costs(CHEAP | {"step": True}), "cost of step = True is no number"),
]
VULNERABILITY = [
    (lambda: parse({}, ""), "no vulnerabilities: give {model: {gemm: {type: probability}}}"),
    (lambda: parse([], ""), "no vulnerabilities"),
    (lambda: parse({"m": PHI}, "gpt2"), "no vulnerabilities of 'gpt2', only of m"),
    (lambda: parse({"m": 3}, ""), "vulnerabilities of m are 3"),
    (lambda: parse({"m": {"Q": {"inf": 1}}}, ""), "m, Q: give inf, nan, near_inf, not"),
    (lambda: parse({"m": {}}, ""), "m, Q: give inf, nan, near_inf, not None"),
    (lambda: parse({"m": PHI | {"V": PHI["V"] | {"inf": 1.5}}}, "m"), "no probability"),
    (
        lambda: parse({"m": PHI | {"O": PHI["V"] | {"nan": nan}}}, "m"),
        "vulnerability of m, O, nan = nan is no probability",
    ),
]
FREQUENCIES = [
    (lambda: plan_frequencies([], 0.0), "target = 0.0 must be more than 0"),
    (lambda: plan_frequencies([], 1.0), "target = 1.0 must be more than 0"),
    (lambda: plan_frequencies([], nan), "target = nan must be more than 0"),
    (lambda: ErrorRates(0.0, -1e-25, 0.0), "rate of nan = -1e-25 must be"),
    (lambda: ErrorRates(0.0, inf, 0.0), "rate of nan = inf must be"),
]
INTERVALS = [
    (lambda: stall_s(-1.0, 1.0), "saving_s = -1.0 must be finite and at least 0"),
    (lambda: stall_s(1.0, nan), "compute_s = nan must be finite and at least 0"),
    (lambda: overhead(0.0, 1.0, 1.0, 1.0), "interval_s = 0.0 must be finite and above 0"),
    (lambda: interval_s(1.0, 0.0), "failures_per_s = 0.0 must be finite and above 0"),
    (lambda: interval_s(inf, 1.0), "save_s = inf must be finite"),
    (lambda: every(nan, 1.0, 1.0), "save_s = nan must be finite seconds: measure it again"),
    (lambda: every(1.0, 0.0, 1.0), "step_s = 0.0 must be finite and above 0"),
    (lambda: every(1.0, 1.0, inf), "mttf_s = inf must be finite and above 0"),
    (lambda: every(1.0, 1.0, 1.0, -1.0), "floor_s = -1.0 must be finite and at least 0"),
    (lambda: job_rate(1.0, 0), "nodes = 0 must be at least 1"),
    (lambda: several_failures(1.5, 4), "probability = 1.5 must be from 0 to 1"),
    (lambda: several_failures(nan, 4), "probability = nan must be from 0 to 1"),
    (lambda: several_failures(0.5, 4, 5), "parities = 5 must be from 0 to the nodes = 4"),
    (lambda: several_failures(0.5, 99, 33), f"at most {MAX_PARITIES}"),
    (lambda: log_bearable(nan, 4), "hazard = nan must be at least 0"),
    (lambda: log_bearable(1.0, 4, -1), "parities = -1 must be from 0 to the nodes = 4"),
    (lambda: memory_loss_rate(1.0, 4, 4, 1.0), "parities = 4 must be from 0 to 3 in a group"),
    (lambda: memory_loss_rate(1.0, 4, 1, inf), "window_s = inf must be finite"),
]
SNAPSHOTS = [
    (lambda: replace(FLEET, mttf_s=0.0), "mttf = 0.0 s must be finite and above 0"),
    (lambda: replace(FLEET, mttf_s=inf), "mttf = inf s must be finite and above 0"),
    (lambda: replace(FLEET, software_mttf_s=-1.0), "software mttf = -1.0 s must be above 0"),
    (lambda: replace(FLEET, nodes=0), "0 nodes in groups of 8: both must be at least 1"),
    (lambda: replace(COSTS, reload_s=nan), "reload_s = nan must be finite and at least 0"),
    (lambda: replace(SPEEDS, disk_bytes_s=0.0), "disk_bytes_s = 0.0 must be finite and above"),
    (lambda: plan_snapshots(FLEET, COSTS, 0.0), "step_s = 0.0 must be finite and above 0"),
    (lambda: plan_snapshots(FLEET, COSTS, 1.0, 8), "parities = 8 must be from 0 to 7"),
    (
        lambda: snapshot_costs(8e9, FLEET, SPEEDS, 1.0, 1.0, 1, disk_share=0.0),
        "disk share = 0.0 must be above 0 and at most 1",
    ),
    (lambda: snapshot_costs(0.0, FLEET, SPEEDS, 1.0, 1.0, 1), "state = 0.0 bytes must be"),
]
SURVIVAL = [
    (lambda: replace(FIGURE_8, hardware=-1.0), "hardware = -1.0 must be finite and at least 0"),
    (lambda: replace(FIGURE_8, software=nan), "software = nan must be finite"),
    (lambda: replace(FIGURE_8, smp=inf), "smp = inf must be finite"),
    (lambda: replace(FIGURE_8, shape=0.0), "shape = 0.0 must be from 0.01 to 100"),
    (lambda: replace(FIGURE_8, group=0), "3072 nodes in groups of 0: both must be at least 1"),
    (lambda: FIGURE_8.with_snapshots(-1.0), "time = -1.0 must be finite"),
    (lambda: FIGURE_8.with_snapshots(inf), "time = inf must be finite"),
    (lambda: FIGURE_8.time_with_snapshots(0.0), "survival = 0.0 must be more"),
    (lambda: FIGURE_8.time_with_checkpoints(1.0), "survival = 1.0 must be more"),
    (
        lambda: FIGURE_8.time_with_snapshots(0.9, 7),
        "parities = 7 must be from 0 to the nodes = 6",
    ),
    (lambda: weibull_rate(0.0, 1.0), "mttf = 0.0 must be above 0"),
]
SIMULATION = [
    (lambda: months(1), "simulate at least 2"),
    (lambda: months(2, outside=Faults(1e-5)), "too many to play one by one"),
]


@for_each(
    ("call", "message"),
    [*ATTENTION, *VULNERABILITY, *FREQUENCIES, *INTERVALS, *SNAPSHOTS, *SURVIVAL, *SIMULATION],
)
def test_what_makes_no_sense_is_refused_with_its_value(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        call()
