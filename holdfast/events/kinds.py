"""Every kind of event: what happened, what holdfast did about it, and what the user should do.

This table is the only one. The report and ``docs/events.md`` (made by ``python -m
holdfast.events``) are derived from it.
"""

import logging
from enum import Enum, StrEnum
from typing import Self


class Role(Enum):
    """The part that an event plays in the course of a fault."""

    STRUCK = "struck"  # the injector did something
    FOUND = "found"  # a computation or a stored value was found wrong, and where
    DOUBT = "doubt"  # something looks wrong, and may be the consequence of another fault
    ANSWER = "answer"  # a rung of the ladder judged, repeated or restored
    NOTE = "note"  # worth knowing; no result depends on it


class EventKind(StrEnum):
    """The kind of an event; a string, equal to what the ledger stores.

    Attributes:
        role: Part that the event plays in the course of a fault.
        summary: The kind in a few words, as the report shows it.
        happened: Sentence that says what happened.
        done: Sentence that says what holdfast did about it.
        advice: Sentence that says what the user should do.
        level: Level at which events of this kind are logged.
    """

    role: Role
    summary: str
    happened: str
    done: str
    advice: str
    level: int

    def __new__(cls, name: str, role: Role = Role.NOTE, *sentences: str) -> Self:
        """Make a member whose docstring says what happened, what was done, and what to do."""
        member = str.__new__(cls, name)
        member._value_, member.role, member.level = name, role, logging.WARNING
        member.summary, *about = sentences
        member.happened, member.done, member.advice = about
        member.__doc__ = " ".join(about)
        return member

    @classmethod
    def summary_of(cls, kind: str) -> str:
        """Return the summary of a kind, also of one that only another release knows."""
        try:
            return cls(kind).summary
        except ValueError:
            return kind.replace("_", " ")

    INJECTED = (
        "injected",
        Role.STRUCK,
        "fault injected",
        "The fault injector changed a value or ended a process, as its schedule says.",
        "The injector recorded the fault before its effect, so that it never strikes twice.",
        "Nothing: compare it with the events that follow.",
    )
    GEMM_FAULT = (
        "gemm_fault",
        Role.FOUND,
        "wrong matrix product",
        "A matrix product or a convolution contradicted its checksum and its recomputation.",
        "With the rung `correct` the wrong values were replaced; without a rung nothing was "
        "changed, and the product raised or failed the step of a Guard.",
        "Nothing after a single event; replace a device that keeps appearing in such events.",
    )
    GEMM_PERSISTENT = (
        "gemm_persistent",
        Role.FOUND,
        "product wrong each time",
        "A matrix product or convolution stayed wrong when it was computed again.",
        "The product was not used: it raised, or failed the step of a Guard.",
        "Screen the device with `holdfast screen`, and replace it if it is suspect.",
    )
    CHECKSUM_FAULT = (
        "checksum_fault",
        Role.FOUND,
        "damaged checksum",
        "The stored checksum of an operand no longer matched its own fingerprint.",
        "The checksum was computed again; the operand itself was intact.",
        "Nothing after a single event; repeated ones mean unreliable memory.",
    )
    OPERAND_FAULT = (
        "operand_fault",
        Role.FOUND,
        "operand changed in memory",
        "An operand, such as a weight, changed in memory after its checksum was computed.",
        "With the rung `correct` it was repaired; without a rung the product raised, or failed "
        "the step of a Guard, which rolls back.",
        "Check the memory of this host. If your code edits weights through `.data` within a "
        "step, edit them under `torch.no_grad()` instead.",
    )
    STATE_FAULT = (
        "state_fault",
        Role.FOUND,
        "state changed at rest",
        "A weight, a buffer or a value of the optimizer's state changed in memory between the "
        "optimizer's step and its next use.",
        "With the rung `correct` its bytes were copied back from the snapshot, and the pass was "
        "repeated if it may have used them; without a rung training rolls back.",
        "Check the memory of this host. If your code edits weights through `.data`, edit them "
        "under `torch.no_grad()` instead.",
    )
    OPTIMIZER_FAULT = (
        "optimizer_fault",
        Role.FOUND,
        "wrong optimizer step",
        "An optimizer's update of a parameter was computed again, and gave other bits.",
        "With the rung `recompute` two equal computations decided, and a wrong update was replaced "
        "by the right one; without a rung no two were equal, and training rolls back.",
        "Screen the named rank's device with `holdfast screen`; replace it if it is named again.",
    )
    MODULE_FAULT = (
        "module_fault",
        Role.FOUND,
        "wrong module",
        "A module's forward or backward was computed again, and gave other bits.",
        "A Guard repeated the step, unless a further computation agreed with the module.",
        "Screen the named rank's device with `holdfast screen`; replace it if it is named again.",
    )
    BATCH_FAULT = (
        "batch_fault",
        Role.FOUND,
        "batch changed in memory",
        "A tensor of a batch changed after the loader had made it and before the step used it.",
        "With the rung `recompute` it was made again; without a rung the step was refused.",
        "Check the memory of this host. Restart after a refused step, which reads the batch anew.",
    )
    SOFTMAX_FAULT = (
        "softmax_fault",
        Role.FOUND,
        "wrong softmax",
        "A row of attention probabilities did not sum to one, and its recomputation did.",
        "With the rung `correct` the row was replaced; without a rung nothing was changed, and "
        "the operator raised or failed the step of a Guard.",
        "Nothing after a single event; replace a device that keeps appearing in such events.",
    )
    SOFTMAX_PERSISTENT = (
        "softmax_persistent",
        Role.FOUND,
        "softmax wrong each time",
        "A row of attention probabilities stayed wrong when it was computed again.",
        "The result was not used: the operator raised, or failed the step of a Guard.",
        "Screen the device with `holdfast screen`, and replace it if it is suspect.",
    )
    EMBEDDING_BAG_FAULT = (
        "embedding_bag_fault",
        Role.FOUND,
        "wrong embedding bag",
        "A pooled embedding contradicted its checksum and its recomputation.",
        "With a rung the pooled values were replaced; without one nothing was changed, and the "
        "operator raised or failed the step of a Guard.",
        "Nothing after a single event; replace a device that keeps appearing in such events.",
    )
    EMBEDDING_BAG_PERSISTENT = (
        "embedding_bag_persistent",
        Role.FOUND,
        "bag wrong each time",
        "Several computations of a pooled embedding did not agree with each other.",
        "The result was not used: the operator raised, or failed the step of a Guard.",
        "Screen the device with `holdfast screen`, and replace it if it is suspect.",
    )
    ROW_FAULT = (
        "row_fault",
        Role.FOUND,
        "damaged table row",
        "A stored row of an embedding table contradicted its checksums.",
        "With the rung `correct` the row was repaired, by its checksums or from its source; "
        "without a rung it is still damaged.",
        "Give the table a source with `register_source()`, or load the table again; check the "
        "memory of this host if it repeats.",
    )
    SCREEN_FAULT = (
        "screen_fault",
        Role.FOUND,
        "wrong in a screening",
        "A core or GPU gave a wrong result while `holdfast screen` ran.",
        "The unit, the operator and the wrong bits were recorded.",
        "Take the unit out of service.",
    )
    SHADOW_MISMATCH = (
        "shadow_mismatch",
        Role.FOUND,
        "computed otherwise than its shadows",
        "A rank's pass differed from the same pass on other ranks.",
        "With the rung `recompute` the majority's result was used instead of the rank's.",
        "Screen the named rank's device; replace it if it is named again.",
    )
    COLLECTIVE_FAULT = (
        "collective_fault",
        Role.FOUND,
        "wrong collective",
        "What a rank got is not what was sent, not the sum, or not what the other ranks got.",
        "A Guard repeated the step on all ranks.",
        "Nothing after a single event; check the link and memory of a rank that is named again.",
    )
    SNAPSHOT_CORRUPT = (
        "snapshot_corrupt",
        Role.FOUND,
        "damaged snapshot",
        "A stored snapshot or checkpoint did not match its digest, or could not be read.",
        "It was not restored; an older or another copy is tried.",
        "Check the memory or the disk of the host that held it.",
    )
    NONFINITE_INPUT = (
        "nonfinite_input",
        Role.DOUBT,
        "NaN or INF in an operand",
        "An operand of a protected operator held NaN or INF, or a product overflowed.",
        "The operator's checksum cannot judge such rows; a Guard repeats the step.",
        "If the step's repetition confirms it, look for the cause in the model or the data.",
    )
    EXTREME_INPUT = (
        "extreme_input",
        Role.DOUBT,
        "extreme value in an operand",
        "An operand held a value too large for a healthy model.",
        "The product passed its checksum and was used; a Guard repeats the step.",
        "If the step's repetition confirms it, look for the cause in the model or the data.",
    )
    SHADOW_UNDECIDED = (
        "shadow_undecided",
        Role.DOUBT,
        "two replicas differ, undecided",
        "Ranks that computed the same pass disagreed, and there was no majority.",
        "The step was not applied; a Guard repeats it or rolls back.",
        "Use at least three data-parallel ranks, so that a majority can decide.",
    )
    CHECK_FAILED = (
        "check_failed",
        Role.DOUBT,
        "a check could not be made",
        "The check of a result raised an error, as it does if memory is short.",
        "The result was used as it is. A Guard repeats the step if the result was suspect.",
        "Mend what the error names; until then this place is not verified.",
    )
    STEP_NOT_REPEATABLE = (
        "step_not_repeatable",
        Role.NOTE,
        "the first step does not repeat",
        "A Guard repeated the first step of a run, and no two results had the same bits.",
        "Training went on with the last one.",
        "Run `holdfast.replay.check_determinism`: faults in such a step cannot be told from its "
        "own differences, and a step in doubt ends the run.",
    )
    RERUN = (
        "rerun",
        Role.ANSWER,
        "step repeated",
        "A Guard doubted a step, for the reason that the event's detector names.",
        "The step was computed again until two results agreed: the verdict `transient` means "
        "that the first was wrong, `genuine` that it was right, `persistent` that none agreed.",
        "Nothing if it is rare. If most steps are repeated, the program may not be deterministic.",
    )
    ROLLBACK = (
        "rollback",
        Role.ANSWER,
        "rolled back",
        "Repetition gave no result that could be trusted.",
        "The state of the last clean snapshot was restored, and the steps since were repeated.",
        "Look at the events before it for the device that erred.",
    )
    RESTORED = (
        "restored",
        Role.ANSWER,
        "state restored",
        "Training started again, or rolled back, and a snapshot or checkpoint was found.",
        "Model, optimizer, schedule, data position and random state were loaded from it.",
        "Nothing.",
    )
    WORLD_CHANGED = (
        "world_changed",
        Role.ANSWER,
        "continued with other ranks",
        "The run continues with another number of ranks, or another division of the model.",
        "The state was dealt anew; new ranks have random states of their own, derived from rank 0.",
        "See `position` for the samples that come again, if a batch of all ranks changed its size.",
    )
    NONFINITE_GENUINE = (
        "nonfinite_genuine",
        Role.ANSWER,
        "non-finite, and confirmed",
        "The loss or a gradient was NaN or INF, and repetition gave the same.",
        "The result was applied, as it is what the program computes.",
        "Look for the cause in the model, the data or the learning rate.",
    )
    SNAPSHOT_REBUILT = (
        "snapshot_rebuilt",
        Role.ANSWER,
        "lost shard rebuilt by parity",
        "A part of a snapshot was lost with its node, or was damaged.",
        "It was computed from the parity in the memory of the other nodes, and verified.",
        "Replace the node if it does not return: until then fewer losses can be survived.",
    )
    SMP_LOST = (
        "smp_lost",
        Role.DOUBT,
        "snapshot process lost",
        "The process that keeps this node's snapshots (SMP) ended or closed its connection.",
        "While training goes on another one is started; the snapshots that it held are gone from "
        "this node.",
        "Find out what ended it: often the kernel, for lack of memory.",
    )
    SNAPSHOTS_LOST = (
        "snapshots_lost",
        Role.DOUBT,
        "snapshots lost",
        "Snapshots had been taken, and none is left to restore.",
        "Training starts from its beginning.",
        "Stop it and load a checkpoint; set `persist_dir`, so that there is one next time.",
    )
    SNAPSHOTS_SUSPENDED = (
        "snapshots_suspended",
        Role.NOTE,
        "no new snapshots",
        "Snapshots failed: the process that keeps them does not answer, memory is short, or no "
        "snapshot was committed for a while.",
        "Training goes on without new ones; they are tried again in growing intervals.",
        "Mend what the reason names: until then a lost process costs the work since the last one.",
    )
    SNAPSHOTS_RESUMED = (
        "snapshots_resumed",
        Role.NOTE,
        "snapshots again",
        "After a time without snapshots one was committed again.",
        "The run is protected as before.",
        "Nothing.",
    )
    DOMAIN_SHARED = (
        "domain_shared",
        Role.NOTE,
        "too many nodes in one rack",
        "A parity group has more nodes of one failure domain (rack, switch) than it may lose.",
        "Training goes on; the loss of that domain takes the snapshots in memory with it.",
        "Place the run on more racks or switches, or give smaller groups (`group_nodes`).",
    )
    REPLICA_DIVERGED = (
        "replica_diverged",
        Role.DOUBT,
        "replicas of a state differ",
        "Ranks that hold the same state held different bits when it was copied.",
        "The snapshot of that step was not kept.",
        "Audit the named ranks with `Guard(audit=...)` to find the faulty device.",
    )
    EVICT = (
        "evict",
        Role.NOTE,
        "device keeps erring: replace it",
        "Other ranks, or checks of the optimizer's step, found the same device wrong repeatedly.",
        "The device was named; it still takes part.",
        "Take the device out of the run.",
    )
    LOADER_UNSAVED = (
        "loader_unsaved",
        Role.NOTE,
        "loader's position not in snapshots",
        "The data loader has no `state_dict`, or it raises: its position cannot be saved.",
        "Snapshots were taken without it.",
        "Draw the batches through `Guard.batches`, or use a loader that has `state_dict`.",
    )
    FAULT_MISSED = (
        "fault_missed",
        Role.NOTE,
        "planned fault not injected",
        "A planned fault found no target before the run ended.",
        "It was left out.",
        "Choose an earlier step for it.",
    )
    SNAPSHOT_TORN = (
        "snapshot_torn",
        Role.NOTE,
        "snapshot skipped: state changed under it",
        "A tensor was changed while it was being copied into a snapshot, or the copy from a device "
        "is not what the device held.",
        "The snapshot of that step was dropped; older ones are kept.",
        "Change weights in `guard.step(..., after=fn)`, or between `finish()` and `begin()`. With "
        "the detector `digest`, do what the event's remedy says.",
    )
    BEGUN_AGAIN = (
        "begun_again",
        Role.NOTE,
        "finished run begun again at step 0",
        "The run directory is that of a run that was finished, and nothing of it is left.",
        "Training began at step 0.",
        "To continue a finished run, persist its last step; give another run another directory.",
    )
    WEIGHT_CHANGED_UNSEEN = (
        "weight_changed_unseen",
        Role.NOTE,
        "weight changed behind its checksum",
        "A weight changed in a way that PyTorch's version counter does not see, as an edit through "
        "`.data` does.",
        "It was kept. Its checksum was computed again, and the product was verified with it; the "
        "check of the state at rest compares with it from then on.",
        "Edit weights under `torch.no_grad()`, not through `.data` or NumPy. If your code does "
        "neither, check the memory of this host.",
    )
    SCREENED = (
        "screened",
        Role.NOTE,
        "machine screened",
        "`holdfast screen` finished.",
        "Its verdict was recorded.",
        "Look at the verdict in the event's detail.",
    )
    PERSISTED = (
        "persisted",
        Role.NOTE,
        "checkpoint written",
        "A snapshot was written to disk as a checkpoint.",
        "It can be restored from now on.",
        "Nothing.",
    )
    PERSIST_SLOW = (
        "persist_slow",
        Role.NOTE,
        "checkpoint slow",
        "Writing a checkpoint took longer than the interval between checkpoints, or hangs.",
        "Training went on; the newest snapshot is written next.",
        "Raise `persist_every`, or give `persist_dir` a faster storage.",
    )
    PERSIST_FAILED = (
        "persist_failed",
        Role.NOTE,
        "checkpoint failed",
        "A checkpoint could not be written.",
        "Training went on; the checkpoints written before are kept.",
        "Look at the reason in the event's detail: free or repair the disk.",
    )
    SCRUB_FAILED = (
        "scrub_failed",
        Role.NOTE,
        "rows not scrubbed",
        "A pass over an embedding table failed, or the source of a damaged row did.",
        "The row is still damaged, or the pass ended early; the next pass is tried all the same.",
        "Mend what the reason names: until then rows that no lookup reads may stay damaged.",
    )
    RANK_HUNG = (
        "rank_hung",
        Role.NOTE,
        "the run hangs",
        "No step has ended for many times as long as the steps before; the detail names the ranks "
        "for which the others wait, and the collective.",
        "The stacks of all threads were written to the folder in the detail; with "
        "`Hang(restart=True)` the named ranks were killed, so that the launcher restarts the run.",
        "Look at the stacks of the named rank: a loader, a branch that skips a collective, a "
        "stopped process or a dead host. No rank named: look at the network.",
    )
    STRAGGLER = (
        "straggler",
        Role.NOTE,
        "slow rank",
        "A rank computes for longer in each step than the others, which wait for it.",
        "Nothing was changed; the detail says by which factor.",
        "Look at the host: other processes, clock rates, temperature. Replace it if it stays.",
    )
    CONFIG_IN_FORCE = (
        "config_in_force",
        Role.NOTE,
        "config in force",
        "A Guard was entered while a config file set defaults.",
        "The values that took effect were recorded.",
        "Nothing.",
    )
    GUARD_ATTACHED = (
        "guard_attached",
        Role.NOTE,
        "guard without repetition",
        "A Guard was attached to an optimizer; the training loop does not call it.",
        "It takes snapshots and refuses gradients that are not finite; it repeats no step.",
        "To have wrong steps found and repeated, call `Guard.step` or `Guard.micro_step`.",
    )
    EVENTS_DROPPED = (
        "events_dropped",
        Role.NOTE,
        "events lost: ledger not writable",
        "The ledger could not be written for so long that the buffer for events was full.",
        "The oldest events were dropped; the detail says how many. Training went on.",
        "Free the disk, or end the process that locks the ledger.",
    )


for _routine in (
    EventKind.INJECTED,
    EventKind.RESTORED,
    EventKind.WORLD_CHANGED,
    EventKind.SCREENED,
    EventKind.PERSISTED,
    EventKind.CONFIG_IN_FORCE,
    EventKind.GUARD_ATTACHED,
    EventKind.SNAPSHOTS_RESUMED,
):
    _routine.level = logging.INFO


def kinds_table() -> str:
    """Render every kind as a table in Markdown, as ``docs/events.md`` holds it."""
    head = "| kind | role | what happened | what was done | what to do |\n"
    rows = (
        f"| `{kind}`: {kind.summary} | {kind.role.value} | {kind.happened} | {kind.done} "
        f"| {kind.advice} |\n"
        for kind in EventKind
    )
    return head + "| --- | --- | --- | --- | --- |\n" + "".join(rows)
