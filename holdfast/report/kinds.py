"""Kinds of events as a report tells them, also kinds that only other releases know."""

from holdfast.events import RUNGS, Event, EventKind, Role

RUNG_TITLES = {
    "correct": "1 correct",
    "recompute": "2 recompute",
    "rollback": "3 roll back",
    "rebuild": "4 rebuild",
    "reload": "5 reload",
}
assert (*RUNG_TITLES,) == RUNGS[1:]
# After these the state is that of an earlier step again.
CAME_BACK = (EventKind.RESTORED, EventKind.SNAPSHOT_REBUILT)


def role_of(event: Event) -> Role:
    """Return the part that an event plays; of an unknown kind, by its name and rung."""
    try:
        return EventKind(event.kind).role
    except ValueError:
        if event.kind.endswith("_fault"):
            return Role.FOUND
        return Role.ANSWER if event.rung else Role.NOTE
