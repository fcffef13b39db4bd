"""``sdc.mitigation``: the outcome of training on each unhealthy node with each mitigation.

Three data-parallel ranks train a small GPT on real text, with rank 1 on the node. Its errors come
in the paper's bursts, inside and outside of matmuls. They either repeat bit for bit when a pass is
repeated, so that a rerun does not find them, or they do not. Each training is compared with the
same one on healthy ranks. The paper measures nothing of the kind: it proposes recomputation
(section 7).

The full ladder is verified products, the Guard, and a shadow of every step. With a lower rate,
wrong results of steps without an audit would be applied.
"""

from collections.abc import Iterator

from holdfast_lab.emulation.profile import BURST_EVERY_STEPS, NODES
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study, watched
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.ranks import DEFENCES, LADDER, RERUN, UNHEALTHY, Job, Outcome, outcomes
from holdfast_lab.study.sdc.subjects import SMALL, TINY

HEALTHY = "healthy ranks"
REPEAT, CHANGE = "errors that repeat", "errors that do not repeat"
EQUAL, DISTANCE = "weights bit-equal", "‖θ' − θ‖"
LOSS, DONE, STRUCK = "loss off, in the end", "steps done", "wrong values"
CAUGHT = {
    "gemm_fault": "repaired by checksums",
    "rerun": "steps repeated",
    "shadow_mismatch": "steps put right by shadows",
}


def jobs_for(nodes: tuple[int, ...]) -> list[Job]:
    """List the jobs: a healthy training under each defence, then one on each node."""
    repeat = [Job(defence, node, persistent=True) for node in nodes for defence in DEFENCES]
    change = [Job(defence, node) for node in nodes for defence in (RERUN, LADDER)]
    return [*(Job(defence) for defence in DEFENCES), *repeat, *change]


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, TINY, SMALL)
    steps = settings.choose(3, 12, 6 * BURST_EVERY_STEPS)
    nodes = settings.choose((7,), tuple(NODES), tuple(NODES))
    jobs = jobs_for(nodes)
    healthy: Outcome | None = None
    with outcomes(size, steps, settings.seed, jobs) as found:
        for job in watched(jobs, progress):
            outcome = next(found)
            healthy = healthy or outcome
            yield _row(job, outcome, healthy)


def _row(job: Job, outcome: Outcome, healthy: Outcome) -> Row:
    table = (REPEAT if job.persistent else CHANGE) if job.node else HEALTHY
    case: Case = {"node": job.node or "healthy", "defence": job.defence}
    measured = {
        EQUAL: float(outcome.equal),
        DONE: float(outcome.steps),
        STRUCK: float(outcome.struck),
        **{title: float(outcome.events[kind]) for kind, title in CAUGHT.items()},
    }
    if outcome.steps == healthy.steps:
        measured[DISTANCE] = outcome.distance
        measured[LOSS] = abs(outcome.losses[-1] - healthy.losses[-1])
    published = {EQUAL: paper.RECOMPUTED} if job.defence == LADDER else {}
    notes = [f"evict rank {rank}" for rank in outcome.evicted]
    notes += ["stopped before a wrong step was applied"] if outcome.stopped else []
    return Row(table, case, measured, published, ", ".join(notes))


def _verdict(rows: list[Row]) -> str:
    """Check that the full ladder ends bit-equal to the healthy training and names the right rank.

    No defence may act on healthy ranks, and only the unhealthy rank may be evicted.
    """
    for row in rows:
        where = f"{row.case['defence']} on node {row.case['node']}, {row.table}"
        if row.case["defence"] == LADDER and not row.measured[EQUAL]:
            return f"{where}: does not end as the healthy training"
        caught = any(row.measured[title] for title in CAUGHT.values())
        if row.table == HEALTHY and (caught or not row.measured[EQUAL]):
            return f"{where}: a healthy training is not left alone"
        if row.note.count("evict") > row.note.count(f"evict rank {UNHEALTHY}"):
            return f"{where}: {row.note}, which is healthy"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Draw the distance of the weights from the healthy ones and the steps of each training."""
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (table, quantity) in zip(panels, ((REPEAT, DISTANCE), (CHANGE, DONE)), strict=True):
        for number, defence in enumerate(DEFENCES):
            chosen = [row for row in rows if row.table == table and row.case["defence"] == defence]
            if chosen:
                style = f"C{number}{'o-'[: 1 + (quantity == DISTANCE)]}"
                line(axes, chosen, "node", quantity, style, label=defence, markersize=4)
        axes.set(ylabel=quantity, title=table)
        axes.legend(fontsize="x-small")
    panels[0].set_yscale("symlog", linthresh=1e-8)  # 0 is bit-equal
    panels[1].set(xlabel="node")


STUDY = Study(
    name="sdc.mitigation",
    paper="SDC study, section 7",
    reproduces="recomputation, which the paper proposes: what a training on each unhealthy node "
    "ends with, unprotected, under each defence and under all of them",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)
