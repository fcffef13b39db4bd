"""``holdfast plan attention``: the share of executions in which to check each section."""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.cli import plan_plots
from holdfast.cli.tables import print_table, say, write_json
from holdfast.errors import ConfigError
from holdfast.planner.attention import (
    MODELS,
    SECTIONS,
    AttentionSize,
    CheckCosts,
    check_reads,
    gemm_flops,
    modelled_costs,
    parse_costs,
)
from holdfast.planner.frequencies import (
    ErrorRates,
    FrequencyPlan,
    Section,
    bearable_factor,
    plan_frequencies,
    sections_of,
)
from holdfast.planner.vulnerability import Vulnerability, parse, published
from holdfast.text_files import UNPARSABLE, read_text

EXIT_INFEASIBLE = 1
FLOPS_OF_RATES = 1e25
DEFAULT_MODEL = "bert-base"
_SIZES = ("width", "heads", "kv_heads", "head_size")
_COLUMNS = ("section", "GEMMs", "flops", "harm unchecked", "check costs", "frequency")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subject ``attention`` to the verb ``plan``."""
    parser = subparsers.add_parser(
        "attention",
        help="how often to check the sections of attention",
        description="Compute in which share of its executions to check each protection section of "
        "attention, so that the target of failures is met at the least cost (ATTNChecker, "
        "Algorithm 1). Exit code 1 if the target is not met by checking everything.",
    )
    add = parser.add_argument
    text = f"model whose sizes and vulnerability are used (default {DEFAULT_MODEL})"
    add("--model", choices=MODELS, help=text)
    for name in _SIZES:
        option, text = f"--{name.replace('_', '-')}", "size to use instead of the model's"
        add(option, metavar="N", type=int, help=text)
    add("--batch", metavar="N", type=int, default=16, help="number of sequences (default 16)")
    text = "number of tokens of each sequence (default 128)"
    add("--length", metavar="N", type=int, default=128, help=text)
    for kind in ("inf", "nan", "near-inf"):
        text = "errors per 1e25 flops (default 20)"
        add(f"--rate-{kind}", metavar="R", type=float, default=20.0, help=text)
    text = "largest probability of failure of an execution of attention (default 1e-11)"
    add("--target", metavar="P", type=float, default=1e-11, help=text)
    text = "JSON of measured seconds: S_AS, S_CL, S_O, and optionally attention and step"
    add("--costs", metavar="FILE", type=Path, help=text)
    text = "JSON of P(non-trainable | error): {model: {gemm: {type: probability}}}"
    add("--phi", metavar="FILE", type=Path, help=text)
    add("--plot", metavar="FILE", type=Path, help="draw the plan over the error rate")
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Question:
    """The inputs of the plan and a description of their sources."""

    name: str
    size: AttentionSize
    rates: ErrorRates
    target: float
    costs: CheckCosts
    costs_source: str
    phi: Vulnerability
    phi_source: str

    def sections(self, factor: float = 1.0) -> tuple[Section, ...]:
        """Return the sections with all error rates multiplied by ``factor``."""
        return sections_of(self.size, self.rates.scaled(factor), self.phi, self.costs)

    def plan(self, factor: float = 1.0) -> FrequencyPlan:
        """Plan the frequencies with all error rates multiplied by ``factor``."""
        return plan_frequencies(self.sections(factor), self.target)

    def bearable(self, frequency: float) -> float:
        """Return the largest factor of the error rates at which this frequency meets the target."""
        return bearable_factor(self.size, self.rates, self.phi, self.target, frequency)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if the target cannot be met, else 0."""
    question = _question(args)
    if args.plot is not None and question.rates.total == 0.0:
        raise ConfigError("--plot draws over the error rate: give a --rate-… above 0")
    plan = question.plan()
    _print(question, plan)
    if args.plot is not None:
        plan_plots.draw_frequencies(
            args.plot, question.plan, question.rates, question.costs, _limits(question)
        )
        say(f"plot: {args.plot}")
    write_json(args.json, _document(question, plan))
    return 0 if plan.feasible else EXIT_INFEASIBLE


def _question(args: argparse.Namespace) -> Question:
    own = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    for name, value in own.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    model = args.model or ("" if own else DEFAULT_MODEL)
    if not model and not {"width", "heads"} <= set(own):
        raise ConfigError("sizes without --model: give both --width and --heads")
    name = "own sizes"
    if model:
        name = f"{model}, resized" if own else model
        _, width, heads = MODELS[model]
        own = {"width": width, "heads": heads} | own
    size = AttentionSize(args.batch, args.length, **own)
    rates = (args.rate_inf, args.rate_nan, args.rate_near_inf)
    return Question(
        name,
        size,
        ErrorRates(*(rate / FLOPS_OF_RATES for rate in rates)),
        args.target,
        *_costs(args, size),
        *_vulnerability(args, model),
    )


