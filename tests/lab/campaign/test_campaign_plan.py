"""The plan: complete, in a fixed order, the same everywhere, and filtered as asked."""

import subprocess
import sys
from dataclasses import replace

import torch
from case_loops import for_each

from holdfast_lab.campaign.models import fault_names
from holdfast_lab.campaign.plan import (
    DTYPES,
    FULL,
    KEEP_WEIGHT,
    PRODUCTS,
    QUICK,
    SITES,
    UNCOVERED_SITES,
    Filters,
    Plan,
    injected_dtype,
    make_plan,
)

BF16_OUTPUT = Filters(operators=["mm"], dtypes=["bf16"], sites=["output"])


def axis(plan: Plan, name: str) -> set[object]:
    return {getattr(cell, name) for cell in plan.cells}


@for_each("preset", [QUICK, FULL])
def test_a_preset_covers_every_operator_dtype_site_and_fault(preset):
    plan = make_plan(preset)
    assert axis(plan, "operator") == set(PRODUCTS)
    assert axis(plan, "dtype") == set(DTYPES)
    assert axis(plan, "site") == set(SITES) - set(UNCOVERED_SITES)
    assert axis(plan, "fault") == set(fault_names(torch.float64, matrix=True))
    cached = {cell.operator for cell in plan.cells if cell.site == "cached_checksum"}
    assert cached == set(KEEP_WEIGHT)
    assert len({cell.key for cell in plan.cells}) == len(set(plan.cells)) == len(plan.cells)


def test_every_bit_of_each_struck_dtype_flips_both_ways():
    plan = make_plan(QUICK)
    for dtype in DTYPES:
        for site in axis(plan, "site"):
            names = {c.fault for c in plan.cells if c.dtype == dtype and c.site == site}
            flips = {name for name in names if name.startswith("flip-")}
            width = 8 * injected_dtype(DTYPES[dtype], site).itemsize
            assert len(flips) == 2 * width, (dtype, site)


def test_the_same_options_make_the_same_plan_in_any_process():
    ours = make_plan(QUICK, BF16_OUTPUT, seed=5)
    program = (
        "from holdfast_lab.campaign.plan import *\n"
        "f = Filters(operators=['mm'], dtypes=['bf16'], sites=['output'])\n"
        "p = make_plan(QUICK, f, seed=5)\n"
        "print(p.digest(), p.seed_of('cell', p.cells[7].key))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert run.stdout.split() == [ours.digest(), str(ours.seed_of("cell", ours.cells[7].key))]


def test_any_change_of_a_plan_changes_its_digest():
    plan = make_plan(QUICK, BF16_OUTPUT)
    changed = [
        replace(plan, trials=plan.trials + 1),
        replace(plan, end_to_end=plan.end_to_end + 1),
        replace(plan, seed=1),
        replace(plan, cells=plan.cells[1:]),
        replace(plan, cells=(plan.cells[1], plan.cells[0], *plan.cells[2:])),
    ]
    assert len({plan.digest(), *(other.digest() for other in changed)}) == 1 + len(changed)


def test_a_filter_replaces_its_axis_in_every_block():
    plan = make_plan(
        QUICK,
        Filters(
            operators=["addmm"], dtypes=["fp16"], shapes=[(3, 5, 7)], distributions=["huge_range"]
        ),
    )
    assert axis(plan, "operator") == {"addmm"}
    assert axis(plan, "dtype") == {"fp16"}
    assert axis(plan, "shape") == {(3, 5, 7)}
    assert axis(plan, "distribution") == {"huge_range"}
    assert axis(plan, "site") == set(SITES) - set(UNCOVERED_SITES) - {"cached_checksum"}


def test_faults_are_chosen_by_name_or_kind_and_undirected_flips_by_request_only():
    for asked, expected in (
        (["inf", "flip-7", "flip-14-down"], {"inf", "flip-7-up", "flip-7-down", "flip-14-down"}),
        (["flip-7-any", "flip-31-any", "flip-3"], {"flip-7-any", "flip-3-up", "flip-3-down"}),
    ):
        filters = replace(BF16_OUTPUT, faults=asked)
        assert axis(make_plan(QUICK, filters), "fault") == expected
    everything = axis(make_plan(QUICK), "fault") | axis(
        make_plan(QUICK, replace(BF16_OUTPUT, faults=["flip"])), "fault"
    )
    assert not any(str(fault).endswith("any") for fault in everything)
