"""Faults put into computed products are those that the real interception would have seen."""

import pytest
import torch
from case_loops import for_each

from holdfast import sites
from holdfast.abft.gemm.reference import as_batch
from holdfast.inject.models import BURST_ELEMENTS, LANES, fault_model
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.campaign.effects import HARMFUL, MASKED
from holdfast_lab.campaign.end_to_end import clean_run, replay
from holdfast_lab.campaign.plan import DTYPES, PRODUCTS, injected_dtype
from holdfast_lab.campaign.programs import make_program
from holdfast_lab.campaign.strikes import Edit, strike
from holdfast_lab.campaign.workload import Problem, make_problem
from holdfast_lab.distributions import RANDOM

SHAPE = (6, 40, 24)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem_of(operator: str, dtype: str, distribution: str = "n01") -> Problem:
    program = make_program(operator, SHAPE, DTYPES[dtype], RANDOM[distribution], draw(3))
    return make_problem(program)


def faulty_output(problem: Problem, edit: Edit) -> torch.Tensor:
    """What the real program computes with a fault in it, unverified, as a batch."""
    role, seen = problem.program.role, []
    stage_of_edit = "output" if edit.target == "output" else "operand"

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if not site.endswith(f"/{role}"):
            return
        struck = {"output": output, "a": gemm.a, "b": gemm.b}[edit.target]
        if stage == stage_of_edit:
            place = as_batch(struck.data)[edit.index]
            seen.append((place, place.clone()))
            place.copy_(edit.values)
        if stage == "output":
            seen.append(as_batch(output).clone())

    with protect(problem.program.model, verify=False):
        sites.arm(hook)
        try:
            problem.program.run()
        finally:
            sites.disarm()
            place, held = seen[0]
            place.copy_(held)
    return seen[1]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def _watch(monkeypatch: pytest.MonkeyPatch, name: str, verified: list[torch.Tensor]) -> None:
    """Keep what the verification pass is given."""
    judge = getattr(Problem, name)

    def keep(self: Problem, c: torch.Tensor, *rest: object) -> object:
        verified.append(c.clone())
        return judge(self, c, *rest)

    monkeypatch.setattr(Problem, name, keep)


@for_each("dtype", DTYPES)
@for_each("operator", PRODUCTS)
@for_each("site", ["operand_a", "operand_b"])
@for_each("fault", ["flip sign", "near_inf"])
def test_emulated_operand_faults_are_what_the_kernel_computes(operator, dtype, site, fault):
    """Up to rounding: of the product's size, and of the damage's where that is huge."""
    problem, info = problem_of(operator, dtype), torch.finfo(DTYPES[dtype])
    name = fault if fault == "near_inf" else f"flip-{info.bits - 1}-up"
    verified: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for name_of_pass in ("suspects", "suspected"):
            _watch(patch, name_of_pass, verified)
        strikes = strike(problem, site, fault_model(name, DTYPES[dtype]), draw(), 4)
    assert len(strikes.effects) == 4
    for number in range(4):
        edit = strikes.edit(number)
        emulated = problem.c.double().clone()
        if site == "operand_a":  # one fault a row, all in one pass
            emulated[edit.index[:2]] = verified[0][edit.index[:2]].double()
        else:
            emulated = verified[number].double()
        real = faulty_output(problem, edit).double()
        assert (real != problem.c.double()).any()
        finite = emulated.isfinite() & real.isfinite()
        size = problem.c.double().abs().max() + emulated.abs()
        assert ((real - emulated).abs() <= 4 * info.eps * size)[finite].all()
        # Next to the largest number one rounding decides between finite and INF.
        large = (emulated.abs() > info.max / 2) & (real.abs() > info.max / 2)
        assert (large | (emulated.isnan() & real.isnan()))[~finite].all()


@for_each("dtype", DTYPES)
@for_each("operator", ["mm", "baddbmm", "linear", "linear_grad_weight"])
@for_each("fault", ["nan", "near_inf", "burst_elements", "row", "column"])
def test_output_faults_end_to_end_are_the_emulated_ones(operator, dtype, fault):
    problem = problem_of(operator, dtype)
    model = fault_model(fault, DTYPES[dtype])
    strikes = strike(problem, "output", model, draw(), 3)
    for number in range(3):
        edit = strikes.edit(number)
        real = faulty_output(problem, edit)
        assert torch.equal(bits(real[edit.index]), bits(edit.values))
        untouched = real.clone()
        untouched[edit.index] = problem.c[edit.index]
        assert torch.equal(bits(untouched), bits(problem.c))


@for_each("dtype", DTYPES)
def test_a_partial_sum_moves_its_element_by_its_own_change(dtype):
    """Partial sums of ones are small integers: known exactly in every dtype."""
    ones = lambda m, k, n, t, g: (torch.ones(m, k, dtype=t), torch.ones(k, n, dtype=t))  # noqa: E731
    problem = make_problem(make_program("mm", SHAPE, DTYPES[dtype], ones, draw()))
    struck = injected_dtype(DTYPES[dtype], "accumulator")
    model = fault_model(f"flip-{struck.itemsize * 8 - 1}-up", struck)  # S becomes −S: C loses 2 S
    strikes = strike(problem, "accumulator", model, draw(), 6)
    assert len(strikes.effects) == 6
    for number in range(6):
        row = strikes.edit(number).values.double()
        changed = row[row != SHAPE[1]]
        lost = (SHAPE[1] - changed) / 2
        assert len(changed) == 1
        assert 1 <= lost.item() <= SHAPE[1]
        assert lost.item() == round(lost.item())