def _vulnerability(args: argparse.Namespace, model: str) -> tuple[Vulnerability, str]:
    if args.phi is not None:
        whose = args.model or "the largest of all models"
        return parse(_read(args.phi), args.model or ""), f"{args.phi}, {whose}"
    return published(model), f"ATTNChecker's Table 3, {model or 'the largest of all models'}"


def _costs(args: argparse.Namespace, size: AttentionSize) -> tuple[CheckCosts, str]:
    if args.costs is not None:
        return parse_costs(_read(args.costs)), f"measured, {args.costs}"
    source = "ATTNChecker's 11 % of attention and 7 % of the step, split by what checks read"
    return modelled_costs(size), f"modelled: {source}"


def _read(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a JSON file") from error
    except UNPARSABLE as error:
        raise ConfigError(f"{path} is no JSON: {error}; see --help for what it holds") from error


def _print(question: Question, plan: FrequencyPlan) -> None:
    size, flops = question.size, gemm_flops(question.size)
    print(
        f"{question.name}: batch {size.batch}, length {size.length}, width {size.width}, "
        f"{size.heads} heads of {size.head_size} ({size.kv_heads} of keys and values); "
        f"{sum(flops.values()):.3g} flops an execution"
    )
    rates = {kind: rate * FLOPS_OF_RATES for kind, rate in asdict(question.rates).items()}
    print("errors per 1e25 flops: " + ", ".join(f"{kind} {rate:g}" for kind, rate in rates.items()))
    say(f"vulnerability: {question.phi_source}")
    say(f"costs: {question.costs_source}")
    rows = [_row(section, plan, question, flops) for section in question.sections()]
    print_table(_COLUMNS, rows, right=_COLUMNS[2:])
    met = "met" if plan.feasible else "NOT MET, even by checking everything"
    print(f"target: {plan.target:g} failures an execution, {met}")
    print(
        f"failures: {plan.failure:.3g} planned, {plan.unchecked_failure:.3g} without checks, "
        f"{plan.least_failure:.3g} with all"
    )
    for line in _overheads(question.costs, plan):
        print(line)
    for line in _range(question):
        print(line)


def _row(
    section: Section, plan: FrequencyPlan, question: Question, flops: dict[str, int]
) -> list[str]:
    gemms = SECTIONS[section.name]
    return [
        section.name,
        " ".join(gemms),
        f"{sum(flops[gemm] for gemm in gemms):.3g}",
        f"{section.exposed:.3g}",
        _cost(section.cost, question.costs),
        f"{plan.frequencies[section.name]:.4g}",
    ]


def _cost(cost: float, costs: CheckCosts) -> str:
    """Format a cost as a share of attention if its time is known, else in seconds."""
    return f"{100 * cost / costs.attention:.3g} %" if costs.attention else f"{cost:.3g} s"


def _overheads(costs: CheckCosts, plan: FrequencyPlan) -> list[str]:
    lines = [
        f"expected overhead: {100 * plan.cost / whole:.3g} % of {name} "
        f"(all checks {100 * plan.full_cost / whole:.3g} %)"
        for name, whole in (("attention", costs.attention), ("the step", costs.step))
        if whole
    ]
    if lines:
        return lines
    return [
        f"expected overhead: {plan.cost:.3g} s an execution (all checks {plan.full_cost:.3g} s)"
    ]


def _limits(question: Question) -> tuple[float, float]:
    """Return the largest factors of the error rates for which no checks and all checks suffice."""
    return question.bearable(0.0), question.bearable(1.0)


def _range(question: Question) -> list[str]:
    if question.rates.total == 0.0:
        return ["without errors no checks are needed"]
    needed, enough = _limits(question)
    return [
        f"no checks are needed up to {needed:.3g} times these rates, "
        f"none suffice above {enough:.3g} times"
    ]


def _document(question: Question, plan: FrequencyPlan) -> dict[str, object]:
    needed, enough = _limits(question)
    return {
        "model": question.name,
        "size": asdict(question.size),
        "flops": gemm_flops(question.size),
        "check_reads": check_reads(question.size),
        "rates_per_flop": asdict(question.rates),
        "vulnerability": {gemm: dict(types) for gemm, types in question.phi.items()},
        "vulnerability_source": question.phi_source,
        "costs": asdict(replace(question.costs, sections=dict(question.costs.sections))),
        "costs_source": question.costs_source,
        "sections": [asdict(section) for section in question.sections()],
        "plan": asdict(plan) | {"feasible": plan.feasible},
        "bearable_factor": {"without_checks": needed, "with_all_checks": enough},
    }
