"""The roles of events in a report, also of kinds that this release does not know."""

from holdfast.events import RUNGS, Event, EventKind, Role

RUNG_TITLES = {
    "correct": "1 correct",
    "recompute": "2 recompute",
    "rollback": "3 roll back",
    "rebuild": "4 rebuild",
    "reload": "5 reload",
}
assert (*RUNG_TITLES,) == RUNGS[1:]
# Events after which the state is that of an earlier step.
CAME_BACK = (EventKind.RESTORED, EventKind.SNAPSHOT_REBUILT)


def role_of(event: Event) -> Role:
    """Return the role of an event; that of an unknown kind follows from its name and rung."""
    try:
        return EventKind(event.kind).role
    except ValueError:
        if event.kind.endswith("_fault"):
            return Role.FOUND
        return Role.ANSWER if event.rung else Role.NOTE
