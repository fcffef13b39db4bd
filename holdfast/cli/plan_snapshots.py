"""``holdfast plan snapshots``: how often to snapshot and to persist, and how long memory lasts."""

import argparse
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path

from holdfast.cli import plan_plots
from holdfast.cli.quantities import (
    duration_s,
    shown_duration,
    shown_steps,
    size_bytes,
    speed_bytes_s,
)
from holdfast.cli.tables import print_table, say, write_json
from holdfast.errors import ConfigError
from holdfast.planner import parity_groups
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.planner.snapshots import (
    SECONDS_PER_DAY,
    Costs,
    Fleet,
    SnapshotPlan,
    Speeds,
    plan_snapshots,
    snapshot_costs,
)
from holdfast.planner.survival import Survival
from holdfast.report.quantities import size

EXIT_NO_PROGRESS = 1
MOST_PARITIES = 2
MOST_NODES = 1_000_000
_COLUMNS = (
    *("saved by", "snapshot, steps", "persist, steps", "memory lost every"),
    *("saving h", "recomputing h", "restarting h", "lost h", "survives"),
)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subject ``snapshots`` to the verb ``plan``."""
    parser = subparsers.add_parser(
        "snapshots",
        help="how often to snapshot and to persist",
        description="Compute after how many steps to snapshot into memory and to persist to disk, "
        "what failures then cost a month, and how long memory keeps the state (REFT, section 5 and "
        "appendix A). Times are like 700ms, 90s, 5m, 12h, 30d; sizes like 4GB or 4GiB. Exit code 1 "
        "if failures cost more time than is left to train.",
    )
    fleet = parser.add_argument_group("the fleet").add_argument
    fleet("--nodes", metavar="N", type=int, required=True, help="number of nodes of the job")
    fleet("--group", metavar="N", type=int, help="most nodes of a parity group (default 8)")
    text = "lost nodes that a group rebuilds (default 1; 0 in a group of one)"
    fleet("--parities", metavar="R", type=int, help=text)
    text = "mean time until a node and its memory are lost"
    fleet("--mttf", metavar="TIME", required=True, help=text)
    text = "mean time until a node's trainer dies and its memory stays (default never)"
    fleet("--software-mttf", metavar="TIME", help=text)
    job = parser.add_argument_group("the job").add_argument
    text = "parameters and optimizer state of one group"
    job("--state", metavar="SIZE", required=True, help=text)
    text = "time of a training step without a save"
    job("--step", metavar="TIME", required=True, help=text)
    text = "time of forward and backward, beside which a save is free (default the step)"
    job("--compute", metavar="TIME", help=text)
    costs = parser.add_argument_group("costs of saving and restoring, on each node").add_argument
    text = "measured time by which a snapshot lengthens a step, instead of --copy-rate"
    costs("--stall", metavar="TIME", help=text)
    text = "speed of copies into memory (default 5GB/s)"
    costs("--copy-rate", metavar="SPEED", default="5GB/s", help=text)
    text = "speed of the disk (default 250MB/s)"
    costs("--disk-rate", metavar="SPEED", default="250MB/s", help=text)
    text = "share of the time in which the disk may write checkpoints (default 0.1)"
    costs("--disk-share", metavar="S", type=float, default=0.1, help=text)
    text = "speed of the network between nodes (default 1GB/s)"
    costs("--network-rate", metavar="SPEED", default="1GB/s", help=text)
    text = "time from a failure until all nodes run again (default 1m)"
    costs("--restart", metavar="TIME", default="1m", help=text)
    text = "probability of survival for which the time is printed (default 0.9)"
    parser.add_argument("--survival", metavar="P", type=float, default=0.9, help=text)
    text = "c of the Weibull curves, not of the intervals (default 1: a constant rate)"
    parser.add_argument("--shape", metavar="C", type=float, default=1.0, help=text)
    text = "draw the probability of survival over days (REFT's figure 8)"
    parser.add_argument("--plot", metavar="FILE", type=Path, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Question:
    """The inputs of the plan, in seconds and bytes."""

    fleet: Fleet
    parities: int
    state_bytes: float
    step_s: float
    compute_s: float
    stall_s: float | None
    speeds: Speeds
    disk_share: float
    restart_s: float
    survival: float
    shape: float

    def costs(self, parities: int | None, *, blocking: bool = False) -> Costs:
        """Estimate the costs; a measured stall is scaled to the bytes that other parities copy."""
        costs = snapshot_costs(
            self.state_bytes,
            self.fleet,
            self.speeds,
            self.compute_s,
            self.restart_s,
            parities,
            disk_share=self.disk_share,
            blocking=blocking,
        )
        if self.stall_s is None:
            return costs
        stall = self.stall_s * (1 + (parities or 0)) / (1 + self.parities)
        if parities is not None:
            return replace(costs, snapshot_stall_s=stall)
        return replace(costs, persist_stall_s=stall + (costs.persist_stall_s if blocking else 0))

    def plan(self, parities: int | None, *, blocking: bool = False) -> SnapshotPlan:
        """Plan for a number of parity blocks; None plans with checkpoints on disk alone."""
        costs = self.costs(parities, blocking=blocking)
        return plan_snapshots(self.fleet, costs, self.step_s, parities)

    def all_plans(self) -> dict[str, SnapshotPlan]:
        """Make the plans to compare, by what saves the state."""
        fits = range(min(MOST_PARITIES + 1, self.fleet.group))
        return {
            "checkpoints, training waits": self.plan(None, blocking=True),
            "checkpoints in background": self.plan(None),
        } | {_with_parities(r): self.plan(r) for r in fits}


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if more time is lost than trained, else 0."""
    question = _question(args)
    plans = question.all_plans()
    curves = question.fleet.survival(question.shape)
    times = {name: _survives(curves, one, question.survival) for name, one in plans.items()}
    plan = plans[_with_parities(question.parities)]
    _print(question, plans, times)
    if args.plot is not None:
        parities = [one.parities for one in plans.values() if one.parities is not None]
        plan_plots.draw_survival(args.plot, curves, parities, question.survival)
        say(f"plot: {args.plot}")
    write_json(args.json, _document(question, plans, times))
    return EXIT_NO_PROGRESS if plan.lost.total >= 1 else 0


