"""The status of a snapshot management process (SMP) as names and values for people."""

from holdfast.report.quantities import duration, size
from holdfast.snapshot.node.launch import Status

Rows = list[tuple[str, str]]


def smp_rows(smp: Status) -> Rows:
    """Return the snapshots in an SMP's memory, its ranks, the other nodes and its persister."""
    begun = max((step for steps in smp["steps"] for step in steps), default=-1)
    newest = "none yet"
    if smp["newest"] is not None:
        behind = f"{begun - smp['newest']} steps begun since"
        newest = f"step {smp['newest']:,}, {duration(smp['age_s'])} old, {behind}"
    speed = smp["copy_bytes_s"]
    rows = [
        ("SMP", f"process {smp['pid']}, up {duration(smp['uptime_s'])}"),
        ("state", smp["state"]),
        ("newest clean snapshot", newest),
        ("clean steps", ", ".join(map(str, smp["clean"][0])) or "none"),
        ("ranks connected", f"{sum(smp['connected'])} of {len(smp['connected'])}"),
        ("committed, aborted", f"{smp['commits']}, {smp['aborts']}"),
        ("memory", size(smp["bytes"])),
        ("last copy", f"{size(speed)}/s" if speed else "unknown"),
        ("training waited", f"{duration(smp['stall_s'])} in all"),
    ]
    return rows + _cluster_rows(smp) + _persister_rows(smp)


def _cluster_rows(smp: Status) -> Rows:
    cluster = smp["cluster"]
    if cluster is None:
        return [("other nodes", "none: this one is on its own")]
    states = (f"{node}: {state}" for node, state in sorted(smp["peers"].items()))
    return [
        ("nodes", f"this is {cluster['node']} of {cluster['nodes']}, epoch {cluster['epoch']}"),
        ("parity group", f"nodes {', '.join(map(str, cluster['group']))}{_troubles(cluster)}"),
        ("other nodes", ", ".join(states) or "not heard of yet"),
        ("manifests of other nodes", size(cluster["mirror_bytes"])),
        ("strangers refused", str(smp["refused"])),
    ]


def _troubles(cluster: Status) -> str:
    late, weak = (", ".join(map(str, cluster[name])) for name in ("late", "weak_domains"))
    shared = f"; does not survive the loss of {weak}, which has too many of them" if weak else ""
    return shared + (f"; the newest step waits for nodes {late}" if late else "")


def _persister_rows(smp: Status) -> Rows:
    persister = smp["persister"]
    if persister is None:
        return [("persister", "none: the run has no persist_dir")]
    text = f"every {persister['every']} steps, {persister['restarts']} restarts"
    rows = [("persister", f"process {persister['pid']}, {text}")]
    if smp["leased"]:
        rows.append(("being read", f"step {', '.join(map(str, smp['leased']))}"))
    failed = smp["persist_failed"]
    if failed is not None:
        rows.append(("last failure", f"step {failed['step']}: {failed['error']}"))
    return rows