@for_each("operator", PRODUCTS)
def test_extreme_values_are_found_and_repaired_bit_for_bit(operator):
    """And, with verification off, the same faults reach the result."""
    for dtype in DTYPES:
        problem = problem_of(operator, dtype)
        for site in ("output", "accumulator", "operand_a"):
            for fault in ("inf", "nan", "near_inf"):
                model = fault_model(fault, injected_dtype(DTYPES[dtype], site))
                strikes = strike(problem, site, model, draw(), 2)
                assert strikes.detected.all(), (dtype, site, fault)
                assert (strikes.effects == HARMFUL).all()
                outcome = replay(problem, strikes.edit(1))
                assert outcome.detected
                assert outcome.corrected
                assert not torch.equal(
                    bits(faulty_output(problem, strikes.edit(1))), bits(problem.c)
                )


@for_each("operator", PRODUCTS)
@for_each("dtype", DTYPES)
def test_clean_programs_are_silent(operator, dtype):
    program = make_program(operator, SHAPE, DTYPES[dtype], RANDOM["u11"], draw(9))
    run = clean_run(program.model, program.run)
    assert run.clean_rows >= SHAPE[0]
    assert run.false_alarms == 0
    problem = make_problem(program)
    assert not problem.suspects(problem.c).any()


@for_each("operator", ["mm", "bmm", "linear", "linear_grad_input"])
def test_a_damaged_operand_b_is_reported_and_stops_the_program(operator):
    problem = problem_of(operator, "fp32")
    strikes = strike(problem, "operand_b", fault_model("nan", torch.float32), draw(), 3)
    assert strikes.detected.all()
    for number in range(3):
        outcome = replay(problem, strikes.edit(number))
        assert outcome.detected
        assert not outcome.corrected
    assert problem.program.digest() == problem.clean_digest  # the operand was put back


def test_a_damaged_operand_a_in_memory_is_the_hole_that_it_is_said_to_be():
    problem = problem_of("mm", "fp32")
    model = fault_model("flip-30-up", torch.float32)
    seen = strike(problem, "operand_a", model, draw(), 6)
    unseen = strike(problem, "operand_a_memory", model, draw(), 6)
    assert len(seen.effects) == len(unseen.effects) > 0
    assert torch.equal(seen.effects, unseen.effects)
    assert (unseen.effects == HARMFUL).all()
    assert seen.detected.all()
    moderate = fault_model("flip-31-up", torch.float32)
    unseen = strike(problem, "operand_a_memory", moderate, draw(), 6)
    assert not unseen.detected.any()
    assert not replay(problem, unseen.edit(0)).detected


@for_each("site", ["checksum", "cached_checksum"])
def test_a_damaged_checksum_is_found_and_heals(site):
    problem = problem_of("linear", "fp32")
    strikes = strike(problem, site, fault_model("inf", torch.float64), draw(), 4)
    assert (strikes.effects == MASKED).all()
    assert strikes.detected.all()
    outcome = replay(problem, strikes.edit(0), kept=site == "cached_checksum")
    assert outcome.detected
    assert outcome.corrected


def test_damaged_statistics_never_harm_and_are_reported_as_emulated():
    problem = problem_of("linear", "fp32")
    for fault in ("nan", "flip-63-up", "random_value"):
        strikes = strike(problem, "statistics", fault_model(fault, torch.float64), draw(), 8)
        assert (strikes.effects == MASKED).all()
        for number in range(8):
            outcome = replay(problem, strikes.edit(number))
            assert outcome.corrected
            assert outcome.detected == strikes.detected[number]


@for_each(
    ("fault", "count", "stride"),
    [
        ("random_value", 1, 1),
        ("burst_elements", BURST_ELEMENTS, 1),
        ("stuck_at_1", SHAPE[2] // LANES, LANES),
        ("row", SHAPE[2], 1),
    ],
)
def test_extents_strike_the_elements_they_name(fault, count, stride):
    problem = problem_of("mm", "fp64")
    places = set()
    for seed in range(60):
        strikes = strike(problem, "output", fault_model(fault, torch.float64), draw(seed), 6)
        for number in range(6):
            edit = strikes.edit(number)
            changed = (edit.values != problem.c[edit.index]).nonzero().flatten().tolist()
            assert len(changed) <= count
            assert all((place - changed[0]) % stride == 0 for place in changed)
            assert not changed or changed[-1] - changed[0] <= stride * (count - 1)
            places.update(changed)
    assert places == set(range(SHAPE[2]))


def test_a_column_fault_strikes_all_rows_of_one_column():
    problem = problem_of("bmm", "fp64")
    strikes = strike(problem, "output", fault_model("column", torch.float64), draw(), 5)
    for number in range(5):
        edit = strikes.edit(number)
        assert edit.index[1] == slice(None)
        assert (edit.values != problem.c[edit.index]).all()


def test_flips_only_strike_elements_whose_bit_can_flip():
    problem = problem_of("mm", "fp32")
    for fault, sign in (("flip-31-up", 1), ("flip-31-down", -1)):
        strikes = strike(problem, "output", fault_model(fault, torch.float32), draw(), 6)
        for number in range(len(strikes.effects)):
            edit = strikes.edit(number)
            old = problem.c[edit.index]
            changed = edit.values != old
            assert changed.sum() == 1
            assert (old[changed].sign() == sign).all()
    positive = make_problem(make_program("mm", SHAPE, torch.float32, RANDOM["u01"], draw()))
    model = fault_model("flip-31-down", torch.float32)
    assert len(strike(positive, "output", model, draw(), 6).effects) == 0
    assert len(strike(positive, "operand_b", model, draw(), 6).effects) == 0
