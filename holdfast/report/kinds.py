"""What the kinds of events mean, in plain words, and what part each plays in a fault's story."""

from enum import Enum

from holdfast.events import RUNGS, Event


class Role(Enum):
    """The part that an event plays."""

    STRUCK = "struck"  # the injector did something
    FOUND = "found"  # a computation or a stored value was found wrong, and where
    DOUBT = "doubt"  # something looks wrong, and may be another fault's doing
    ANSWER = "answer"  # the ladder judged, repeated or restored
    NOTE = "note"  # worth knowing; no result depends on it


KINDS = {
    "injected": (Role.STRUCK, "fault injected"),
    "gemm_fault": (Role.FOUND, "wrong matrix product"),
    "gemm_persistent": (Role.FOUND, "product wrong each time"),
    "checksum_fault": (Role.FOUND, "damaged checksum"),
    "operand_fault": (Role.FOUND, "operand changed in memory"),
    "softmax_fault": (Role.FOUND, "wrong softmax"),
    "softmax_persistent": (Role.FOUND, "softmax wrong each time"),
    "embedding_bag_fault": (Role.FOUND, "wrong embedding bag"),
    "embedding_bag_persistent": (Role.FOUND, "bag wrong each time"),
    "row_fault": (Role.FOUND, "damaged table row"),
    "screen_fault": (Role.FOUND, "wrong in a screening"),
    "shadow_mismatch": (Role.FOUND, "computed otherwise than its shadows"),
    "snapshot_corrupt": (Role.FOUND, "damaged snapshot"),
    "nonfinite_input": (Role.DOUBT, "NaN or INF in an operand"),
    "extreme_input": (Role.DOUBT, "extreme value in an operand"),
    "shadow_undecided": (Role.DOUBT, "two replicas differ, undecided"),
    "rerun": (Role.ANSWER, "step repeated"),
    "rollback": (Role.ANSWER, "rolled back"),
    "restored": (Role.ANSWER, "state restored"),
    "nonfinite_genuine": (Role.ANSWER, "non-finite, and confirmed"),
    "snapshot_rebuilt": (Role.ANSWER, "lost shard rebuilt by parity"),
    "smp_lost": (Role.DOUBT, "snapshot process lost"),
    "snapshots_lost": (Role.DOUBT, "snapshots lost"),
    "replica_diverged": (Role.DOUBT, "replicas of a state differ"),
    "evict": (Role.NOTE, "device keeps erring: replace it"),
    "loader_unsaved": (Role.NOTE, "loader's position not in snapshots"),
    "fault_missed": (Role.NOTE, "planned fault not injected"),
    "snapshot_torn": (Role.NOTE, "snapshot skipped: state changed under it"),
    "weight_changed_unseen": (Role.NOTE, "weight changed behind its checksum"),
    "screened": (Role.NOTE, "machine screened"),
    "persisted": (Role.NOTE, "checkpoint written"),
    "persist_slow": (Role.NOTE, "checkpoint slow"),
    "persist_failed": (Role.NOTE, "checkpoint failed"),
}
RUNG_TITLES = {
    "correct": "1 correct",
    "recompute": "2 recompute",
    "rollback": "3 roll back",
    "rebuild": "4 rebuild",
    "reload": "5 reload",
}
assert (*RUNG_TITLES,) == RUNGS[1:]
CAME_BACK = ("restored", "snapshot_rebuilt")  # the state is that of an earlier step again


def role_of(event: Event) -> Role:
    """The part an event plays; of kinds unknown here, by its name and rung."""
    if event.kind in KINDS:
        return KINDS[event.kind][0]
    if event.kind.endswith("_fault"):
        return Role.FOUND
    return Role.ANSWER if event.rung else Role.NOTE


def title_of(kind: str) -> str:
    """A kind in plain words."""
    return KINDS[kind][1] if kind in KINDS else kind.replace("_", " ")