def _question(args: argparse.Namespace) -> Question:
    def seconds(name: str) -> float | None:
        given = getattr(args, name.replace("-", "_"))
        return None if given is None else duration_s(given, f"--{name}")

    def speed(name: str) -> float:
        return speed_bytes_s(getattr(args, name.replace("-", "_")), f"--{name}")

    if not 1 <= args.nodes <= MOST_NODES:
        raise ConfigError(f"--nodes {args.nodes}: give 1 to {MOST_NODES}")
    software = seconds("software-mttf")
    group = min(args.nodes, GROUP_NODES if args.group is None else args.group)
    mttf_s = duration_s(args.mttf, "--mttf")
    fleet = Fleet(args.nodes, group, mttf_s, inf if software is None else software)
    step_s = duration_s(args.step, "--step")
    compute = seconds("compute")
    parities = min(1, group - 1) if args.parities is None else args.parities
    _check(args.survival, parities, group)
    return Question(
        fleet=fleet,
        parities=parities,
        state_bytes=size_bytes(args.state, "--state"),
        step_s=step_s,
        compute_s=step_s if compute is None else compute,
        stall_s=seconds("stall"),
        speeds=Speeds(speed("copy-rate"), speed("disk-rate"), speed("network-rate")),
        disk_share=args.disk_share,
        restart_s=duration_s(args.restart, "--restart"),
        survival=args.survival,
        shape=args.shape,
    )


def _check(probability: float, parities: int, group: int) -> None:
    if not 0 <= parities <= min(MOST_PARITIES, group - 1):
        raise ConfigError(
            f"--parities {parities}: a group of {group} can have 0 to "
            f"{min(MOST_PARITIES, group - 1)}"
        )
    if not 0.0 < probability < 1.0:
        raise ConfigError(f"--survival {probability} must be more than 0 and less than 1")


