"""``holdfast plan ladder``: the whole configuration of a fleet, and its expected month."""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.progress import Progress

from holdfast import config
from holdfast.cli import plan_plots
from holdfast.cli.quantities import shown_duration, shown_steps
from holdfast.cli.tables import print_table, say, write_json, write_text
from holdfast.errors import ConfigError
from holdfast.logs import printable
from holdfast.planner import parity_groups
from holdfast.planner.detection import Looks
from holdfast.planner.fleet import LadderQuestion
from holdfast.planner.fleet_file import load_question
from holdfast.planner.ladder import LadderPlan, Month, plan_checkpoints, plan_ladder, stall_of
from holdfast.planner.simulate import Estimate, estimates, simulate
from holdfast.report.quantities import size

EXIT_INFEASIBLE = 1
SEEDS = 20
MOST_MONTHS = 1_000_000
_HOURS = ("training", "detecting", "saving", "recomputing", "restarting", "repairing", "lost")
_COUNTS = ("undetected_faults", "failures", "memory_losses")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subject ``ladder`` to the verb ``plan``."""
    parser = subparsers.add_parser(
        "ladder",
        help="plan everything at once from a file about the fleet, and write a config file",
        description="Compute how often to check, audit, shadow, snapshot and persist, and with how "
        "many parities, from a TOML file about the fleet, its faults, the model and the measured "
        "costs (docs/planning.md lists the fields), compared with checkpoints alone at their own "
        "best interval. Exit code 1 if the target of undetected faults cannot be met.",
    )
    add = parser.add_argument
    add("fleet", metavar="FILE", type=Path, help="a TOML file such as examples/fleet.toml")
    text = "write the plan as a config file, for holdfast run --config FILE or for scripts"
    add("--write", metavar="FILE", type=Path, help=text)
    text = f"also simulate N months with each plan, event by event (default {SEEDS})"
    add("--simulate", metavar="N", type=int, nargs="?", const=SEEDS, help=text)
    text = "random seed of the first simulated month (default 0)"
    add("--seed", metavar="S", type=int, default=0, help=text)
    text = "draw the lost hours of fleets of 1 to 100,000 devices"
    add("--plot", metavar="FILE", type=Path, help=text)
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if the target cannot be met, else 0."""
    if args.simulate is not None and args.simulate < 2:
        raise ConfigError(f"--simulate {args.simulate}: give at least 2 months for an interval")
    if args.simulate is not None and args.simulate > MOST_MONTHS:
        raise ConfigError(f"--simulate {args.simulate}: give at most {MOST_MONTHS} months")
    question = load_question(args.fleet)
    plans = {"ladder": plan_ladder(question), "checkpoints alone": plan_checkpoints(question)}
    simulated = _simulated(question, plans, args) if args.simulate else {}
    _print(question, plans, simulated)
    if args.plot is not None:
        plan_plots.draw_fleets(args.plot, question, plans["ladder"].configuration.looks)
        say(f"plot: {args.plot}")
    if args.write is not None:
        write_config(args.write, plans["ladder"], args.fleet)
        say(f"config: {args.write}; use it with: holdfast run --config {args.write} …")
    write_json(args.json, _document(question, plans, simulated))
    return 0 if plans["ladder"].feasible else EXIT_INFEASIBLE


def _simulated(
    question: LadderQuestion, plans: dict[str, LadderPlan], args: argparse.Namespace
) -> dict[str, dict[str, Estimate]]:
    found = {}
    with Progress(transient=True) as progress:
        for name, plan in plans.items():
            months: list[Month] = []
            seeds = range(args.seed, args.seed + args.simulate)
            for seed in progress.track(seeds, description=f"months of {name}"):
                months += simulate(question, plan.configuration, [seed])
            found[name] = estimates(months)
    return found


def write_config(path: Path, plan: LadderPlan, fleet: Path) -> None:
    """Write the settings of a plan as a config file that ``holdfast.config.load`` reads."""
    found, looks = plan.configuration, plan.configuration.looks
    tables: dict[str, dict[str, object]] = {
        "protect": {"frequency": _short(looks.check)},
        "attention": {name: _short(share) for name, share in (plan.attention or {}).items()},
        "guard": {"audit": _short(looks.audit), "shadow": _short(looks.shadow)},
        "snapshots": {
            "every": found.save_steps,
            "parities": found.parities or 0,
            "persist_every": found.persist_steps,
        },
    }
    config.parse({name: table for name, table in tables.items() if table})
    origin = f"holdfast plan ladder {printable(str(fleet))}"
    lines = [f"# By `{origin}`: defaults, which arguments in code override."]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {value}" for key, value in table.items())]
    write_text(path, "\n".join(lines) + "\n")


