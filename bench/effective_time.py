"""Effective training time of a job of 1,024 nodes × 8 devices at published failure rates.

    python -m bench.effective_time [--months 40] [--restart-s 15 60 180 600]

Months of a run are simulated event by event (``holdfast.planner.simulate``) under three policies,
each at its own best intervals: checkpoints alone, copies in the memory of a pair of nodes, and
groups of eight nodes with parities. A row is the share of time in which steps that are kept were
computed, with a 95 % interval over months, by what a restart costs until training runs again.

Assumptions, which are in each row: Llama 3's rate of interruptions (419 in 54 days of 16,384
devices), half of which lose a node's memory; a state of 5.7 TB (405 · 10⁹ parameters of 14 bytes)
that is sharded over all nodes, and steps of 20 s; copies, networks and disks of 5, 1 and 0.25 GB/s
a node, the planner's defaults. A node reads no more than its own part of a checkpoint. Silent
faults and checks are left out, because the other policies have neither. ByteRobust's published
figure is 0.97 on 9,600 devices; its failures, models and definition of effective time differ.
"""

import argparse
from dataclasses import asdict

from rich.progress import track

from bench.rows import record
from holdfast.planner import fleet
from holdfast.planner.detection import MONTH_S, Looks
from holdfast.planner.ladder import LadderPlan, plan_checkpoints, plan_ladder
from holdfast.planner.simulate import Estimate, estimates, simulate

NODES, DEVICES_PER_NODE = 1024, 8
GROUPS = {"pairs in memory": 2, "groups of 8 with parities": 8}
STEP_S, STATE_BYTES = 20.0, 405e9 * 14
SPEEDS = fleet.LadderSpeeds()
NEVER = fleet.Faults(float("inf"))
FAULTS = dict.fromkeys(fleet.KINDS, NEVER) | {
    kind: fleet.KINDS[kind] for kind in ("crash", "node_loss")
}


def question(group_nodes: int, restart_s: float) -> fleet.LadderQuestion:
    """Return the job with groups of this size and this cost of a restart."""
    node_bytes = STATE_BYTES / NODES
    return fleet.LadderQuestion(
        fleet.Devices(NODES * DEVICES_PER_NODE, DEVICES_PER_NODE, group_nodes),
        fleet.Model(STEP_S, node_bytes * group_nodes),
        FAULTS,
        costs=fleet.LadderCosts(
            restart_s=restart_s,
            restore_s=node_bytes / SPEEDS.copy_bytes_per_s,
            rebuild_s=node_bytes * (group_nodes - 1) / SPEEDS.network_bytes_per_s,
            reload_s=node_bytes / SPEEDS.disk_bytes_per_s,
        ),
        speeds=SPEEDS,
    )


def plans(restart_s: float) -> dict[str, tuple[fleet.LadderQuestion, LadderPlan]]:
    """Return each policy with the question that it answers and its best intervals."""
    asked = question(max(GROUPS.values()), restart_s)
    found = {"checkpoints alone": (asked, plan_checkpoints(asked))}
    for name, nodes in GROUPS.items():
        asked = question(nodes, restart_s)
        found[name] = asked, plan_ladder(asked, Looks(0, 0, 0))
    return found


def row(
    asked: fleet.LadderQuestion, plan: LadderPlan, found: dict[str, Estimate]
) -> dict[str, object]:
    """Return what the simulated months have shown, with every assumption."""
    hours, kept = MONTH_S / 3600, found["training_h"]
    return {
        "effective": round(kept.mean / hours, 4),
        "interval": [round(kept.low / hours, 4), round(kept.high / hours, 4)],
        "expected": round(plan.month.training_h / hours, 4),
        "failures_a_month": round(found["failures"].mean, 1),
        "memory_losses_a_month": round(found["memory_losses"].mean, 2),
        "parities": plan.configuration.parities,
        "save_steps": plan.configuration.save_steps,
        "persist_steps": plan.configuration.persist_steps,
        "model": asdict(asked.model),
        "costs": {name: round(cost, 2) for name, cost in asdict(asked.costs).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Effective training time of a simulated job.")
    parser.add_argument("--months", type=int, default=40)
    parser.add_argument("--restart-s", type=float, nargs="+", default=[15.0, 60.0, 180.0, 600.0])
    options = parser.parse_args()
    for restart_s in options.restart_s:
        for name, (asked, plan) in plans(restart_s).items():
            seeds = track(range(options.months), description=f"{name}, {restart_s:g} s")
            found = estimates(simulate(asked, plan.configuration, seeds))
            said = {"policy": name, "restart_s": restart_s, "months": options.months}
            record("effective_time", said | row(asked, plan, found))


if __name__ == "__main__":
    main()