def _with_parities(count: int) -> str:
    kind = {0: "no parity", 1: "1 parity"}.get(count, f"{count} parities")
    return f"snapshots, {kind}"


def _survives(curves: Survival, plan: SnapshotPlan, probability: float) -> float:
    """Return the days until survival without another save has fallen to ``probability``."""
    if plan.parities is None:
        return curves.time_with_checkpoints(probability)
    return curves.time_with_snapshots(probability, plan.parities)


def _print(question: Question, plans: dict[str, SnapshotPlan], times: dict[str, float]) -> None:
    fleet, costs = question.fleet, question.costs(question.parities)
    name = _with_parities(question.parities)
    plan = plans[name]
    print(
        f"{fleet.nodes} nodes in {parity_groups.described(fleet.nodes, fleet.group)}, "
        f"{size(question.state_bytes)} each; a step takes {shown_duration(question.step_s)}"
    )
    deaths = f", its trainer alone dies every {shown_duration(fleet.software_mttf_s)}"
    print(
        f"a node is lost every {shown_duration(fleet.mttf_s)}"
        f"{deaths if isfinite(fleet.software_mttf_s) else ''}: the job fails every "
        f"{shown_duration(1 / fleet.failures_per_s)}"
    )
    source = "modelled; measure yours for --stall" if question.stall_s is None else "measured"
    print(
        f"costs: snapshot stall {shown_duration(costs.snapshot_stall_s)} ({source}), restart "
        f"{shown_duration(costs.restart_s)}, rebuild {shown_duration(costs.rebuild_s)}, reload "
        f"{shown_duration(costs.reload_s)}; checkpoints at least "
        f"{shown_duration(costs.persist_s)} apart ({question.disk_share:g} of the disk's time)"
    )
    rows = [_row(which, one, question.step_s, times[which]) for which, one in plans.items()]
    columns = (*_COLUMNS[:-1], f"{question.survival:g} survives unrepaired")
    print_table(columns, rows, title="hours lost a month", right=columns[1:])
    assert plan.snapshot_steps is not None
    snapshot = shown_steps(plan.snapshot_steps, question.step_s)
    persist = shown_steps(plan.persist_steps, question.step_s)
    print(f"plan with {name}: snapshot {snapshot}, persist {persist}")
    print(f"expected loss: {plan.lost.hours_per_month:.3g} h a month of 730 h")
    if plan.lost.total >= 1:
        print("NO PROGRESS: more time is lost than trained; fewer nodes, or a larger --mttf")


def _row(name: str, plan: SnapshotPlan, step_s: float, days: float) -> list[str]:
    lost = plan.lost
    share = lost.hours_per_month / lost.total if lost.total else 0.0
    loss = 1 / plan.memory_losses_per_s if plan.memory_losses_per_s else inf
    return [
        name,
        "" if plan.snapshot_steps is None else _cell(plan.snapshot_steps, step_s),
        _cell(plan.persist_steps, step_s),
        shown_duration(loss) if plan.parities is not None else "",
        *(f"{share * part:.3g}" for part in (lost.saving, lost.recomputing, lost.restarting)),
        f"{lost.hours_per_month:.3g}",
        shown_duration(days * SECONDS_PER_DAY),
    ]


def _cell(count: int, step_s: float) -> str:
    return f"{count} ({shown_duration(count * step_s)})"


def _document(
    question: Question, plans: dict[str, SnapshotPlan], times: dict[str, float]
) -> dict[str, object]:
    made = {
        name: asdict(plan) | {"lost_hours_per_month": plan.lost.hours_per_month}
        for name, plan in plans.items()
    }
    return {
        "question": asdict(question),
        "costs": asdict(question.costs(question.parities)),
        "plan": made[_with_parities(question.parities)],
        "compared": {name: made[name] | {"survives_days": times[name]} for name in plans},
    }