def _short(share: float) -> float:
    """Round up to six digits, so that the target of undetected faults is still met."""
    return min(1.0, -(-share * 1e6 // 1) / 1e6)


def _print(
    question: LadderQuestion,
    plans: dict[str, LadderPlan],
    simulated: dict[str, dict[str, Estimate]],
) -> None:
    for line in _described(question):
        print(line)
    plan, alone = plans.values()
    print_table(("setting", "plan", "costs"), _settings(question, plan), right=("plan",))
    columns = ["a month of 730 h"]
    for name in plans:
        columns += [name, *([f"simulated ({name})"] if simulated else [])]
    rows = [_row(name, f"{name}_h", plans, simulated) for name in _HOURS] + [
        _row(name.replace("_", " "), name, plans, simulated) for name in _COUNTS
    ]
    print_table(columns, rows, title="hours", right=columns[1:])
    every = shown_duration(alone.configuration.persist_steps * question.model.step_s)
    print(f"checkpoints alone: one every {every}, which is best for them; nothing is detected")
    target, met = question.undetected_target, "met" if plan.feasible else "NOT MET by any shares"
    print(f"target: {target:.3g} undetected silent faults a month, {met}")
    unseen = plan_ladder(question, Looks(0, 0, 0)).month
    print(
        f"detection costs {plan.month.detecting_h:.3g} h of it: without, the ladder would lose "
        f"{unseen.lost_h:.3g} h, and let {unseen.undetected_faults:.4g} silent faults through"
    )
    print(f"overhead of a healthy step: {100 * plan.month.overhead:.3g} %")
    for name, one in plans.items():
        for doubt in one.doubts:
            say(f"beware, {name}: {doubt}")


def _described(question: LadderQuestion) -> list[str]:
    fleet, model = question.fleet, question.model
    lines = [
        f"{fleet.devices} devices in {fleet.nodes} node{'s' * (fleet.nodes > 1)}, "
        f"{parity_groups.described(fleet.nodes, fleet.group_nodes)}; "
        f"{size(model.state_bytes)} of state in each; a step takes "
        f"{shown_duration(model.step_s)}"
    ]
    for kind, faults in question.faults.items():
        often = shown_duration(faults.mttf_s / faults.units(fleet))
        shape = "" if faults.shape == 1 else f", Weibull of shape {faults.shape:g}"
        each = shown_duration(faults.mttf_s)
        name = kind.replace("_", " ")
        lines.append(f"  {name}: every {often} in the fleet ({each} a {faults.per}{shape})")
    if question.assumed:
        values = [f"{name} = {_assumed(question, name)}" for name in question.assumed]
        lines.append(f"ASSUMED, as the file does not say: {', '.join(values)}")
    return lines


def _assumed(question: LadderQuestion, name: str) -> str:
    """Format the value of ``table.key``, or of a kind of fault, in four digits."""
    table, key = name.split(".")
    if table == "faults":
        return f"{question.faults[key].mttf_days:.4g} days a {question.faults[key].per}"
    return f"{getattr(getattr(question, table), key):.4g}"


def _settings(question: LadderQuestion, plan: LadderPlan) -> list[tuple[str, str, str]]:
    costs, found, step_s = question.costs, plan.configuration, question.model.step_s
    looks = found.looks
    shares = {
        "check": (looks.check, costs.check_s_per_step),
        "audit": (looks.audit, costs.audit_s_per_step),
        "shadow": (looks.shadow, costs.shadow_s_per_step),
    }
    rows = []
    for name, (share, cost) in shares.items():
        of_step = f"{100 * share * cost / step_s:.3g} % of a step"
        rows.append((f"{name}, share of steps", f"{share:.4g}", of_step))
    for name, share in (plan.attention or {}).items():
        rows.append((f"attention {name}, share of calls", f"{share:.4g}", "(Algorithm 1)"))
    assert found.parities is not None
    stall = shown_duration(stall_of(question, found.parities))
    unit_s, disk = step_s + looks.cost_s(question), shown_duration(costs.persist_s)
    return [
        *rows,
        ("snapshot", shown_steps(found.save_steps, unit_s), f"{stall} stall"),
        ("parities", str(found.parities), "that many nodes of a group may be lost"),
        ("persist", shown_steps(found.persist_steps, unit_s), f"{disk} of disk, beside training"),
    ]


def _row(
    label: str,
    name: str,
    plans: dict[str, LadderPlan],
    simulated: dict[str, dict[str, Estimate]],
) -> list[str]:
    cells = [label]
    for which, plan in plans.items():
        cells.append(f"{getattr(plan.month, name):.4g}")
        if which in simulated:
            found = simulated[which][name]
            cells.append(f"{found.mean:.4g} [{found.low:.4g}, {found.high:.4g}]")
    return cells


def _document(
    question: LadderQuestion,
    plans: dict[str, LadderPlan],
    simulated: dict[str, dict[str, Estimate]],
) -> dict[str, object]:
    return {
        "question": asdict(question),
        "plans": {
            name: asdict(plan) | {"lost_h": plan.month.lost_h, "overhead": plan.month.overhead}
            for name, plan in plans.items()
        },
        "simulated": {
            name: {key: asdict(one) for key, one in found.items()}
            for name, found in simulated.items()
        },
    }
